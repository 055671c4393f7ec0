"""Schedule templates, one file per variant, and the policies that say which of them to try.

A template works on a kernel's named stages with TVM's public schedule primitives alone. `VARIANTS`
is the list of what there is, in the order that breaks ties.
"""

from __future__ import annotations

from attentune.schedules.fallback import FALLBACK
from attentune.schedules.flash_unit import FLASH_UNIT
from attentune.schedules.policy import POLICIES

VARIANTS = (FALLBACK, FLASH_UNIT)

__all__ = ["POLICIES", "VARIANTS"]
