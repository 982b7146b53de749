"""Fixes put into a Workload or a model, and taken out of a model again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from oomph.errors import UserError
from oomph.fixes import catalogue
from oomph.fixes.anatomy import check_can_be_fixed
from oomph.fixes.journal import Around, Journal
from oomph.records import Change, FixUse, Proposal
from oomph.workload import Changed, Workload

# Where a model keeps the journal of its fixes: on the instance, so that both are freed together.
_JOURNAL = "_oomph_fixes"


class HasFixes(Protocol):
    """A plan."""

    @property
    def fixes(self) -> Sequence[FixUse]: ...


One = str | FixUse | Proposal | Mapping[str, Any]
Fixes = One | Iterable[One] | HasFixes


def apply(fixes: Fixes, workload: Workload) -> Workload:
    """The Workload with the fixes in; the one given is left as it was, and so undoes them.

    `fixes`: names, proposals, records, `{"fix": name, "options": {...}}`, or a plan. They are applied in the
    order of the catalogue, whatever the order given. What is in the Workload already is not applied again.
    """
    if not isinstance(workload, Workload):
        raise UserError(f"apply takes fixes and a Workload; {type(workload).__name__} was given")
    new = _to_apply(uses_of(fixes), workload.fixes)
    for use in new:
        workload = catalogue.find(use.fix).change_workload(workload, **use.options)
    of_model = [use for use in new if catalogue.find(use.fix).changes_model]
    if of_model:
        workload = replace(workload, model=Changed(workload.model, _Fixing(tuple(of_model))))
    return replace(workload, fixes=(*workload.fixes, *new)) if new else workload


def apply_to_model(fixes: Fixes, model: nn.Module) -> tuple[Change, ...]:
    """Put those fixes that change a model into this instance; returns what was changed.

    All or nothing: where one fails, the model is as it was.
    """
    uses = uses_of(fixes)
    for use in uses:
        fix = catalogue.find(use.fix)
        if not fix.changes_model or fix.only_in_workloads:
            raise UserError(f"fix {use.fix!r} changes the step, not the model; apply it to a Workload")
    return _apply(uses, model)


def _apply(uses: Sequence[FixUse], model: nn.Module) -> tuple[Change, ...]:
    check_can_be_fixed(model)
    journal = journal_of(model)
    if journal is None:
        _check_no_others(model)
        journal = Journal()
    new = _to_apply(uses, journal.uses)
    begun = len(journal.changes)
    mark = None
    try:
        for use in new:
            mark_of_use = journal.begin(use)
            mark = mark or mark_of_use
            catalogue.find(use.fix).change_model(model, journal, **use.options)
    except BaseException:
        if mark is not None:
            journal.undo(mark)
        raise
    if journal.uses:
        vars(model)[_JOURNAL] = journal
    return tuple(journal.changes[begun:])


def undo(model: nn.Module) -> None:
    """Take every fix out of this model again; the same for a model without fixes."""
    if not isinstance(model, nn.Module):
        raise UserError(f"undo takes a model; {type(model).__name__} was given (keep what you gave to apply)")
    journal = journal_of(model)
    if journal is None:
        _check_no_others(model)
        return
    journal.undo()
    vars(model).pop(_JOURNAL, None)


def changes_in(model: nn.Module) -> tuple[Change, ...]:
    """What fixes have changed in this model."""
    journal = journal_of(model)
    return () if journal is None else tuple(journal.changes)


def journal_of(model: nn.Module) -> Journal | None:
    journal = vars(model).get(_JOURNAL)
    if journal is not None and journal.is_a_copy:
        raise UserError(
            "the model is a copy of a fixed one, whose fixes cannot be told or undone: "
            "undo them before copying, or fix the copy of an unfixed model"
        )
    return journal


def _check_no_others(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), Around) or _JOURNAL in vars(module):
            raise UserError(
                f"fixes are in {name or 'the model'!r} that were applied to another model, around or in it; "
                "apply and undo them there"
            )


def uses_of(fixes: Fixes) -> list[FixUse]:
    """Whatever way they are given."""
    if isinstance(fixes, str | FixUse | Proposal | Mapping):
        fixes = [fixes]
    elif hasattr(fixes, "fixes"):
        fixes = fixes.fixes
    if not isinstance(fixes, Iterable):
        raise UserError(f"fixes={fixes!r} is not valid; give names, proposals or a plan")
    return [_use_of(one) for one in fixes]


def _use_of(one: Any) -> FixUse:
    if isinstance(one, str):
        use = FixUse(one)
    elif isinstance(one, Proposal):
        use = one.use
    elif isinstance(one, FixUse):
        use = one
    elif isinstance(one, Mapping) and isinstance(one.get("fix"), str) and "option" not in one:
        use = FixUse(one["fix"], dict(one.get("options") or {}))  # a row of `oomph fixes --json` has more
    else:
        raise UserError(
            f"a fix is given as {one!r}; valid: a name, a proposal, or {{'fix': name, 'options': {{...}}}}"
        )
    catalogue.find(use.fix).check_options(use.options)
    return use


def _to_apply(uses: Sequence[FixUse], present: Sequence[FixUse]) -> list[FixUse]:
    """Those that are not there yet, in the catalogue's order; a UserError where two exclude each other."""
    new: list[FixUse] = []
    for use in sorted(uses, key=lambda use: catalogue.rank(use.fix)):
        if any(catalogue.are_the_same(use, other) for other in (*present, *new)):
            continue
        for other in (*present, *new):
            why = catalogue.why_not_both(use, other)
            if why is not None:
                raise UserError(why)
        for other in present:
            if catalogue.rank(other.fix) > catalogue.rank(use.fix):
                raise UserError(
                    f"fix {use.fix!r} has to be applied before {other.fix!r}, which is in already; "
                    "apply them in one call"
                )
        new.append(use)
    return new


@dataclass(frozen=True)
class _Fixing:
    """The model's part of the fixes of a Workload."""

    uses: tuple[FixUse, ...]

    def __call__(self, model: nn.Module) -> None:
        _apply(self.uses, model)
