"""Export the library that the C++ tests load, and write down what Python chooses and computes."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from broken import changed, rename

import attentune
from attentune import AttentionKey, AttentionProblem
from attentune.library import workspace
from attentune.search.inputs import random_inputs

MEMORY_BYTES = 1 << 28

TEXTS = (
    "1,4,4,128,128,64,64:float32",
    "1,4,2,64,64,40,48:float32:mask:bias:causal",
    "2,4,4,64,64,32,32:float32:softcap=20:window=9/0:mask=padding",
    "1,8,2,1,512,64,64:float32",
    "1,4,4,1024,1024,64,64:float32",
    "1,4,4,128,128,64,64:float32:causal",
)
CALLS = (
    *TEXTS,
    "2,3,3,77,91,64,64:float32",
    "1,4,2,33,65,40,48:float32:mask=1x1x1x65:bias=4x33x65:causal:scale=-0.5",
    "1,8,2,5,300,64,64:float32",
    "1,2,2,50,120,64,64:float32:causal:top_left",
    "1,2,2,50,20,64,64:float32:causal",
    "2,3,3,77,91,64,64:float32:bshd",
)


def random_problem(rng):
    """Return a problem that is near the library's keys as often as not."""

    def count():
        return rng.choice((rng.randint(1, 6), rng.randint(1, 300), rng.randint(1, 1 << 20)))

    def side():
        return rng.choice((None, rng.randint(0, 5), rng.randint(0, 5000)))

    kv_heads, group = rng.randint(1, 8), rng.choice((1, 1, 2, 4))
    batch, seq_q, seq_kv = rng.randint(1, 4), count(), count()
    heads = kv_heads * group

    def shape():
        return tuple(rng.choice((1, extent)) for extent in (batch, heads, seq_q, seq_kv))

    if rng.random() < 0.5:  # what the library has code for
        base = AttentionProblem.parse(rng.choice(TEXTS))
        heads = kv_heads * base.group
        return replace(
            base, batch=batch, q_heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_kv=seq_kv,
            mask=None if base.mask is None else shape(),
            bias=None if base.bias is None else shape(),
            layout=rng.choice(("bhsd", "bshd", "strided")),
        )  # fmt: skip
    bias = shape() if rng.random() < 0.3 else None
    head_dim, value_dim = rng.choice(((64, 64), (64, 64), (40, 48), (32, 32), (7, 9)))
    return AttentionProblem(
        batch, heads, kv_heads, seq_q, seq_kv, head_dim, value_dim,
        rng.choice(("float32", "float32", "float16", "bfloat16")),
        mask=shape() if rng.random() < 0.3 else None,
        bias=bias,
        bias_dtype=None if bias is None else rng.choice((None, "float16")),
        is_causal=rng.random() < 0.4,
        causal_alignment=rng.choice(("bottom_right", "top_left")),
        window=(side(), side()) if rng.random() < 0.3 else None,
        softcap=20.0 if rng.random() < 0.2 else None,
        precision=rng.choice(("strict", "strict", "strict", "relaxed")),
        layout=rng.choice(("bhsd", "bhsd", "bshd", "strided")),
    )  # fmt: skip


def line(problem, made):
    """Return a problem as words, its key, and the symbol that serves it or a dash."""
    p = problem
    window = p.window or (None, None)
    words = [
        p.batch, p.q_heads, p.kv_heads, p.seq_q, p.seq_kv, p.head_dim, p.value_dim, p.dtype,
        "x".join(map(str, p.mask)) if p.mask else "-",
        "x".join(map(str, p.bias)) if p.bias else "-",
        p.bias_dtype or "-", int(p.is_causal), int(p.causal_alignment == "top_left"),
        *("-" if side is None else side for side in window),
        int(p.softcap is not None), int(p.precision == "relaxed"), p.layout,
    ]  # fmt: skip
    key = AttentionKey.from_problem(p, made.level)
    return "\t".join((" ".join(map(str, words)), str(key), symbol(problem, made.choose(key))))


def symbol(problem, found):
    """Return the kernel that fits in the memory, "-" without a key, "none" without memory."""
    if found is None:
        return "-"
    entry, _ = found
    for choice in entry.choices:
        if workspace(choice, entry, problem) <= MEMORY_BYTES:
            return choice.symbol
    return "none"


def write_call(folder, number, text):
    """Write a call's arrays and the reference's result as raw bytes."""
    problem = AttentionProblem.parse(text)
    inputs = random_inputs(problem, number)
    expected = attentune.reference.expected(problem, inputs)
    left, right = problem.window or (None, None)
    lines = [
        f"options {int(problem.is_causal)} {int(problem.causal_alignment == 'top_left')} "
        f"{-1 if left is None else left} {-1 if right is None else right} "
        f"{problem.scale if problem.scale is not None else 'nan'} {problem.softcap or 0}"
    ]
    for name, array in {**inputs, "expected": expected.astype(np.float32)}.items():
        raw = folder / f"{number}.{name}.bin"
        # The memory as it lies, the axes in the order of their strides.
        base = array.transpose(0, 2, 1, 3) if problem.layout == "bshd" and name in (
            "query", "key", "value") else array  # fmt: skip
        raw.write_bytes(np.ascontiguousarray(base).tobytes())
        strides = [s // array.itemsize for s in array.strides]
        lines.append(
            f"{name} {array.ndim} {' '.join(map(str, array.shape))} {' '.join(map(str, strides))}"
        )
    (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")


def write_broken(folder, path):
    """Write libraries that must be refused."""
    content = path.read_bytes()
    (folder / "cut.so").write_bytes(content[: len(content) // 2])
    (folder / "flipped.so").write_bytes(content[:999] + bytes([content[999] ^ 1]) + content[1000:])
    changed(path, folder / "schema.so", lambda data: data.update(schema=2))
    changed(path, folder / "arch.so", lambda data: data.update(arch="sparc"))
    changed(path, folder / "features.so", lambda data: data.update(cpu_flags=["amx9"]))
    changed(path, folder / "nonsense.so", lambda data: data.pop("keys"))
    changed(path, folder / "missing.so", rename)


def main():
    """Write everything below the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "attention.so"
    made = attentune.export_library(TEXTS, path=path)
    rng = random.Random(20260101)
    problems = [random_problem(rng) for _ in range(10_000)]
    (folder / "choices.txt").write_text("\n".join(line(p, made) for p in problems) + "\n")
    for number, text in enumerate(CALLS):
        write_call(folder, number, text)
    (folder / "calls.txt").write_text(f"{len(CALLS)}\n")
    write_broken(folder, path)


if __name__ == "__main__":
    main()
