"""Named shapes: the attention calls of well-known models.

They are in float32, which is what CPUs run by default, and for one input: a prompt of 512 tokens,
or one new token after 4096.
"""

from __future__ import annotations

import difflib

from attentune.errors import UnknownName
from attentune.problem import AttentionProblem

NAMED: dict[str, tuple[str, ...]] = {
    "bert-base": ("1,12,12,384,384,64,64:float32:mask=padding",),
    "llama-3-8b-prefill": ("1,32,8,512,512,128,128:float32:causal",),
    "llama-3-8b-decode": ("1,32,8,1,4096,128,128:float32",),
    # 512 x 512 pixels, at the four resolutions of the U-Net; the batch of two is the guidance.
    "sd15-self": (
        "2,8,8,4096,4096,40,40:float32",
        "2,8,8,1024,1024,80,80:float32",
        "2,8,8,256,256,160,160:float32",
        "2,8,8,64,64,160,160:float32",
    ),
    # The 77 tokens of a text.
    "sd15-cross": (
        "2,8,8,4096,77,40,40:float32",
        "2,8,8,1024,77,80,80:float32",
        "2,8,8,256,77,160,160:float32",
        "2,8,8,64,77,160,160:float32",
    ),
    # 30 s of sound in the encoder; the decoder's self-attention over a full text, then one token
    # over the encoder's output.
    "whisper-base": (
        "1,8,8,1500,1500,64,64:float32",
        "1,8,8,448,448,64,64:float32:causal",
        "1,8,8,1,1500,64,64:float32",
    ),
    # 14 x 14 patches and the class token.
    "vit-b16": ("1,12,12,197,197,64,64:float32",),
    # 224 x 224 pixels in windows of 7 x 7, which are the batch; every second layer shifts them and
    # masks what is no neighbour. The last stage has a single window.
    "swin-t": (
        "64,3,3,49,49,32,32:float32:bias",
        "64,3,3,49,49,32,32:float32:mask:bias",
        "16,6,6,49,49,32,32:float32:bias",
        "16,6,6,49,49,32,32:float32:mask:bias",
        "4,12,12,49,49,32,32:float32:bias",
        "4,12,12,49,49,32,32:float32:mask:bias",
        "1,24,24,49,49,32,32:float32:bias",
    ),
    # Layers take turns: the last 4096 tokens, or all.
    "gemma-2-2b": (
        "1,8,4,512,512,256,256:float32:causal:window=4095/0:softcap=50",
        "1,8,4,512,512,256,256:float32:causal:softcap=50",
    ),
    # Relative positions are a bias, and scores are not scaled. Encoder, one token of the decoder
    # over a full text, and the same token over the encoder's output, which has no positions.
    "t5-small": (
        "1,8,8,512,512,64,64:float32:mask=padding:bias:scale=1",
        "1,8,8,1,512,64,64:float32:bias:scale=1",
        "1,8,8,1,512,64,64:float32:mask=padding:scale=1",
    ),
    "mistral-7b": (
        "1,32,8,512,512,128,128:float32:causal:window=4095/0",
        "1,32,8,1,4096,128,128:float32:window=4095/0",
    ),
    # Keys of 128 elements and 64 of rotary positions.
    "deepseek-v2-lite": ("1,16,16,512,512,192,128:float32:causal",),
}


def get(name: str) -> tuple[AttentionProblem, ...]:
    """Return the attention calls of a model.

    Parameters
    ----------
    name : str
        One of `NAMED`.

    Returns
    -------
    tuple of AttentionProblem
        In the order in which the model meets them.

    Raises
    ------
    UnknownName
        If no shapes of that name ship.

    Examples
    --------
    >>> [str(problem) for problem in get("vit-b16")]
    ['1,12,12,197,197,64,64:float32']
    """
    if name not in NAMED:
        near = difflib.get_close_matches(str(name), NAMED, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(NAMED)}."
        raise UnknownName(f"There is no model {name!r}; {hint}")
    return tuple(AttentionProblem.parse(text) for text in NAMED[name])
