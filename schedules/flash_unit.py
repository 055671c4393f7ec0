"""flash_unit: flash attention on vector units, register blocked, transposed.

Wins when the scores do not fit the cache and there is no matrix unit for the element type. The
products run in register tiles that broadcast one key (or value) against vectors of queries; the
softmax runs on the same vectors, so it never reduces across lanes.

Loop nest on CPUs, from the kernel's stages to this schedule's; `cuda_flash_unit` has CUDA's:

    for batch, head, block of queries        ->  one parallel loop
      for block of keys
        product; score                       ->  register tiles, the score applied as one is stored
        maximum                              ->  columns of vectors in registers
        weight; sum                          ->  summed as they are computed
        weight x value; rescale and add      ->  register tiles, added as one is stored
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attentune.kernels.flash import flash
from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.schedules import common, cuda_flash_unit
from attentune.target import Target
from attentune.variant import Domains, Parameters, Variant

STATE_STAGES = (
    "init_max", "init_sum", "init_out", "new_max", "rescale", "new_sum",
    "commit_max", "commit_sum", "commit_out", "inverse", "normalize",
)  # fmt: skip


def supports(key: AttentionKey, target: Target) -> str | None:
    """Serve every key on CPUs."""
    return None if target.is_cpu else cuda_flash_unit.supports(key, target)


def structure(key: AttentionKey, target: Target) -> Domains:
    """Return the blocks: 64 queries unless there are fewer, keys so that scores stay in cache."""
    if not target.is_cpu:
        return cuda_flash_unit.structure(key, target)
    width = common.lanes(target)
    block_q = tuple(b for b in (64, 32) if b < 2 * key.seq_q) or (max(16, width),)
    block_kv = tuple(b for b in (128, 64, 256) if b < 2 * key.seq_kv) or (32,)
    return {"block_q": block_q, "block_kv": block_kv}


def space(key: AttentionKey, target: Target, parameters: Parameters) -> Domains:
    """Return the tiles of both products."""
    if target.is_cpu:
        return common.product_tiles(key, target, parameters)
    return cuda_flash_unit.space(key, target, parameters)


def allows(key: AttentionKey, target: Target, parameters: Parameters) -> bool:
    """Keep to tiles that fit the registers."""
    if target.is_cpu:
        return common.tiles_fit(key, target, parameters)
    return cuda_flash_unit.allows(key, target, parameters)


def kernel(spec: KernelSpec, parameters: Parameters) -> Any:
    """Return the flash kernel with the blocks chosen."""
    copies = bool(parameters.get("copies", spec.widens))
    return flash(spec, parameters["block_q"], parameters["block_kv"], copies=copies)


def schedule(sch: Any, spec: KernelSpec, target: Target, parameters: Mapping[str, Any]) -> None:
    """Apply the template."""
    if not target.is_cpu:
        cuda_flash_unit.schedule(sch, parameters)
        return
    width = common.lanes(target)
    common.schedule_products(sch, parameters, width)
    for stage in ("load_query", *STATE_STAGES):
        common.vectorize_last(sch, stage, width)
    if spec.widens:
        common.vectorize_loads(sch, spec, width)
    common.parallelize_tasks(sch, "task")


def workspace(problem: AttentionProblem, target: Target, parameters: Parameters) -> int:
    """Return what the tasks that run at once keep: state, scores, weights, widened blocks.

    On a GPU all of that is on the chip.
    """
    if not target.is_cpu:
        return 0
    block_q, block_kv = parameters["block_q"], parameters["block_kv"]
    state = (problem.head_dim + 3 * problem.value_dim + 6) * block_q
    scores = 2 * block_kv * block_q
    widened = 0
    if problem.dtype != "float32":
        widened = (problem.head_dim + problem.value_dim) * block_kv
    return 4 * (state + scores + widened) * target.num_cores


FLASH_UNIT = Variant(
    name="flash_unit",
    supports=supports,
    structure=structure,
    space=space,
    kernel=kernel,
    schedule=schedule,
    workspace=workspace,
    allows=allows,
)
