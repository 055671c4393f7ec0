"""Flash attention: online softmax over blocks of keys, everything in between kept in cache.

The block of keys belongs to the algorithm, since no schedule primitive derives the online softmax;
so does the block of queries, which the running state is kept for. All else is the schedule's.

The products are transposed, S^T = K Q^T and O^T = V^T P^T, so that the innermost axis of every
stage is the queries': maximum, sum and rescaling then need no reduction across lanes, and neither
K nor V has to be packed.

Every stage is a block of its own with a loop above it, nothing is updated in place, and the
running state changes only in the ``commit`` blocks: schedules then find the shape they need, and
leave the function that they start from intact.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from attentune.kernels import blocks, scores, script
from attentune.kernels.spec import KernelSpec


def flash(spec: KernelSpec, block_q: int, block_kv: int, *, copies: bool | None = None) -> Any:
    """Return flash attention as a PrimFunc with symbolic batch, heads, lengths and strides.

    Its parameters are query, key, value, [mask], [bias], out, scale, [softcap], [lower], [upper];
    those in brackets only where the spec has them. Shapes are ``[batch, heads, seq, dim]``, mask
    and bias ``[batch, heads, seq_q, seq_kv]`` with a stride of 0 on broadcast axes. Key j is
    visible to query i when ``lower <= j - i <= upper``.

    Parameters
    ----------
    spec : KernelSpec
        What the kernel is compiled for.
    block_q, block_kv : int
        Queries whose state is kept together, and keys between two updates of that state.
    copies : bool, optional
        Whether keys and values are copied, as float32, before the products read them; by default
        only where they are narrower. What is read by many threads is worth a copy.
    """
    return _flash.specialize(
        spec=spec,
        block_q=block_q,
        block_kv=block_kv,
        copies=spec.widens if copies is None else copies,
        **script.absent(spec),
    )


@script.jit(s_tir=True)
def _flash(
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
    copies: T.constexpr,
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

    for b, h, t in T.grid(batch, heads, T.ceildiv(seq_q, block_q)):
        with T.sblock("task"):
            vb, vh, vt = T.axis.remap("SSS", [b, h, t])
            query_t = T.sblock_alloc_buffer((spec.head_dim, block_q), "float32")
            row_max = T.sblock_alloc_buffer((block_q,), "float32")
            row_sum = T.sblock_alloc_buffer((block_q,), "float32")
            out_t = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
            inverse = T.sblock_alloc_buffer((block_q,), "float32")
            normal = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
            for d, i in T.grid(spec.head_dim, block_q):
                with T.sblock("load_query"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    query_t[vd, vi] = T.cast(
                        query[vb, vh, T.min(vt * block_q + vi, seq_q - 1), vd], "float32"
                    ) * scores.query_factor(spec, scale, softcap)
            for i in T.serial(block_q):
                with T.sblock("init_max"):
                    vi = T.axis.spatial(block_q, i)
                    row_max[vi] = scores.minus_infinity()
            for i in T.serial(block_q):
                with T.sblock("init_sum"):
                    vi = T.axis.spatial(block_q, i)
                    row_sum[vi] = T.float32(0)
            for d, i in T.grid(spec.value_dim, block_q):
                with T.sblock("init_out"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    out_t[vd, vi] = T.float32(0)

            for s in T.serial(blocks.count(vt, seq_q, seq_kv, lower, upper, block_q, block_kv)):
                with T.sblock("keys"):
                    vs = T.axis.opaque(
                        T.ceildiv(seq_kv, block_kv),
                        blocks.first(vt, lower, block_q, block_kv) + s,
                    )
                    new_max = T.sblock_alloc_buffer((block_q,), "float32")
                    new_sum = T.sblock_alloc_buffer((block_q,), "float32")
                    new_out = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
                    for u in T.serial(1):
                        with T.sblock("step"):
                            _ = T.axis.spatial(1, u)
                            product = T.sblock_alloc_buffer((block_kv, block_q), "float32")
                            score = T.sblock_alloc_buffer((block_kv, block_q), "float32")
                            block_max = T.sblock_alloc_buffer((block_q,), "float32")
                            rescale = T.sblock_alloc_buffer((block_q,), "float32")
                            weight = T.sblock_alloc_buffer((block_kv, block_q), "float32")
                            block_sum = T.sblock_alloc_buffer((block_q,), "float32")
                            block_out = T.sblock_alloc_buffer((spec.value_dim, block_q), "float32")
                            if copies:
                                wide_key = T.sblock_alloc_buffer(
                                    (block_kv, spec.head_dim), "float32"
                                )
                                wide_value = T.sblock_alloc_buffer(
                                    (block_kv, spec.value_dim), "float32"
                                )
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
                            for j, i, d in T.grid(block_kv, block_q, spec.head_dim):
                                with T.sblock("product"):
                                    vj, vi, vd = T.axis.remap("SSR", [j, i, d])
                                    with T.init():
                                        product[vj, vi] = T.float32(0)
                                    product[vj, vi] = (
                                        product[vj, vi]
                                        + (
                                            wide_key[vj, vd]
                                            if copies
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
                                    score[vj, vi] = scores.score(
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
                            for i, j in T.grid(block_q, block_kv):
                                with T.sblock("block_max"):
                                    vi, vj = T.axis.remap("SR", [i, j])
                                    with T.init():
                                        block_max[vi] = scores.minus_infinity()
                                    block_max[vi] = T.max(block_max[vi], score[vj, vi])
                            for i in T.serial(block_q):
                                with T.sblock("new_max"):
                                    vi = T.axis.spatial(block_q, i)
                                    new_max[vi] = T.max(row_max[vi], block_max[vi])
                            for i in T.serial(block_q):
                                with T.sblock("rescale"):
                                    vi = T.axis.spatial(block_q, i)
                                    rescale[vi] = scores.exponential(
                                        spec, row_max[vi] - scores.finite(new_max[vi])
                                    )
                            for j, i in T.grid(block_kv, block_q):
                                with T.sblock("weight"):
                                    vj, vi = T.axis.remap("SS", [j, i])
                                    weight[vj, vi] = scores.exponential(
                                        spec, score[vj, vi] - scores.finite(new_max[vi])
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
                                    new_sum[vi] = row_sum[vi] * rescale[vi] + block_sum[vi]
                            for d, i, j in T.grid(spec.value_dim, block_q, block_kv):
                                with T.sblock("block_out"):
                                    vd, vi, vj = T.axis.remap("SSR", [d, i, j])
                                    with T.init():
                                        block_out[vd, vi] = T.float32(0)
                                    block_out[vd, vi] = (
                                        block_out[vd, vi]
                                        + (
                                            wide_value[vj, vd]
                                            if copies
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
                                    new_out[vd, vi] = (
                                        out_t[vd, vi] * rescale[vi] + block_out[vd, vi]
                                    )
                    for u in T.serial(1):
                        with T.sblock("commit"):
                            _ = T.axis.spatial(1, u)
                            for i in T.serial(block_q):
                                with T.sblock("commit_max"):
                                    vi = T.axis.spatial(block_q, i)
                                    row_max[vi] = new_max[vi]
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
