"""What a kernel is compiled for: the part of an attention key that changes the code."""

from __future__ import annotations

from dataclasses import dataclass

from attentune.key import AttentionKey

SIXTEEN_BIT = ("float16", "bfloat16")


@dataclass(frozen=True)
class KernelSpec:
    """The compile-time side of an attention kernel; everything else is an argument.

    Attributes
    ----------
    dtype : str
        Element type of query, key, value and output.
    head_dim, value_dim : int
        Extents that are never symbolic.
    group : int
        Query heads that share one key/value head.
    mask, bias : str
        "none", "dense", or "broadcast" where one row serves every query.
    bias_dtype : str
        Element type of the bias, "none" without one.
    softcap : bool
        Whether scores are capped.
    lower, upper : bool
        Whether a key must lie at or above (below) a diagonal: windows and causal masks.
    """

    dtype: str
    head_dim: int
    value_dim: int
    group: int = 1
    mask: str = "none"
    bias: str = "none"
    bias_dtype: str = "none"
    softcap: bool = False
    lower: bool = False
    upper: bool = False

    @classmethod
    def from_key(cls, key: AttentionKey) -> KernelSpec:
        """Return the spec of a key's kernel."""
        left, right = key.window or (None, None)
        return cls(
            dtype=key.query_dtype,
            head_dim=key.head_dim,
            value_dim=key.value_dim,
            group=key.group,
            mask=key.mask,
            bias=key.bias,
            bias_dtype=key.bias_dtype,
            softcap=key.softcap,
            lower=left is not None,
            upper=key.causal or right is not None,
        )

    @property
    def widens(self) -> bool:
        """Whether keys and values are converted to float32 before the products."""
        return self.dtype in SIXTEEN_BIT

    @property
    def natural(self) -> bool:
        """Whether scores stay in natural units up to the exponential.

        Without a bias the factor log2(e) is folded into the queries. With one it is not: a bias
        of the most negative float, which many models write for "masked", would become -inf.
        """
        return self.bias != "none"

    @property
    def changes_scores(self) -> bool:
        """Whether anything but the length of the keys stands between product and softmax."""
        return (
            self.softcap or self.lower or self.upper or self.mask != "none" or self.bias != "none"
        )
