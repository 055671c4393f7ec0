"""fallback: attention in three stages, the scores materialized in memory.

Wins with few queries, or where all scores of a panel stay in cache: it does no rescaling and its
maximum is known before the first exponential. Requires room for the scores.

    for batch, head, panel: scores           ->  parallel; register tiles
    for batch, head, panel: row maximum      ->  parallel; columns of vectors in registers
    for batch, head, panel: weighted sum     ->  parallel; weights summed as they are computed,
                                                 register tiles
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attentune.kernels.fallback import fallback
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.schedules import common
from attentune.target import Target
from attentune.variant import Domains, Parameters, Variant

STATE_STAGES = (
    "init_max", "new_max", "commit_max", "store_max", "init_sum", "init_out", "new_sum",
    "commit_sum", "commit_out", "inverse", "normalize",
)  # fmt: skip


def supports(key: AttentionKey, target: Target) -> str | None:
    """Serve every key on CPUs; whether the scores fit is the policy's and dispatch's question."""
    return None if target.is_cpu else f"no schedule for {target.kind} targets"


def structure(key: AttentionKey, target: Target) -> Domains:
    """Return panels of up to 64 queries."""
    width = common.lanes(target)
    block_q = tuple(b for b in (64, 32) if b < 2 * key.seq_q) or (max(16, width),)
    return {"block_q": block_q, "block_kv": (128,)}


def kernel(spec: KernelSpec, parameters: Parameters) -> Any:
    """Return the three-stage kernel with the blocks chosen."""
    return fallback(spec, parameters["block_q"], parameters["block_kv"])


def schedule(sch: Any, spec: KernelSpec, target: Target, parameters: Mapping[str, Any]) -> None:
    """Apply the template."""
    width = common.lanes(target)
    common.schedule_products(sch, parameters, width)
    for stage in ("load_query", *STATE_STAGES):
        common.vectorize_last(sch, stage, width)
    if spec.widens:
        common.vectorize_loads(sch, spec, width)
    for task in ("score_task", "max_task", "out_task"):
        common.parallelize_tasks(sch, task)


def workspace(problem: AttentionProblem, target: Target, parameters: Parameters) -> int:
    """Return the materialized scores, padded to whole blocks, and a maximum for each row."""
    block_q, block_kv = parameters["block_q"], parameters["block_kv"]
    rows = -(-problem.seq_q // block_q) * block_q
    keys = -(-problem.seq_kv // block_kv) * block_kv
    return 4 * problem.batch * problem.q_heads * rows * (keys + 1)


FALLBACK = Variant(
    name="fallback",
    supports=supports,
    structure=structure,
    space=common.product_tiles,
    kernel=kernel,
    schedule=schedule,
    workspace=workspace,
    allows=common.tiles_fit,
)
