"""Problems: their text, what they derive, and the message of every mistake."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import problems

from attentune.errors import InvalidProblem
from attentune.problem import AttentionProblem

SIZES = {
    "batch": 2, "q_heads": 6, "kv_heads": 3, "seq_q": 5, "seq_kv": 7, "head_dim": 8, "value_dim": 4,
}  # fmt: skip


def make(**changes):
    return AttentionProblem(**{**SIZES, "dtype": "float32", **changes})


def message(**changes):
    with pytest.raises(InvalidProblem) as caught:
        make(**changes)
    return str(caught.value)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_text_reads_back(problem):
    assert AttentionProblem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    "text",
    [
        "1,32,8,512,512,128,128:bfloat16:causal",
        "2,6,3,5,7,8,4:float32",
        "2,6,3,5,7,8,4:float32:causal:top_left",
        "2,6,3,5,7,8,4:float32:mask",
        "2,6,3,5,7,8,4:float32:mask=padding",
        "2,6,3,5,7,8,4:float32:mask=1x6x1x7:bias",
        "2,6,3,5,7,8,4:float16:bias=1x6x5x7@float32",
        "2,6,3,5,7,8,4:float32:bias=1x1x1x1",
        "2,6,3,5,7,8,4:float32:window=4095/0",
        "2,6,3,5,7,8,4:float32:window=/3",
        "2,6,3,5,7,8,4:float32:softcap=50.0:scale=-0.1:relaxed:strided",
        "0,0,0,0,0,1,1:float32",
    ],
)
def test_canonical_text(text):
    assert str(AttentionProblem.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" 2, 6,3,5,7,8,4 : float32 : causal ", "2,6,3,5,7,8,4:float32:causal"),
        ("2,6,3,5,7,8,4:float32:softcap=50", "2,6,3,5,7,8,4:float32:softcap=50.0"),
        ("2,6,3,5,7,8,4:float32:mask=7", "2,6,3,5,7,8,4:float32:mask=1x1x1x7"),
        ("2,6,3,5,7,8,4:float32:bias=6x5x7", "2,6,3,5,7,8,4:float32:bias"),
        ("2,6,3,1,7,8,4:float32:mask", "2,6,3,1,7,8,4:float32:mask=padding"),
        ("2,6,3,5,7,8,4:float32:window=/", "2,6,3,5,7,8,4:float32"),
    ],
)
def test_text_is_brought_into_canonical_form(text, canonical):
    assert str(AttentionProblem.parse(text)) == canonical


def test_shapes_are_kept_with_rank_4():
    problem = make(mask=(5, 1), bias=True)
    assert problem.mask == (1, 1, 5, 1)
    assert problem.bias == (1, 6, 5, 7)
    assert problem.bias_dtype == "float32"
    assert make(mask=True).mask == (2, 1, 5, 7)
    assert make(mask="padding").mask == (2, 1, 1, 7)
    assert make(bias=[7], bias_dtype="float16").bias_dtype == "float16"


def test_numbers_of_numpy_become_pythons():
    problem = make(seq_q=np.int64(5), scale=np.float32(0.5), window=(np.int32(1), None))
    assert problem == make(scale=0.5, window=(1, None))
    assert {type(problem.seq_q), type(problem.window[0])} == {int}
    assert type(problem.scale) is float


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (None, None)),
        ({"is_causal": True}, (None, 2)),
        ({"is_causal": True, "causal_alignment": "top_left"}, (None, 0)),
        ({"window": (3, 1)}, (-1, 3)),
        ({"window": (3, 1), "causal_alignment": "top_left"}, (-3, 1)),
        ({"window": (None, 1)}, (None, 3)),
        ({"window": (3, 1), "is_causal": True}, (-1, 2)),
        ({"window": (None, None)}, (None, None)),
        ({"is_causal": True, "seq_q": 9}, (None, -2)),
    ],
)
def test_bounds(options, bounds):
    assert make(**options).bounds == bounds


def test_derived_numbers():
    assert make().group == 2
    assert make(q_heads=0, kv_heads=0).group == 1
    assert make(head_dim=16).scale_value == 0.25
    assert make(scale=0).scale_value == 0.0
    assert [make(**{name: 0}).is_empty for name in ("batch", "seq_q", "seq_kv")] == [1, 1, 0]
    assert make(q_heads=0, kv_heads=0).is_empty


def test_is_hashable():
    assert len({make(), make(mask=[7]), make(mask=(1, 1, 1, 7))}) == 2


FULL = "[batch, q_heads, seq_q, seq_kv] = [2, 6, 5, 7]"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *(
            ({name: -1}, f"{name} is -1; it must be a whole number of at least 0.")
            for name in ("batch", "q_heads", "kv_heads", "seq_q", "seq_kv")
        ),
        *(
            ({name: 0}, f"{name} is 0; it must be a whole number of at least 1.")
            for name in ("head_dim", "value_dim")
        ),
        ({"seq_q": 2.0}, "seq_q is 2.0; it must be a whole number of at least 0."),
        ({"seq_q": "2"}, "seq_q is '2'; it must be a whole number of at least 0."),
        ({"batch": True}, "batch is True; it must be a whole number of at least 0."),
        *(
            (
                {"q_heads": q, "kv_heads": kv},
                f"q_heads is {q} and kv_heads {kv}; q_heads must be a multiple of kv_heads, and 0 "
                "only where kv_heads is.",
            )
            for q, kv in ((7, 3), (3, 6), (0, 3), (3, 0))
        ),
        ({"dtype": "float64"}, "dtype is 'float64'; did you mean 'float16'?"),
        ({"dtype": "int"}, "dtype is 'int'; it must be one of float32, float16, bfloat16."),
        (
            {"dtype": np.dtype("float32")},
            "dtype is dtype('float32'); did you mean 'float32'?",
        ),
        (
            {"causal_alignment": "top"},
            "causal_alignment is 'top'; did you mean 'top_left'?",
        ),
        (
            {"causal_alignment": None},
            "causal_alignment is None; it must be one of bottom_right, top_left.",
        ),
        ({"precision": "exact"}, "precision is 'exact'; it must be one of strict, relaxed."),
        ({"layout": "stridden"}, "layout is 'stridden'; did you mean 'strided'?"),
        ({"layout": []}, "layout is []; it must be one of bhsd, bshd, strided."),
        ({"is_causal": 1}, "is_causal is 1; it must be True or False."),
        (
            {"window": 5},
            "window is 5; it must be None or (left, right), each None or a count.",
        ),
        (
            {"window": (1, 2, 3)},
            "window is (1, 2, 3); it must be None or (left, right), each None or a count.",
        ),
        ({"window": (-1, 0)}, "window is -1; it must be a whole number of at least 0."),
        *(
            ({"softcap": x}, f"softcap is {x!r}; it must be None or a finite number above 0.")
            for x in (0, -1.0, float("inf"), float("nan"), "50", True)
        ),
        *(
            ({"scale": x}, f"scale is {x!r}; it must be None or a finite number.")
            for x in (float("-inf"), float("nan"), "0.1", False, 10**400)
        ),
        (
            {"mask": False},
            'mask is False; it must be None, True, "padding" or a shape that broadcasts over '
            "(2, 6, 5, 7).",
        ),
        (
            {"mask": np.ones(2, bool)},
            'mask is array([ True,  True]); it must be None, True, "padding" or a shape that '
            "broadcasts over (2, 6, 5, 7).",
        ),
        (
            {"bias": "padding"},
            "bias is 'padding'; it must be None, True or a shape that broadcasts over "
            "(2, 6, 5, 7).",
        ),
        (
            {"mask": (2, 1, 1, 8)},
            f"mask has shape (2, 1, 1, 8); it must broadcast from the right over {FULL}.",
        ),
        (
            {"bias": (2, 7)},
            f"bias has shape (2, 7); it must broadcast from the right over {FULL}.",
        ),
        ({"bias": ()}, "bias has shape (), of rank 0; its rank must be 1 to 4."),
        ({"mask": (1,) * 5}, "mask has shape (1, 1, 1, 1, 1), of rank 5; its rank must be 1 to 4."),
        ({"mask": (-1, 7)}, "mask is -1; it must be a whole number of at least 0."),
        (
            {"bias_dtype": "float16"},
            "bias_dtype is 'float16' without a bias; give a bias or leave it out.",
        ),
        (
            {"bias": True, "bias_dtype": "int8"},
            "bias_dtype is 'int8'; it must be one of float32, float16, bfloat16.",
        ),
    ],
)
def test_message(changes, expected):
    assert message(**changes) == expected


KNOWN = "causal, top_left, mask, bias, relaxed, bshd, strided, softcap, window, scale"
LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "The problem '' has no element type; write it as B,Hq,Hkv,Sq,Skv,D,Dv:dtype"
            "[:option...].",
        ),
        (
            "1,2,2,3,3,4,4",
            "The problem '1,2,2,3,3,4,4' has no element type; write it as "
            "B,Hq,Hkv,Sq,Skv,D,Dv:dtype[:option...].",
        ),
        *(
            (
                f"{head}:float32",
                f"The problem '{head}:float32' begins with {head!r}; it must begin with seven "
                "counts, B,Hq,Hkv,Sq,Skv,D,Dv.",
            )
            for head in (
                "1,2,2,3,3,4",
                "1,2,2,3,3,4,-4",
                "1,2,2,3,3,4,x",
                "",
                LONG,
                f"{LONG},1" * 6,
            )
        ),
        ("1,2,2,3,3,4,4:", "dtype is ''; it must be one of float32, float16, bfloat16."),
        ("1,2,2,3,3,4,4:float3", "dtype is 'float3'; did you mean 'float32'?"),
        ("1,2,2,3,3,4,0:float32", "value_dim is 0; it must be a whole number of at least 1."),
        *(
            (
                f"1,2,2,3,3,4,4:float32:{option}",
                f"The option {option!r} of a problem is not understood; {hint}",
            )
            for option, hint in (
                ("casual", "did you mean 'causal'?"),
                ("winodw=3/0", "did you mean 'window'?"),
                ("zzz", f"the options are {KNOWN}."),
                ("", f"the options are {KNOWN}."),
                ("causal=1", "write causal."),
                ("mask=", "write mask, mask=padding or mask=1x1x384x384."),
                ("mask=3y4", "write mask, mask=padding or mask=1x1x384x384."),
                ("bias=x", "write bias, bias=1x8x64x64 or bias=1x8x64x64@float32."),
                ("window=3", "write window=4095/0."),
                ("window=a/0", "write window=4095/0."),
                ("softcap=big", "write softcap=50."),
                ("scale", "write scale=0.1."),
            )
        ),
        (
            "1,2,2,3,3,4,4:float32:mask:mask=padding",
            "The option 'mask=padding' says mask twice; say it once.",
        ),
        (
            "1,2,2,3,3,4,4:float32:bshd:strided",
            "The option 'strided' says layout twice; say it once.",
        ),
        (
            "1,2,2,3,3,4,4:float32:softcap=nan",
            "softcap is nan; it must be None or a finite number above 0.",
        ),
        (
            "1,2,2,3,3,4,4:float32:window=-1/0",
            "window is -1; it must be a whole number of at least 0.",
        ),
    ],
)
def test_message_of_text(text, expected):
    with pytest.raises(InvalidProblem) as caught:
        AttentionProblem.parse(text)
    assert str(caught.value) == expected
