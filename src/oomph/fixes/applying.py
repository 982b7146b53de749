"""Fixes put into a Workload or a model, and taken out of a model again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from oomph.errors import UserError
from oomph.fixes import catalogue
from oomph.fixes.anatomy import check_can_be_fixed
from oomph.fixes.journal import Around, Journal
from oomph.records import Change, FixUse, Proposal
from oomph.workload import Workload


class HasFixes(Protocol):
    """A plan."""

    @property
    def fixes(self) -> Sequence[FixUse]: ...


One = str | FixUse | Proposal | Mapping[str, Any]
Fixes = One | Iterable[One] | HasFixes

_journals: WeakKeyDictionary[nn.Module, Journal] = WeakKeyDictionary()


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
        workload = replace(workload, model=_with_fixes(workload.model, of_model))
    return replace(workload, fixes=(*workload.fixes, *new)) if new else workload


def apply_to_model(fixes: Fixes, model: nn.Module) -> tuple[Change, ...]:
    """Put those fixes that change a model into this instance; returns what was changed.

    All or nothing: where one fails, the model is as it was.
    """
    uses = uses_of(fixes)
    for use in uses:
        if not catalogue.find(use.fix).changes_model:
            raise UserError(f"fix {use.fix!r} changes the step, not the model; apply it to a Workload")
    check_can_be_fixed(model)
    if model not in _journals and any(isinstance(vars(m).get("forward"), Around) for m in model.modules()):
        raise UserError(
            "the model holds fixes that were not applied to it: it is a copy, or a part, of a fixed model; "
            "apply all of them to one model, or undo them before copying"
        )
    journal = _journals.setdefault(model, Journal())
    begun = len(journal.changes)
    mark = None
    try:
        for use in _to_apply(uses, journal.uses):
            mark_of_use = journal.begin(use)
            mark = mark or mark_of_use
            catalogue.find(use.fix).change_model(model, journal, **use.options)
    except BaseException:
        if mark is not None:
            journal.undo(mark)
        raise
    return tuple(journal.changes[begun:])


def undo(model: nn.Module) -> None:
    """Take every fix out of this model again."""
    journal = _journals.pop(model, None)
    if journal is not None:
        journal.undo()


def changes_in(model: nn.Module) -> tuple[Change, ...]:
    """What fixes have changed in this model."""
    return tuple(_journals[model].changes) if model in _journals else ()


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
    elif isinstance(one, Mapping) and isinstance(one.get("fix"), str) and set(one) <= {"fix", "options"}:
        use = FixUse(one["fix"], dict(one.get("options") or {}))
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
        if use in present or use in new:
            continue
        for other in (*present, *new):
            why = catalogue.why_not_both(use, other)
            if why is not None:
                raise UserError(why)
        new.append(use)
    return new


@dataclass(frozen=True)
class _Fixed:
    """Builds the model, then fixes it."""

    build: Callable[[], nn.Module]
    uses: tuple[FixUse, ...]

    def __call__(self) -> nn.Module:
        model = self.build()
        apply_to_model(self.uses, model)
        return model


def _with_fixes(build: Callable[[], nn.Module], uses: Sequence[FixUse]) -> _Fixed:
    if isinstance(build, _Fixed):
        return _Fixed(build.build, (*build.uses, *uses))
    return _Fixed(build, tuple(uses))
