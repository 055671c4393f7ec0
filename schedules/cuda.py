"""Steps that CUDA templates share. Each says what it does to the loop nest.

A block of threads is one line, ``threadIdx.x`` of one extent in every stage: TVM merges extents
that differ, silently, and loses results.
"""

from __future__ import annotations

from typing import Any

from attentune.target import Target

Schedule = Any
Extent = Any  # an integer, or MetaSchedule's random variable for one

# Dynamic, since what a kernel declares itself ends at 48 KB.
SHARED = "shared.dyn"


def exceeds(target: Target, shared_bytes: int, threads: int) -> str | None:
    """Return why a block of threads does not fit a target, or None."""
    if shared_bytes > target.shared_memory_bytes:
        need, limit = -(-shared_bytes // 1024), target.shared_memory_bytes // 1024
        return f"{need} KB of shared memory, {target.arch} has {limit}"
    if threads > target.max_threads:
        return f"{threads} threads in a block, {target.arch} has {target.max_threads}"
    return None


def bind_tasks(sch: Schedule, block: str) -> None:
    """Give each task a block of threads. Comes last, as `parallel` does on CPUs.

    Along x alone: y and z end at 65535.
    """
    sch.bind(sch.fuse(*sch.get_loops(sch.get_sblock(block))), "blockIdx.x")


def keep(sch: Schedule, blocks: tuple[str, ...], scope: str) -> None:
    """Keep what blocks write in a scope."""
    for block in blocks:
        sch.set_scope(sch.get_sblock(block), 0, scope)


def spread(sch: Schedule, block: str, threads: Extent, loops: int) -> None:
    """Spread the innermost loops over the threads, neighbours side by side.

    before: ``for i, j: block``
    after: ``for n_0: for n_1 in threadIdx.x: block``
    """
    fused = sch.fuse(*sch.get_loops(sch.get_sblock(block))[-loops:], preserve_unit_iters=True)
    _, thread = sch.split(fused, [None, threads], preserve_unit_iters=True)
    sch.bind(thread, "threadIdx.x")


def reduce_by_row(sch: Schedule, block: str, threads: Extent) -> None:
    """Reduce every row in one thread's register.

    before: ``for i, j: total[i] += value[j, i]``
    after: ``for i in threadIdx.x: for j: total_local += value``; store once.
    """
    reduction = sch.get_sblock(block)
    row, key = sch.get_loops(reduction)[-2:]
    _, thread = sch.split(row, [None, threads], preserve_unit_iters=True)
    sch.bind(thread, "threadIdx.x")
    store = sch.cache_write(reduction, 0, "local")
    sch.reverse_compute_at(store, thread, preserve_unit_loops=True)
    sch.decompose_reduction(reduction, key)


def tile_by_thread(sch: Schedule, block: Any, across: Extent, down: Extent) -> Any:
    """Give each thread a dense tile of ``[rows, columns]``, which can stay in its registers.

    before: ``for j, i: block``
    after: ``for thread in threadIdx.x: for j_1, i_1 unrolled: block``

    Parameters
    ----------
    sch : Schedule
        The schedule.
    block : SBlock
        Its two innermost loops are the tile's.
    across, down : Extent
        Threads along the columns and along the rows.

    Returns
    -------
    LoopRV
        The loop over threads.
    """
    rows, columns = sch.get_loops(block)[-2:]
    row_thread, row = sch.split(rows, [down, None], preserve_unit_iters=True)
    column_thread, column = sch.split(columns, [across, None], preserve_unit_iters=True)
    sch.reorder(row_thread, column_thread, row, column)
    thread = sch.fuse(row_thread, column_thread, preserve_unit_iters=True)
    sch.bind(thread, "threadIdx.x")
    sch.unroll(row)
    sch.unroll(column)
    return thread


def tile_product(sch: Schedule, product: str, result: str, across: Extent, down: Extent) -> None:
    """Accumulate a product in each thread's registers, and finish it where it is used.

    before: ``for j, i, d: product[j, i] += a * b`` and ``for j, i: result[j, i] = f(product)``
    after: each thread zeroes its tile, accumulates it over d, applies f and stores.
    """
    thread = tile_by_thread(sch, sch.get_sblock(result), across, down)
    block = sch.get_sblock(product)
    sch.compute_at(block, thread, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    row, column, reduction = sch.get_loops(block)[-3:]
    sch.reorder(reduction, row, column)
    sch.unroll(row)
    sch.unroll(column)
    sch.decompose_reduction(block, reduction)


def publish(
    sch: Schedule, consumers: tuple[str, ...], index: int, across: Extent, down: Extent
) -> None:
    """Copy each thread's tile to shared memory, for consumers that other threads run.

    before: ``for j, i: tile[j, i] = ...`` and ``consumer(tile)``
    after: ``for j, i: shared[j, i] = tile[j, i]`` in between; the consumers read that.
    Computing into shared memory at once would cost a barrier for every element: TVM puts one
    between a shared write and the next condition on a shared value.
    """
    blocks = [sch.get_sblock(name) for name in consumers]
    copy = sch.cache_read(blocks[0], index, SHARED, consumer_blocks=blocks)
    tile_by_thread(sch, copy, across, down)
