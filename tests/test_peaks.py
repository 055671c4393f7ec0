"""A machine's peaks: plausible, and kept."""

import json

import pytest

from attentune.search import peaks
from attentune.search.roofline import Peaks
from attentune.target import Target

NATIVE = Target.parse("native")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_peaks_are_of_this_world():
    found = peaks.measure(NATIVE)
    assert 1e9 < found.flops_per_second < 1e14
    assert 1e8 < found.bytes_per_second < 1e13
    assert 0 < found.launch_seconds < 1e-2


def test_they_are_measured_once(monkeypatch):
    first = peaks.machine_peaks(NATIVE)
    monkeypatch.setattr(peaks, "measure", lambda target: pytest.fail("measured again"))
    assert peaks.machine_peaks(NATIVE) == first


def test_each_target_has_its_own(monkeypatch):
    made = iter((Peaks(1.0, 2.0, 3.0), Peaks(4.0, 5.0, 6.0)))
    monkeypatch.setattr(peaks, "measure", lambda target: next(made))
    one_core = Target.parse({**NATIVE.attributes, "num-cores": 1})
    assert peaks.machine_peaks(NATIVE) != peaks.machine_peaks(one_core)


@pytest.mark.parametrize("damage", ["", "[1, 2]", "{"])
def test_a_damaged_file_is_measured_anew(damage, monkeypatch, tmp_path):
    file = tmp_path / "attentune" / "peaks.json"
    file.parent.mkdir()
    file.write_text(damage)
    monkeypatch.setattr(peaks, "measure", lambda target: Peaks(1.0, 2.0, 3.0))
    assert peaks.machine_peaks(NATIVE) == Peaks(1.0, 2.0, 3.0)
    assert len(json.loads(file.read_text())) == 1
