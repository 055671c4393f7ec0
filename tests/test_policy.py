"""The policies that ship: their batches as the design's tables, and the reasons behind them."""

import pytest

from attentune.key import AttentionKey
from attentune.plan import make_plan
from attentune.problem import AttentionProblem
from attentune.schedules.policy import DEFAULT, POLICIES, SEED
from attentune.target import Target

CMMA = tuple(f"flash_cmma_{planes}_planes" for planes in (2, 4, 8))
FALLBACK, UNIT, SPLIT = "fallback", "flash_unit", "flash_split_kv"

A100 = Target.parse("cuda:sm_80")
PASCAL = Target.parse("cuda:sm_60")
V100 = Target.parse("cuda:sm_70")
AMX = Target.parse({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v4",
                    "mattr": ["+amx-tile", "+amx-bf16"]})  # fmt: skip
AMX_FP16 = Target.parse({**AMX.attributes, "mattr": ["+amx-tile", "+amx-bf16", "+amx-fp16"]})
CPU = Target.parse({"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v4"})
ARM = Target.parse({"kind": "llvm", "mtriple": "aarch64-unknown-linux-gnu"})

SHORT = "1,8,8,64,512,64,64"  # seq_q <= head_dim
LONG = "1,8,8,65,512,64,64"
PLENTY = 1 << 40


def batches(policy, target, problem, memory_bytes=PLENTY):
    return make_plan(
        AttentionProblem.parse(problem), target, policy, memory_bytes=memory_bytes
    ).batches


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", [A100, V100, AMX, AMX_FP16], ids=str)
def test_seed_with_a_matrix_unit(target, dtype):
    assert batches(SEED, target, f"{SHORT}:{dtype}") == ((FALLBACK, *CMMA), (UNIT,))
    assert batches(SEED, target, f"{LONG}:{dtype}") == (CMMA, (UNIT,), (FALLBACK,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", [PASCAL, CPU, ARM], ids=str)
def test_seed_without_a_matrix_unit(target, dtype):
    assert batches(SEED, target, f"{SHORT}:{dtype}") == ((FALLBACK,), (*CMMA, UNIT))
    assert batches(SEED, target, f"{LONG}:{dtype}") == ((*CMMA, UNIT), (FALLBACK,))


def test_seed_compares_anchored_queries_with_exact_dims():
    # 65 to 80 queries anchor to 128, past a head_dim of 80.
    assert batches(SEED, CPU, "1,8,8,65,512,80,64:float32")[-1] == (FALLBACK,)
    assert batches(SEED, CPU, "1,8,8,64,512,80,64:float32")[0] == (FALLBACK,)


def test_seed_looks_at_no_memory():
    assert batches(SEED, CPU, f"{SHORT}:float32", 0) == ((FALLBACK,), (*CMMA, UNIT))


def test_seed_knows_no_split():
    plan = make_plan(AttentionProblem.parse("1,8,8,1,512,64,64:float32"), A100, SEED)
    assert plan.dropped == ()
    assert SPLIT not in SEED.variants


# The same four situations under `default`: fragments of the problem's own type, at least 16
# queries, and scores that fit.
@pytest.mark.parametrize(
    ("target", "problem", "expected"),
    [
        (A100, f"{SHORT}:float16", ((FALLBACK, *CMMA), (UNIT,))),
        (A100, f"{LONG}:float16", (CMMA, (UNIT,), (FALLBACK,))),
        (PASCAL, f"{SHORT}:float16", ((FALLBACK, UNIT), CMMA)),
        (PASCAL, f"{LONG}:float16", ((UNIT,), CMMA, (FALLBACK,))),
        (AMX, f"{SHORT}:bfloat16", ((FALLBACK, *CMMA), (UNIT,))),
        (AMX, f"{LONG}:bfloat16", ((FALLBACK, *CMMA), (UNIT,))),
        (CPU, f"{SHORT}:bfloat16", ((FALLBACK, UNIT), CMMA)),
        (CPU, f"{LONG}:bfloat16", ((FALLBACK, UNIT), CMMA)),
    ],
)
def test_default(target, problem, expected):
    assert batches(DEFAULT, target, problem) == expected


# Where operands are split, or converted to fragments that are narrower than the problem.
@pytest.mark.parametrize(
    ("target", "dtype", "unit_competes"),
    [
        (AMX, "bfloat16", False),
        (AMX, "float16", True),
        (AMX, "float32", True),
        (AMX_FP16, "float16", False),
        (AMX_FP16, "float32", True),
        (A100, "float32", True),
        (A100, "bfloat16", False),
        (V100, "bfloat16", True),
        (V100, "float16", False),
        (CPU, "float32", True),
        (ARM, "bfloat16", True),
    ],
)
def test_unit_competes_where_operands_are_split(target, dtype, unit_competes):
    first = batches(DEFAULT, target, f"{LONG}:{dtype}")[0]
    assert (UNIT in first) == unit_competes
    assert (CMMA[0] in first) == bool(target.cmma_dtypes)


# Nothing is split there: the fragments may be narrower as they are.
def test_relaxed_precision_splits_nothing():
    assert batches(DEFAULT, AMX, f"{SHORT}:float32:relaxed") == ((FALLBACK, *CMMA), (UNIT,))
    assert batches(DEFAULT, A100, f"{LONG}:float32:relaxed") == (CMMA, (UNIT,), (FALLBACK,))
    assert batches(DEFAULT, CPU, f"{SHORT}:float32:relaxed") == ((FALLBACK, UNIT), CMMA)


@pytest.mark.parametrize("queries", [0, 1, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("target", [A100, AMX, CPU], ids=str)
def test_few_queries(target, queries):
    problem = f"1,8,8,{queries},512,64,64:bfloat16"
    plan = make_plan(AttentionProblem.parse(problem), target, DEFAULT, memory_bytes=PLENTY)
    # 9 to 15 queries share their kernel with 16.
    few = queries <= 8
    assert (SPLIT in plan.batches[0]) == few
    assert plan.dropped == (() if few else (SPLIT,))
    assert (UNIT in plan.batches[0]) == (few or target is CPU)


def test_decoding():
    assert batches(DEFAULT, A100, "1,32,8,1,4096,128,128:float16") == (
        (FALLBACK, *CMMA, UNIT, SPLIT),
    )
    assert batches(DEFAULT, CPU, "1,32,8,1,4096,128,128:float16") == ((FALLBACK, UNIT, SPLIT), CMMA)


@pytest.mark.parametrize("target", [A100, CPU], ids=str)
def test_fallback_competes_while_its_scores_fit(target):
    scores = 4 * 8 * 60 * 500
    problem = "1,8,8,60,500,64,64:float32"
    assert FALLBACK in batches(DEFAULT, target, problem, scores)[0]
    assert batches(DEFAULT, target, problem, scores - 1)[-1] == (FALLBACK,)


def test_memory_of_a_key_is_that_of_its_bucket():
    key = AttentionKey.from_problem(AttentionProblem.parse("1,8,8,60,500,64,64:float32"))
    scores = 4 * 8 * 64 * 512
    fits, exceeds = (make_plan(key, CPU, DEFAULT, memory_bytes=m) for m in (scores, scores - 1))
    assert FALLBACK in fits.batches[0]
    assert exceeds.batches[-1] == (FALLBACK,)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_plan_is_empty(policy):
    for target in (A100, PASCAL, AMX, CPU, ARM):
        for problem in (SHORT, LONG, "1,8,8,1,512,64,64", "0,8,8,0,0,64,64"):
            plan = make_plan(
                AttentionProblem.parse(f"{problem}:float16"), target, policy, memory_bytes=0
            )
            assert {FALLBACK, *CMMA, UNIT} <= {name for batch in plan.batches for name in batch}


def test_names():
    assert {name: policy.name for name, policy in POLICIES.items()} == {
        "seed": "seed", "default": "default",
    }  # fmt: skip
