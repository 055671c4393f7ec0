"""What this machine has, and what each of it enables."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attentune.database import default_path
from attentune.target import C_COMPILERS, Target, cross_compiler, native
from attentune.threads import available_cores
from attentune.versions import PINNED, installed

# Linux: asks for the registers that AMX's tiles are in; without asking, their first use is fatal.
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18

_OPTIONAL = {
    "torch": "PyTorch tensors as arguments, models, and the baseline of bench --against torch",
    "onnx": "ONNX models",
}
_TOOLS = (
    (C_COMPILERS, "export: linking libraries for this machine"),
    (("cmake",), "building programs that call a library from C++"),
    ((cross_compiler("aarch64"),), "export --target for 64-bit Arm"),
    (("qemu-aarch64", "qemu-aarch64-static"), "running such libraries here"),
    (("nvcc",), "compiling CUDA kernels to machine code"),
    (("nvdisasm",), "looking at their machine code"),
    (("nvidia-smi",), "an NVIDIA driver: running CUDA kernels"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Parameters
    ----------
    topic : str
        "versions", "machine", "tools" or "files".
    name : str
        What it is.
    found : str or None
        What there is of it, None if it is missing.
    enables : str
        What it is good for.
    wrong : str or None
        Why nothing works until it is mended.
    """

    topic: str
    name: str
    found: str | None
    enables: str = ""
    wrong: str | None = None


def examine() -> list[Finding]:
    """Return what this machine has and lacks."""
    return [*_versions(), *_machine(native()), *_tools(), *_files()]


def _versions() -> list[Finding]:
    found = [
        Finding("versions", "Python", platform.python_version()),
        Finding("versions", "attentune", installed("attentune")),
    ]
    for package, pin in PINNED.items():
        have = installed(package)
        wrong = None if have == pin else f"run: pip install {package}=={pin}"
        found.append(Finding("versions", package, have, "compiling and running kernels", wrong))
    found += [Finding("versions", "LLVM", _llvm(), "code for CPUs")]
    found += [Finding("versions", name, installed(name), use) for name, use in _OPTIONAL.items()]
    return found


def _llvm() -> str | None:
    """Return the version of TVM's LLVM. A TVM that cannot be loaded is its own finding."""
    try:
        from tvm.target.codegen import llvm_version_major
    except (ImportError, OSError):
        return None
    return str(llvm_version_major())


def _machine(target: Target) -> list[Finding]:
    features = ", ".join(sorted(target.features)) or None
    cores = f"{available_cores()} of {os.cpu_count()}"
    vectors = f"{8 * target.vector_bytes} bits" if target.is_cpu else None
    return [
        Finding("machine", "processor", f"{platform.machine()}, {platform.system()}"),
        Finding("machine", "target", str(target), "what native stands for; records are kept by it"),
        Finding("machine", "features", features, "instructions that kernels use"),
        Finding("machine", "vectors", vectors, "flash_unit, flash_split_kv, fallback"),
        Finding("machine", "cores", cores, "threads of a kernel, by default"),
        Finding("machine", "AMX permission", amx_permission(target), "matrix units of x86 CPUs"),
    ]


def amx_permission(target: Target, ask: Callable[[], int] | None = None) -> str | None:
    """Return "granted" where AMX's tiles may be used, None where they may not.

    Parameters
    ----------
    target : Target
        This CPU.
    ask : Callable, optional
        Asks the system and returns 0 if it agrees.
    """
    if "amx-tile" not in target.features:
        return None
    return "granted" if (ask or _ask_for_tiles)() == 0 else None


def _ask_for_tiles() -> int:
    if sys.platform != "linux":
        return -1
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))


def _tools() -> list[Finding]:
    found = []
    for names, use in _TOOLS:
        path = next(filter(None, map(shutil.which, names)), None)
        found.append(Finding("tools", names[0], path, use))
    return found


def _files() -> list[Finding]:
    path = default_path()
    note = "the database, unless another is named"
    return [Finding("files", "records", _existing(path), f"{note}: {path}")]


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None
