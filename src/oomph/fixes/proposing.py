"""Which fixes apply to a Workload, what each would save, and what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from oomph.errors import OomphError
from oomph.fixes.applying import apply
from oomph.fixes.catalogue import all_fixes, find, why_not_both
from oomph.fixes.fix import Patient
from oomph.fixes.short_steps import can_be_told, told
from oomph.prediction.predict import predict
from oomph.records import FIX_KINDS, FixKind, Prediction, Proposal
from oomph.workload import Workload

Progress = Callable[[str, float | None], None]


def propose(
    prediction: Prediction,
    workload: Workload,
    *,
    kinds: Collection[FixKind] = FIX_KINDS,
    only: Collection[str] = (),
    progress: Progress | None = None,
) -> list[Proposal]:
    """Every fix that lowers the predicted peak, the largest saving first.

    `prediction` is the Workload's own. `only` names fixes; by default all of `kinds` are tried. Each is
    predicted once, with the fix in.
    """
    patient = Patient(prediction, workload)
    wanted = [find(name) for name in only] or [fix for fix in all_fixes() if fix.kind in kinds]
    found = [
        proposal
        for fix in wanted
        for proposal in fix.found(patient)
        if not any(why_not_both(proposal.use, use) for use in workload.fixes)
    ]
    short = can_be_told(workload, prediction)
    proposals = []
    for number, proposal in enumerate(found):
        if progress is not None:
            progress(f"predicting with {proposal.fix}", number / len(found))
        proposals.append(priced(proposal, patient, short))
    useful = [proposal for proposal in proposals if proposal.saving is None or proposal.saving > 0]
    return sorted(useful, key=lambda proposal: -(proposal.saving or 0))


def priced(proposal: Proposal, patient: Patient, short: bool = False) -> Proposal:
    """The proposal with its peak, saving and slowdown, from a prediction with the fix in.

    `short`: from steps of fewer batches than the Workload accumulates.
    """
    before = patient.prediction
    try:
        fixed = apply(proposal, patient.workload)
        if short:
            after = told(fixed, before.gpu, before.limit)
        else:
            after = predict(fixed, gpu=before.gpu, max=before.limit)
    except OomphError as error:
        note = f"{proposal.note}; not predicted: {error}" if proposal.note else f"not predicted: {error}"
        return replace(proposal, note=note)
    slowdown = None
    if before.step_seconds and after.step_seconds:
        slowdown = after.step_seconds / before.step_seconds
    saving = before.peak.reserved - after.peak.reserved
    return replace(proposal, peak=after.peak, saving=saving, slowdown=slowdown, fits=after.fits)
