"""From records to one shared library that runs without the compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tvm import IRModule

from attentune import manifest as manifests
from attentune.compile import compile_module
from attentune.dispatch import Dispatcher
from attentune.errors import InvalidParameters, InvalidTarget, MissingToolchain, Unsupported
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.manifest import Choice, Code, Entry, Manifest
from attentune.problem import AttentionProblem
from attentune.target import C_COMPILERS, Target, cross_compiler, native
from attentune.variant import Variant
from attentune.versions import current_versions

# No build id, no symbol table beyond what is exported: the same code gives the same bytes.
_LINK = ("-shared", "-fPIC", "-Wl,--build-id=none", "-Wl,-s")
_LINK_ELSEWHERE = ("-shared", "-fPIC")


def write_library(
    keys: Iterable[AttentionKey],
    path: Path,
    dispatcher: Dispatcher,
    level: str = "balanced",
    compiler: Sequence[str] | None = None,
) -> Manifest:
    """Compile the kernels of keys into one library, with its manifest inside and beside it.

    Parameters
    ----------
    keys : iterable of AttentionKey
        What it is to serve, each key's whole bucket.
    path : Path
        Where it goes; replaced at once when it is whole.
    dispatcher : Dispatcher
        Where kernels are chosen, and its target.
    level : str
        How coarsely calls are anchored to the keys.
    compiler : sequence of str, optional
        The command that links; found on PATH by default.

    Returns
    -------
    Manifest
        What the library holds.

    Raises
    ------
    InvalidParameters
        If there is no key, or one that no call is anchored to.
    MissingToolchain
        If nothing that links for the target is found, or it fails.
    Unsupported
        If no variant serves a key.
    """
    wanted = sorted(set(keys), key=str)
    if not wanted:
        raise InvalidParameters("There is no key to export; tune some, or name keys.")
    for key in wanted:
        _check_level(key, level)
    target = dispatcher.target
    if not target.is_cpu:
        raise InvalidTarget(f"The target {target} is no CPU; libraries hold the code of CPUs.")
    linker = list(compiler) if compiler else find_linker(target)
    chosen = {key: _candidates(key, dispatcher) for key in wanted}
    codes: dict[str, Code] = {}
    functions: dict[str, Any] = {}
    entries = []
    for key, candidates in chosen.items():
        choices = []
        # Unlike what is tuned, not bounded.
        corner = key.representative(max_scores=None)
        for variant, parameters in candidates:
            code = _code(key, variant, parameters)
            if code.symbol not in codes:
                codes[code.symbol] = code
                scheduled = variant.scheduled(key, target, parameters)
                functions[code.symbol] = scheduled["main"].with_attr("global_symbol", code.symbol)
            choices.append(_choice(code, corner, variant, target))
        scores = corner.q_heads * corner.seq_q * corner.seq_kv
        entries.append(Entry(key, scores, tuple(choices)))
    manifest = Manifest(
        level=level,
        target=str(target),
        arch=target.arch,
        cpu_flags=tuple(sorted(target.cpu_flags)),
        versions=current_versions(),
        codes=tuple(codes[symbol] for symbol in sorted(codes)),
        entries=tuple(entries),
    )
    module = IRModule({symbol: functions[symbol] for symbol in sorted(functions)})
    _write(compile_module(module, target), manifest, path, linker)
    return manifest


def _check_level(key: AttentionKey, level: str) -> None:
    if key.anchored(level) != key:
        raise InvalidParameters(
            f"No call is anchored to the key {key} at the level {level}; name the level that it "
            "was tuned at."
        )


def _candidates(
    key: AttentionKey, dispatcher: Dispatcher
) -> list[tuple[Variant, Mapping[str, int]]]:
    """Return what serves a key, best first: as many as dispatch would try."""
    found: dict[str, tuple[Variant, Mapping[str, int]]] = {}
    for name, parameters in dispatcher.candidates(key, key.representative()):
        variant = dispatcher.variants.get(name)
        if variant is None or name in found or variant.supports(key, dispatcher.target):
            continue
        chosen = variant.defaults(key, dispatcher.target) if parameters is None else parameters
        found[name] = variant, variant.check(key, dispatcher.target, chosen)
    if not found:
        raise Unsupported(f"No variant can serve {key} on {dispatcher.target}; leave the key out.")
    return list(found.values())


def _code(key: AttentionKey, variant: Variant, parameters: Mapping[str, int]) -> Code:
    identity = repr((vars(KernelSpec.from_key(key)), sorted(parameters.items())))
    symbol = f"{variant.name}_{sha256(identity.encode()).hexdigest()[:12]}"
    return Code(symbol, variant.name, dict(parameters), variant.fingerprint())


def _choice(code: Code, corner: AttentionProblem, variant: Variant, target: Target) -> Choice:
    fixed = variant.workspace(replace(corner, batch=0), target, code.parameters)
    return Choice(code.symbol, fixed, variant.workspace(corner, target, code.parameters) - fixed)


def find_linker(target: Target) -> list[str]:
    """Return the command that links shared libraries for a target.

    Raises
    ------
    MissingToolchain
        Naming the compiler that was looked for.
    """
    if target.arch == native().arch:
        names, wanted = list(C_COMPILERS), "a C compiler"
    else:
        names = [cross_compiler(target.arch)]
        wanted = f"the cross compiler {names[0]}"
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise MissingToolchain(
        f"Linking a library for {target.arch} takes {wanted}, which is not to be found; install "
        "it, or name the command with compiler=."
    )


def _write(module: Any, manifest: Manifest, path: Path, linker: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = _LINK_ELSEWHERE if "darwin" in manifest.target else _LINK

    def link(output: str, objects: Sequence[str]) -> None:
        command = [*linker, *options, "-o", output, *objects]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise MissingToolchain(
                f"The linker {linker[0]} cannot be run ({error.strerror}); name another."
            ) from None
        if done.returncode != 0:
            raise MissingToolchain(
                f"The linker {linker[0]} failed ({done.stderr.strip().splitlines()[:1]}); name one "
                f"for {manifest.arch}."
            )

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".attentune-") as folder:
        whole = Path(folder) / path.name
        objects = [str(Path(folder) / "kernels.o")]
        module.write_to_file(objects[0])
        link(str(whole), objects)
        manifests.append(whole, manifest)
        beside = Path(folder) / f"{path.name}.json"
        beside.write_text(manifest.dumps())
        # Whoever loads in between finds either library, but never one with the other's manifest.
        path.with_name(beside.name).unlink(missing_ok=True)
        os.replace(whole, path)
        os.replace(beside, path.with_name(beside.name))
