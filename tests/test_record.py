"""Records as data: exact, validated, stale when what they came from has changed."""

import json

import pytest
from records import a_record

from attentune import Record
from attentune.errors import CorruptRecord
from attentune.record import Loser, stale_reason

TODAY = {"attentune": "0.2.0", "tvm": "0.27.0.post1", "llvm": "22"}


def test_a_record_survives_json_byte_for_byte():
    record = a_record()
    assert Record.loads(record.dumps()) == record
    assert Record.loads(record.dumps()).dumps() == record.dumps()
    assert "\n" not in record.dumps()


@pytest.mark.parametrize(
    ("samples", "median"), [((3.0,), 3.0), ((3.0, 1.0), 2.0), ((9.0, 1.0, 2.0), 1.5)]
)
def test_the_first_of_three_samples_does_not_count(samples, median):
    assert a_record(seconds_all=samples).seconds == median


def test_a_losers_samples_survive_json_and_may_be_missing():
    loser = Loser("fallback", {}, "slower", "1.1 times", 2.0, (1.0, 2.0, 2.0))
    record = a_record(losers=(loser, Loser("fallback", {}, "slower", "1.1 times", 2.0)))
    assert Record.loads(record.dumps()) == record
    assert "seconds_all" not in record.to_json()["losers"][1]
    data = record.to_json()
    data["losers"][0]["seconds_all"] = [1.0, float("nan")]
    with pytest.raises(CorruptRecord, match="seconds_all is"):
        Record.from_json(data)


def test_a_fresh_record_is_not_stale():
    assert stale_reason(a_record(), {"flash_unit": "abc"}, TODAY) is None


@pytest.mark.parametrize(
    ("fingerprints", "versions", "says"),
    [
        ({}, TODAY, "no variant flash_unit"),
        ({"flash_unit": "abd"}, TODAY, "sources of flash_unit"),
        ({"flash_unit": "abc"}, {**TODAY, "tvm": "0.28"}, "tvm 0.27.0.post1, and this is 0.28"),
        ({"flash_unit": "abc"}, {**TODAY, "llvm": "23"}, "llvm 22, and this is 23"),
    ],
)
def test_why_a_record_is_stale(fingerprints, versions, says):
    assert says in stale_reason(a_record(), fingerprints, versions)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("schema", 2, "schema 2"),
        ("target", 3, "target is 3"),
        ("parameters", [], "parameters is []"),
        ("parameters", {"block_q": "64"}, "whole numbers"),
        ("seconds", [], "a number or more"),
        ("seconds", ["1"], "a number or more"),
        ("seconds", [1e-3, float("nan")], "finite and above zero"),
        ("seconds", [float("inf")], "finite and above zero"),
        ("seconds", [10**400], "finite and above zero"),
        ("seconds", [-1e-3], "finite and above zero"),
        ("seconds", [True], "finite and above zero"),
        ("score", float("nan"), "score is nan"),
        ("score", 0.0, "finite and above zero"),
        ("score", "1", "score is '1'"),
        ("losers", [{"variant": "x"}], "loser is"),
        ("batch", "flash_unit", "batch is 'flash_unit'"),
        ("workspace_bytes", True, "workspace_bytes is True"),
    ],
)
def test_a_field_that_is_not_what_the_schema_says_is_named(field, value, says):
    data = {**a_record().to_json(), field: value}
    with pytest.raises(CorruptRecord) as caught:
        Record.from_json(data)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_record_is_refused(text):
    with pytest.raises(CorruptRecord):
        Record.loads(text)


def test_a_missing_field_is_named():
    data = a_record().to_json()
    del data["fingerprint"]
    with pytest.raises(CorruptRecord, match="fingerprint"):
        Record.from_json(json.loads(json.dumps(data)))


def test_an_outcome_is_one_of_the_known():
    with pytest.raises(CorruptRecord, match="'lost'"):
        Loser("flash_unit", {}, "lost", "somehow")


def test_boxed_numbers_of_a_trace_stay_numbers():
    from tvm.tirx import FloatImm, IntImm

    record = a_record(trace=[["inst", IntImm("int64", 7), FloatImm("float64", 0.5)]])
    assert record.to_json()["trace"] == [["inst", 7, 0.5]]
