"""The front door's attention: kinds of arrays, strides, errors, records and misses."""

import logging
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm

import attentune
from attentune import AttentionKey, AttentionProblem, Database, Record
from attentune.accuracy import mismatch
from attentune.arrays import _EXPORTED, as_tensor
from attentune.dispatch import Dispatcher
from attentune.errors import (
    InvalidParameters,
    InvalidProblem,
    RecordNotFound,
    UnsupportedArray,
)
from attentune.schedules import POLICIES, VARIANTS
from attentune.target import Target
from attentune.versions import current_versions

NATIVE = Target.parse("native")
BY_NAME = {variant.name: variant for variant in VARIANTS}


def arrays(seed, dtype=np.float32, shape=(2, 4, 43, 40), kv_heads=2):
    rng = np.random.default_rng(seed)
    b, h, s, d = shape
    query = rng.standard_normal((b, h, s, d)).astype(dtype)
    key = rng.standard_normal((b, kv_heads, s + 5, d)).astype(dtype)
    value = rng.standard_normal((b, kv_heads, s + 5, d)).astype(dtype)
    return query, key, value


def agrees(out, expected, dtype="float32"):
    return mismatch(out, expected, dtype, 4.0) is None


def record(problem, variant="flash_unit", **changes):
    """Return a record of a variant's default parameters."""
    key = AttentionKey.from_problem(problem)
    fields = {
        "key": key, "target": str(NATIVE), "variant": variant,
        "parameters": BY_NAME[variant].defaults(key, NATIVE), "seconds_all": (1e-3,),
        "score": 1e-3, "losers": (), "versions": current_versions(),
        "fingerprint": BY_NAME[variant].fingerprint(), "created": "2026-01-01T00:00:00Z",
        "machine": "test", "batch": (variant,),
    }  # fmt: skip
    return Record(**{**fields, **changes})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_in_numpy_out(dtype, seed):
    q, k, v = arrays(seed, dtype)
    out = attentune.attention(q, k, v, is_causal=True)
    assert type(out) is np.ndarray
    assert out.dtype == dtype
    expected = attentune.reference.attention(q, k, v, is_causal=True)
    assert agrees(out, expected, np.dtype(dtype).name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(dtype, seed):
    tensors = [torch.from_numpy(a).to(dtype) for a in arrays(seed)]
    out = attentune.attention(*tensors)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == dtype
    wide = [t.float().numpy() for t in tensors]
    name = str(dtype).removeprefix("torch.")
    assert agrees(out.float().numpy(), attentune.reference.attention(*wide), name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tvm_in_tvm_out(dtype, seed):
    element = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    originals = arrays(seed, element)
    tensors = [tvm.runtime.empty(a.shape, dtype) for a in originals]
    for tensor, original in zip(tensors, originals, strict=True):
        tensor.copyfrom(original)
    out = attentune.attention(*tensors)
    assert isinstance(out, tvm.runtime.Tensor)
    assert str(out.dtype) == dtype
    assert agrees(out.numpy(), attentune.reference.attention(*originals), dtype)


def test_a_tensor_that_requires_a_gradient_is_read(seed):
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in arrays(seed))
    out = attentune.attention(q, k, v)
    assert not out.requires_grad


def test_views_are_read_in_place(seed, monkeypatch):
    q, k, v = arrays(seed)
    views = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (q, k, v)]
    every_other = np.repeat(q, 2, axis=2)[:, :, ::2]

    def refuse(*_args, **_kwargs):
        raise AssertionError("an array was copied")

    expected = attentune.reference.attention(q, k, v)
    monkeypatch.setattr(np, "ascontiguousarray", refuse)
    assert agrees(attentune.attention(*views), expected)
    assert agrees(attentune.attention(every_other, k, v), expected)


@pytest.mark.parametrize("change", [lambda a: a[:, :, ::-1], lambda a: a[..., ::-1]])
def test_other_strides_are_copied(change, seed):
    q, k, v = (change(a) for a in arrays(seed))
    assert agrees(attentune.attention(q, k, v), attentune.reference.attention(q, k, v))


def test_torch_views_with_another_innermost_stride(seed):
    q, k, v = arrays(seed)
    odd = torch.from_numpy(q.swapaxes(2, 3).copy()).transpose(2, 3)
    out = attentune.attention(odd, torch.from_numpy(k), torch.from_numpy(v))
    assert agrees(out.numpy(), attentune.reference.attention(q, k, v))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_read_only_and_misaligned_arrays(dtype, seed):
    originals = arrays(seed, dtype)
    expected = attentune.reference.attention(*originals)
    shifted = []
    for original in originals:
        raw = np.zeros(original.nbytes + 16, np.uint8)
        start = -raw.ctypes.data % 16 + original.itemsize
        view = raw[start : start + original.nbytes].view(dtype).reshape(original.shape)
        view[:] = original
        view.flags.writeable = False
        shifted.append(view)
    assert agrees(attentune.attention(*shifted), expected, np.dtype(dtype).name)


def test_what_was_exported_is_let_go(seed):
    q, k, v = arrays(seed, ml_dtypes.bfloat16)
    before = len(_EXPORTED)
    attentune.attention(q, k, v)
    assert len(_EXPORTED) == before
    held = as_tensor(q)
    assert len(_EXPORTED) == before + 1
    del held
    assert len(_EXPORTED) == before


@pytest.mark.parametrize("shape", [(48,), (43, 48), (1, 43, 1), (2, 1, 1, 48), (4, 43, 48)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_masks_and_biases_of_every_rank(shape, kind, seed):
    q, k, v = arrays(seed)
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) > 0.3
    bias = rng.standard_normal(shape).astype(np.float32)
    expected = attentune.reference.attention(q, k, v, mask=mask, bias=bias)
    given = (q, k, v, mask, bias)
    if kind == "torch":
        given = [torch.from_numpy(a) for a in given]
    out = attentune.attention(*given[:3], mask=given[3], bias=given[4])
    assert agrees(np.asarray(out), expected)


@pytest.mark.parametrize(
    "extents", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5)], ids=("batch", "heads", "queries")
)
def test_empty_results(extents):
    b, h, s, t = extents
    q, k = np.zeros((b, h, s, 8), np.float32), np.zeros((b, h, t, 8), np.float32)
    assert attentune.attention(q, k, k).shape == (b, h, s, 8)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy, tvm.runtime.tensor])
def test_no_keys_give_zeros(convert):
    q, k = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 0, 8), np.float32)
    out = attentune.attention(convert(q), convert(k), convert(k))
    np.testing.assert_array_equal(out.numpy() if hasattr(out, "numpy") else out, 0)


def test_a_second_call_of_a_shape_uses_its_own_values(seed):
    q, k, v = arrays(seed)
    first = attentune.attention(q, k, v)
    second = attentune.attention(2 * q, k, v)
    assert agrees(second, attentune.reference.attention(2 * q, k, v))
    assert not np.array_equal(first, second)


def test_options_of_equal_shapes_do_not_collide(seed):
    q, k, v = arrays(seed)
    for options in ({"scale": 0.3}, {"scale": 0.6}, {"window": (3, 0)}, {"window": (9, 0)},
                    {"softcap": 2.0}, {"softcap": 9.0}, {"is_causal": True},
                    {"is_causal": True, "causal_alignment": "top_left"}):  # fmt: skip
        out = attentune.attention(q, k, v, **options)
        assert agrees(out, attentune.reference.attention(q, k, v, **options)), options


Q = np.zeros((1, 4, 8, 16), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: attentune.attention(Q[0], Q, Q), InvalidProblem, "query has shape (4, 8, 16)"),
        (lambda: attentune.attention(Q, Q[:, :3], Q[:, :3]), InvalidProblem, "kv_heads 3"),
        (lambda: attentune.attention(Q, Q.astype("f2"), Q), InvalidProblem, "key has the element"),
        (lambda: attentune.attention(Q.astype("f8"), Q, Q), InvalidProblem, "float64"),
        (lambda: attentune.attention(Q, Q[..., :8], Q), InvalidProblem, "head_dim 8"),
        (lambda: attentune.attention(Q, Q, Q[:, :, :4]), InvalidProblem, "value has 4 heads of 4"),
        (lambda: attentune.attention(Q, np.repeat(Q, 2, 0), Q), InvalidProblem, "batch size 2"),
        (lambda: attentune.attention(Q, Q, Q, mask=Q[0, 0, :, :8]), InvalidProblem, "as bias"),
        (lambda: attentune.attention(Q, Q, Q, bias=np.ones((8, 8), bool)), InvalidProblem,
         "as mask"),
        (lambda: attentune.attention(Q, Q, Q, mask=np.ones((8, 9), bool)), InvalidProblem,
         "broadcast"),
        (lambda: attentune.attention(Q, Q, Q, softcap=-1.0), InvalidProblem, "softcap is -1.0"),
        (lambda: attentune.attention(Q, Q, Q, window=(1,)), InvalidProblem, "window is (1,)"),
        (lambda: attentune.attention(Q, Q, Q, causal_alignment="top_rihgt"), InvalidProblem,
         "causal_alignment"),
        (lambda: attentune.attention([[1.0]], Q, Q), UnsupportedArray, "builtins.list"),
        (lambda: attentune.attention(Q, Q, Q, on_miss="guess"), InvalidParameters, "on_miss"),
        (lambda: attentune.attention(Q, Q, Q, target="cpuu"), attentune.errors.InvalidTarget,
         "cpuu"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_elsewhere_is_refused():
    meta = torch.zeros((1, 2, 3, 8), device="meta")
    with pytest.raises(UnsupportedArray, match="device meta"):
        attentune.attention(meta, meta, meta)


PROBLEM = AttentionProblem.parse("2,4,2,43,48,40,40:float32")


def test_a_record_is_served(tmp_path, seed):
    with Database(tmp_path / "records.sqlite") as database:
        kept = record(PROBLEM)
        other = list(
            BY_NAME["flash_unit"].points(kept.key, NATIVE, {"block_q": 32, "block_kv": 64})
        )
        kept = replace(kept, parameters=other[-1])
        database.put(kept)
        kernel = attentune.build(PROBLEM, database=database, on_miss="error")
        assert kernel.variant == "flash_unit"
        assert kernel.parameters == other[-1]
        q, k, v = arrays(seed)
        expected = attentune.reference.attention(q, k, v)
        assert agrees(kernel(q, k, v), expected)
        assert agrees(attentune.attention(q, k, v, database=database, on_miss="error"), expected)


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "0"}, {"versions": {"tvm": "0.1", "llvm": "1"}}]
)
def test_a_stale_record_is_not_served(changes, tmp_path):
    with Database(tmp_path / "records.sqlite") as database:
        database.put(record(PROBLEM, **changes))
        with pytest.raises(RecordNotFound, match="no record"):
            attentune.build(PROBLEM, database=database, on_miss="error")


@pytest.mark.parametrize(
    ("problem", "variant"),
    [(PROBLEM, "flash_unit"), ("1,8,2,1,512,64,64:float32", "flash_split_kv")],
)
def test_a_miss_takes_what_needs_the_least_memory_of_the_first_batch(problem, variant):
    assert variant in attentune.plan(problem).batches[0]
    assert attentune.build(problem).variant == variant


def test_a_winner_that_cannot_launch_gives_way_and_is_counted(tmp_path, caplog):
    with Database(tmp_path / "records.sqlite") as database:
        database.put(record(PROBLEM, "fallback"))
        dispatcher = Dispatcher(
            NATIVE, BY_NAME, POLICIES["default"], database, "error", memory_bytes=200_000
        )
        with caplog.at_level(logging.WARNING, "attentune.dispatch"):
            kernel = dispatcher.kernel(PROBLEM)
        assert kernel.variant == "flash_unit"
        assert sum(dispatcher.steps.values()) == 1
        assert "bytes of workspace" in caplog.text


def test_a_kernel_serves_its_bucket_and_refuses_others(seed):
    kernel = attentune.build("2,4,2,43,48,40,40:float32:causal")
    for length in (33, 50, 64):
        q, k, v = arrays(seed, shape=(2, 4, length, 40))
        k, v = k[:, :, :length], v[:, :, :length]
        expected = attentune.reference.attention(q, k, v, is_causal=True)
        assert agrees(kernel(q, k, v), expected)
    q, k, v = arrays(seed, shape=(2, 4, 43, 64))
    with pytest.raises(InvalidProblem, match="does not serve"):
        kernel(q, k, v)


def test_a_kernel_of_a_key_takes_scale_and_softcap(seed):
    problem = AttentionProblem.parse("2,4,2,43,48,40,40:float32:softcap=3")
    kernel = attentune.build(AttentionKey.from_problem(problem))
    q, k, v = arrays(seed)
    expected = attentune.reference.attention(q, k, v, softcap=5.0, scale=0.2)
    assert agrees(kernel(q, k, v, softcap=5.0, scale=0.2), expected)
    assert "sblock" in kernel.source
    assert "vfmadd" in kernel.assembly or NATIVE.arch != "x86_64"
