"""Messages of errors that only what lies above TVM raises."""

import numpy as np
import pytest

import attentune
from attentune.dispatch import Dispatcher
from attentune.errors import RecordNotFound, Unsupported, UnsupportedArray
from attentune.key import AttentionKey
from attentune.problem import AttentionProblem
from attentune.schedules.policy import DEFAULT
from attentune.target import Target

PROBLEM = AttentionProblem.parse("1,2,2,3,3,4,4:float32")
ARRAY = np.zeros((1, 2, 3, 4), np.float32)


def test_array_of_an_unknown_kind():
    with pytest.raises(UnsupportedArray) as caught:
        attentune.attention(Other(), Other(), Other())
    assert str(caught.value) == (
        f"An array is of type {__name__}.Other; pass a NumPy array, a PyTorch tensor or a TVM "
        "tensor."
    )


class Other:
    shape = (1, 2, 3, 4)
    dtype = "float32"
    strides = (24, 12, 4, 1)


def test_no_variant():
    with pytest.raises(Unsupported) as caught:
        Dispatcher(Target.parse("native"), {}, DEFAULT).kernel(PROBLEM)
    assert str(PROBLEM) in str(caught.value)


def test_no_record():
    key, target = AttentionKey.from_problem(PROBLEM), Target.parse("native")
    with pytest.raises(RecordNotFound) as caught:
        attentune.build(PROBLEM, on_miss="error")
    assert str(caught.value) == (
        f"The database has no record for {key} on {target}; tune it, or pass on_miss='heuristic'."
    )
