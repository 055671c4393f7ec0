"""The named shapes."""

import pytest

from attentune.errors import UnknownName
from attentune.key import AttentionKey
from attentune.models import NAMED, get


@pytest.mark.parametrize("name", NAMED)
def test_shapes_are_distinct_problems(name):
    problems = get(name)
    assert len(problems) == len(NAMED[name]) == len(set(problems)) >= 1
    assert not any(problem.is_empty for problem in problems)


@pytest.mark.parametrize("name", NAMED)
def test_no_two_shapes_of_a_model_share_a_key(name):
    keys = [AttentionKey.from_problem(problem) for problem in get(name)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("bert-base", ["1,12,12,384,384,64,64:float32:mask=padding"]),
        ("llama-3-8b-prefill", ["1,32,8,512,512,128,128:float32:causal"]),
        ("llama-3-8b-decode", ["1,32,8,1,4096,128,128:float32"]),
    ],
)
def test_shapes_of_the_design(name, texts):
    assert [str(problem) for problem in get(name)] == texts


def test_models_that_the_command_line_promises():
    assert {
        "bert-base", "llama-3-8b-prefill", "llama-3-8b-decode", "sd15-self", "sd15-cross",
        "whisper-base", "vit-b16", "swin-t", "gemma-2-2b", "t5-small", "mistral-7b",
        "deepseek-v2-lite",
    } <= set(NAMED)  # fmt: skip


def test_traits_that_make_a_model_worth_having():
    assert {problem.window for problem in get("gemma-2-2b")} == {(4095, 0), None}
    assert all(problem.softcap == 50 and problem.group == 2 for problem in get("gemma-2-2b"))
    assert all(problem.scale_value == 1 for problem in get("t5-small"))
    assert all((p.seq_q, p.seq_kv, p.head_dim) == (49, 49, 32) for p in get("swin-t"))
    assert all(problem.bias is not None for problem in get("swin-t"))
    assert all(problem.window == (4095, 0) for problem in get("mistral-7b"))
    assert [(p.head_dim, p.value_dim) for p in get("deepseek-v2-lite")] == [(192, 128)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert_base", "There is no model 'bert_base'; did you mean 'bert-base'?"),
        ("zzz", f"There is no model 'zzz'; choose from {', '.join(NAMED)}."),
        (None, f"There is no model None; choose from {', '.join(NAMED)}."),
    ],
)
def test_unknown_model(name, message):
    with pytest.raises(UnknownName) as caught:
        get(name)
    assert str(caught.value) == message
