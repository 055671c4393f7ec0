"""Arrays of callers as tensors of TVM, without copies.

NumPy (with ml_dtypes' bfloat16), PyTorch and TVM arrays pass through DLPack with their own
strides; results come back as the kind that came in.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tvm_ffi

from attentune.errors import UnsupportedArray

KERNEL_DTYPES = ("float32", "float16", "bfloat16")
_EXPORTED: dict[int, Any] = {}  # what DLPack consumers still hold, by the address of its header


def kind(array: Any) -> str:
    """Return "numpy", "torch" or "tvm".

    Raises
    ------
    UnsupportedArray
        For anything else.
    """
    if isinstance(array, np.ndarray):
        return "numpy"
    if isinstance(array, tvm_ffi.Tensor):
        return "tvm"
    if type(array).__module__.partition(".")[0] == "torch" and hasattr(array, "__dlpack__"):
        return "torch"
    raise UnsupportedArray(
        f"An array is of type {type(array).__module__}.{type(array).__qualname__}; "
        "pass a NumPy array, a PyTorch tensor or a TVM tensor."
    )


def dtype_name(array: Any) -> str:
    """Return the element type's name as NumPy and TVM spell it."""
    name = str(array.dtype)
    return name.removeprefix("torch.")


def as_tensor(array: Any) -> tvm_ffi.Tensor:
    """Return a tensor that shares an array's memory.

    Parameters
    ----------
    array : numpy.ndarray, torch.Tensor or tvm_ffi.Tensor
        Any strides, on the CPU.

    Raises
    ------
    UnsupportedArray
        If the array lies on another device, or is of another kind.
    """
    which = kind(array)
    if which == "tvm":
        return array
    if which == "torch":
        if array.device.type != "cpu":
            raise UnsupportedArray(
                f"A tensor is on the device {array.device}; move it to the CPU, which the kernel "
                "was compiled for."
            )
        return tvm_ffi.from_dlpack(array.detach() if array.requires_grad else array)
    if array.flags.writeable and array.dtype.name != "bfloat16":
        return tvm_ffi.from_dlpack(array)
    return tvm_ffi.from_dlpack(_NumpyExporter(array))


def readable(array: Any, unit_innermost: bool = True) -> Any:
    """Return an array that a kernel can read in place, copied once if it can not.

    Parameters
    ----------
    array : Any
        Shape ``[batch, heads, seq, dim]``.
    unit_innermost : bool
        Whether the kernel needs the innermost stride to be 1.
    """
    which = kind(array)
    if which == "numpy":
        item = array.itemsize
        strides = array.strides
        fits = all(s >= 0 and s % item == 0 for s in strides)
        if fits and (not unit_innermost or array.shape[-1] <= 1 or strides[-1] == item):
            return array
        return np.ascontiguousarray(array)
    strides = array.stride() if which == "torch" else array.strides
    if not unit_innermost or array.shape[-1] <= 1 or strides[-1] == 1:
        return array
    if which == "torch":
        return array.contiguous()
    return as_tensor(np.ascontiguousarray(to_numpy(array)))


def broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of an array that broadcasts from the right, with strides of 0."""
    if tuple(array.shape) == shape:
        return array
    which = kind(array)
    if which == "torch":
        return array.expand(shape)
    if which == "tvm":
        array = to_numpy(array)
    view = np.broadcast_to(array, shape)
    return np.lib.stride_tricks.as_strided(array, shape, view.strides)


def empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Return an uninitialized array of an array's kind, device and element type."""
    which = kind(array)
    if which == "numpy":
        return np.empty(shape, array.dtype)
    if which == "torch":
        return array.new_empty(shape)
    return as_tensor(np.empty(shape, _numpy_dtype(dtype_name(array))))


def span(array: Any) -> tuple[int, int]:
    """Return the addresses where an array's memory begins and ends."""
    tensor = as_tensor(array)
    if 0 in tensor.shape:
        return 0, 0
    last = sum((e - 1) * s for e, s in zip(tensor.shape, tensor.strides, strict=True))
    begin = int(tensor.data_ptr())
    return begin, begin + (last + 1) * _numpy_dtype(dtype_name(array)).itemsize


def clear(array: Any) -> None:
    """Set every element of an array to 0."""
    if kind(array) == "tvm":
        to_numpy(array)[...] = 0
    else:
        array[...] = 0


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return an array as NumPy, sharing memory where NumPy knows the element type."""
    which = kind(array)
    if which == "numpy":
        return array
    name = dtype_name(array)
    if name != "bfloat16":
        return np.from_dlpack(array.detach() if which == "torch" else array)
    if which == "torch":
        import torch

        return array.detach().view(torch.uint16).numpy().view(_numpy_dtype(name))
    return _map_memory(array).view(_numpy_dtype(name))


def _map_memory(tensor: tvm_ffi.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor of 16-bit elements as integers, its memory mapped by address."""
    if 0 in tensor.shape:
        return np.empty(tuple(tensor.shape), np.uint16)
    span = 1 + sum((e - 1) * s for e, s in zip(tensor.shape, tensor.strides, strict=True))
    memory = (ctypes.c_uint16 * span).from_address(tensor.data_ptr())
    memory.owner = tensor  # the array keeps its buffer alive, the buffer keeps the tensor
    strides = tuple(2 * s for s in tensor.strides)
    return np.ndarray(tuple(tensor.shape), np.uint16, memory, strides=strides)


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


@_Deleter
def _release(address: int) -> None:
    _EXPORTED.pop(address, None)


_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT16 = 4
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _NumpyExporter:
    """DLPack for what NumPy itself does not export: bfloat16, and read-only memory.

    Kernels only read their inputs, so that memory the caller may not write is safe with them.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_options: Any) -> Any:
        array = self.array
        extents = ctypes.c_int64 * max(array.ndim, 1)
        shape = extents(*array.shape)
        strides = extents(*(s // array.itemsize for s in array.strides))
        is_bfloat16 = array.dtype.name == "bfloat16"
        managed = _DLManagedTensor(
            _DLTensor(
                array.__array_interface__["data"][0],
                1,
                0,
                array.ndim,
                _BFLOAT16 if is_bfloat16 else _CODES[array.dtype.kind],
                array.itemsize * 8,
                1,
                shape,
                strides,
                0,
            ),
            None,
            _release,
        )
        address = ctypes.addressof(managed)
        _EXPORTED[address] = (managed, array, shape, strides)
        return _new_capsule(address, b"dltensor", None)
