"""flash_unit for CUDA: flash attention on scalar units, one block of threads a block of queries.

The kernel is the CPU's, with keys and values copied to shared memory as float32.

    for batch, head, block of queries        ->  blockIdx.x
      for block of keys
        copy keys and values                 ->  all threads, neighbours side by side
        product; score                       ->  a register tile a thread, stored to shared memory
        maximum; sum                         ->  a thread a query
        weight                               ->  the score's tiles
        weight x value; rescale and add      ->  a register tile a thread, where it stays
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attentune.key import AttentionKey
from attentune.schedules import cuda
from attentune.target import Target
from attentune.variant import Domains, Parameters

COPIES = ("load_query", "load_key", "load_value")
ROWS = ("init_max", "init_sum", "new_max", "rescale", "new_sum", "commit_max", "commit_sum",
        "inverse")  # fmt: skip
REDUCTIONS = ("block_max", "block_sum")
OUT_TILES = ("init_out", "commit_out", "normalize")
# (queries, keys) of a block. 64 x 64 gives each of 128 threads 32 multiply-adds for 12 values that
# it reads; the smaller ones are for few queries and wide heads.
BLOCKS = ((64, 64), (32, 32), (64, 32), (16, 16))


def supports(key: AttentionKey, target: Target) -> str | None:
    """Serve keys whose smallest blocks fit the shared memory."""
    if "bfloat16" in (key.query_dtype, key.bias_dtype) and target.compute_capability < 80:
        return f"no bfloat16 in CUDA's arithmetic before sm_80, {target.arch} is older"
    return cuda.exceeds(target, shared_bytes(key.head_dim, key.value_dim, *BLOCKS[-1]), 64)


def structure(key: AttentionKey, target: Target) -> Domains:
    """Return the blocks that fit, large first unless there are few queries."""
    fitting = [
        (block_q, block_kv)
        for block_q, block_kv in BLOCKS
        if cuda.exceeds(target, shared_bytes(key.head_dim, key.value_dim, block_q, block_kv), 1)
        is None
    ]
    used = [block for block in fitting if block[0] < 2 * key.seq_q] or fitting[-1:]
    return {
        "block_q": tuple(dict.fromkeys(block_q for block_q, _ in used)),
        "block_kv": tuple(dict.fromkeys(block_kv for _, block_kv in used)),
        # Keys and values are copied to shared memory, whatever their type.
        "copies": (1,),
    }


def space(key: AttentionKey, target: Target, structure: Parameters) -> Domains:
    """Return how many threads there are, and how many of them lie along the queries."""
    area = structure["block_q"] * structure["block_kv"]
    counts = (256, 128, 64) if key.value_dim > 64 else (128, 256, 64)
    return {
        "threads": tuple(n for n in counts if 4 <= area // n <= 32),
        "threads_q": tuple(n for n in (16, 8) if structure["block_q"] % n == 0),
    }


def allows(key: AttentionKey, target: Target, parameters: Parameters) -> bool:
    """Keep to blocks that fit together, and to threads that have keys each."""
    block_q, block_kv = parameters["block_q"], parameters["block_kv"]
    fits = cuda.exceeds(
        target, shared_bytes(key.head_dim, key.value_dim, block_q, block_kv), parameters["threads"]
    )
    return fits is None and block_kv % (parameters["threads"] // parameters["threads_q"]) == 0


def shared_bytes(head_dim: int, value_dim: int, block_q: int, block_kv: int) -> int:
    """Return an upper bound of the shared memory: TVM lays some of these over each other."""
    copies = block_q * head_dim + block_kv * (head_dim + value_dim)
    scores = 2 * block_q * block_kv
    return 4 * (copies + scores + 8 * block_q)


def schedule(sch: Any, parameters: Mapping[str, Any]) -> None:
    """Apply the template."""
    threads, across = parameters["threads"], parameters["threads_q"]
    down = threads // across
    cuda.keep(sch, (*COPIES, *ROWS, *REDUCTIONS, "score"), cuda.SHARED)
    cuda.keep(sch, ("weight", "new_out", "init_out", "normalize"), "local")
    for stage in COPIES:
        cuda.spread(sch, stage, threads, loops=2)
    for stage in ROWS:
        cuda.spread(sch, stage, threads, loops=1)
    cuda.publish(sch, ("block_sum", "block_out"), 0, across, down)
    cuda.tile_product(sch, "product", "score", across, down)
    cuda.tile_product(sch, "block_out", "new_out", across, down)
    for stage in ("weight", *OUT_TILES):
        cuda.tile_by_thread(sch, sch.get_sblock(stage), across, down)
    cuda.publish(sch, ("store",), 0, across, down)
    for stage in REDUCTIONS:
        cuda.reduce_by_row(sch, stage, threads)
    cuda.spread(sch, "store", threads, loops=2)
    cuda.bind_tasks(sch, "task")
