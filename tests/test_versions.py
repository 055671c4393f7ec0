"""TVM and its FFI have to be the pair that works together."""

import pytest

import attentune
from attentune import versions
from attentune.errors import IncompatibleVersions


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15.post2"}, "0.1.15.post2"),
        ({"apache-tvm": "0.26.0", "apache-tvm-ffi": "0.1.14.post1"}, "apache-tvm 0.26.0"),
        ({"apache-tvm-ffi": "0.1.14.post1"}, "apache-tvm missing"),
    ],
)
def test_a_wrong_pair_is_named_at_the_first_use(found, says, monkeypatch):
    monkeypatch.setattr(versions, "installed", found.get)
    versions.check_versions.cache_clear()
    try:
        with pytest.raises(IncompatibleVersions) as caught:
            attentune.tune("1,2,2,64,64,32,32:float32")
    finally:
        versions.check_versions.cache_clear()
    assert says in str(caught.value)
    assert "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_pair_that_is_installed_is_the_right_one():
    versions.check_versions.cache_clear()
    versions.check_versions()
