"""What kernels are compiled for, described without the compiler.

A target is the configuration that TVM is given, in canonical form. A CPU is described by the
features that change code, not by its name, so that two machines with one instruction set share
records and the same code is generated wherever it is generated.
"""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from attentune.errors import InvalidTarget
from attentune.threads import available_cores

# Features of each x86-64 level, as Linux spells them; a level includes those before it.
_LEVELS = (
    ("x86-64", ()),
    ("x86-64-v2", ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")),
    ("x86-64-v3", ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")),
    ("x86-64-v4", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
)
# Where LLVM's spelling of these differs.
_LLVM_NAMES = {
    "lahf_lm": "sahf",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "bmi1": "bmi",
    "abm": "lzcnt",
}
# Features beyond the levels that kernels here use or LLVM makes other code for, as Linux and LLVM
# spell them.
_X86_EXTRAS = {
    "avx_vnni": "avxvnni",
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
    "amx_fp16": "amx-fp16",
}
_AMX = "avx512vnni avx512bf16 avx512fp16 avxvnni amx-tile amx-bf16 amx-int8"
# CPUs that TVM's tags name: their level and what they have beyond it.
_CPUS = {
    **dict.fromkeys(("haswell", "broadwell", "skylake"), ("x86-64-v3", "")),
    **dict.fromkeys(("znver1", "znver2", "znver3"), ("x86-64-v3", "")),
    "skylake-avx512": ("x86-64-v4", ""),
    **dict.fromkeys(("cascadelake", "icelake-server"), ("x86-64-v4", "avx512vnni")),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids"), ("x86-64-v4", _AMX)),
    "graniterapids": ("x86-64-v4", f"{_AMX} amx-fp16"),
    "znver4": ("x86-64-v4", "avx512vnni avx512bf16"),
    "znver5": ("x86-64-v4", "avx512vnni avx512bf16 avxvnni"),
}
_ARM_EXTRAS = {"asimdhp": "fullfp16", "asimddp": "dotprod", "bf16": "bf16", "sve": "sve"}
_TENSOR_CORES = {"float16": 70, "bfloat16": 80}
# KB of shared memory that one block of threads may ask for, by compute capability; of those
# between two, the lower's holds.
_SHARED_KB = {60: 48, 70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}
KINDS = ("llvm", "cuda")
# What links for this machine, the first that is found.
C_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class Target:
    """A TVM target in canonical form.

    Parameters
    ----------
    config : str
        Canonical JSON of the target's configuration: sorted keys, no spaces. Use `parse`.

    Examples
    --------
    >>> Target.parse("cuda:sm_80").cmma_dtypes
    ('float16', 'bfloat16')
    """

    config: str

    @classmethod
    def parse(cls, target: Target | str | Mapping[str, Any]) -> Target:
        """Return a target.

        Parameters
        ----------
        target : Target, str or Mapping
            "native" (this CPU, its features and cores), "cuda:sm_80", or a TVM target as a mapping,
            as JSON or as a tag.

        Raises
        ------
        InvalidTarget
            If it is none of these.
        """
        if isinstance(target, Target):
            return target
        if isinstance(target, Mapping):
            return cls._from_config(dict(target))
        if not isinstance(target, str):
            raise InvalidTarget(
                f"The target is {target!r}; pass 'native', 'cuda:sm_80', or a TVM target as JSON."
            )
        text = target.strip()
        if text == "native":
            return native()
        if text.startswith("{"):
            try:
                config = json.loads(text)
            except json.JSONDecodeError as error:
                raise InvalidTarget(f"The target {text!r} is not JSON: {error}.") from None
            return cls._from_config(config)
        kind, _, arch = text.partition(":")
        if kind == "cuda":
            return cls._from_config({"kind": "cuda", "arch": arch})
        return cls._from_tag(text)

    @classmethod
    def _from_config(cls, config: dict[str, Any]) -> Target:
        kind = config.get("kind")
        if kind not in KINDS:
            raise InvalidTarget(
                f"The target's kind is {kind!r}; kernels are made for {' and '.join(KINDS)}."
            )
        if kind == "cuda":
            arch = str(config.get("arch", ""))
            number = arch.removeprefix("sm_").rstrip("af")
            if not (arch.startswith("sm_") and number.isdecimal()):
                raise InvalidTarget(
                    f"The CUDA target's arch is {arch!r}; name one, as in 'cuda:sm_80'."
                )
        clean = {name: value for name, value in config.items() if name not in ("keys", "tag")}
        mattr = clean.pop("mattr", [])
        if not isinstance(mattr, (list, tuple)) or not all(isinstance(name, str) for name in mattr):
            raise InvalidTarget(
                f"The target's mattr is {mattr!r}; it must be a list of names, as in ['+avx2']."
            )
        if mattr:
            clean["mattr"] = sorted(set(mattr))
        cores = clean.get("num-cores", 1)
        if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
            raise InvalidTarget(
                f"The target's num-cores is {cores!r}; it must be a whole number of at least 1."
            )
        try:
            return cls(json.dumps(clean, sort_keys=True, separators=(",", ":")))
        except TypeError:
            raise InvalidTarget(f"The target {config!r} holds values that are not JSON.") from None

    @classmethod
    def _from_tag(cls, tag: str) -> Target:
        import tvm

        try:
            resolved = tvm.target.Target(tag)
        except Exception:  # TVM raises several types for what is not a tag
            known = ("native", "cuda:sm_80", "cuda:sm_90")
            near = difflib.get_close_matches(tag, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(known)}, or JSON."
            raise InvalidTarget(f"There is no target {tag!r}; {hint}") from None
        config = json.loads(str(resolved))
        # TVM derives its features again, and the host is not the tag's to choose.
        return cls._from_config(
            {n: v for n, v in config.items() if n != "host" and not n.startswith("feature.")}
        )

    def __str__(self) -> str:
        """Return the canonical JSON, which `parse` reads."""
        return self.config

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The configuration as a mapping."""
        return dict(json.loads(self.config))

    @property
    def kind(self) -> str:
        """TVM's name of the code generator."""
        return str(self.attributes["kind"])

    @property
    def is_cpu(self) -> bool:
        """Whether code runs on a CPU."""
        return self.kind == "llvm"

    @cached_property
    def arch(self) -> str:
        """The instruction set: "x86_64", "aarch64", or "sm_80" and the like."""
        if not self.is_cpu:
            return str(self.attributes["arch"])
        triple = str(self.attributes.get("mtriple", ""))
        arch = triple.partition("-")[0] or platform.machine().lower()
        return {"arm64": "aarch64", "amd64": "x86_64"}.get(arch, arch)

    @cached_property
    def features(self) -> frozenset[str]:
        """CPU features beyond the baseline, as LLVM spells them."""
        if not self.is_cpu:
            return frozenset()
        cpu = str(self.attributes.get("mcpu", ""))
        cpu, beyond = _CPUS.get(cpu, (cpu, ""))
        found = set(beyond.split())
        names = [name for name, _ in _LEVELS]
        if cpu in names:
            for _, features in _LEVELS[: names.index(cpu) + 1]:
                found |= {_LLVM_NAMES.get(feature, feature) for feature in features}
        if self.arch == "aarch64":
            found.add("neon")
        given = [str(name) for name in self.attributes.get("mattr", [])]
        found |= {name.removeprefix("+") for name in given if not name.startswith("-")}
        return frozenset(found - {name[1:] for name in given if name.startswith("-")})

    @property
    def cpu_flags(self) -> frozenset[str]:
        """The features that must be there to run the code, as Linux spells them."""
        linux = {llvm: name for name, llvm in (*_LLVM_NAMES.items(), *_X86_EXTRAS.items())}
        linux |= {llvm: name for name, llvm in _ARM_EXTRAS.items()}
        linux["neon"] = "asimd"
        return frozenset(linux.get(name, name) for name in self.features)

    @property
    def num_cores(self) -> int:
        """Cores that a kernel is spread over."""
        return int(self.attributes.get("num-cores", 1))

    @property
    def vector_bytes(self) -> int:
        """Width of a vector register."""
        if {"avx512f", "avx512dq"} <= self.features:
            return 64
        return 32 if "avx2" in self.features else 16

    @property
    def cmma_dtypes(self) -> tuple[str, ...]:
        """Element types of the fragments that a matrix unit takes, none without one."""
        if self.is_cpu:
            units = {"bfloat16": "amx-bf16", "float16": "amx-fp16"}
            return tuple(
                dtype for dtype, name in units.items() if {"amx-tile", name} <= self.features
            )
        return tuple(
            dtype for dtype, least in _TENSOR_CORES.items() if self.compute_capability >= least
        )

    @property
    def compute_capability(self) -> int:
        """A GPU's generation, 80 for sm_80; 0 for a CPU."""
        return 0 if self.is_cpu else int(self.arch.removeprefix("sm_").rstrip("af"))

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a GPU that one block of threads may use; 0 for a CPU."""
        if self.is_cpu:
            return 0
        given = self.attributes.get("max_shared_memory_per_block")
        if given is not None:
            return int(given)
        known = [kb for least, kb in _SHARED_KB.items() if least <= self.compute_capability]
        return 1024 * (known or [48])[-1]

    @property
    def max_threads(self) -> int:
        """Threads of a GPU that one block may have; 0 for a CPU."""
        return 0 if self.is_cpu else int(self.attributes.get("max_threads_per_block", 1024))

    def to_tvm(self) -> Any:
        """Return TVM's target."""
        return _to_tvm(self.config)


@cache
def _to_tvm(config: str) -> Any:
    import tvm

    try:
        resolved = tvm.target.Target(json.loads(config))
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidTarget(f"TVM does not accept the target {config}: {reason}") from None
    return resolved if resolved.kind.name == "llvm" else resolved.with_host("llvm")


def cross_compiler(arch: str) -> str:
    """Return the name of the command that links for another instruction set."""
    return f"{arch}-linux-gnu-gcc"


@cache
def native() -> Target:
    """Return this machine's CPU."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return describe_cpu(platform.system(), platform.machine(), text, available_cores())


def describe_cpu(system: str, machine: str, cpuinfo: str, cores: int) -> Target:
    """Return the target of a CPU.

    Parameters
    ----------
    system, machine : str
        As the platform module names them.
    cpuinfo : str
        Text of Linux's ``/proc/cpuinfo``, empty elsewhere.
    cores : int
        Cores to use.
    """
    arch = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    flags = _flags(cpuinfo)
    if arch == "x86_64":
        cpu = "x86-64"
        for name, features in _LEVELS:
            if not set(features) <= flags:
                break
            cpu = name
        extras = [llvm for linux, llvm in _X86_EXTRAS.items() if linux in flags]
    elif arch != "aarch64":
        cpu, extras = "generic", []
    else:
        cpu = "generic"
        extras = ["neon", *(llvm for linux, llvm in _ARM_EXTRAS.items() if linux in flags)]
    suffix = {"Linux": "unknown-linux-gnu", "Darwin": "apple-darwin", "Windows": "pc-windows-msvc"}
    vendor = suffix.get(system, "unknown-unknown")
    prefix = "arm64" if system == "Darwin" and arch == "aarch64" else arch
    config: dict[str, Any] = {
        "kind": "llvm",
        "mtriple": f"{prefix}-{vendor}",
        "mcpu": cpu,
        "num-cores": cores,
    }
    if extras:
        config["mattr"] = [f"+{name}" for name in extras]
    return Target._from_config(config)


def _flags(cpuinfo: str) -> set[str]:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
