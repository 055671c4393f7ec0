"""Keys: anchors by table and by an independent formula, identity field by field, text."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from strategies import problems

from attentune.errors import InvalidKey
from attentune.key import LEVELS, AttentionKey, anchor
from attentune.problem import AttentionProblem

BASES = {"minimal": Fraction(5, 2), "balanced": Fraction(2), "extensive": Fraction(3, 2)}

ANCHORS = [
    *(("balanced", x, y) for x, y in ((0, 0), (1, 1), (2, 2), (3, 4), (100, 128), (128, 128))),
    *(("balanced", x, y) for x, y in ((129, 256), (1500, 2048))),
    *(("balanced", 1 << n, 1 << n) for n in (29, 31, 39)),
    ("balanced", (1 << 39) + 1, 1 << 40),
    *(("minimal", x, y) for x, y in ((0, 0), (1, 1), (64, 98), (100, 245), (129, 245))),
    ("minimal", 512, 611),
    *(("extensive", x, y) for x, y in ((0, 0), (1, 1), (64, 87), (128, 130))),
    *(("full", x, x) for x in (0, 1, 3, 129, 1500, 1 << 39)),
]


@pytest.mark.parametrize(("level", "count", "expected"), ANCHORS)
def test_anchor_of_the_design(level, count, expected):
    assert anchor(count, level) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_anchor_of_every_count_up_to_5000(level):
    counts = range(5001)
    if level == "full":
        expected = list(counts)
    else:
        # All powers as exact fractions, then for each count the least one that reaches it.
        powers = [BASES[level] ** n for n in range(25)]
        expected = [0, *(math.ceil(next(p for p in powers if p >= x)) for x in counts[1:])]
    assert [anchor(x, level) for x in counts] == expected


def test_anchor_is_balanced_by_default():
    assert anchor(5) == 8


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("balance", "The level of anchoring is 'balance'; did you mean 'balanced'?"),
        (
            "coarse",
            "The level of anchoring is 'coarse'; choose from minimal, balanced, extensive, full.",
        ),
        (2, "The level of anchoring is 2; choose from minimal, balanced, extensive, full."),
    ],
)
def test_unknown_level(level, message):
    with pytest.raises(InvalidKey) as caught:
        anchor(3, level)
    assert str(caught.value) == message


def test_key_of_a_problem():
    problem = AttentionProblem.parse(
        "3,6,2,100,129,80,72:float16:causal:mask=padding:bias=1x6x1x129@float32:window=100/0"
        ":softcap=50:scale=0.1:relaxed:bshd"
    )
    assert AttentionKey.from_problem(problem) == AttentionKey(
        query_dtype="float16",
        key_dtype="float16",
        value_dtype="float16",
        out_dtype="float16",
        total_batches=32,
        seq_q=128,
        seq_kv=256,
        head_dim=80,
        value_dim=72,
        group=3,
        mask="broadcast",
        bias="broadcast",
        bias_dtype="float32",
        causal=True,
        alignment="bottom_right",
        window=(128, 0),
        softcap=True,
        precision="relaxed",
        layout="bshd",
    )


def test_level_reaches_every_anchored_field():
    problem = AttentionProblem.parse("1,64,64,100,129,80,80:float32:window=512/3")
    key = AttentionKey.from_problem(problem, "minimal")
    assert (key.total_batches, key.seq_q, key.seq_kv, key.window) == (98, 245, 245, (611, 7))


# For each field of a key two problems that differ in nothing else of it. A problem has one
# element type for all four of its arrays, so that their fields only vary together there.
BASE = "2,8,8,128,256,64,64:float32"
PAIRS = {
    "total_batches": (BASE, "4,8,8,128,256,64,64:float32"),
    "seq_q": (BASE, "2,8,8,256,256,64,64:float32"),
    "seq_kv": (BASE, "2,8,8,128,512,64,64:float32"),
    "head_dim": (BASE, "2,8,8,128,256,72,64:float32"),
    "value_dim": (BASE, "2,8,8,128,256,64,72:float32"),
    "group": (BASE, "2,8,4,128,256,64,64:float32"),
    "mask": (f"{BASE}:mask", f"{BASE}:mask=padding"),
    "bias": (f"{BASE}:bias", f"{BASE}:bias=1x1x1x256"),
    "bias_dtype": (f"{BASE}:bias", f"{BASE}:bias=2x8x128x256@float16"),
    "causal": (f"{BASE}:window=64/0", f"{BASE}:window=64/0:causal"),
    "alignment": (f"{BASE}:causal", f"{BASE}:causal:top_left"),
    "window": (f"{BASE}:window=64/0", f"{BASE}:window=128/0"),
    "softcap": (BASE, f"{BASE}:softcap=30"),
    "precision": (BASE, f"{BASE}:relaxed"),
    "layout": (BASE, f"{BASE}:bshd"),
}
DTYPE_FIELDS = ("query_dtype", "key_dtype", "value_dtype", "out_dtype")
FURTHER_PAIRS = [
    ("mask", BASE, f"{BASE}:mask"),
    ("mask", BASE, f"{BASE}:mask=padding"),
    ("window", f"{BASE}:window=64/", f"{BASE}:window=64/0"),
    ("window", f"{BASE}:window=64/64", f"{BASE}:window=/64"),
    ("layout", f"{BASE}:bshd", f"{BASE}:strided"),
]


def differing(first, second):
    return {
        field.name
        for field in dataclasses.fields(AttentionKey)
        if getattr(first, field.name) != getattr(second, field.name)
    }


def test_every_field_has_a_pair():
    fields = {field.name for field in dataclasses.fields(AttentionKey)}
    assert fields == {*PAIRS, *DTYPE_FIELDS}


@pytest.mark.parametrize(
    ("field", "first", "second"), [*((f, *pair) for f, pair in PAIRS.items()), *FURTHER_PAIRS]
)
def test_problems_that_differ_in_one_field_have_different_keys(field, first, second):
    keys = [AttentionKey.from_problem(AttentionProblem.parse(text)) for text in (first, second)]
    assert differing(*keys) == {field}
    assert keys[0] != keys[1]
    assert str(keys[0]) != str(keys[1])


def test_bias_is_told_from_none():
    keys = [
        AttentionKey.from_problem(AttentionProblem.parse(text)) for text in (BASE, f"{BASE}:bias")
    ]
    assert differing(*keys) == {"bias", "bias_dtype"}


@pytest.mark.parametrize("field", DTYPE_FIELDS)
def test_keys_that_differ_in_one_element_type_are_different(field):
    key = AttentionKey.from_problem(AttentionProblem.parse(BASE))
    other = dataclasses.replace(key, **{field: "bfloat16"})
    assert differing(key, other) == {field}
    assert str(key) != str(other)


def test_element_type_of_a_problem_is_that_of_all_arrays():
    keys = [
        AttentionKey.from_problem(AttentionProblem.parse(text))
        for text in (BASE, BASE.replace("float32", "float16"))
    ]
    assert differing(*keys) == set(DTYPE_FIELDS)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BASE, f"{BASE}:scale=0.3"),
        (f"{BASE}:softcap=30", f"{BASE}:softcap=50"),
        (BASE, f"{BASE}:top_left"),
        (BASE, "1,16,16,65,129,64,64:float32"),
        (f"{BASE}:mask=padding", f"{BASE}:mask=1x1"),
        (f"{BASE}:causal:window=100/0", f"{BASE}:causal:window=65/0"),
    ],
)
def test_problems_of_one_bucket_share_a_key(first, second):
    keys = [AttentionKey.from_problem(AttentionProblem.parse(text)) for text in (first, second)]
    assert keys[0] == keys[1]


@given(problems())
@settings(max_examples=60, deadline=None)
def test_text_of_a_key_reads_back(problem):
    for level in LEVELS:
        key = AttentionKey.from_problem(problem, level)
        assert AttentionKey.parse(str(key)) == key


def test_text_of_a_key():
    key = AttentionKey.from_problem(AttentionProblem.parse(f"{BASE}:causal:window=100/"))
    assert str(key) == (
        "query_dtype float32, key_dtype float32, value_dtype float32, out_dtype float32, "
        "total_batches 16, seq_q 128, seq_kv 256, head_dim 64, value_dim 64, group 1, mask none, "
        "bias none, bias_dtype none, causal yes, alignment bottom_right, window 128/, softcap no, "
        "precision strict, layout bhsd"
    )


TEXT = str(AttentionKey.from_problem(AttentionProblem.parse(BASE)))
FIELDS = ", ".join(field.name for field in dataclasses.fields(AttentionKey))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seq_q 128", "seq 128", "has a field 'seq'; did you mean 'seq_q'?"),
        ("seq_q 128", "zzz 1", f"has a field 'zzz'; fields are {FIELDS}."),
        (", seq_q 128", "", "lacks seq_q; write every field once."),
        ("seq_q 128", "seq_q 128, seq_q 64", "has the field seq_q twice; write it once."),
    ],
)
def test_text_with_other_fields(old, new, message):
    text = TEXT.replace(old, new)
    with pytest.raises(InvalidKey) as caught:
        AttentionKey.parse(text)
    assert str(caught.value) == f"The key {text!r} {message}"


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("seq_q", "many", "a whole number"),
        ("seq_q", "-1", "a whole number"),
        ("head_dim", "0", "a whole number of at least 1"),
        ("group", "x", "a whole number of at least 1"),
        ("causal", "True", "yes or no"),
        ("window", "5", "none, or left/right"),
        ("window", "5/-1", "none, or left/right"),
        ("query_dtype", "float64", "one of float32, float16, bfloat16"),
        ("bias_dtype", "int8", "one of none, float32, float16, bfloat16"),
        ("mask", "yes", "one of none, dense, broadcast"),
        ("alignment", "left", "one of none, bottom_right, top_left"),
        ("precision", "loose", "one of strict, relaxed"),
        ("layout", "sbhd", "one of bhsd, bshd, strided"),
    ],
)
def test_text_with_a_value_that_is_not_allowed(field, value, form):
    old = next(part for part in TEXT.split(", ") if part.startswith(f"{field} "))
    with pytest.raises(InvalidKey) as caught:
        AttentionKey.parse(TEXT.replace(old, f"{field} {value}"))
    assert str(caught.value) == f"The field {field} of a key is {value!r}; write {form}."


@given(problems(largest=600))
@settings(max_examples=60, deadline=None)
def test_representative_has_the_key_that_it_represents(problem):
    for level in ("balanced", "full"):
        key = AttentionKey.from_problem(problem, level)
        representative = key.representative(max_scores=1 << 60)
        assert AttentionKey.from_problem(representative, level) == key


@given(problems(largest=600))
@settings(max_examples=40, deadline=None)
def test_representative_bounded_by_memory_differs_in_heads_only(problem):
    key = AttentionKey.from_problem(problem)
    bounded = key.representative(max_scores=5000)
    groups = bounded.q_heads // bounded.group
    assert groups == 1 or bounded.q_heads * bounded.seq_q * bounded.seq_kv <= 5000
    assert differing(key, AttentionKey.from_problem(bounded)) <= {"total_batches"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,12,12,384,384,64,64:float32", "1,16,16,512,512,64,64:float32"),
        # Whole groups of three: nine heads of three groups would lie in the next bucket.
        ("2,3,1,5,5,8,8:float16", "1,6,2,8,8,8,8:float16"),
        ("0,4,2,5,5,8,8:float16", "0,2,1,8,8,8,8:float16"),
        ("2,0,0,5,5,8,8:float16", "0,1,1,8,8,8,8:float16"),
        ("1,2,2,1,0,8,8:float32:mask:bias", "1,2,2,1,0,8,8:float32:mask=padding:bias=1x1x1x0"),
        ("1,2,2,0,7,8,8:float32:mask", "1,2,2,0,8,8,8:float32:mask"),
        ("1,2,2,5,7,8,8:float32:softcap=3", "1,2,2,8,8,8,8:float32:softcap=50.0"),
    ],
)
def test_representative(text, expected):
    key = AttentionKey.from_problem(AttentionProblem.parse(text))
    assert str(key.representative()) == expected


def test_representative_does_not_depend_on_the_call():
    texts = ("1,12,12,384,300,64,64:float32:mask=1x1", "4,4,4,257,512,64,64:float32:mask=padding")
    first, second = (
        AttentionKey.from_problem(AttentionProblem.parse(text)).representative() for text in texts
    )
    assert first == second


def test_documentation_of_every_field():
    for field in dataclasses.fields(AttentionKey):
        assert field.name in AttentionKey.__doc__
