"""Versions of what a kernel is made with, and the check that they fit together."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from attentune.errors import IncompatibleVersions

# apache-tvm's own metadata admits a later tvm-ffi, with which serializing IR crashes.
PINNED = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def installed(package: str) -> str | None:
    """Return a package's version, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def check_versions() -> None:
    """Check that TVM and its FFI are the pair that works together.

    Raises
    ------
    IncompatibleVersions
        With the versions found and the command that installs the right ones.
    """
    found = {package: installed(package) for package in PINNED}
    if found != PINNED:
        wanted = " ".join(f"{package}=={pin}" for package, pin in PINNED.items())
        have = ", ".join(f"{package} {number or 'missing'}" for package, number in found.items())
        raise IncompatibleVersions(
            f"attentune needs {wanted.replace(' ', ' with ')}, but found {have}; "
            f"run: pip install {wanted}"
        )


@cache
def current_versions() -> dict[str, str]:
    """Return the versions that a record was measured with."""
    from tvm.target.codegen import llvm_version_major

    return {
        "attentune": installed("attentune") or "unknown",
        "tvm": installed("apache-tvm") or "unknown",
        "llvm": str(llvm_version_major()),
    }


def machine_name() -> str:
    """Return the machine a record was measured on: its processor, without a host name."""
    return platform.processor() or platform.machine()
