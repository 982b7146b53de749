"""Steps of many accumulated batches are priced by steps of two, to the same figures."""

from dataclasses import replace

import pytest
from small import TinyLM, plain_loss, seeded, tiny_batch

import oomph
from oomph import fixes
from oomph.fixes.fix import Patient
from oomph.fixes.proposing import priced
from oomph.fixes.short_steps import short_step

BATCHES = 4


class Counting:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return plain_loss(model, batch)


def workload(loss=plain_loss, accumulate=BATCHES):
    return oomph.Workload(
        lambda: seeded(lambda: TinyLM(vocabulary=512, layers=1)),
        lambda device: tiny_batch(device, 4, 64, 512),
        loss,
        accumulate=accumulate,
    )


@pytest.mark.parametrize(
    "name", ["recompute", "fused_attention", "micro_batches", "fused_optimizer", "optimizer_offload"]
)
def test_two_batches_tell_the_peak_and_the_time_of_all(name):
    work = workload()
    patient = Patient(oomph.predict(work, gpu="h200"), work)
    short = short_step(work, patient.prediction)
    assert short.workload.accumulate == 2
    for offer in fixes.find(name).found(patient)[:1]:
        whole, told = priced(offer, patient), priced(offer, patient, short)
        assert whole.peak is not None
        assert told.peak == whole.peak
        assert told.slowdown == pytest.approx(whole.slowdown, rel=0.03)


def test_rows_are_predicted_with_two_batches_except_where_the_batches_of_a_step_differ():
    loss = Counting()
    work = workload(loss)
    prediction = oomph.predict(work, gpu="h200")

    def calls(name):
        loss.calls = 0
        patient = Patient(prediction, work)
        rows = len(fixes.find(name).found(patient))
        fixes.propose(prediction, work, only=(name,))
        return rows, loss.calls

    steps = 3
    rows, seen = calls("fused_optimizer")
    assert seen == (rows + 1) * 2 * steps  # and once without the fix
    rows, seen = calls("bf16_parameters")
    assert seen == rows * BATCHES * steps


def test_what_is_short_already_or_has_another_peak_is_priced_as_it_is():
    two = workload(accumulate=2)
    assert short_step(two, oomph.predict(two, gpu="h200")) is None
    work = workload()
    other = oomph.predict(work, gpu="h200")
    other = replace(other, peak=replace(other.peak, allocated=other.peak.allocated + 512))
    assert short_step(work, other) is None
