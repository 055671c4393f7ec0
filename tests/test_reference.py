"""The oracle: cases worked by hand, and a loop over every score that shares nothing with it."""

import math

import ml_dtypes
import numpy as np
import pytest

from attentune import reference
from attentune.errors import InvalidProblem


def naive(
    q, k, v, mask=None, bias=None, is_causal=False, causal_alignment="bottom_right", window=None,
    scale=None, softcap=None,
):  # fmt: skip
    """Attention one score at a time, in Python's own floats."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    out = np.zeros((batch, heads, queries, value_dim))
    lse = np.zeros((batch, heads, queries))
    full = (batch, heads, queries, keys)
    left, right = window or (None, None)
    for b, h, i in np.ndindex(batch, heads, queries):
        shared = h // (heads // kv_heads)
        here = i + (keys - queries if causal_alignment == "bottom_right" else 0)
        scores = {}
        for j in range(keys):
            hidden = (
                (is_causal and j > here)
                or (left is not None and j < here - left)
                or (right is not None and j > here + right)
                or (mask is not None and not np.broadcast_to(mask, full)[b, h, i, j])
            )
            if hidden:
                continue
            score = math.fsum(float(q[b, h, i, d]) * float(k[b, shared, j, d]) for d in range(dim))
            score *= dim**-0.5 if scale is None else scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if bias is not None:
                score += float(np.broadcast_to(bias, full)[b, h, i, j])
            if score != -math.inf:
                scores[j] = score
        top = max(scores.values(), default=0.0)
        weights = {j: math.exp(score - top) for j, score in scores.items()}
        total = math.fsum(weights.values())
        lse[b, h, i] = top + math.log(total) if weights else -math.inf
        for d in range(value_dim):
            products = (w * float(v[b, shared, j, d]) for j, w in weights.items())
            out[b, h, i, d] = math.fsum(products) / total if weights else 0.0
    return out, lse


def inputs(batch=2, heads=4, kv_heads=2, queries=5, keys=7, dim=6, value_dim=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, heads, queries, dim), (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim),
    )  # fmt: skip
    return tuple(rng.standard_normal(shape) * 2 for shape in shapes)


RNG = np.random.default_rng(1)
SHAPES = [
    (7,),
    (5, 1),
    (5, 7),
    (4, 1, 1),
    (4, 5, 7),
    (1, 1, 1, 7),
    (2, 1, 5, 1),
    (2, 4, 5, 7),
    (1,),
]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"kv_heads": 1}, {}),
        ({"kv_heads": 4}, {}),
        ({"queries": 1}, {"is_causal": True}),
        *(
            (sizes, {**options, "causal_alignment": alignment})
            for sizes in ({}, {"queries": 7}, {"queries": 9}, {"queries": 9, "keys": 4})
            for options in (
                {"is_causal": True},
                {"window": (2, 1)},
                {"window": (None, 1)},
                {"window": (0, None)},
                {"window": (1, 3), "is_causal": True},
            )
            for alignment in ("bottom_right", "top_left")
        ),
        ({}, {"scale": 0}),
        ({}, {"scale": -0.7}),
        ({}, {"softcap": 1.5}),
        ({}, {"softcap": 0.5, "scale": 3.0, "is_causal": True}),
        *(({}, {"mask": RNG.random(shape) < 0.6}) for shape in SHAPES),
        *(({}, {"bias": RNG.standard_normal(shape)}) for shape in SHAPES),
        (
            {},
            {
                "mask": RNG.random((2, 1, 1, 7)) < 0.7,
                "bias": RNG.standard_normal((4, 5, 7)),
                "softcap": 2.0,
                "window": (3, 1),
                "is_causal": True,
                "scale": 0.9,
            },
        ),
    ],
)
def test_agrees_with_one_score_at_a_time(sizes, options):
    q, k, v = inputs(**sizes)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = naive(q, k, v, **options)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


def test_blocks_of_queries_change_nothing(monkeypatch):
    q, k, v = inputs(queries=11)
    options = {
        "mask": RNG.random((11, 7)) < 0.6,
        "bias": RNG.standard_normal((11, 1)),
        "is_causal": True,
    }
    whole = reference.attention(q, k, v, return_lse=True, **options)
    monkeypatch.setattr(reference, "_BLOCK_SCORES", 2 * 4 * 7 * 3)
    parts = reference.attention(q, k, v, return_lse=True, **options)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)


def tiny(queries, keys, values):
    """One head and one element a vector, so that scores are products of two numbers."""
    return (np.reshape(np.array(a, float), (1, 1, len(a), 1)) for a in (queries, keys, values))


LN3 = math.log(3)


@pytest.mark.parametrize(
    ("queries", "options", "expected"),
    [
        ([0], {}, [2]),  # equal weights for the values 0 and 4
        ([LN3], {}, [1]),  # scores ln 3 and 0: weights 3/4 and 1/4
        ([LN3], {"scale": 2}, [0.4]),  # weights 9/10 and 1/10
        ([LN3], {"scale": 0}, [2]),
        ([LN3], {"scale": -1}, [3]),
        ([LN3], {"bias": np.array([0, LN3])}, [2]),
        ([LN3], {"mask": np.array([False, True])}, [4]),
        ([LN3], {"mask": np.array([True, False])}, [0]),
        ([9], {"softcap": 1e-9}, [2]),
        ([0, 0], {"is_causal": True}, [0, 2]),
        ([0, 0, 0], {"is_causal": True}, [0, 0, 2]),
        ([0, 0, 0], {"is_causal": True, "causal_alignment": "top_left"}, [0, 2, 2]),
        ([0], {"is_causal": True}, [2]),
        ([0], {"is_causal": True, "causal_alignment": "top_left"}, [0]),
        ([0, 0], {"window": (0, 0)}, [0, 4]),
        ([0], {"window": (0, None)}, [4]),
        ([0], {"bias": np.array([-np.inf, 0])}, [4]),
        ([0], {"bias": np.array([-np.inf, -np.inf])}, [0]),
    ],
)
def test_worked_by_hand(queries, options, expected):
    q, k, v = tiny(queries, [1, 0], [0, 4])
    np.testing.assert_allclose(reference.attention(q, k, v, **options).ravel(), expected, atol=1e-8)


def test_logarithm_of_the_sum():
    q, k, v = tiny([LN3, 0], [1, 0], [0, 4])
    _, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(lse.ravel(), [math.log(4), math.log(2)])


def test_queries_read_the_head_of_their_group():
    q = np.zeros((1, 6, 1, 1))
    v = np.arange(3.0).reshape(1, 3, 1, 1)
    assert reference.attention(q, v, v).ravel().tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.array([[True], [False]])},
        {"bias": np.array([[0.0], [-np.inf]])},
        {"window": (0, None), "bias": np.array([0.0, -np.inf])},
    ],
)
def test_row_without_a_visible_key(options):
    q, k, v = tiny([5, 6], [1, 2], [3, 4])
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    assert out[0, 0, 1].tolist() == [0.0]
    assert lse[0, 0, 1] == -np.inf
    assert out[0, 0, 0] != 0
    assert np.isfinite(lse[0, 0, 0])


def test_no_keys():
    q, k, v = inputs(keys=0)
    out, lse = reference.attention(q, k, v, return_lse=True, is_causal=True)
    assert out.shape == (2, 4, 5, 3)
    assert not out.any()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"heads": 0, "kv_heads": 0}, {"queries": 0}, {"queries": 0, "keys": 0}]
)
def test_nothing_to_compute(sizes):
    q, k, v = inputs(**sizes)
    mask = np.ones((*q.shape[:3], k.shape[2]), bool)
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    assert out.shape == (*q.shape[:3], 3)
    assert lse.shape == q.shape[:3]
    assert out.size == 0


def test_nan_in_a_hidden_key_is_not_seen():
    q, k, v = inputs()
    expected = reference.attention(q, k, v, mask=np.arange(7) != 3)
    k[:, :, 3] = np.nan
    assert (reference.attention(q, k, v, mask=np.arange(7) != 3) == expected).all()
    hidden_by_the_diagonal = reference.attention(q, k, v, is_causal=True)
    assert np.isfinite(hidden_by_the_diagonal[:, :, 0]).all()  # sees keys 0 to 2
    assert np.isnan(hidden_by_the_diagonal[:, :, 1:]).all()


def test_nan_in_a_visible_key_or_a_query_is_seen():
    q, k, v = inputs()
    k[0, 1, 2, 0] = np.nan
    q[1, 3, 4, 1] = np.nan
    out = reference.attention(q, k, v)
    seen = np.isnan(out).all(axis=-1)
    expected = np.zeros((2, 4, 5), bool)
    expected[0, 2:] = True
    expected[1, 3, 4] = True
    assert (seen == expected).all()
    assert (np.isnan(out).any(axis=-1) == expected).all()


def test_nan_in_a_query_that_sees_no_key_gives_zero():
    q, k, v = inputs()
    q[:] = np.nan
    assert not reference.attention(q, k, v, mask=np.zeros(1, bool)).any()


def test_infinite_scores():
    q, k, v = tiny([1e200], [1e200, 0], [3, 4])
    assert np.isnan(reference.attention(q, k, v, bias=np.array([np.inf, 0.0]))).all()
    assert reference.attention(q, k, v, softcap=2.0).ravel() == pytest.approx(
        (3 * math.e**2 + 4) / (math.e**2 + 1)
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_narrow_inputs_are_computed_in_float64(dtype):
    q, k, v = (array.astype(dtype) for array in inputs())
    out = reference.attention(q, k, v, bias=np.ones((5, 7), dtype))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, naive(q, k, v)[0], rtol=1e-12)


def test_large_logits_are_finite():
    q = np.full((1, 1, 2, 128), 1e3)
    out = reference.attention(q, q, q)
    np.testing.assert_allclose(out, q)


def test_inputs_are_left_alone():
    arrays = inputs()
    copies = [array.copy() for array in arrays]
    reference.attention(*arrays, is_causal=True, softcap=2.0)
    for array, copy in zip(arrays, copies, strict=True):
        assert (array == copy).all()


Q, K, V = inputs(batch=1, heads=2, queries=3, keys=4, dim=5)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (
            (Q[0], K, V),
            {},
            "query has shape (2, 3, 5); it must have four axes, [batch, heads, seq, dim].",
        ),
        (
            (Q, K, V[..., None]),
            {},
            "value has shape (1, 2, 4, 3, 1); it must have four axes, [batch, heads, seq, dim].",
        ),
        *(
            (
                (Q, k, v),
                {},
                f"query, key and value have the shapes {Q.shape}, {k.shape} and {v.shape}; batch "
                "must be equal, head_dim of query and key, and all but the last axis of key and "
                "value.",
            )
            for k, v in (
                (K[..., :4], V),
                (K[:, :, :3], V),
                (K[:, :1], V),
                (np.repeat(K, 2, 0), np.repeat(V, 2, 0)),
            )
        ),
        (
            (Q, np.repeat(K, 2, 1)[:, :3], np.repeat(V, 2, 1)[:, :3]),
            {},
            "q_heads is 2 and kv_heads 3; q_heads must be a multiple of kv_heads, and 0 only "
            "where kv_heads is.",
        ),
        (
            (Q, K, V),
            {"mask": np.ones(4)},
            "mask has the element type float64; a mask is boolean: pass values to be added as "
            "bias.",
        ),
        (
            (Q, K, V),
            {"bias": np.ones(4, bool)},
            "bias has the element type bool; a bias is a float: pass a boolean one as mask.",
        ),
        (
            (Q, K, V),
            {"mask": np.ones(3, bool)},
            "mask has shape (3,); it must broadcast from the right over [batch, q_heads, seq_q, "
            "seq_kv] = [1, 2, 3, 4].",
        ),
        (
            (Q, K, V),
            {"bias": np.ones((1, 1, 1, 3, 4))},
            "bias has shape (1, 1, 1, 3, 4), of rank 5; its rank must be 1 to 4.",
        ),
        (
            (Q, K, V),
            {"mask": np.array(True)},
            "mask has shape (), of rank 0; its rank must be 1 to 4.",
        ),
        ((Q, K, V), {"softcap": 0}, "softcap is 0; it must be None or a finite number above 0."),
        ((Q, K, V), {"scale": math.nan}, "scale is nan; it must be None or a finite number."),
        ((Q, K, V), {"scale": "big"}, "scale is 'big'; it must be None or a finite number."),
        (
            (Q, K, V),
            {"causal_alignment": "left"},
            "causal_alignment is 'left'; did you mean 'top_left'?",
        ),
        (
            (Q, K, V),
            {"window": 3},
            "window is 3; it must be None or (left, right), each None or a count.",
        ),
    ],
)
def test_message(arrays, options, message):
    with pytest.raises(InvalidProblem) as caught:
        reference.attention(*arrays, **options)
    assert str(caught.value) == message
