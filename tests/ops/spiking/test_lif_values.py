"""The gate against its definition: values, surrogate gradients, precision, and going on from a state."""

from __future__ import annotations

import math

import pytest
import torch
from spiking_inputs import NEURON, normal, relative_error, results

from oomph.ops.spiking import lif_gate

SHAPES = [(1, 1), (1, 1, 1), (2, 3, 1), (1, 127, 3), (1, 3, 257), (2, 18, 3, 5)]
FAST = ["chunked", "triton"]


def by_hand(drive: list[float], decay: float, theta: float, beta: float, start: float):
    """Spikes, final membrane, and their derivatives by each drive, by `start` and by decay (the last two).

    In plain numbers and forward mode: no tensor, no autograd, and nothing shared with the op.
    """
    inputs = len(drive) + 2
    m, dm = start, [0.0] * inputs
    dm[-2] = 1.0
    spikes, dspikes = [], []
    for t, now in enumerate(drive):
        dm = [decay * each for each in dm]
        dm[-1] += m
        dm[t] += 1.0
        m = decay * m + now
        p = 1 / (1 + math.exp(-beta * (m - theta)))
        spike = 1.0 if m > theta else 0.0
        dspike = [beta * p * (1 - p) * each for each in dm]
        m -= spike * theta
        dm = [each - theta * d for each, d in zip(dm, dspike, strict=True)]
        spikes.append(spike)
        dspikes.append(dspike)
    return spikes, m, dspikes, dm


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_one_channel_is_what_plain_arithmetic_gives_and_so_is_every_derivative(impl: str) -> None:
    drive = (0.4 * normal(1, 12, seed=7)).requires_grad_()
    initial = torch.tensor([0.2], dtype=torch.float64, requires_grad=True)
    decay = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    spikes, membrane = lif_gate(
        drive, decay=decay, threshold=0.35, surrogate_beta=9.0, initial=initial, impl=impl
    )
    right_spikes, right_m, dspikes, dm = by_hand(drive[0].tolist(), 0.9, 0.35, 9.0, 0.2)
    assert spikes[0].tolist() == right_spikes
    assert 0 < sum(right_spikes) < 12
    assert membrane.item() == pytest.approx(right_m, rel=1e-14)
    inputs = (drive, initial, decay)
    for output, right in [*zip(spikes[0], dspikes, strict=True), (membrane[0], dm)]:
        grads = torch.autograd.grad(output, inputs, retain_graph=True)
        found = torch.cat([each.reshape(-1) for each in grads])
        torch.testing.assert_close(found, torch.tensor(right, dtype=torch.float64), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gives_what_the_reference_gives_in_float64(shape: tuple[int, ...], impl: str) -> None:
    decay_shape = shape[2:] or None
    right, found = (results(each, shape, decay_shape=decay_shape) for each in ("reference", impl))
    assert found.keys() == right.keys()
    assert torch.equal(found["spikes"], right["spikes"])
    for name, each in found.items():
        torch.testing.assert_close(each, right[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_in_lower_precision_only_one_rounding_of_slope_and_result_is_lost(
    dtype: torch.dtype, impl: str
) -> None:
    # The interpreter cuts bfloat16 off where a GPU rounds it; float32 is also summed in float32.
    tolerance = 4 * torch.finfo(dtype).eps
    shape = (1, 40, 3, 5)
    found = results(impl, shape, dtype, decay_shape=(3, 5))
    right = results("reference", shape, dtype, decay_shape=(3, 5), exact=True)
    assert torch.equal(found["spikes"].double(), right["spikes"])
    assert found["spikes"].dtype == found["drive"].dtype == found["initial"].dtype == dtype
    assert found["membrane"].dtype == torch.float32
    for name, each in found.items():
        assert relative_error(each, right[name]) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_fires_at_the_same_steps_as_plain_torch_to_the_bit(dtype: torch.dtype) -> None:
    one, two = (results(impl, (2, 40, 40), dtype) for impl in FAST)
    assert torch.equal(one["spikes"], two["spikes"])
    assert torch.equal(one["membrane"], two["membrane"])


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_the_final_membrane_continues_the_sequence_gradients_included(impl: str) -> None:
    def run(cuts: list[int]) -> list[torch.Tensor]:
        drive = (0.4 * normal(2, 30, 6, seed=3)).requires_grad_()
        membrane, spikes = None, []
        for part in drive.split(cuts, dim=1):
            some, membrane = lif_gate(part, initial=membrane, impl=impl, **NEURON)
            spikes.append(some)
        whole = torch.cat(spikes, dim=1)
        assert membrane is not None
        ((whole * normal(2, 30, 6, seed=4)).sum() + membrane.sum()).backward()
        assert drive.grad is not None
        return [whole.detach(), membrane.detach(), drive.grad]

    for one, two in zip(run([30]), run([7, 1, 22]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", FAST)
def test_a_later_drive_changes_no_earlier_spike(impl: str) -> None:
    drive = normal(1, 30, 8, seed=1)
    other = drive.clone()
    other[:, 17:] += 1
    one, two = (lif_gate(each, impl=impl, **NEURON)[0] for each in (drive, other))
    assert torch.equal(one[:, :17], two[:, :17])
    assert not torch.equal(one, two)


@pytest.mark.parametrize("impl", FAST)
def test_memory_may_have_any_layout_and_gradients_too(impl: str) -> None:
    plain = (0.4 * normal(2, 9, 3, 5, seed=1)).requires_grad_()
    turned = plain.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_()
    assert not turned.is_contiguous()
    for drive in (plain, turned):
        spikes, _ = lif_gate(drive, impl=impl, **NEURON)
        spikes.sum().backward()  # its gradient is one number seen everywhere
    torch.testing.assert_close(plain.grad, turned.grad)
    sliced = torch.cat([plain.detach(), plain.detach()], dim=3)[..., :5]
    assert torch.equal(lif_gate(sliced, impl=impl, **NEURON)[0], lif_gate(plain, impl=impl, **NEURON)[0])


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_nan_is_not_mistaken_for_silence(impl: str) -> None:
    drive = normal(1, 6, 3, seed=1, dtype=torch.float32)
    drive[0, 2, 1] = math.nan
    spikes, membrane = lif_gate(drive, impl=impl, **NEURON)
    assert spikes[0, 2:, 1].isnan().all()
    assert not spikes[0, :2].isnan().any()
    assert not spikes[0, :, [0, 2]].isnan().any()
    assert membrane[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_no_time_leaves_the_state_and_no_channels_leave_nothing(impl: str) -> None:
    initial = torch.randn(2, 3, requires_grad=True)
    spikes, membrane = lif_gate(torch.zeros(2, 0, 3), initial=initial, impl=impl, **NEURON)
    assert spikes.shape == (2, 0, 3)
    assert torch.equal(membrane, initial)
    membrane.sum().backward()
    assert torch.equal(initial.grad, torch.ones(2, 3))
    for shape in ((0, 4, 3), (2, 4, 0)):
        spikes, membrane = lif_gate(torch.zeros(shape), impl=impl, **NEURON)
        assert spikes.shape == shape
        assert membrane.shape == (shape[0], shape[2])


@pytest.mark.parametrize("impl", FAST)
def test_extreme_drives_stay_finite(impl: str) -> None:
    drive = torch.tensor([[1e4, -1e4, 6e4, 0.0, -6e4]], dtype=torch.float16).requires_grad_()
    spikes, _ = lif_gate(drive, decay=0.5, threshold=0.35, surrogate_beta=1e6, impl=impl)
    spikes.sum().backward()
    assert drive.grad.isfinite().all()
    assert spikes.tolist() == [[1, 0, 1, 1, 0]]


@pytest.mark.parametrize("decay", [0, 0.0, 1, 1.0])
def test_the_ends_of_decays_range_are_a_comparison_and_a_sum(decay: float) -> None:
    drive = 0.1 * normal(1, 20, 4).abs()
    spikes, membrane = lif_gate(drive, decay=decay, threshold=0.35, surrogate_beta=9.0)
    if decay == 0:
        # The rest of a step is forgotten, so every step stands alone.
        assert torch.equal(spikes, (drive > 0.35).double())
    else:
        # Nothing leaks: what came in is in the spikes or still in the membrane.
        torch.testing.assert_close(drive.sum(1), 0.35 * spikes.sum(1) + membrane)
