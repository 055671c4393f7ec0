"""What an exported library holds, as data: which kernels, for which keys, for which machines.

The manifest lies at the end of the library's file, where loaders of machine code do not look, so
that it is read and checked before any of the code is loaded::

    machine code | manifest, JSON | format, checksum, length of the manifest, magic

`Manifest.choose` is the one rule by which calls find kernels; the C++ runtime has the same.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attentune.errors import (
    AttentuneError,
    CorruptLibrary,
    ForeignLibrary,
    LibraryNotFound,
    NewerLibrary,
)
from attentune.kernels.spec import KernelSpec
from attentune.key import LEVELS, AttentionKey

SCHEMA = 1
_MAGIC = b"ATTNLIB\n"
# Format of the file, CRC-32 of all before the footer, bytes of the manifest, magic.
_FOOTER = struct.Struct("<IIQ8s")
_FORMAT = 1


@dataclass(frozen=True)
class Code:
    """The machine code of one candidate.

    Attributes
    ----------
    symbol : str
        Name of its function in the library.
    variant : str
        Its variant.
    parameters : Mapping
        Its parameters by name.
    fingerprint : str
        Digest of the sources it was made from.
    """

    symbol: str
    variant: str
    parameters: Mapping[str, int]
    fingerprint: str


@dataclass(frozen=True)
class Choice:
    """One of the kernels that can serve a key.

    Attributes
    ----------
    symbol : str
        Name of its function.
    fixed_bytes : int
        Workspace that it needs for any call.
    bytes : int
        Workspace beyond that at the key's corner; it grows with the number of scores.
    """

    symbol: str
    fixed_bytes: int
    bytes: int


@dataclass(frozen=True)
class Entry:
    """A key with the kernels that serve it, the best first.

    Attributes
    ----------
    key : AttentionKey
        The key.
    scores : int
        ``heads * seq_q * seq_kv`` at the key's corner.
    choices : tuple of Choice
        The kernels.
    """

    key: AttentionKey
    scores: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a library.

    Attributes
    ----------
    level : str
        How coarsely calls are anchored to its keys.
    target : str
        Canonical text of the target.
    arch : str
        Instruction set.
    cpu_flags : tuple of str
        What the CPU must have, as Linux names it.
    versions : Mapping
        Of attentune, TVM and LLVM.
    codes : tuple of Code
        The kernels, ordered by symbol.
    entries : tuple of Entry
        The keys.
    """

    level: str
    target: str
    arch: str
    cpu_flags: tuple[str, ...]
    versions: Mapping[str, str]
    codes: tuple[Code, ...]
    entries: tuple[Entry, ...]

    def choose(self, key: AttentionKey) -> tuple[Entry, bool] | None:
        """Return the entry that serves a key, and whether it is the key's own.

        Every kernel is right for all lengths, so that a key which the library lacks is served by
        the nearest one with the same code: by the sum of the differences of the counts' binary
        lengths, and among equals by the first. A kernel for dense masks serves broadcast ones,
        where nothing else does.

        Parameters
        ----------
        key : AttentionKey
            Of the call, at this manifest's level.

        Returns
        -------
        (Entry, bool) or None
            None if no kernel serves the key.
        """
        nearest: tuple[int, Entry] | None = None
        for entry in self.entries:
            if entry.key == key:
                return entry, True
            distance = _distance(key, entry.key)
            if distance is not None and (nearest is None or distance < nearest[0]):
                nearest = distance, entry
        return None if nearest is None else (nearest[1], False)

    def dumps(self) -> str:
        """Return it as JSON: the same contents, the same text."""
        data = {
            "schema": SCHEMA,
            "level": self.level,
            "target": self.target,
            "arch": self.arch,
            "cpu_flags": list(self.cpu_flags),
            "versions": dict(self.versions),
            "kernels": [
                {
                    "symbol": code.symbol,
                    "variant": code.variant,
                    "parameters": dict(code.parameters),
                    "fingerprint": code.fingerprint,
                }
                for code in self.codes
            ],
            "keys": [
                {
                    "key": str(entry.key),
                    "scores": entry.scores,
                    "kernels": [
                        {"symbol": c.symbol, "fixed_bytes": c.fixed_bytes, "bytes": c.bytes}
                        for c in entry.choices
                    ],
                }
                for entry in self.entries
            ],
        }
        return json.dumps(data, sort_keys=True, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str, path: Path) -> Manifest:
        """Return the manifest of a text.

        Raises
        ------
        NewerLibrary
            If its schema is not this version's.
        CorruptLibrary
            If it is not a manifest.
        """
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise NewerLibrary(
                    f"The manifest of {path} has the schema {data['schema']!r}, and this version "
                    f"reads {SCHEMA}; export the library with the version that loads it."
                )
            codes = tuple(Code(**one) for one in data["kernels"])
            entries = tuple(
                Entry(
                    AttentionKey.parse(one["key"]),
                    int(one["scores"]),
                    tuple(Choice(**choice) for choice in one["kernels"]),
                )
                for one in data["keys"]
            )
            manifest = cls(
                data["level"], data["target"], data["arch"], tuple(data["cpu_flags"]),
                data["versions"], codes, entries,
            )  # fmt: skip
        except NewerLibrary:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, AttentuneError) as error:
            raise CorruptLibrary(
                f"The manifest of {path} is damaged ({type(error).__name__}: {error}); export the "
                "library anew."
            ) from None
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        symbols = {code.symbol for code in self.codes}
        named = {choice.symbol for entry in self.entries for choice in entry.choices}
        if not named <= symbols or self.level not in LEVELS:
            raise CorruptLibrary(
                f"The manifest of {path} is damaged (it names "
                f"{sorted(named - symbols) or self.level!r}, which it does not hold); export the "
                "library anew."
            )


def _distance(key: AttentionKey, served: AttentionKey) -> int | None:
    """Return how far a key is from one that is served, None if its kernels are not for it."""
    distance = 0
    wanted, found = _code(key), _code(served)
    for name, value in wanted.items():
        if value != found[name]:
            if name not in ("mask", "bias") or (value, found[name]) != ("broadcast", "dense"):
                return None
            distance += 1000
    return distance + sum(
        abs(getattr(key, name).bit_length() - getattr(served, name).bit_length())
        for name in ("total_batches", "seq_q", "seq_kv")
    )


def _code(key: AttentionKey) -> dict[str, Any]:
    """Return what a kernel's code depends on."""
    return {**vars(KernelSpec.from_key(key)), "precision": key.precision}


def append(path: Path, manifest: Manifest) -> None:
    """Write a manifest to the end of a library's file."""
    text = manifest.dumps().encode()
    code = path.read_bytes()
    footer = _FOOTER.pack(_FORMAT, zlib.crc32(text, zlib.crc32(code)), len(text), _MAGIC)
    with path.open("ab") as file:
        file.write(text + footer)


def read(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a library, whose file it checks from beginning to end.

    Raises
    ------
    LibraryNotFound
        If there is no file.
    ForeignLibrary
        If it is not a library of this package, or its end is missing.
    CorruptLibrary
        If it, or the copy of the manifest beside it, was changed.
    NewerLibrary
        If this version does not know its format.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LibraryNotFound(
            f"The library {path} cannot be read ({error.strerror}); check the path."
        ) from None
    if len(content) < _FOOTER.size or content[-len(_MAGIC) :] != _MAGIC:
        raise ForeignLibrary(
            f"{path} is not a library that attentune exported, or its end was cut off; export it "
            "anew and copy it whole, without stripping it."
        )
    version, checksum, length, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    if version != _FORMAT:
        raise NewerLibrary(
            f"The library {path} has the format {version}, and this version reads {_FORMAT}; "
            "export it with the version that loads it."
        )
    body = content[: -_FOOTER.size]
    if zlib.crc32(body) != checksum or length > len(body):
        raise CorruptLibrary(
            f"The library {path} is damaged: its checksum is not that of its contents; export it "
            "anew, or copy it again."
        )
    text = body[len(body) - length :].decode()
    beside = path.with_name(f"{path.name}.json")
    if beside.exists() and beside.read_text() != text:
        raise CorruptLibrary(
            f"{beside} is not the manifest of {path}; delete it, or export the library anew."
        )
    return Manifest.loads(text, path)
