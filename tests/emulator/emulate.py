"""Runs TVM's CUDA source, unchanged, on the CPU, and checks every access that it makes."""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from attentune import arrays
from attentune.compile import PIPELINE

HERE = Path(__file__).parent
CPU_DEVICE = 1
FLAGS = ["-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]


class EmulationError(AssertionError):
    """A kernel did what it must not on a GPU."""


class Launch:
    """A kernel compiled for the CPU, called by TVM's host code in place of a GPU's."""

    def __init__(self, source, name, kinds, axes):
        self.axes = axes
        self.kinds = kinds  # None for a pointer, else a ctypes type
        self.ranges = ()
        self.unknown = False
        self.shared_bytes = 0
        self._runtime = ctypes.CDLL(_runtime(), mode=ctypes.RTLD_GLOBAL)
        self._runtime.emulator_launch.restype = ctypes.c_char_p
        self._entry = ctypes.CDLL(_library(source, name)).entry

    def __call__(self, *values):
        count = len(self.kinds)
        boxes = [
            (kind or ctypes.c_void_p)(_address(value) if kind is None else value)
            for kind, value in zip(self.kinds, values[:count], strict=True)
        ]
        arguments = (ctypes.c_void_p * count)(*[ctypes.addressof(box) for box in boxes])
        extents = dict(zip(self.axes, values[count:], strict=True))
        self.shared_bytes = extents.pop("tirx.use_dyn_shared_memory", 0)
        blocks, threads = extents.pop("blockIdx.x"), extents.pop("threadIdx.x")
        assert not extents, f"the emulator knows no {extents}"
        flat = [end for pair in self.ranges for end in pair]
        wrong = self._runtime.emulator_launch(
            ctypes.cast(self._entry, ctypes.c_void_p), arguments, ctypes.c_size_t(blocks),
            ctypes.c_size_t(threads), ctypes.c_size_t(self.shared_bytes),
            (ctypes.c_size_t * len(flat))(*flat), ctypes.c_size_t(len(self.ranges)),
            int(self.unknown),
        )  # fmt: skip
        if wrong is not None:
            raise EmulationError(wrong.decode())


class Program:
    """A scheduled module: TVM's host code for this CPU, and its kernels emulated.

    Parameters
    ----------
    module : IRModule
        After scheduling for CUDA.
    arch : str
        Which source TVM makes.
    edit : Callable, optional
        Changes the source before it is compiled: tests break kernels by it.
    """

    def __init__(self, module, arch="sm_80", edit=lambda source: source):
        # TVM then expects its tensors, and allocates workspace, where this process can read them.
        config = {"kind": "cuda", "arch": arch, "target_device_type": CPU_DEVICE}
        target = tvm.target.Target(config).with_host("llvm")
        lower, host_passes, device_passes = tirx.get_tir_pipeline(PIPELINE)
        host, devices = split_host_device_mods(lower(tirx.transform.BindTarget(target)(module)))
        ((device, kernels),) = devices.items()
        kernels = device_passes()(kernels)
        self.source = edit(codegen_build(kernels, device).inspect_source())
        self.launches = {
            name.name_hint: Launch(
                self.source,
                name.name_hint,
                [_ctype(parameter) for parameter in function.params],
                [str(axis) for axis in function.attrs["tirx.kernel_launch_params"]],
            )
            for name, function in kernels.functions.items()
        }
        self._host = codegen_build(host_passes()(host), tvm.target.Target("llvm"))

    def __call__(self, *arguments):
        ranges = [arrays.span(a) for a in arguments if not isinstance(a, (int, float))]
        for name, launch in self.launches.items():
            launch.ranges = ranges
            # Workspace between kernels is allocated by the host code, which does not tell where.
            launch.unknown = len(self.launches) > 1
            tvm_ffi.register_global_func(name, launch, override=True)
        try:
            self._host["main"](*arguments)
        except EmulationError:
            raise
        except Exception as error:  # TVM wraps what a callback raises
            raise EmulationError(str(error)) from error


def _address(pointer):
    return pointer.value if isinstance(pointer, ctypes.c_void_p) else int(pointer or 0)


def _ctype(parameter):
    text = str(parameter.ty)
    known = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float32": ctypes.c_float}
    return None if "handle" in text else known[text]


def _compile(text, name, *flags):
    """Compile C++ once: what comes out is kept under a digest of what went in."""
    headers = (HERE / "runtime.h").read_text()
    digest = hashlib.sha256(repr((text, headers, FLAGS, flags)).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / f"attentune-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        source = folder / f"{name}-{digest}-{os.getpid()}.cpp"
        source.write_text(text)
        compiled, made = source.with_suffix(".o"), source.with_suffix(".so")
        paths = [f"-I{HERE}", f"-I{HERE / 'include'}"]
        subprocess.run(["g++", *FLAGS, *flags, *paths, "-c", source, "-o", compiled], check=True)
        # Without the flags: the runtime answers what -fsanitize has the kernel call.
        subprocess.run(["g++", "-shared", compiled, "-o", made], check=True)
        source.unlink()
        compiled.unlink()
        made.rename(library)
    return str(library)


def _runtime():
    return _compile((HERE / "runtime.cpp").read_text(), "runtime")


def _library(source, name):
    (signature,) = set(re.findall(rf"\b{name}\(([^)]*)\)", source))
    types = [part.rsplit(" ", 1)[0].replace("__restrict__", "") for part in signature.split(",")]
    values = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(types))
    # Reading the arguments is the launch's doing, not the kernel's.
    unchecked = '__attribute__((no_sanitize("thread")))'
    entry = f'\nextern "C" {unchecked} void entry(void** a) {{ {name}({values}); }}\n'
    return _compile(source + entry, name, "-fsanitize=thread")
