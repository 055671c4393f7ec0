"""Attention for few queries: keys read once for a whole group of heads, and split over the cores.

With few queries there is nothing to gain from registers full of them; what counts is that each key
and value comes from memory once, for all query heads that share it, and that all cores read. So
the rows of a tile are the queries of a group, vectors run along head_dim and value_dim, and the
keys are cut into parts whose results are merged by their log-sum-exp. A part without a visible
key has the maximum -inf, and changes nothing.

Dot products, maxima and sums are first taken by lane, and over the lanes at the end.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from attentune.kernels import blocks, scores, script
from attentune.kernels.spec import KernelSpec


def split_kv(spec: KernelSpec, rows: int, block_kv: int, splits: int, lanes: int) -> Any:
    """Return attention with split keys as a PrimFunc with symbolic extents and strides.

    Parameters
    ----------
    spec : KernelSpec
        What the kernel is compiled for. The PrimFunc's own parameters are `flash`'s.
    rows : int
        Queries of a group that are computed together.
    block_kv : int
        Keys between two updates of the running state.
    splits : int
        Parts that the keys are cut into.
    lanes : int
        Partial results of a reduction; must divide head_dim and block_kv.
    """
    return _split_kv.specialize(
        spec=spec, rows=rows, block_kv=block_kv, splits=splits, lanes=lanes, **script.absent(spec)
    )


@script.jit(s_tir=True)
def _split_kv(
    query_handle: T.handle,
    key_handle: T.handle,
    value_handle: T.handle,
    mask_handle: T.Optional(T.handle),
    bias_handle: T.Optional(T.handle),
    out_handle: T.handle,
    scale: T.float32,
    softcap: T.Optional(T.float32),
    lower: T.Optional(T.int64),
    upper: T.Optional(T.int64),
    *,
    spec: T.constexpr,
    rows: T.constexpr,
    block_kv: T.constexpr,
    splits: T.constexpr,
    lanes: T.constexpr,
):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
    batch, heads, kv_heads, seq_q, seq_kv = T.int64(), T.int64(), T.int64(), T.int64(), T.int64()
    query = script.strided(query_handle, (batch, heads, seq_q, spec.head_dim), spec.dtype)
    key = script.strided(key_handle, (batch, kv_heads, seq_kv, spec.head_dim), spec.dtype)
    value = script.strided(value_handle, (batch, kv_heads, seq_kv, spec.value_dim), spec.dtype)
    out = script.strided(out_handle, (batch, heads, seq_q, spec.value_dim), spec.dtype)
    if mask_handle is not None:
        mask = script.strided(
            mask_handle, (batch, heads, seq_q, seq_kv), "bool", unit_innermost=False
        )
    if bias_handle is not None:
        bias = script.strided(
            bias_handle, (batch, heads, seq_q, seq_kv), spec.bias_dtype, unit_innermost=False
        )
    # What each part found, by batch, KV head, tile of rows and part.
    part_max = T.sblock_alloc_buffer(
        (batch, kv_heads, T.ceildiv(seq_q * spec.group, rows), splits, rows), "float32"
    )
    part_sum = T.sblock_alloc_buffer(
        (batch, kv_heads, T.ceildiv(seq_q * spec.group, rows), splits, rows), "float32"
    )
    part_out = T.sblock_alloc_buffer(
        (batch, kv_heads, T.ceildiv(seq_q * spec.group, rows), splits, rows, spec.value_dim),
        "float32",
    )

    for b, h, t, p in T.grid(batch, kv_heads, T.ceildiv(seq_q * spec.group, rows), splits):
        with T.sblock("task"):
            vb, vh, vt, vp = T.axis.remap("SSSS", [b, h, t, p])
            query_rows = T.sblock_alloc_buffer((rows, spec.head_dim), "float32")
            row_max = T.sblock_alloc_buffer((rows,), "float32")
            row_sum = T.sblock_alloc_buffer((rows,), "float32")
            out_rows = T.sblock_alloc_buffer((rows, spec.value_dim), "float32")
            for r, d in T.grid(rows, spec.head_dim):
                with T.sblock("load_query"):
                    vr, vd = T.axis.remap("SS", [r, d])
                    query_rows[vr, vd] = T.cast(
                        query[
                            vb,
                            scores.row_head(vh, vt * rows + vr, seq_q, spec),
                            scores.row_query(vt * rows + vr, seq_q, spec),
                            vd,
                        ],
                        "float32",
                    ) * scores.query_factor(spec, scale, softcap)
            for r in T.serial(rows):
                with T.sblock("init_max"):
                    vr = T.axis.spatial(rows, r)
                    row_max[vr] = scores.minus_infinity()
            for r in T.serial(rows):
                with T.sblock("init_sum"):
                    vr = T.axis.spatial(rows, r)
                    row_sum[vr] = T.float32(0)
            for r, d in T.grid(rows, spec.value_dim):
                with T.sblock("init_out"):
                    vr, vd = T.axis.remap("SS", [r, d])
                    out_rows[vr, vd] = T.float32(0)

            for s in T.serial(blocks.part_count(vp, seq_q, seq_kv, lower, upper, block_kv, splits)):
                with T.sblock("keys"):
                    vs = T.axis.opaque(
                        T.ceildiv(seq_kv, block_kv),
                        blocks.part_first(vp, seq_q, seq_kv, lower, upper, block_kv, splits) + s,
                    )
                    new_max = T.sblock_alloc_buffer((rows,), "float32")
                    new_sum = T.sblock_alloc_buffer((rows,), "float32")
                    new_out = T.sblock_alloc_buffer((rows, spec.value_dim), "float32")
                    for u in T.serial(1):
                        with T.sblock("step"):
                            _ = T.axis.spatial(1, u)
                            partial = T.sblock_alloc_buffer((rows, block_kv, lanes), "float32")
                            product = T.sblock_alloc_buffer((rows, block_kv), "float32")
                            score = T.sblock_alloc_buffer((rows, block_kv), "float32")
                            lane_max = T.sblock_alloc_buffer((rows, lanes), "float32")
                            block_max = T.sblock_alloc_buffer((rows,), "float32")
                            rescale = T.sblock_alloc_buffer((rows,), "float32")
                            weight = T.sblock_alloc_buffer((rows, block_kv), "float32")
                            lane_sum = T.sblock_alloc_buffer((rows, lanes), "float32")
                            block_sum = T.sblock_alloc_buffer((rows,), "float32")
                            block_out = T.sblock_alloc_buffer((rows, spec.value_dim), "float32")
                            for r, j, i, c in T.grid(rows, block_kv, lanes, spec.head_dim // lanes):
                                with T.sblock("partial"):
                                    vr, vj, vi, vc = T.axis.remap("SSSR", [r, j, i, c])
                                    with T.init():
                                        partial[vr, vj, vi] = T.float32(0)
                                    partial[vr, vj, vi] = partial[vr, vj, vi] + query_rows[
                                        vr, vc * lanes + vi
                                    ] * T.cast(
                                        key[
                                            vb,
                                            vh,
                                            T.min(vs * block_kv + vj, seq_kv - 1),
                                            vc * lanes + vi,
                                        ],
                                        "float32",
                                    )
                            for r, j, i in T.grid(rows, block_kv, lanes):
                                with T.sblock("product"):
                                    vr, vj, vi = T.axis.remap("SSR", [r, j, i])
                                    with T.init():
                                        product[vr, vj] = T.float32(0)
                                    product[vr, vj] = product[vr, vj] + partial[vr, vj, vi]
                            for r, j in T.grid(rows, block_kv):
                                with T.sblock("score"):
                                    vr, vj = T.axis.remap("SS", [r, j])
                                    score[vr, vj] = scores.score(
                                        spec,
                                        product[vr, vj],
                                        0,
                                        vj,
                                        scores.row_query(vt * rows + vr, seq_q, spec),
                                        vs * block_kv,
                                        seq_kv,
                                        softcap=softcap,
                                        mask=None
                                        if spec.mask == "none"
                                        else mask[
                                            vb,
                                            scores.row_head(vh, vt * rows + vr, seq_q, spec),
                                            scores.row(
                                                spec.mask,
                                                scores.row_query(vt * rows + vr, seq_q, spec),
                                                seq_q,
                                            ),
                                            T.min(vs * block_kv + vj, seq_kv - 1),
                                        ],
                                        bias=None
                                        if spec.bias == "none"
                                        else bias[
                                            vb,
                                            scores.row_head(vh, vt * rows + vr, seq_q, spec),
                                            scores.row(
                                                spec.bias,
                                                scores.row_query(vt * rows + vr, seq_q, spec),
                                                seq_q,
                                            ),
                                            T.min(vs * block_kv + vj, seq_kv - 1),
                                        ],
                                        lower=lower,
                                        upper=upper,
                                    )
                            for r, i, c in T.grid(rows, lanes, block_kv // lanes):
                                with T.sblock("lane_max"):
                                    vr, vi, vc = T.axis.remap("SSR", [r, i, c])
                                    with T.init():
                                        lane_max[vr, vi] = scores.minus_infinity()
                                    lane_max[vr, vi] = T.max(
                                        lane_max[vr, vi], score[vr, vc * lanes + vi]
                                    )
                            for r, i in T.grid(rows, lanes):
                                with T.sblock("block_max"):
                                    vr, vi = T.axis.remap("SR", [r, i])
                                    with T.init():
                                        block_max[vr] = scores.minus_infinity()
                                    block_max[vr] = T.max(block_max[vr], lane_max[vr, vi])
                            for r in T.serial(rows):
                                with T.sblock("new_max"):
                                    vr = T.axis.spatial(rows, r)
                                    new_max[vr] = T.max(row_max[vr], block_max[vr])
                            for r in T.serial(rows):
                                with T.sblock("rescale"):
                                    vr = T.axis.spatial(rows, r)
                                    rescale[vr] = scores.exponential(
                                        spec, row_max[vr] - scores.finite(new_max[vr])
                                    )
                            for r, j in T.grid(rows, block_kv):
                                with T.sblock("weight"):
                                    vr, vj = T.axis.remap("SS", [r, j])
                                    weight[vr, vj] = scores.exponential(
                                        spec, score[vr, vj] - scores.finite(new_max[vr])
                                    )
                            for r, i, c in T.grid(rows, lanes, block_kv // lanes):
                                with T.sblock("lane_sum"):
                                    vr, vi, vc = T.axis.remap("SSR", [r, i, c])
                                    with T.init():
                                        lane_sum[vr, vi] = T.float32(0)
                                    lane_sum[vr, vi] = (
                                        lane_sum[vr, vi] + weight[vr, vc * lanes + vi]
                                    )
                            for r, i in T.grid(rows, lanes):
                                with T.sblock("block_sum"):
                                    vr, vi = T.axis.remap("SR", [r, i])
                                    with T.init():
                                        block_sum[vr] = T.float32(0)
                                    block_sum[vr] = block_sum[vr] + lane_sum[vr, vi]
                            for r in T.serial(rows):
                                with T.sblock("new_sum"):
                                    vr = T.axis.spatial(rows, r)
                                    new_sum[vr] = row_sum[vr] * rescale[vr] + block_sum[vr]
                            for r, d, j in T.grid(rows, spec.value_dim, block_kv):
                                with T.sblock("block_out"):
                                    vr, vd, vj = T.axis.remap("SSR", [r, d, j])
                                    with T.init():
                                        block_out[vr, vd] = T.float32(0)
                                    block_out[vr, vd] = block_out[vr, vd] + weight[vr, vj] * T.cast(
                                        value[vb, vh, T.min(vs * block_kv + vj, seq_kv - 1), vd],
                                        "float32",
                                    )
                            for r, d in T.grid(rows, spec.value_dim):
                                with T.sblock("new_out"):
                                    vr, vd = T.axis.remap("SS", [r, d])
                                    new_out[vr, vd] = (
                                        out_rows[vr, vd] * rescale[vr] + block_out[vr, vd]
                                    )
                    for u in T.serial(1):
                        with T.sblock("commit"):
                            _ = T.axis.spatial(1, u)
                            for r in T.serial(rows):
                                with T.sblock("commit_max"):
                                    vr = T.axis.spatial(rows, r)
                                    row_max[vr] = new_max[vr]
                            for r in T.serial(rows):
                                with T.sblock("commit_sum"):
                                    vr = T.axis.spatial(rows, r)
                                    row_sum[vr] = new_sum[vr]
                            for r, d in T.grid(rows, spec.value_dim):
                                with T.sblock("commit_out"):
                                    vr, vd = T.axis.remap("SS", [r, d])
                                    out_rows[vr, vd] = new_out[vr, vd]

            for r in T.serial(rows):
                with T.sblock("part_max"):
                    vr = T.axis.spatial(rows, r)
                    part_max[vb, vh, vt, vp, vr] = row_max[vr]
            for r in T.serial(rows):
                with T.sblock("part_sum"):
                    vr = T.axis.spatial(rows, r)
                    part_sum[vb, vh, vt, vp, vr] = row_sum[vr]
            for r, d in T.grid(rows, spec.value_dim):
                with T.sblock("part_out"):
                    vr, vd = T.axis.remap("SS", [r, d])
                    part_out[vb, vh, vt, vp, vr, vd] = out_rows[vr, vd]

    for b, h, t in T.grid(batch, kv_heads, T.ceildiv(seq_q * spec.group, rows)):
        with T.sblock("merge_task"):
            vb, vh, vt = T.axis.remap("SSS", [b, h, t])
            total_max = T.sblock_alloc_buffer((rows,), "float32")
            factor = T.sblock_alloc_buffer((rows, splits), "float32")
            total_sum = T.sblock_alloc_buffer((rows,), "float32")
            total_out = T.sblock_alloc_buffer((rows, spec.value_dim), "float32")
            for r, p in T.grid(rows, splits):
                with T.sblock("total_max"):
                    vr, vp = T.axis.remap("SR", [r, p])
                    with T.init():
                        total_max[vr] = scores.minus_infinity()
                    total_max[vr] = T.max(total_max[vr], part_max[vb, vh, vt, vp, vr])
            for r, p in T.grid(rows, splits):
                with T.sblock("factor"):
                    vr, vp = T.axis.remap("SS", [r, p])
                    factor[vr, vp] = scores.exponential(
                        spec, part_max[vb, vh, vt, vp, vr] - scores.finite(total_max[vr])
                    )
            for r, p in T.grid(rows, splits):
                with T.sblock("total_sum"):
                    vr, vp = T.axis.remap("SR", [r, p])
                    with T.init():
                        total_sum[vr] = T.float32(0)
                    total_sum[vr] = total_sum[vr] + factor[vr, vp] * part_sum[vb, vh, vt, vp, vr]
            for r, d, p in T.grid(rows, spec.value_dim, splits):
                with T.sblock("total_out"):
                    vr, vd, vp = T.axis.remap("SSR", [r, d, p])
                    with T.init():
                        total_out[vr, vd] = T.float32(0)
                    total_out[vr, vd] = (
                        total_out[vr, vd] + factor[vr, vp] * part_out[vb, vh, vt, vp, vr, vd]
                    )
            for r, d in T.grid(rows, spec.value_dim):
                with T.sblock("store"):
                    vr, vd = T.axis.remap("SS", [r, d])
                    T.where(vt * rows + r < seq_q * spec.group)
                    out[
                        vb,
                        scores.row_head(vh, vt * rows + vr, seq_q, spec),
                        scores.row_query(vt * rows + vr, seq_q, spec),
                        vd,
                    ] = T.cast(
                        T.Select(
                            total_sum[vr] == T.float32(0),
                            T.float32(0),
                            total_out[vr, vd] / total_sum[vr],
                        ),
                        spec.dtype,
                    )
