"""oomph.diagnose: predict, and once more at other sizes, and name the causes of the peak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from oomph.diagnosis.findings import find, scaled_sizes
from oomph.diagnosis.patterns import PeakAnalysis
from oomph.errors import OomphError
from oomph.gpus import GPU
from oomph.prediction import Script, predict
from oomph.records import Diagnosis, Note, Prediction, Progress
from oomph.workload import Workload


def diagnose(
    target: Workload | Script | Callable[[], Any] | Prediction,
    *,
    gpu: str | GPU | None = None,
    max: str | int | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Diagnosis:
    """What the peak of a training step consists of, the cause first.

    The arguments are those of `oomph.predict`; a Prediction is diagnosed as it is. A Workload with sizes is
    predicted a second time at other sizes, to find how its memory grows.
    """
    if isinstance(target, Prediction):
        return _diagnosis(target)

    def at(sizes: Mapping[str, int] | None) -> Prediction:
        at_size = at_sizes(target, sizes)
        return predict(at_size, gpu=gpu, max=max, allow=allow, progress=progress, search=False)

    return diagnose_with(at)


def diagnose_with(predict_at: Callable[[Mapping[str, int] | None], Prediction]) -> Diagnosis:
    """`predict_at` predicts the target at sizes; None: at its own."""
    prediction = predict_at(None)
    scaled: Prediction | None = None
    notes: tuple[Note, ...] = ()
    if prediction.sizes:
        sizes = scaled_sizes(dict(prediction.sizes))
        try:
            scaled = predict_at(sizes)
        except OomphError as error:
            given = ", ".join(f"{name}={size}" for name, size in sizes.items())
            failure = str(error).split("\n")[0]
            notes = (Note(f"growth follows from shapes, because the program fails at {given}: {failure}"),)
    return _diagnosis(prediction, scaled, notes)


def _diagnosis(
    prediction: Prediction, scaled: Prediction | None = None, notes: tuple[Note, ...] = ()
) -> Diagnosis:
    facts = PeakAnalysis(prediction)
    findings = find(facts, scaled)
    failed = (Note(f"the rule for {name} failed: {error}") for name, error in facts.failed.items())
    return Diagnosis(prediction, findings, (*notes, *failed))


def at_sizes(
    target: Workload | Script | Callable[[], Any], sizes: Mapping[str, int] | None
) -> Workload | Script | Callable[[], Any]:
    """The target at other sizes; a function that returns a Workload still does."""
    if sizes is None or isinstance(target, Script):
        return target
    if isinstance(target, Workload):
        return replace(target, sizes=sizes)
    return lambda: replace(target(), sizes=sizes)
