"""What the kernels of delta attention allocate, forward and backward, in predictions for an H200."""

import pytest
import torch

import oomph
from oomph.ops.delta_attention import kda
from oomph.ops.delta_attention.fused import fused_kda

MIB = 2**20
# Flash-linear-attention 0.6.0 took these peaks above its inputs, in MiB.
LONG = (1, 32768, 32, 128)
MANY = (4, 8192, 32, 128)
SHORT = (1, 4096, 16, 128)
REPORT = (16, 256, 8, 64)
THEIRS = {LONG: 7192, MANY: 7192, SHORT: 450, REPORT: 117}


def _peak(shape: tuple[int, int, int, int], segment: int | None) -> float:
    """In MiB, above the inputs and the gradient that arrives."""

    def build():  # type: ignore[no-untyped-def]
        def new(*size: int, grad: bool = True) -> torch.Tensor:
            return torch.empty(*size, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

        leaves = [*(new(*shape) for _ in range(4)), new(*shape[:3])]
        grad_o = new(*shape, grad=False)

        def step() -> None:
            o, _ = fused_kda(*leaves, None, 0.1, None, segment)
            o.backward(grad_o)
            for leaf in leaves:
                leaf.grad = None

        return step

    tokens = shape[0] * shape[1] * shape[2]
    return (oomph.predict(build, gpu="h200").peak.allocated - 2 * tokens * (5 * shape[3] + 1)) / MIB


@pytest.mark.parametrize("shape", [LONG, MANY, SHORT, REPORT], ids=str)
def test_the_peak_is_at_most_half_of_the_peers(shape: tuple[int, int, int, int]) -> None:
    assert _peak(shape, None) <= THEIRS[shape] / 2


@pytest.mark.parametrize(("shape", "segment"), [(LONG, 1024), (MANY, 512)], ids=str)
def test_short_segments_take_at_most_a_quarter_of_the_peers_peak(
    shape: tuple[int, int, int, int], segment: int
) -> None:
    assert _peak(shape, segment) <= THEIRS[shape] / 4


def test_the_reports_shape_fits_in_sixty_mib_and_in_forty_with_short_segments() -> None:
    assert _peak(REPORT, None) <= 60
    assert _peak(REPORT, 64) <= 40


def _beside(shape: tuple[int, int, int, int], dv: int, backward: bool, budget: int) -> int:
    """Bytes that impl="triton" needs beside inputs, outputs and gradients, with a budget for them in MiB."""
    dk = shape[3]

    def build():  # type: ignore[no-untyped-def]
        def new(*size: int, grad: bool = backward) -> torch.Tensor:
            return torch.empty(*size, device="cuda", dtype=torch.bfloat16, requires_grad=grad)

        leaves = [new(*shape), new(*shape), new(*shape[:3], dv), new(*shape), new(*shape[:3])]
        grad_o = new(*shape[:3], dv, grad=False)

        def step() -> None:
            o, _ = kda(*leaves, impl="triton", memory_budget=f"{budget}MiB")
            if backward:
                o.backward(grad_o)
            for leaf in leaves:
                leaf.grad = None

        return step

    rows = 2 * shape[0] * shape[1] * shape[2]
    inputs, state = rows * (3 * dk + dv + 1), 4 * shape[0] * shape[2] * dk * dv
    known = inputs + state + 2 * rows * dv + (inputs if backward else 0)
    return oomph.predict(build, gpu="h200").peak.allocated - known


@pytest.mark.parametrize("backward", [True, False], ids=["training", "forward alone"])
@pytest.mark.parametrize(
    ("shape", "dv", "budgets"),
    [((2, 2048, 8, 128), 128, (32, 48, 80)), ((1, 1000, 4, 64), 96, (6, 9, 12))],
    ids=str,
)
def test_a_budget_is_kept_where_a_segment_meets_it(
    shape: tuple[int, int, int, int], dv: int, budgets: tuple[int, ...], backward: bool
) -> None:
    needed = [_beside(shape, dv, backward, budget) for budget in budgets]
    assert all(each <= budget * MIB for each, budget in zip(needed, budgets, strict=True)), needed
    if backward:
        assert needed[0] >= 0.5 * budgets[0] * MIB, needed  # and used
        assert needed == sorted(needed)
