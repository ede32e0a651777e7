"""All pairs of kernels, with the module that each is of; nothing here needs cudatool."""

from __future__ import annotations

import race_rules_barriers as barriers
import race_rules_copies as copies
import race_rules_flags as flags

__all__ = ["MODULES", "PAIRS"]

MODULES = {"barriers": barriers, "copies": copies, "flags": flags}
PAIRS = [(name, pair) for name, module in MODULES.items() for pair in module.PAIRS]
