"""Schedule templates, one file per variant, and the policies that say which of them to try.

A template works on a kernel's named stages with TVM's public schedule primitives alone. `VARIANTS`
is the list of what there is, in the order that breaks ties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attentune.schedules.policy import POLICIES

if TYPE_CHECKING:
    from attentune.variant import Variant

    VARIANTS: tuple[Variant, ...]

__all__ = ["POLICIES", "VARIANTS"]


def __getattr__(name: str) -> Any:
    # At first use: the variants load TVM, and planning only needs the policies.
    if name != "VARIANTS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attentune.schedules.fallback import FALLBACK
    from attentune.schedules.flash_split_kv import FLASH_SPLIT_KV
    from attentune.schedules.flash_unit import FLASH_UNIT

    globals()[name] = (FALLBACK, FLASH_UNIT, FLASH_SPLIT_KV)
    return globals()[name]
