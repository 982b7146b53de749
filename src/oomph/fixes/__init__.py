"""Remedies for too large a peak: one file each, applied from outside, undoable, priced.

`propose` tells which apply and what they save and cost; `apply` puts them into a Workload, `apply_to_model`
into a model, from which `undo` takes them out again; `verify` checks loss and gradients before and after.
"""

from oomph.fixes.applying import apply, apply_to_model, changes_in, undo, uses_of
from oomph.fixes.catalogue import all_fixes, find
from oomph.fixes.fix import Fix
from oomph.fixes.proposing import propose
from oomph.fixes.verification import verify
from oomph.records import Verification

__all__ = [
    "Fix",
    "Verification",
    "all_fixes",
    "apply",
    "apply_to_model",
    "changes_in",
    "find",
    "propose",
    "undo",
    "uses_of",
    "verify",
]
