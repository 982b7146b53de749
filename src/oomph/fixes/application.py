"""Apply fixes to a Workload or a model, undo them in a model, and propose fixes with predicted savings."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import overload

from torch import nn

from oomph import gpus
from oomph.errors import OomphError, UserError
from oomph.fixes.journal import Journal, WrappedForward
from oomph.fixes.modules import check_can_be_changed, check_model_id
from oomph.fixes.registry import FixContext, Fixes, all_fixes, conflict, find, position, same_use, uses_of
from oomph.prediction import predict
from oomph.prediction.isolation import run_isolated, show_progress
from oomph.records import Change, FixKind, FixUse, Prediction, Progress, Proposal
from oomph.workload import Changed, Workload

# The attribute of a model that holds the journal of its fixes: on the instance, so both are freed together.
_JOURNAL = "_oomph_fixes"


@overload
def apply(fixes: Fixes, target: Workload) -> Workload: ...
@overload
def apply(fixes: Fixes, target: nn.Module) -> tuple[Change, ...]: ...
def apply(fixes: Fixes, target: Workload | nn.Module) -> Workload | tuple[Change, ...]:
    """Apply fixes to a Workload, or to a model in place.

    For a Workload, returns a new Workload; the one given stays as it was. For a model, see `apply_to_model`.

    `fixes`: one or several of `"name"`, `"name:option=value"`, proposals, records, `{"fix": name, "options":
    {...}}`, or a plan. They are applied in the registry's order, whatever the order given. A fix that is
    already applied is not applied again.
    """
    if isinstance(target, nn.Module):
        return apply_to_model(fixes, target)
    if not isinstance(target, Workload):
        raise UserError(f"apply takes fixes and a Workload or a model; {type(target).__name__} was given")
    workload = target
    new = _to_apply(uses_of(fixes), workload.fixes)
    for use in new:
        workload = find(use.fix).change_workload(workload, **use.options)
    of_model = tuple(use for use in new if find(use.fix).changes_model and not find(use.fix).places_model)
    if of_model or any(use.model_id for use in new):
        made_for = next((use.model_id for use in new if use.model_id), "")
        workload = replace(workload, model=Changed(workload.model, _ModelChange(of_model, made_for)))
    return replace(workload, fixes=(*workload.fixes, *new)) if new else workload


def apply_to_model(fixes: Fixes, model: nn.Module) -> tuple[Change, ...]:
    """Apply fixes that change a model to this instance, and return what was changed.

    Of a plan, those that change the step instead are left out with a warning. If one fails, the model is
    restored.
    """
    uses = uses_of(fixes)
    others = [use.fix for use in uses if not find(use.fix).changes_model]
    if others and not any(use.model_id for use in uses):
        raise UserError(f"fix {others[0]!r} changes the step, not the model; apply it to a Workload")
    if others:
        warnings.warn(
            f"not applied, because they change the step, not the model: {', '.join(others)}; set them in the "
            "program, or run it with `oomph run --plan`",
            stacklevel=3,
        )
    return _change_model([use for use in uses if use.fix not in others], model)


def undo(model: nn.Module) -> None:
    """Undo every fix in this model. Does nothing for a model without fixes."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"undo takes a model; {type(model).__name__} was given (undo the model that was given to apply)"
        )
    journal = _journal(model)
    if journal is None:
        _check_no_other_journal(model)
        return
    journal.undo()
    vars(model).pop(_JOURNAL, None)


def changes_in(model: nn.Module) -> tuple[Change, ...]:
    """What fixes have changed in this model."""
    journal = _journal(model)
    return () if journal is None else tuple(journal.changes)


@dataclass(frozen=True)
class _ModelChange:
    """The model's part of a Workload's fixes, called with the model after it is built."""

    uses: tuple[FixUse, ...]
    model_id: str

    def __call__(self, model: nn.Module) -> None:
        check_model_id(self.model_id, model)
        _change_model(self.uses, model)


def _change_model(uses: Sequence[FixUse], model: nn.Module) -> tuple[Change, ...]:
    journal = _journal(model)
    if journal is None or _to_apply(uses, journal.uses):
        check_can_be_changed(model)
    for use in uses:
        check_model_id(use.model_id, model)
    if journal is None:
        _check_no_other_journal(model)
        journal = Journal()
    start = journal.mark()
    try:
        for use in _to_apply(uses, journal.uses):
            journal.begin(use)
            find(use.fix).change_model(model, journal, **use.options)
    except BaseException:
        journal.undo(start)
        raise
    if journal.uses:
        vars(model)[_JOURNAL] = journal
    return tuple(journal.changes[start.changes :])


def _journal(model: nn.Module) -> Journal | None:
    journal = vars(model).get(_JOURNAL)
    if journal is not None and journal.is_copy:
        raise UserError(
            "the model is a copy of a model with fixes, which cannot be listed or undone in the copy: "
            "undo them before copying, or copy the model before applying fixes"
        )
    return journal


def _check_no_other_journal(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(vars(module).get("forward"), WrappedForward) or _JOURNAL in vars(module):
            raise UserError(
                f"{name or 'the model'!r} has fixes that were applied to another model, around or inside it; "
                "apply and undo them there"
            )


def _to_apply(uses: Sequence[FixUse], present: Sequence[FixUse]) -> list[FixUse]:
    """The uses that are not present yet, in the order of application. UserError where two conflict."""
    new: list[FixUse] = []
    for use in sorted(uses, key=lambda use: position(use.fix)):
        if any(same_use(use, other) for other in (*present, *new)):
            continue
        for other in (*present, *new):
            why = conflict(use, other)
            if why is not None:
                raise UserError(why)
        for other in present:
            if position(other.fix) > position(use.fix):
                raise UserError(
                    f"fix {use.fix!r} has to be applied before {other.fix!r}, which is already applied; "
                    "apply them in one call"
                )
        new.append(use)
    return new


# -------------------------------------------------------------------------------------------- proposals


def propose(
    prediction: Prediction,
    workload: Workload,
    *,
    kinds: Collection[FixKind] = ("exact", "precision", "training"),
    only: Collection[str] = (),
    progress: Progress | None = None,
) -> list[Proposal]:
    """Every fix that lowers the predicted peak, the largest saving first.

    `prediction` is the Workload's own. `only` names fixes; by default all of `kinds` are tried. These leave
    out "compile", which takes as long as the compiler. Each proposal is predicted with the fix applied.
    """
    with show_progress(progress) as report:
        return run_isolated(lambda progress: _propose(prediction, workload, kinds, only, progress), report)


def _propose(
    prediction: Prediction,
    workload: Workload,
    kinds: Collection[FixKind],
    only: Collection[str],
    progress: Progress,
) -> list[Proposal]:
    context = FixContext(prediction, workload)
    candidates = [find(name) for name in only] or [fix for fix in all_fixes() if fix.kind in kinds]
    found = [
        proposal
        for fix in candidates
        for proposal in fix.proposals(context)
        if not any(conflict(proposal.use, use) for use in workload.fixes)
    ]
    proposals = []
    for number, proposal in enumerate(found):
        progress(f"predicting with {proposal.fix}", number / len(found))
        predicted = _with_prediction(proposal, context)
        if predicted is not None and (predicted.saving is None or predicted.saving > 0):
            proposals.append(predicted)
    return sorted(proposals, key=lambda proposal: -(proposal.saving or 0))


def _with_prediction(proposal: Proposal, context: FixContext) -> Proposal | None:
    before = context.prediction
    try:
        fixed = apply(proposal, context.workload)
        card = None if before.gpu is None else gpus.with_rates(gpus.find(before.gpu))
        # Its own warnings were shown for the step as it is; others are of fixes that nobody has chosen yet.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            fixed_prediction = predict(fixed, gpu=card, max=before.limit, search=False)
            return with_prediction(proposal, before, fixed_prediction)
    except OomphError as error:
        return with_prediction(proposal, before, error)


def with_prediction(proposal: Proposal, before: Prediction, after: Prediction | Exception) -> Proposal | None:
    """The proposal with its peak, saving and slowdown; None where the fix refuses the program."""
    if isinstance(after, Exception):
        if isinstance(after, UserError) and proposal.saving is None:
            return None
        note = f"{proposal.note}; not predicted: {after}" if proposal.note else f"not predicted: {after}"
        return replace(proposal, note=note)
    slowdown = None
    if before.step_seconds and after.step_seconds:
        slowdown = after.step_seconds / before.step_seconds
    saving = before.peak.reserved - after.peak.reserved
    return replace(proposal, peak=after.peak, saving=saving, slowdown=slowdown, verdict=after.verdict)
