"""flash_split_kv: for few queries, keys read once for a group of heads and split over the cores.

Wins in decoding, where reading keys and values is all the work. Requires a CPU target. Splits the
keys only where batch x KV heads leave cores idle.

    for batch, KV head, tile of rows, part   ->  one parallel loop
      for block of keys
        dot products by lane; over lanes     ->  keys in register tiles, then summed across
        maximum, weights, sum                ->  vectors of keys
        weight x value; rescale and add      ->  register tiles of rows x vectors of value_dim
    for batch, KV head, tile of rows: merge  ->  parallel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attentune.kernels.spec import KernelSpec
from attentune.kernels.split_kv import split_kv
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.schedules import common
from attentune.target import Target
from attentune.variant import Domains, Parameters, Variant

MAX_ROWS = 16
# Partial results of a dot product. The widest vector there is; narrower machines take several.
LANES = 16
BY_VALUE_DIM = ("load_query", "init_out", "commit_out", "part_out")
BY_KEY = ("score", "weight")


def supports(key: AttentionKey, target: Target) -> str | None:
    """Serve every key on CPUs; that it is for few queries is the policy's rule."""
    return None if target.is_cpu else f"no schedule for {target.kind} targets"


def structure(key: AttentionKey, target: Target) -> Domains:
    """Return rows for a whole group where they fit, and parts where cores would be idle."""
    groups = max(key.total_batches // key.group, 1)
    idle = groups % target.num_cores != 0
    return {
        "rows": (min(max(key.seq_q, 1) * key.group, MAX_ROWS),),
        "block_kv": (64, 128),
        "splits": (target.num_cores, 1) if idle else (1,),
    }


def space(key: AttentionKey, target: Target, parameters: Parameters) -> Domains:
    """Return keys of a dot product's tile, and rows x vectors of the weighted sum's."""
    width = common.vector_width(key.value_dim, common.lanes(target))
    return {
        "score_keys": (16, 8, 4),
        "out_rows": common.divisors(parameters["rows"], (1, 2, 4)),
        "out_columns": common.divisors(key.value_dim // width, (8, 4, 2, 1)),
    }


def allows(key: AttentionKey, target: Target, parameters: Parameters) -> bool:
    """Keep to tiles that fit the registers."""
    return common.tile_fits(target, parameters["score_keys"], 1) and common.tile_fits(
        target, parameters["out_rows"], parameters["out_columns"]
    )


def _lanes(head_dim: int, target: Target) -> int:
    return common.vector_width(head_dim, common.lanes(target))


def kernel(spec: KernelSpec, parameters: Parameters) -> Any:
    """Return the kernel with rows, blocks and parts chosen."""
    lanes = common.vector_width(spec.head_dim, LANES)
    return split_kv(spec, parameters["rows"], parameters["block_kv"], parameters["splits"], lanes)


def schedule(sch: Any, spec: KernelSpec, target: Target, parameters: Mapping[str, Any]) -> None:
    """Apply the template."""
    width = common.lanes(target)
    lanes = common.vector_width(spec.head_dim, LANES)
    _dot_products(sch, parameters["score_keys"], lanes)
    common.tile_product(
        sch, "block_out", "new_out", parameters["out_rows"], parameters["out_columns"],
        common.vector_width(spec.value_dim, width),
    )  # fmt: skip
    for reduction in ("lane_max", "lane_sum"):
        _, lane, block = sch.get_loops(sch.get_sblock(reduction))[-3:]
        sch.reorder(block, lane)
        sch.vectorize(lane)
        sch.decompose_reduction(sch.get_sblock(reduction), block)
    for stage in BY_VALUE_DIM:
        extent = spec.head_dim if stage == "load_query" else spec.value_dim
        common.vectorize_last(sch, stage, common.vector_width(extent, width))
    for stage in BY_KEY:
        common.vectorize_last(sch, stage, width)
    for task in ("task", "merge_task"):
        common.parallelize_tasks(sch, task)


def _dot_products(sch: Any, keys: Any, lanes: int) -> None:
    """Accumulate a tile of keys by lane in registers, then sum over the lanes of all keys at once.

    before: ``for r, j, i, c: partial[r, j, i] += q * k`` and ``for r, j, i: product += partial``
    after: for each tile of keys: ``for c: for keys: for lanes: partial += q * k`` in registers;
    ``for lanes: for keys: product += partial``
    """
    partial, product = sch.get_sblock("partial"), sch.get_sblock("product")
    row, key, lane = sch.get_loops(product)[-3:]
    outer, inner = sch.split(key, [None, keys], preserve_unit_iters=True)
    sch.reorder(row, outer, lane, inner)
    sch.compute_at(partial, outer, preserve_unit_loops=True)
    sch.set_scope(partial, 0, "local")
    tile_row, tile_key, tile_lane, block = sch.get_loops(partial)[-4:]
    sch.reorder(block, tile_row, tile_key, tile_lane)
    sch.vectorize(tile_lane)
    sch.unroll(tile_key)
    sch.decompose_reduction(partial, block)
    sch.vectorize(inner)
    sch.unroll(lane)
    sch.decompose_reduction(product, lane)


def workspace(problem: AttentionProblem, target: Target, parameters: Parameters) -> int:
    """Return what every part keeps until it is merged, and what the running tasks need."""
    rows, block_kv, splits = (parameters[n] for n in ("rows", "block_kv", "splits"))
    tiles = -(-problem.seq_q * problem.group // rows)
    parts = problem.batch * problem.kv_heads * tiles * splits
    kept = parts * rows * (problem.value_dim + 2)
    running = rows * (problem.head_dim + 2 * problem.value_dim + 4 * block_kv)
    return 4 * (kept + running * target.num_cores)


FLASH_SPLIT_KV = Variant(
    name="flash_split_kv",
    supports=supports,
    structure=structure,
    space=space,
    kernel=kernel,
    schedule=schedule,
    workspace=workspace,
    allows=allows,
)
