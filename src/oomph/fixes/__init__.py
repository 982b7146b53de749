"""Fixes: changes that lower the peak memory of a training step, applied from outside and undoable.

`propose` lists the fixes that apply to a Workload, with what each saves and costs. `apply` applies fixes to a
Workload or a model; `undo` takes them out of a model again. `verify` compares loss and gradients before and
after.
"""

from typing import TYPE_CHECKING

from oomph import _attach

if TYPE_CHECKING:
    from oomph.fixes.application import (
        apply as apply,
        apply_to_model as apply_to_model,
        changes_in as changes_in,
        propose as propose,
        undo as undo,
    )
    from oomph.fixes.registry import Fix as Fix, all_fixes as all_fixes, find as find, uses_of as uses_of
    from oomph.fixes.verification import verify as verify
    from oomph.records import Verification as Verification

__getattr__, __dir__, __all__ = _attach(
    __name__,
    {
        "application": ("apply", "apply_to_model", "changes_in", "propose", "undo"),
        "registry": ("Fix", "all_fixes", "find", "uses_of"),
        "verification": ("Verification", "verify"),
    },
)
