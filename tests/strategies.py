"""Hypothesis strategies that several test files share."""

from hypothesis import strategies as st

from attentune.problem import ALIGNMENTS, DTYPES, LAYOUTS, PRECISIONS, AttentionProblem


@st.composite
def problems(draw, largest=1 << 40):
    """Problems over the whole option space, counts up to `largest`."""
    counts = st.one_of(st.integers(0, min(largest, 5)), st.integers(0, largest))
    batch, kv_heads, seq_q, seq_kv = (draw(counts) for _ in range(4))
    q_heads = kv_heads * draw(st.integers(1, 8))
    extents = (batch, q_heads, seq_q, seq_kv)
    bias = draw(st.none() | st.just(True) | shapes(extents))
    sides = st.none() | counts
    return AttentionProblem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=draw(st.integers(1, 300)),
        value_dim=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.none() | st.sampled_from((True, "padding")) | shapes(extents)),
        bias=bias,
        bias_dtype=None if bias is None else draw(st.none() | st.sampled_from(DTYPES)),
        is_causal=draw(st.booleans()),
        causal_alignment=draw(st.sampled_from(ALIGNMENTS)),
        window=draw(st.none() | st.tuples(sides, sides)),
        softcap=draw(st.none() | st.floats(1e-300, 1e300)),
        scale=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        precision=draw(st.sampled_from(PRECISIONS)),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@st.composite
def shapes(draw, extents):
    """Shapes of rank 1 to 4 that broadcast from the right over `extents`."""
    axes = extents[draw(st.integers(0, 3)) :]
    return tuple(extent if draw(st.booleans()) else 1 for extent in axes)
