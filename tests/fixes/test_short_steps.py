"""Steps of many accumulated batches are priced by steps of two and three, to the same figures."""

from dataclasses import replace

import pytest
from small import TinyLM, plain_loss, seeded, tiny_batch

import oomph
from oomph import fixes
from oomph.fixes.application import _two_batches_have_the_peak, _with_prediction
from oomph.fixes.registry import FixContext

BATCHES = 8


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
    "name",
    [
        "activation_checkpointing",
        "micro_batches",
        "optimizer_cpu_offload",
        "bf16_parameters",
        "gradient_accumulation_fusion",
    ],
)
def test_few_batches_tell_the_peak_and_the_time_of_all(name):
    work = workload()
    context = FixContext(oomph.predict(work, gpu="h200"), work)
    assert _two_batches_have_the_peak(work, context.prediction)
    for proposal in fixes.find(name).proposals(context):
        whole, told = (_with_prediction(proposal, context, few) for few in (False, True))
        assert whole.peak is not None
        assert (told.peak, told.fits) == (whole.peak, whole.fits)
        assert told.slowdown == pytest.approx(whole.slowdown, rel=1e-6)


def test_rows_are_predicted_with_two_and_three_batches():
    loss = Counting()
    work = workload(loss)
    prediction = oomph.predict(work, gpu="h200")
    rows = len(fixes.find("fused_optimizer").proposals(FixContext(prediction, work)))
    loss.calls = 0
    fixes.propose(prediction, work, only=("fused_optimizer",))
    assert loss.calls == (2 + rows * (2 + 3)) * 3  # and once without the fix; three steps each


def test_what_is_short_already_or_has_another_peak_is_priced_as_it_is():
    few = workload(accumulate=5)
    assert not _two_batches_have_the_peak(few, oomph.predict(few, gpu="h200"))
    work = workload()
    other = oomph.predict(work, gpu="h200")
    other = replace(other, peak=replace(other.peak, allocated=other.peak.allocated + 512))
    assert not _two_batches_have_the_peak(work, other)


def test_a_limit_of_the_prediction_is_that_of_its_proposals():
    work = workload(accumulate=1)
    prediction = oomph.predict(work, gpu="24GiB", max="1MiB")
    assert prediction.fits is False
    assert {row.fits for row in fixes.propose(prediction, work, only=("activation_checkpointing",))} <= {
        False
    }
