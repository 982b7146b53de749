"""Fixes: changes that lower the peak memory of a training step, applied from outside and undoable.

`propose` lists the fixes that apply to a Workload, with what each saves and costs. `apply` applies fixes to a
Workload or a model; `undo` takes them out of a model again. `verify` compares loss and gradients before and
after.
"""

from oomph.fixes.application import apply, apply_to_model, changes_in, propose, undo
from oomph.fixes.registry import Fix, all_fixes, find, uses_of
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
