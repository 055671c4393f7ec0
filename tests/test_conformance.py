"""Every variant, element type and option against the float64 reference, tails of every size.

Kernels are symbolic in their lengths: each is compiled once and run at every pair of lengths.
"""

import itertools
import random

import numpy as np
import pytest
from conformance import AVX2, NATIVE, check, kernel, output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attentune import AttentionKey, AttentionProblem, reference
from attentune.schedules import VARIANTS
from attentune.target import Target

LENGTHS = (0, 1, 7, 20, 43, 100, 197, 300, 1500)
DIMS = (5, 40, 64, 72, 80, 96, 128, 160, 256)
VALUE_DIMS = {64: 96, 128: 64, 40: 72, 160: 5}
DTYPES = ("float32", "float16", "bfloat16")
ALL = {variant.name: variant for variant in VARIANTS}
CPU = [name for name, variant in ALL.items() if variant.supports(
    AttentionKey.from_problem(AttentionProblem(1, 1, 1, 64, 64, 64, 64, "float32")), NATIVE
) is None]  # fmt: skip

# What can be asked for, one at a time and together; shapes of mask and bias by axis letters.
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal top left": {"is_causal": True, "causal_alignment": "top_left"},
    "window": {"window": (37, 5)},
    "window left": {"window": (12, None)},
    "window top left": {"window": (64, 0), "causal_alignment": "top_left"},
    "causal window": {"is_causal": True, "window": (100, 3)},
    "padding mask": {"mask": "b11k"},
    "dense mask": {"mask": "bhqk"},
    "mask of queries": {"mask": "1hq1"},
    "mask of rank 2": {"mask": "qk"},
    "bias": {"bias": "1hqk"},
    "bias of keys": {"bias": "k"},
    "bias float32": {"bias": "b1qk", "bias_dtype": "float32"},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": -0.7},
    "scale zero": {"scale": 0.0},
    "bshd": {"layout": "bshd"},
    "everything": {
        "is_causal": True, "window": (150, None), "mask": "b1qk", "bias": "bhqk",
        "softcap": 20.0, "scale": 0.3, "layout": "bshd",
    },
}  # fmt: skip


def problem(batch, kv_heads, group, seq_q, seq_kv, head_dim, value_dim, dtype, options):
    """Return a problem; mask and bias are given by letters, 1 where they broadcast."""
    extents = {"b": batch, "h": kv_heads * group, "q": seq_q, "k": seq_kv, "1": 1}
    chosen = dict(options)
    for name in ("mask", "bias"):
        if name in chosen:
            chosen[name] = tuple(extents[letter] for letter in chosen[name])
    return AttentionProblem(
        batch, kv_heads * group, kv_heads, seq_q, seq_kv, head_dim, value_dim, dtype, **chosen
    )


def check_lengths(
    variant, pairs, head_dim, value_dim, dtype, options, seed, target=NATIVE, **changes
):
    """Compile for the longest pair and check that kernel at every pair.

    ``changes`` are to the default parameters, of variants that have them.
    """
    chosen = [
        problem(2, 2, 2, seq_q, seq_kv, head_dim, value_dim, dtype, options)
        for seq_q, seq_kv in pairs
    ]
    largest = max(chosen, key=lambda p: p.seq_q * p.seq_kv)
    for index, one in enumerate(chosen):
        # A single query makes a dense mask a broadcast one: another key, and another kernel.
        same = AttentionKey.from_problem(one).mask == AttentionKey.from_problem(largest).mask
        same &= AttentionKey.from_problem(one).bias == AttentionKey.from_problem(largest).bias
        compiled_for = largest if same else one
        defaults = ALL[variant].defaults(AttentionKey.from_problem(compiled_for), target)
        changed = {name: changes.get(name, value) for name, value in defaults.items()}
        candidate = kernel(ALL[variant], compiled_for, target, changed)
        check(candidate, one, seed + index)


PAIRS = [(1, 197), (7, 43), (20, 20), (43, 7), (100, 300), (197, 100), (64, 0)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("variant", CPU)
def test_options(variant, options, seed):
    check_lengths(variant, PAIRS, 64, 96, "float32", options, seed)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("options", ["plain", "everything"])
@pytest.mark.parametrize("variant", CPU)
def test_dtypes(variant, options, dtype, seed):
    check_lengths(variant, PAIRS, 64, 64, dtype, OPTIONS[options], seed)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("variant", CPU)
def test_dims(variant, head_dim, seed):
    check_lengths(variant, PAIRS, head_dim, VALUE_DIMS.get(head_dim, head_dim), "float32", {}, seed)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8, 32])
def test_split_keys(group, splits, seed):
    """More rows than a tile, more parts than blocks of keys, parts that see nothing."""
    variant = ALL["flash_split_kv"]
    target = Target.parse({**NATIVE.attributes, "num-cores": 2})
    for index, (seq_q, seq_kv) in enumerate([(1, 5), (1, 400), (3, 130), (15, 64), (2, 1500)]):
        one = problem(1, 1, group, seq_q, seq_kv, 64, 64, "float32", OPTIONS["causal window"])
        key = AttentionKey.from_problem(one)
        structure = {**variant.structures(key, target)[0], "splits": splits}
        parameters = next(iter(variant.points(key, target, structure)))
        check(kernel(variant, one, target, parameters), one, seed + index)


@pytest.mark.parametrize("variant", CPU)
def test_every_pair_of_lengths(variant, seed):
    pairs = [p for p in itertools.product(LENGTHS, LENGTHS) if 0 not in p or 1500 not in p]
    check_lengths(variant, pairs, 40, 40, "float32", {"is_causal": True}, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", CPU)
def test_avx2(variant, dtype, seed):
    check_lengths(variant, PAIRS, 80, 72, dtype, OPTIONS["everything"], seed, AVX2)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("variant", CPU)
def test_whole_table(variant, head_dim, dtype, options, seed):
    pairs = [(1, 300), (7, 1), (43, 100), (300, 197), (1500, 20), (20, 1500)]
    value_dim = VALUE_DIMS.get(head_dim, head_dim)
    # One column of vectors in the softmax is the quickest for LLVM; others are drawn below.
    check_lengths(variant, pairs, head_dim, value_dim, dtype, options, seed, softmax_columns=1)


@st.composite
def problems(draw):
    """Any problem: extents, element type, options and shapes of mask and bias."""
    length = st.one_of(st.integers(0, 80), st.sampled_from(LENGTHS[:-1]))
    options = {}
    for name in ("mask", "bias"):
        if draw(st.booleans()):
            letters = [draw(st.sampled_from(("1", letter))) for letter in "bhqk"]
            options[name] = "".join(letters)[draw(st.integers(0, 3)) :]
    if "bias" in options:
        options["bias_dtype"] = draw(st.sampled_from(DTYPES))
    options["is_causal"] = draw(st.booleans())
    options["causal_alignment"] = draw(st.sampled_from(("bottom_right", "top_left")))
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 90))
        options["window"] = (draw(side), draw(side))
    options["softcap"] = draw(st.sampled_from((None, 0.5, 10.0)))
    options["scale"] = draw(st.sampled_from((None, 0.0, -0.5, 0.25, 1.0)))
    options["layout"] = draw(st.sampled_from(("bhsd", "bshd")))
    head_dim = draw(st.sampled_from((1, 5, 16, 24, 64)))
    value_dim = draw(st.sampled_from((head_dim, 3, 32)))
    return problem(
        draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3))),
        draw(length), draw(length), head_dim, value_dim, draw(st.sampled_from(DTYPES)), options,
    )  # fmt: skip


def check_any(variant, one, number):
    """Check a variant with parameters drawn from its space."""
    key = AttentionKey.from_problem(one)
    rng = random.Random(number)
    structure = rng.choice(ALL[variant].structures(key, NATIVE))
    parameters = rng.choice(list(ALL[variant].points(key, NATIVE, structure)))
    check(kernel(ALL[variant], one, NATIVE, parameters), one, number)


@pytest.mark.parametrize("variant", CPU)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(one=problems(), number=st.integers(0, 2**31))
def test_anything(variant, one, number):
    check_any(variant, one, number)


@pytest.mark.slow
@pytest.mark.parametrize("variant", CPU)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(one=problems(), number=st.integers(0, 2**31))
def test_anything_at_length(variant, one, number):
    check_any(variant, one, number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", CPU)
def test_large_logits(variant, dtype, seed):
    one = problem(1, 2, 2, 70, 197, 64, 64, dtype, {})
    check(kernel(ALL[variant], one), one, seed, amplitude=40.0)


@pytest.mark.parametrize("variant", CPU)
def test_float16_does_not_overflow(variant):
    one = problem(1, 1, 1, 20, 43, 128, 128, "float16", {})
    inputs = {
        "query": np.full((1, 1, 20, 128), 32, np.float16),
        "key": np.full((1, 1, 43, 128), 32, np.float16),
        "value": np.ones((1, 1, 43, 128), np.float16),
    }
    np.testing.assert_array_equal(output(kernel(ALL[variant], one), one, inputs), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", CPU)
def test_rows_that_see_no_key_are_exactly_zero(variant, dtype, seed):
    from attentune.search.inputs import random_inputs

    one = problem(1, 1, 1, 43, 100, 64, 64, dtype, {"mask": "qk"})
    inputs = random_inputs(one, seed)
    inputs["mask"][:] = False
    inputs["mask"][..., 5, 99] = True
    out = output(kernel(ALL[variant], one), one, inputs)
    np.testing.assert_array_equal(np.delete(out, 5, axis=2), 0)
    np.testing.assert_array_equal(out[0, 0, 5], inputs["value"][0, 0, 99])


@pytest.mark.parametrize("variant", CPU)
def test_most_negative_bias_is_not_infinity(variant, seed):
    from attentune.search.inputs import random_inputs

    one = problem(1, 1, 1, 20, 43, 64, 64, "float32", {"bias": "qk"})
    inputs = random_inputs(one, seed)
    inputs["bias"][:] = np.finfo(np.float32).min
    inputs["bias"][..., 7, :] = -np.inf
    out = output(kernel(ALL[variant], one), one, inputs)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[0, 0, 7], 0)
    np.testing.assert_allclose(out[0, 0, 3], inputs["value"][0, 0].mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("variant", CPU)
def test_nan_in_a_masked_key_stays_there_and_a_visible_one_spreads(variant, seed):
    from attentune.search.inputs import random_inputs

    one = problem(1, 1, 1, 43, 100, 64, 64, "float32", {"mask": "qk"})
    inputs = random_inputs(one, seed)
    inputs["mask"][:] = True
    inputs["mask"][:, :, :20, 50] = False
    inputs["key"][0, 0, 50] = np.nan
    out = output(kernel(ALL[variant], one), one, inputs)
    assert np.isfinite(out[:, :, :20]).all()
    assert np.isnan(out[:, :, 20:]).all()
    inputs["key"][0, 0, 50] = 0
    inputs["query"][0, 0, 30] = np.nan
    out = output(kernel(ALL[variant], one), one, inputs)
    assert np.isnan(out[:, :, 30]).all()
    assert np.isfinite(np.delete(out, 30, axis=2)).all()


@pytest.mark.parametrize("variant", CPU)
def test_memory_beyond_the_arrays_does_not_matter(variant, seed):
    from attentune.search.inputs import random_inputs

    one = problem(1, 2, 1, 43, 70, 40, 40, "float32", {"mask": "b1qk", "bias": "1hqk"})
    inputs = random_inputs(one, seed)
    wanted = reference.expected(one, inputs)
    # Each array is the corner of a larger one that is otherwise NaN (or visible, for the mask).
    for name, array in inputs.items():
        shape = tuple(extent + 9 for extent in array.shape[:3])
        filling = True if name == "mask" else np.nan
        larger = np.full((*shape, array.shape[3] + 16), filling, array.dtype)
        corner = larger[tuple(slice(0, extent) for extent in array.shape)]
        corner[:] = array
        inputs[name] = corner
    out = output(kernel(ALL[variant], one), one, inputs)
    np.testing.assert_allclose(out, wanted, atol=5e-5)
