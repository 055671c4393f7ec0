"""Attention in three stages, with the scores materialized: scores, row maximum, weighted sum.

No online softmax: the maximum of a row is known before its first weight is computed, so nothing
is rescaled. Scores are kept transposed, a panel ``[keys, queries of the block]`` for each block of
queries, the innermost axis always the queries'.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from attentune.kernels import blocks, scores, script
from attentune.kernels.spec import KernelSpec


def fallback(spec: KernelSpec, block_q: int, block_kv: int) -> Any:
    """Return attention with materialized scores as a PrimFunc with symbolic extents and strides.

    Parameters
    ----------
    spec : KernelSpec
        What the kernel is compiled for. The PrimFunc's own parameters are `flash`'s.
    block_q, block_kv : int
        Queries of a panel of scores, and keys that are loaded together.
    """
    return _fallback.specialize(
        spec=spec, block_q=block_q, block_kv=block_kv, **script.absent(spec)
    )


@script.jit(s_tir=True)
def _fallback(
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
    block_q: T.constexpr,
    block_kv: T.constexpr,
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
    score = T.sblock_alloc_buffer(
        (
            batch,
            heads,
            T.ceildiv(seq_q, block_q),
            T.ceildiv(seq_kv, block_kv),
            block_kv,
            block_q,
        ),
        "float32",
    )
    row_max = T.sblock_alloc_buffer((batch, heads, T.ceildiv(seq_q, block_q), block_q), "float32")

    for b, h, t in T.grid(batch, heads, T.ceildiv(seq_q, block_q)):
        with T.sblock("score_task"):
            vb, vh, vt = T.axis.remap("SSS", [b, h, t])
            query_t = T.sblock_alloc_buffer((spec.head_dim, block_q), "float32")
            for d, i in T.grid(spec.head_dim, block_q):
                with T.sblock("load_query"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    query_t[vd, vi] = T.cast(
                        query[vb, vh, T.min(vt * block_q + vi, seq_q - 1), vd], "float32"
                    ) * scores.query_factor(spec, scale, softcap)
            for s in T.serial(blocks.count(vt, seq_q, seq_kv, lower, upper, block_q, block_kv)):
                with T.sblock("score_keys"):
                    vs = T.axis.spatial(
                        T.ceildiv(seq_kv, block_kv), blocks.first(vt, lower, block_q, block_kv) + s
                    )
                    product = T.sblock_alloc_buffer((block_kv, block_q), "float32")
                    if spec.widens:
                        wide_key = T.sblock_alloc_buffer((block_kv, spec.head_dim), "float32")
                        for j, d in T.grid(block_kv, spec.head_dim):
                            with T.sblock("load_key"):
                                vj, vd = T.axis.remap("SS", [j, d])
                                wide_key[vj, vd] = T.cast(
                                    key[
                                        vb,
                                        vh // spec.group,
                                        T.min(vs * block_kv + vj, seq_kv - 1),
                                        vd,
                                    ],
                                    "float32",
                                )
                    for j, i, d in T.grid(block_kv, block_q, spec.head_dim):
                        with T.sblock("product"):
                            vj, vi, vd = T.axis.remap("SSR", [j, i, d])
                            with T.init():
                                product[vj, vi] = T.float32(0)
                            product[vj, vi] = (
                                product[vj, vi]
                                + (
                                    wide_key[vj, vd]
                                    if spec.widens
                                    else key[
                                        vb,
                                        vh // spec.group,
                                        T.min(vs * block_kv + vj, seq_kv - 1),
                                        vd,
                                    ]
                                )
                                * query_t[vd, vi]
                            )
                    for j, i in T.grid(block_kv, block_q):
                        with T.sblock("score"):
                            vj, vi = T.axis.remap("SS", [j, i])
                            score[vb, vh, vt, vs, vj, vi] = scores.score(
                                spec,
                                product[vj, vi],
                                vi,
                                vj,
                                vt * block_q,
                                vs * block_kv,
                                seq_kv,
                                softcap=softcap,
                                mask=None
                                if spec.mask == "none"
                                else mask[
                                    vb,
                                    vh,
                                    scores.row(spec.mask, vt * block_q + vi, seq_q),
                                    T.min(vs * block_kv + vj, seq_kv - 1),
                                ],
                                bias=None
                                if spec.bias == "none"
                                else bias[
                                    vb,
                                    vh,
                                    scores.row(spec.bias, vt * block_q + vi, seq_q),
                                    T.min(vs * block_kv + vj, seq_kv - 1),
                                ],
                                lower=lower,
                                upper=upper,
                            )

    for b, h, t in T.grid(batch, heads, T.ceildiv(seq_q, block_q)):
        with T.sblock("max_task"):
            vb, vh, vt = T.axis.remap("SSS", [b, h, t])
            running_max = T.sblock_alloc_buffer((block_q,), "float32")
            for i in T.serial(block_q):
                with T.sblock("init_max"):
                    vi = T.axis.spatial(block_q, i)
                    running_max[vi] = scores.minus_infinity()
            for s in T.serial(blocks.count(vt, seq_q, seq_kv, lower, upper, block_q, block_kv)):
                with T.sblock("max_keys"):
                    vs = T.axis.opaque(
                        T.ceildiv(seq_kv, block_kv), blocks.first(vt, lower, block_q, block_kv) + s
                    )
                    new_max = T.sblock_alloc_buffer((block_q,), "float32")
                    for u in T.serial(1):
                        with T.sblock("max_step"):
                            _ = T.axis.spatial(1, u)
                            block_max = T.sblock_alloc_buffer((block_q,), "float32")
                            for i, j in T.grid(block_q, block_kv):
                                with T.sblock("block_max"):
                                    vi, vj = T.axis.remap("SR", [i, j])
                                    with T.init():
                                        block_max[vi] = scores.minus_infinity()
                                    block_max[vi] = T.max(
                                        block_max[vi], score[vb, vh, vt, vs, vj, vi]
                                    )
                            for i in T.serial(block_q):
                                with T.sblock("new_max"):
                                    vi = T.axis.spatial(block_q, i)
                                    new_max[vi] = T.max(running_max[vi], block_max[vi])
                    for u in T.serial(1):
                        with T.sblock("max_commit"):
                            _ = T.axis.spatial(1, u)
                            for i in T.serial(block_q):
                                with T.sblock("commit_max"):
                                    vi = T.axis.spatial(block_q, i)
                                    running_max[vi] = new_max[vi]
            for i in T.serial(block_q):
                with T.sblock("store_max"):
                    vi = T.axis.spatial(block_q, i)
                    row_max[vb, vh, vt, vi] = scores.finite(running_max[vi])

    for b, h, t in T.grid(batch, heads, T.ceildiv(seq_q, block_q)):
        with T.sblock("out_task"):
            vb, vh, vt = T.axis.remap("SSS", [b, h, t])
            row_sum = T.sblock_alloc_buffer((block_q,), "float32")
            out_t = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
            inverse = T.sblock_alloc_buffer((block_q,), "float32")
            normal = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
            for i in T.serial(block_q):
                with T.sblock("init_sum"):
                    vi = T.axis.spatial(block_q, i)
                    row_sum[vi] = T.float32(0)
            for d, i in T.grid(spec.value_dim, block_q):
                with T.sblock("init_out"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    out_t[vd, vi] = T.float32(0)
            for s in T.serial(blocks.count(vt, seq_q, seq_kv, lower, upper, block_q, block_kv)):
                with T.sblock("out_keys"):
                    vs = T.axis.opaque(
                        T.ceildiv(seq_kv, block_kv), blocks.first(vt, lower, block_q, block_kv) + s
                    )
                    new_sum = T.sblock_alloc_buffer((block_q,), "float32")
                    new_out = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
                    for u in T.serial(1):
                        with T.sblock("out_step"):
                            _ = T.axis.spatial(1, u)
                            weight = T.sblock_alloc_buffer((block_kv, block_q), "float32")
                            block_sum = T.sblock_alloc_buffer((block_q,), "float32")
                            block_out = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
                            if spec.widens:
                                wide_value = T.sblock_alloc_buffer(
                                    (block_kv, spec.value_dim), "float32"
                                )
                                for j, d in T.grid(block_kv, spec.value_dim):
                                    with T.sblock("load_value"):
                                        vj, vd = T.axis.remap("SS", [j, d])
                                        wide_value[vj, vd] = T.cast(
                                            value[
                                                vb,
                                                vh // spec.group,
                                                T.min(vs * block_kv + vj, seq_kv - 1),
                                                vd,
                                            ],
                                            "float32",
                                        )
                            for j, i in T.grid(block_kv, block_q):
                                with T.sblock("weight"):
                                    vj, vi = T.axis.remap("SS", [j, i])
                                    weight[vj, vi] = scores.exponential(
                                        spec,
                                        score[vb, vh, vt, vs, vj, vi] - row_max[vb, vh, vt, vi],
                                    )
                            for i, j in T.grid(block_q, block_kv):
                                with T.sblock("block_sum"):
                                    vi, vj = T.axis.remap("SR", [i, j])
                                    with T.init():
                                        block_sum[vi] = T.float32(0)
                                    block_sum[vi] = block_sum[vi] + weight[vj, vi]
                            for i in T.serial(block_q):
                                with T.sblock("new_sum"):
                                    vi = T.axis.spatial(block_q, i)
                                    new_sum[vi] = row_sum[vi] + block_sum[vi]
                            for d, i, j in T.grid(spec.value_dim, block_q, block_kv):
                                with T.sblock("block_out"):
                                    vd, vi, vj = T.axis.remap("SSR", [d, i, j])
                                    with T.init():
                                        block_out[vd, vi] = T.float32(0)
                                    block_out[vd, vi] = (
                                        block_out[vd, vi]
                                        + (
                                            wide_value[vj, vd]
                                            if spec.widens
                                            else value[
                                                vb,
                                                vh // spec.group,
                                                T.min(vs * block_kv + vj, seq_kv - 1),
                                                vd,
                                            ]
                                        )
                                        * weight[vj, vi]
                                    )
                            for d, i in T.grid(spec.value_dim, block_q):
                                with T.sblock("new_out"):
                                    vd, vi = T.axis.remap("SS", [d, i])
                                    new_out[vd, vi] = out_t[vd, vi] + block_out[vd, vi]
                    for u in T.serial(1):
                        with T.sblock("out_commit"):
                            _ = T.axis.spatial(1, u)
                            for i in T.serial(block_q):
                                with T.sblock("commit_sum"):
                                    vi = T.axis.spatial(block_q, i)
                                    row_sum[vi] = new_sum[vi]
                            for d, i in T.grid(spec.value_dim, block_q):
                                with T.sblock("commit_out"):
                                    vd, vi = T.axis.remap("SS", [d, i])
                                    out_t[vd, vi] = new_out[vd, vi]
            for i in T.serial(block_q):
                with T.sblock("inverse"):
                    vi = T.axis.spatial(block_q, i)
                    inverse[vi] = T.float32(1) / row_sum[vi]
            for d, i in T.grid(spec.value_dim, block_q):
                with T.sblock("normalize"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    normal[vd, vi] = T.Select(
                        row_sum[vi] == T.float32(0), T.float32(0), out_t[vd, vi] * inverse[vi]
                    )
            for i, d in T.grid(block_q, spec.value_dim):
                with T.sblock("store"):
                    vi, vd = T.axis.remap("SS", [i, d])
                    T.where(vt * block_q + i < seq_q)
                    out[vb, vh, vt * block_q + vi, vd] = T.cast(normal[vd, vi], spec.dtype)
