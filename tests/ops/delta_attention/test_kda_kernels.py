"""The Triton kernels of kda: on a GPU, or in Triton's interpreter."""

import importlib.util

import pytest
import torch
from kda_inputs import (
    NAMES,
    assert_close,
    boundaries,
    half,
    in_double,
    inputs,
    one_by_one,
    outcome,
    relative_errors,
)
from kernel_device import DEVICE, HALF

import oomph
from oomph.errors import ArgumentError
from oomph.ops.delta_attention import kda
from oomph.ops.delta_attention.reference import kda_reference
from oomph.units import MiB

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    # The interpreter computes masked lanes too, and numpy warns of them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poisoned"),
]


def kernels(**given):
    return kda(**given, impl="triton")


def float32(*shape, **options):
    return inputs(*shape, dtype=torch.float32, **options)


def on_device(given):
    return {name: x.to(DEVICE) for name, x in given.items()}


# Products of a few factors that are rounded to the dtype; the whole relative error.
TOLERANCE = {torch.float32: 5e-6 if DEVICE == "cuda" else 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE) if DEVICE == "cuda" else [torch.float32]  # the others take the interpreter long


def check(given, dtype, lengths=None, names=NAMES[:5], **options):
    given = half(given, dtype, *names)
    run = kda_reference if lengths is None else one_by_one(kda_reference, lengths)
    if lengths is not None:
        options["cu_seqlens"] = boundaries(lengths).to(DEVICE)
    found = outcome(kernels, on_device(given), **options)
    assert_close(found, outcome(run, in_double(given)), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 67, 1, 20, 40), {"memory_chunk_size": 32}),
        ((2, 1, 2, 32, 16), {}),
        ((1, 33, 1, 80, 16), {"memory_budget": "1KiB"}),  # several slices of key channels
    ],
    ids=["segments and odd sizes", "one token", "slices of channels"],
)
def test_results_and_gradients(shape, options, dtype):
    check(float32(*shape), dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("dk", "dv"), [(128, 128), (16, 256), (256, 48)])
def test_results_and_gradients_of_large_heads(dk, dv, dtype):
    check(float32(2, 150, 2, dk, dv), dtype, memory_chunk_size=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_are_independent(dtype):
    check(float32(1, 75, 1, 16, 16, states=4), dtype, [3, 37, 0, 35], memory_chunk_size=32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", ["20 per token", "20 at some tokens"])
def test_strong_decay(decay, dtype):
    given = float32(1, 40, 1, 16, 16, decay=20.0)
    if decay == "20 at some tokens":
        given["log_alpha"].zero_()
        given["log_alpha"][:, [3, 4, 9, 17, 30]] = -20.0
    check(given, dtype)


def gradient_errors(shape, dtype, decay):
    """Relative errors of the gradients of o alone, in units of the dtype's rounding error."""
    given = half(float32(*shape, decay=decay), dtype)
    given.pop("initial_state")
    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in given.items()}
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    grad_o = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = torch.autograd.grad(kernels(**leaves)[0], list(leaves.values()), grad_o.to(DEVICE))
    right = torch.autograd.grad(kda_reference(**exact)[0], list(exact.values()), grad_o.double())
    errors = relative_errors(dict(zip(given, found, strict=True)), dict(zip(given, right, strict=True)))
    return {name: 2 * error / torch.finfo(dtype).eps for name, error in errors.items()}


# A few roundings of factors. For log_alpha it was 1.7 (bounded chunks) and 1.8 (others) before the two terms
# that cancel in its gradient had the same rounded factors.
@pytest.mark.parametrize("decay", [1.0, 20.0], ids=["bounded chunks", "other chunks"])
def test_half_precision_gradients_have_the_error_of_a_few_roundings(decay):
    tokens, size, most = (300, 128, 1.4) if DEVICE == "cuda" else (64, 64, 1.25)
    errors = gradient_errors((1, tokens, 1, size, size), HALF, decay)
    assert max(errors.values()) < most, errors


def test_strided_inputs_and_the_default_initial_state():
    given = on_device(float32(2, 20, 2, 16, 16))
    given["initial_state"].zero_()
    q, k, v = torch.cat([given[name] for name in "qkv"], dim=-1).split(16, dim=-1)
    strided = {
        "log_alpha": given["log_alpha"].transpose(2, 3).contiguous().transpose(2, 3),
        "beta": given["beta"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    for a, b in zip(kernels(q=q, k=k, v=v, **strided), kernels(**given), strict=True):
        assert torch.equal(a, b)


def test_backward_of_the_state_alone_by_one_input_at_a_time():
    leaves = {name: x.requires_grad_() for name, x in on_device(float32(1, 20, 1, 16, 16)).items()}
    total = kernels(**leaves)[1].sum()
    first = torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
    for each, found in zip(leaves.values(), first, strict=True):
        assert torch.equal(torch.autograd.grad(total, each, retain_graph=True)[0], found)
    assert not first[0].any()  # of q
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    right = torch.autograd.grad(kda_reference(**exact)[1].sum(), list(exact.values())[1:])
    for a, b in zip(first[1:], right, strict=True):
        torch.testing.assert_close(a.cpu(), b.float().cpu(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="twice"):
        torch.autograd.grad(total, list(leaves.values()), create_graph=True)


# Memory, in predictions for an H200 ------------------------------------------------------------------

LONG, REPORT = (1, 32768, 32, 128), (16, 256, 8, 64)
# The peaks of flash-linear-attention 0.6.0 above its inputs, in MiB.
FLA = {LONG: 7192, (1, 4096, 16, 128): 450, REPORT: 117}


def peak_above_inputs(shape, dv=None, backward=True, **options):
    """Bytes above the inputs and the gradient of o."""
    lead, dk = shape[:3], shape[3]
    dv = dv or dk

    def one_pass():
        def new(*size, grad=backward):
            return torch.empty(*size, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

        leaves = [new(*shape), new(*shape), new(*lead, dv), new(*shape), new(*lead)]
        grad_o = new(*lead, dv, grad=False)
        o, _ = kda(*leaves, impl="triton", **options)
        if backward:
            o.backward(grad_o)

    rows = lead[0] * lead[1] * lead[2]
    return oomph.predict(one_pass, gpu="h200").peak.allocated - 2 * rows * (3 * dk + 2 * dv + 1)


@pytest.mark.parametrize(
    ("shape", "tokens", "most"),
    [(shape, None, peak / 2) for shape, peak in FLA.items()]
    + [(LONG, 1024, FLA[LONG] / 4), (REPORT, None, 60), (REPORT, 64, 40)],
    ids=str,
)
def test_the_peak_is_at_most_half_of_flas_and_a_quarter_in_short_segments(shape, tokens, most):
    assert peak_above_inputs(shape, memory_chunk_size=tokens) <= most * MiB


@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward only"])
@pytest.mark.parametrize(
    ("shape", "dv", "budgets"), [((2, 2048, 8, 128), 128, (32, 80)), ((1, 1000, 4, 64), 96, (6, 12))], ids=str
)
def test_a_memory_budget_is_met(shape, dv, budgets, backward):
    dk, rows = shape[3], 2 * shape[0] * shape[1] * shape[2]
    results = rows * dv + 4 * shape[0] * shape[2] * dk * dv + (rows * (3 * dk + dv + 1) if backward else 0)
    used = [
        peak_above_inputs(shape, dv, backward, memory_budget=f"{budget}MiB") - results for budget in budgets
    ]
    assert all(each <= budget * MiB for each, budget in zip(used, budgets, strict=True)), used
    if backward:
        assert used[0] >= 0.5 * budgets[0] * MiB, used
        assert used == sorted(used)


@pytest.mark.parametrize("wanted", ["v", "log_alpha", "beta", "initial_state"])
def test_only_inputs_that_require_a_gradient_get_one(wanted):
    given = on_device(float32(1, 20, 1, 16, 16))
    some = {name: x.clone().requires_grad_(name == wanted) for name, x in given.items()}
    o, state = kernels(**some)
    (2 * o.sum() + state.sum()).backward()
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    o, state = kda_reference(**exact)
    (2 * o.sum() + state.sum()).backward()
    assert [name for name, x in some.items() if x.grad is not None] == [wanted]
    torch.testing.assert_close(some[wanted].grad, exact[wanted].grad.float(), rtol=1e-4, atol=1e-5)
