"""Steps that CPU templates share. Each says what it does to the loop nest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attentune.kernels.spec import KernelSpec
from attentune.key import AttentionKey
from attentune.target import Target
from attentune.variant import Domains, Parameters

Schedule = Any
Extent = Any  # an integer, or MetaSchedule's random variable for one

# TVM keeps a buffer on the stack, where LLVM can turn it into registers, up to this size.
REGISTER_TILE_BYTES = 1024


def lanes(target: Target) -> int:
    """Return how many float32 values a vector register holds."""
    return target.vector_bytes // 4


def tile_fits(target: Target, rows: int, columns: int) -> bool:
    """Return whether a tile of rows x vectors stays in registers while it accumulates.

    Besides the tile, a product holds one row of vectors and one broadcast value.
    """
    registers = 32 if target.vector_bytes == 64 or target.arch == "aarch64" else 16
    tile = rows * columns
    return tile * target.vector_bytes <= REGISTER_TILE_BYTES and tile + columns + 1 <= registers


def product_tiles(key: AttentionKey, target: Target, structure: Parameters) -> Domains:
    """Return the tiles of both products, rows x vectors of queries, and the softmax's vectors."""
    columns = divisors(structure["block_q"] // lanes(target), (4, 2, 1))
    return {
        "score_rows": (4, 8, 2),
        "score_columns": columns,
        "out_rows": divisors(key.value_dim, (4, 8, 2, 5, 3)),
        "out_columns": columns,
        "softmax_columns": columns,
    }


def tiles_fit(key: AttentionKey, target: Target, parameters: Parameters) -> bool:
    """Return whether both products' tiles stay in registers."""
    return all(
        tile_fits(target, parameters[f"{tile}_rows"], parameters[f"{tile}_columns"])
        for tile in ("score", "out")
    )


def divisors(extent: int, candidates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the candidates that divide an extent, or 1 where none does."""
    return tuple(c for c in candidates if extent % c == 0) or (1,)


def vector_width(extent: int, width: int) -> int:
    """Return the widest power of two up to ``width`` that divides an extent."""
    return math.gcd(extent, width)


def vectorize_last(sch: Schedule, block: str, width: int) -> None:
    """Vectorize the innermost loop.

    before: ``for i in range(n): block``
    after: ``for i_0 in range(n // width): for i_1 in vectorized(width): block``
    """
    loop = sch.get_loops(sch.get_sblock(block))[-1]
    _, inner = sch.split(loop, [None, width], preserve_unit_iters=True)
    sch.vectorize(inner)


def tile_product(
    sch: Schedule, product: str, result: str, rows: Extent, columns: Extent, width: int
) -> None:
    """Compute a product in register tiles, each finished by the stage that uses it.

    before: ``for j, i, d: product[j, i] += a * b`` and ``for j, i: result[j, i] = f(product)``
    after: for each tile of ``rows`` x ``columns`` vectors: zero the tile in registers, accumulate
    it over d, apply f and store.
    """
    block, consumer = sch.get_sblock(product), sch.get_sblock(result)
    j, i = sch.get_loops(consumer)[-2:]
    j_outer, j_inner = sch.split(j, [None, rows], preserve_unit_iters=True)
    i_outer, i_inner, vector = sch.split(i, [None, columns, width], preserve_unit_iters=True)
    sch.reorder(j_outer, i_outer, j_inner, i_inner, vector)
    sch.compute_at(block, i_outer, preserve_unit_loops=True)
    sch.set_scope(block, 0, "local")
    row, column, reduction = sch.get_loops(block)[-3:]
    column_outer, column_vector = sch.split(column, [None, width], preserve_unit_iters=True)
    sch.reorder(reduction, row, column_outer, column_vector)
    # Vectorize and unroll first: once decomposed, the update is no reduction block any more.
    sch.vectorize(column_vector)
    sch.unroll(column_outer)
    sch.unroll(row)
    sch.decompose_reduction(block, reduction)
    sch.vectorize(vector)
    sch.unroll(i_inner)
    sch.unroll(j_inner)


def reduce_in_registers(
    sch: Schedule, reduction: str, columns: Extent, width: int, producer: str | None = None
) -> None:
    """Reduce over keys, the running values of ``columns`` vectors kept in registers.

    before: ``for i, j: total[i] += value[j, i]``
    after: for each group of vectors: ``for j: for columns: total_local += value[j]``; store once.
    With a producer, each of its values is reduced right after it is computed.
    """
    block = sch.get_sblock(reduction)
    if producer is None:
        i, j = sch.get_loops(block)[-2:]
        outer, unrolled, vector = sch.split(i, [None, columns, width], preserve_unit_iters=True)
        sch.reorder(outer, j, unrolled, vector)
    else:
        j, i = sch.get_loops(sch.get_sblock(producer))[-2:]
        outer, group, group_vector = sch.split(i, [None, columns, width], preserve_unit_iters=True)
        sch.reorder(outer, j, group, group_vector)
        sch.reverse_compute_at(block, j, preserve_unit_loops=True)
        own, unit = sch.get_loops(block)[-2:]
        unrolled, vector = sch.split(own, [None, width], preserve_unit_iters=True)
        sch.reorder(unit, unrolled, vector)
        sch.vectorize(group_vector)
        sch.unroll(group)
    store = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(store, outer, preserve_unit_loops=True)
    store_outer, store_vector = sch.split(
        sch.get_loops(store)[-1], [None, width], preserve_unit_iters=True
    )
    sch.vectorize(store_vector)
    sch.unroll(store_outer)
    sch.vectorize(vector)
    sch.unroll(unrolled)
    sch.decompose_reduction(block, j)


def schedule_products(sch: Schedule, parameters: Mapping[str, Any], width: int) -> None:
    """Tile both products, and keep the softmax's maximum and sum in registers."""
    tile_product(
        sch, "product", "score", parameters["score_rows"], parameters["score_columns"], width
    )
    tile_product(
        sch, "block_out", "new_out", parameters["out_rows"], parameters["out_columns"], width
    )
    columns = parameters["softmax_columns"]
    reduce_in_registers(sch, "block_max", columns, width)
    reduce_in_registers(sch, "block_sum", columns, width, producer="weight")


def vectorize_loads(sch: Schedule, spec: KernelSpec, width: int) -> None:
    """Widen keys and values a vector at a time."""
    vectorize_last(sch, "load_key", vector_width(spec.head_dim, width))
    vectorize_last(sch, "load_value", vector_width(spec.value_dim, width))


def parallelize_tasks(sch: Schedule, block: str) -> None:
    """Spread a block's loops over the cores.

    Comes last: a later primitive would change IR that the schedule shares with its caller.
    """
    sch.parallel(sch.fuse(*sch.get_loops(sch.get_sblock(block))))
