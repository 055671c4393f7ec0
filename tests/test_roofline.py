from __future__ import annotations

import itertools
import math

import pytest

from attentune.errors import InvalidKey, InvalidParameters
from attentune.problem import AttentionProblem
from attentune.search.roofline import Peaks, Work, ideal, limit, reached, work


def work_of(text: str) -> Work:
    return work(AttentionProblem.parse(text))


# Worked by hand: B * Hq * visited * (2 D - 1) + B * Hq * Dv * (2 visited - rows) operations, and
# (B Hq Sq + B Hkv keys) (D + Dv) items.


def test_every_pair_counts_without_causality():
    # visited 3 * 5 = 15, rows 3; query 2 * 4 * 3 heads and rows, keys 2 * 2 * 5.
    flops = 8 * 15 * (2 * 6 - 1) + 8 * 7 * (2 * 15 - 3)
    assert work_of("2,4,2,3,5,6,7:float32") == Work(flops, (24 + 20) * 13 * 4)


def test_causal_square():
    # visited 1 + 2 + 3 + 4 = 10, rows 4.
    assert work_of("1,1,1,4,4,8,8:float32:causal") == Work(10 * 15 + 8 * (20 - 4), (4 + 4) * 16 * 4)


def test_causal_with_more_keys_than_queries():
    # Bottom right: the two queries see 4 and 5 of the 5 keys.
    assert work_of("1,1,1,2,5,8,8:float32:causal") == Work(9 * 15 + 8 * (18 - 2), (2 + 5) * 16 * 4)


def test_causal_with_more_queries_than_keys():
    # Bottom right: the first three queries see nothing, the others 1 and 2 keys.
    assert work_of("1,1,1,5,2,8,8:float32:causal") == Work(3 * 15 + 8 * (6 - 2), (5 + 2) * 16 * 4)


def test_causal_from_the_top_left_reads_only_the_keys_that_are_seen():
    # The two queries see 1 and 2 keys; keys 2 to 4 are never read.
    assert work_of("1,1,1,2,5,8,8:float32:causal:top_left") == Work(
        3 * 15 + 8 * (6 - 2), (2 + 2) * 16 * 4
    )


def test_causal_from_the_top_left_with_more_queries_than_keys():
    # 1, 2, 2, 2, 2 keys.
    assert work_of("1,1,1,5,2,8,8:float32:causal:top_left") == Work(
        9 * 15 + 8 * (18 - 5), (5 + 2) * 16 * 4
    )


@pytest.mark.parametrize(("queries", "keys"), list(itertools.product((1, 2, 7, 8), repeat=2)))
def test_causal_agrees_with_the_published_formula(queries, keys):
    d = min(queries, keys)
    visited = d * keys - d * (d - 1) // 2
    found = work_of(f"1,1,1,{queries},{keys},4,4:float32:causal")
    assert found == Work(visited * 7 + 4 * (2 * visited - d), (queries + keys) * 8 * 4)


def test_decode_is_the_keys_and_values_once():
    # One query sees all keys, causal or not; 8 heads of keys serve 32 of queries.
    expected = Work(
        32 * 4096 * 255 + 32 * 128 * (2 * 4096 - 1), (32 * 1 + 8 * 4096) * (128 + 128) * 2
    )
    assert work_of("1,32,8,1,4096,128,128:bfloat16") == expected
    assert work_of("1,32,8,1,4096,128,128:bfloat16:causal") == expected


def test_a_windowed_decode_reads_the_window():
    # The query's own key and the 3 before it.
    assert work_of("1,1,1,1,4096,8,8:float32:causal:window=3/0") == Work(
        4 * 15 + 8 * (8 - 1), (1 + 4) * 16 * 4
    )


@pytest.mark.parametrize(
    "window", [None, (0, 0), (2, 0), (0, 2), (1, 3), (None, 0), (0, None), (9, 9)]
)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs_rows_and_keys_agree_with_counting(window, alignment, causal):
    for queries, keys in itertools.product((1, 3, 6), repeat=2):
        problem = AttentionProblem(
            1,
            1,
            1,
            queries,
            keys,
            1,
            1,
            "float32",
            is_causal=causal,
            causal_alignment=alignment,
            window=window,
        )
        offset = keys - queries if alignment == "bottom_right" else 0
        left, right = (math.inf if side is None else side for side in window or (None, None))
        seen = [
            (i, j)
            for i, j in itertools.product(range(queries), range(keys))
            if -left <= j - i - offset <= (min(right, 0) if causal else right)
        ]
        rows, columns = len({i for i, _ in seen}), len({j for _, j in seen})
        assert work(problem) == Work(len(seen) + 2 * len(seen) - rows, (queries + columns) * 2 * 4)


def test_a_mask_costs_what_it_stores():
    plain = work_of("2,4,4,16,32,8,8:float16")
    dense = work_of("2,4,4,16,32,8,8:float16:mask")
    padding = work_of("2,4,4,16,32,8,8:float16:mask=padding")
    assert dense.bytes - plain.bytes == 2 * 16 * 32
    assert padding.bytes - plain.bytes == 2 * 32
    assert plain.flops == dense.flops == padding.flops


def test_a_bias_costs_what_it_stores():
    plain = work_of("2,4,4,16,32,8,8:float16")
    assert work_of("2,4,4,16,32,8,8:float16:bias").bytes - plain.bytes == 4 * 16 * 32 * 2
    wide = work_of("2,4,4,16,32,8,8:float16:bias=1x1x16x32@float32")
    assert wide.bytes - plain.bytes == 16 * 32 * 4


@pytest.mark.parametrize("shape", ["0,4,4,3,5", "2,0,0,3,5", "2,4,4,0,5"])
def test_an_empty_problem_computes_nothing(shape):
    assert work_of(f"{shape},8,8:float32").flops == 0


@pytest.mark.parametrize("option", ["", ":causal", ":window=1/1"])
def test_without_keys_only_the_output_and_query_move(option):
    assert work_of(f"1,2,1,3,0,8,4:float32{option}") == Work(0, 2 * 3 * 12 * 4)


# Limits

PEAKS = Peaks(flops_per_second=1000.0, bytes_per_second=100.0, launch_seconds=0.5)


@pytest.mark.parametrize(
    ("level", "expected"), [("minimal", 5 / 0.6), ("balanced", 5 / 0.8), ("extensive", 5 / 0.95)]
)
def test_the_limit_by_level(level, expected):
    assert limit(Work(5000, 10), PEAKS, level) == pytest.approx(expected + 0.5)


def test_memory_bounds_what_computes_little():
    assert limit(Work(5000, 800), PEAKS, "balanced") == pytest.approx(8 / 0.8 + 0.5)
    assert ideal(Work(5000, 800), PEAKS) == pytest.approx(8.5)
    assert ideal(Work(9000, 800), PEAKS) == pytest.approx(9.5)


def test_the_full_level_has_no_limit():
    bound = limit(Work(5000, 10), PEAKS, "full")
    assert bound is None
    assert not reached([1e-9, 1e-9], bound)


def test_an_unknown_level_is_refused():
    with pytest.raises(InvalidKey, match=r"'thorough'.*minimal, balanced, extensive, full"):
        limit(Work(1, 1), PEAKS, "thorough")


@pytest.mark.parametrize(
    ("samples", "ends"),
    [
        ([], False),
        ([0.9], False),
        ([0.9, 1.1], False),
        ([0.9, 1.0], False),
        ([0.9, 1.1, 0.9], True),
        ([0.9, 0.9], True),
    ],
)
def test_two_samples_under_the_limit_end_the_batch(samples, ends):
    assert reached(samples, 1.0) is ends


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops_per_second", 0.0),
        ("bytes_per_second", math.inf),
        ("launch_seconds", -1e-6),
        ("launch_seconds", math.nan),
    ],
)
def test_impossible_peaks_are_refused(field, value):
    values = {"flops_per_second": 1.0, "bytes_per_second": 1.0, "launch_seconds": 0.0, field: value}
    with pytest.raises(InvalidParameters, match=f"{field} is {value!r}"):
        Peaks(**values)


def test_a_launch_may_cost_nothing():
    assert ideal(Work(10, 0), Peaks(1.0, 1.0, 0.0)) == 10
