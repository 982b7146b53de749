"""lif_gate against its definition: values, surrogate gradients, precision, states, arguments, memory."""

import math

import pytest
import torch
from checks import relative_error
from kernel_device import DEVICE

import oomph
from oomph.ops.spiking import lif_gate

NEURON = {"decay": 0.92, "threshold": 0.35, "surrogate_beta": 9.0}
FAST = ["chunked", "triton"]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(impl, shape=(2, 21, 3, 5), dtype=torch.float64, *, exact=False):
    """Spikes, membrane and the gradients, on the same numbers for every call.

    `exact` computes in float64 on the numbers that `dtype` can hold.
    """
    used = torch.float64 if exact else dtype
    device = DEVICE if impl == "triton" else "cpu"
    given = {
        "drive": (0.4 * normal(*shape, seed=1)).to(dtype).to(device, used),
        "initial": normal(shape[0], *shape[2:], seed=2).to(dtype).to(device, used),
    }
    for each in given.values():
        each.requires_grad_()
    spikes, membrane = lif_gate(**given, impl=impl, **NEURON)
    grads = [normal(*spikes.shape, seed=4).to(spikes), normal(*membrane.shape, seed=5).to(membrane)]
    torch.autograd.backward([spikes, membrane], grads)
    found = {"spikes": spikes, "membrane": membrane}
    found |= {name: each.grad for name, each in given.items()}
    return {name: each.detach().cpu() for name, each in found.items()}


# Values and gradients --------------------------------------------------------------------------------


def by_hand(drive, decay, theta, beta, start):
    """Spikes, final membrane, and their derivatives by each drive and by `start` (the last).

    In plain numbers and forward mode: no tensor, no autograd, and nothing shared with the op.
    """
    m, dm = start, [*([0.0] * len(drive)), 1.0]
    spikes, dspikes = [], []
    for t, now in enumerate(drive):
        dm = [decay * each for each in dm]
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


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_one_channel_and_every_derivative_by_hand(impl):
    drive = (0.4 * normal(1, 12, seed=7)).requires_grad_()
    initial = torch.tensor([0.2], dtype=torch.float64, requires_grad=True)
    spikes, membrane = lif_gate(
        drive, decay=0.9, threshold=0.35, surrogate_beta=9.0, initial=initial, impl=impl
    )
    right_spikes, right_m, dspikes, dm = by_hand(drive[0].tolist(), 0.9, 0.35, 9.0, 0.2)
    assert spikes[0].tolist() == right_spikes
    assert 0 < sum(right_spikes) < 12
    assert membrane.item() == pytest.approx(right_m, rel=1e-14)
    for output, right in [*zip(spikes[0], dspikes, strict=True), (membrane[0], dm)]:
        grads = torch.autograd.grad(output, (drive, initial), retain_graph=True)
        found = torch.cat([each.reshape(-1) for each in grads])
        torch.testing.assert_close(found, torch.tensor(right, dtype=torch.float64), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_rounds_slope_and_result_once(dtype, impl):
    # The interpreter truncates to bfloat16 where a GPU rounds; float32 is also summed in float32.
    tolerance = 4 * torch.finfo(dtype).eps
    found = results(impl, (1, 24, 3, 5), dtype)
    if impl == "triton":  # fires at the same steps as plain torch
        plain = results("chunked", (1, 24, 3, 5), dtype)
        assert all(torch.equal(found[name], plain[name]) for name in ("spikes", "membrane"))
    right = results("reference", (1, 24, 3, 5), dtype, exact=True)
    assert torch.equal(found["spikes"].double(), right["spikes"])
    assert found["spikes"].dtype == found["drive"].dtype == found["initial"].dtype == dtype
    assert found["membrane"].dtype == torch.float32
    for name, each in found.items():
        assert relative_error(each, right[name]) < tolerance, name


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_the_final_membrane_continues_the_sequence_with_gradients(impl):
    def run(cuts):
        drive = (0.4 * normal(2, 20, 6, seed=3)).requires_grad_()
        membrane, spikes = None, []
        for part in drive.split(cuts, dim=1):
            some, membrane = lif_gate(part, initial=membrane, impl=impl, **NEURON)
            spikes.append(some)
        whole = torch.cat(spikes, dim=1)
        ((whole * normal(2, 20, 6, seed=4)).sum() + membrane.sum()).backward()
        assert drive.grad is not None
        return [whole.detach(), membrane.detach(), drive.grad]

    for one, two in zip(run([20]), run([7, 1, 12]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_nan_fires_as_nan(impl):
    drive = normal(1, 6, 3, seed=1, dtype=torch.float32)
    drive[0, 2, 1] = math.nan
    spikes, membrane = lif_gate(drive, impl=impl, **NEURON)
    assert spikes[0, 2:, 1].isnan().all()
    assert not spikes[0, :2].isnan().any()
    assert not spikes[0, :, [0, 2]].isnan().any()
    assert membrane[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("impl", FAST)
def test_extreme_drives_stay_finite(impl):
    drive = torch.tensor([[1e4, -1e4, 6e4, 0.0, -6e4]], dtype=torch.float16).requires_grad_()
    spikes, _ = lif_gate(drive, decay=0.5, threshold=0.35, surrogate_beta=1e6, impl=impl)
    spikes.sum().backward()
    assert drive.grad.isfinite().all()
    assert spikes.tolist() == [[1, 0, 1, 1, 0]]


@pytest.mark.parametrize("decay", [0, 1.0])
def test_a_decay_of_0_or_1(decay):
    drive = 0.1 * normal(1, 20, 4).abs()
    spikes, membrane = lif_gate(drive, decay=decay, threshold=0.35, surrogate_beta=9.0)
    if decay == 0:
        # Every step is independent.
        assert torch.equal(spikes, (drive > 0.35).double())
    else:
        # Nothing leaks: the drive is in the spikes or still in the membrane.
        torch.testing.assert_close(drive.sum(1), 0.35 * spikes.sum(1) + membrane)


# In larger programs ----------------------------------------------------------------------------------


def test_the_predicted_memory_is_that_of_its_tensors():
    def train():
        drive = torch.randn(4, 64, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(drive)

        def step():
            spikes, _ = lif_gate(drive, **NEURON)
            spikes.backward(grad)
            drive.grad = None

        return step

    def infer():
        drive = torch.randn(4, 64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return lambda: torch.no_grad()(lif_gate)(drive, **NEURON)

    size, state = 4 * 64 * 512 * 2, 4 * 512 * 4
    # drive, the gradient of the spikes, spikes, slopes, the gradient; the final membrane, initial's gradient
    assert oomph.predict(train, gpu="h200").peak.allocated == 5 * size + 2 * state
    assert oomph.predict(infer, gpu="h200").peak.allocated == 2 * size + state
