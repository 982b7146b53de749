"""The kernels of delta attention on a real GPU: every gradient against float64, and the memory they take.

The interpreter has no products of bfloat16, and Triton 3.4 to 3.7 compile some such kernels wrongly for
Hopper.
"""

import pytest
import torch
from kda_cases import Case, errors, expected

from oomph.ops.delta_attention.fused import fused_kda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCALE = 0.1
# In units of the format's own rounding; o and most gradients are products of two or three rounded factors.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 5e-6}


def _check(case: Case, segment: int | None) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
    try:
        leaves = [x.requires_grad_() for x in case.inputs()]
        cu_seqlens = None if case.packed is None else torch.tensor(case.packed, device="cuda")
        o, state = fused_kda(*leaves, SCALE, cu_seqlens, segment)
        torch.autograd.backward([o, state], case.gradients())
    finally:
        torch.use_deterministic_algorithms(False)
    results = [o.detach(), state.detach(), *(x.grad for x in leaves if x.grad is not None)]
    found = errors(results, expected(case, SCALE))
    assert max(found.values()) < TOLERANCE[case.dtype], found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dk", "dv"), [(128, 128), (64, 64), (16, 256), (256, 48), (80, 96)])
def test_every_gradient_is_that_of_the_recurrence(dtype: torch.dtype, dk: int, dv: int) -> None:
    _check(Case(batch=2, tokens=150, heads=2, dk=dk, dv=dv, dtype=dtype, device="cuda"), 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_strong_decay_is_right(dtype: torch.dtype) -> None:
    _check(Case(tokens=150, heads=2, dk=64, dv=64, dtype=dtype, decay=20.0, device="cuda"), 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_sequences_are_right(dtype: torch.dtype) -> None:
    packed = (0, 3, 100, 100, 161, 300)
    _check(Case(tokens=300, heads=2, dk=64, dv=64, dtype=dtype, packed=packed, device="cuda"), 128)


def test_log_decays_keep_their_own_dtype() -> None:
    _check(
        Case(
            tokens=150, heads=2, dk=64, dv=64, dtype=torch.bfloat16, decay_dtype=torch.float32, device="cuda"
        ),
        64,
    )


@pytest.mark.parametrize(("segment", "share"), [(None, 0.4), (512, 0.3)])
def test_scratch_memory_is_a_small_part_of_the_gradients(segment: int | None, share: float) -> None:
    case = Case(batch=2, tokens=8192, heads=16, dk=128, dv=128, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_() for x in case.inputs()[:5]]
    grad_o = case.gradients()[0]
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, state = fused_kda(*leaves, None, SCALE, None, segment)
    o.backward(grad_o)
    peak = torch.cuda.max_memory_allocated() - base
    results = sum(
        x.numel() * x.element_size() for x in [o, state, *(x.grad for x in leaves if x.grad is not None)]
    )
    assert peak - results < share * results
