"""The tiled product of the Pythia report: values, log-sum-exp, gradients, memory, bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import oomph
from oomph.ops.common import interpreted

pytest.importorskip("triton")

from oomph.errors import ArgumentError
from oomph.systems.pythia.tiled_matmul import MatmulTile, tiled_matmul
from oomph.units import MiB

# The interpreter computes with NumPy, which warns of what a kernel does on purpose: log(0), rows of NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
    # torch's own, on CPUs without bfloat16 instructions
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]
IMPLS = ["reference", "triton"]
SMALL = MatmulTile(32, 16, 32, group=3, stages=1)


@pytest.fixture(autouse=True)
def _interpreter_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes two gaps of Triton 3.6's interpreter that this kernel meets.

    One-element arrays become loop bounds, which NumPy refuses from 2.4 on. And bfloat16, which it keeps as
    16-bit integers, is multiplied as those integers by `tl.dot`.
    """
    if not interpreted():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(operand: Any) -> Any:
        """bfloat16 is the upper half of a float32."""
        if not operand.dtype.scalar.is_bf16():
            return operand
        import triton.language as tl

        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _kernels_run_on_the_gpu_where_there_is_one(request: pytest.FixtureRequest) -> Any:
    impl = request.getfixturevalue("impl") if "impl" in request.fixturenames else None
    with torch.device("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"):
        yield


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.get_default_device(), dtype).requires_grad_(grad)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 1, 1), (40, 70, 127), (5, 7, 257)])
def test_product_is_rounded_once_and_logsumexp_is_of_the_unrounded(impl, dtype, rows, columns, inner):
    a, b = rand(rows, inner, dtype=dtype), rand(inner, columns, dtype=dtype)
    got, lse = tiled_matmul(a, b, tile=SMALL, epilogue="logsumexp", impl=impl)
    want = a.double() @ b.double()
    sums = a.double().abs() @ b.double().abs()  # what float32 additions may lose is relative to this
    cuts = impl == "triton" and dtype == torch.bfloat16 and interpreted()  # it does not round to bfloat16
    bound = want.abs() * torch.finfo(dtype).eps * (1 if cuts else 0.51) + sums * 1e-6
    assert (got.dtype, lse.dtype) == (dtype, torch.float32)
    assert ((got.double() - want).abs() <= bound).all()
    torch.testing.assert_close(lse.double(), want.logsumexp(-1), rtol=1e-5, atol=2e-5)
    assert torch.equal(tiled_matmul(a, b, tile=SMALL, impl=impl), got)
    alone = tiled_matmul(a, b, tile=SMALL, epilogue="logsumexp", return_product=False, impl=impl)
    assert torch.equal(alone, lse)


@pytest.mark.parametrize("impl", IMPLS)
def test_transposed_and_sliced_layouts(impl):
    want_a, want_b = rand(20, 30), rand(30, 24)
    a_wide = torch.zeros(20, 90)
    a_wide[:, 1::3] = want_a
    for a in (want_a.t().contiguous().t(), a_wide[:, 1::3]):
        for b in (want_b, want_b.t().contiguous().t()):
            torch.testing.assert_close(tiled_matmul(a, b, impl=impl), want_a @ want_b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_batches_with_one_b_or_a_b_each(impl):
    a = rand(2, 3, 18, 20)
    for b in (rand(20, 25), rand(2, 3, 20, 25)):
        product, lse = tiled_matmul(a, b, tile=SMALL, epilogue="logsumexp", impl=impl)
        torch.testing.assert_close(product, a @ b, rtol=0, atol=1e-4)
        torch.testing.assert_close(lse, (a @ b).logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_infinities_and_large_entries(impl):
    def lse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tiled_matmul(a, b, tile=SMALL, epilogue="logsumexp", return_product=False, impl=impl)

    a = rand(5, 40)
    a[0, 35] = math.nan
    a[1] = -1e30
    got = lse(a, torch.eye(40))
    assert got[0].isnan()
    assert got[1] == -1e30
    assert got[2:].isfinite().all()
    a, b = torch.ones(3, 1), torch.full((1, 40), -math.inf)
    assert (lse(a, b) == -math.inf).all()
    b[0, 3] = math.inf
    assert (lse(a, b) == math.inf).all()
    b[0, 39] = math.nan
    assert lse(a, b).isnan().all()
    got = lse(torch.tensor([[1e4], [-1e4]]), torch.ones(1, 33))
    torch.testing.assert_close(got, torch.tensor([1e4, -1e4]) + math.log(33))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_sides(impl, rows, columns, inner):
    a, b = rand(rows, inner, grad=True), rand(inner, columns, grad=True)
    product, lse = tiled_matmul(a, b, epilogue="logsumexp", impl=impl)
    assert torch.equal(product, torch.zeros(rows, columns))
    torch.testing.assert_close(lse, torch.full((rows,), math.log(columns) if columns else -math.inf))
    (product.sum() + lse.sum()).backward()
    assert torch.equal(a.grad, torch.zeros_like(a))


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("wanted", ["product", "lse", "both"])
def test_gradients_are_those_of_the_reference(impl, wanted):
    grads = []
    for chosen, dtype in (("reference", torch.float64), (impl, torch.float32)):
        a, b = rand(2, 10, 8, dtype=dtype, grad=True), rand(2, 8, 21, dtype=dtype, grad=True)
        c, lse = tiled_matmul(a, b, tile=SMALL, epilogue="logsumexp", impl=chosen)
        used = {"product": [c], "lse": [lse], "both": [c, lse]}[wanted]
        sum((r * torch.arange(r.numel()).view(r.shape).to(dtype).sin()).sum() for r in used).backward()
        grads.append((a.grad, b.grad))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(tiled_matmul(a, b, impl=impl).sum(), a, create_graph=True)


def test_logsumexp_alone_never_holds_the_product():
    rows = columns = 8192

    def peak(return_product: bool) -> int:
        def step() -> None:
            a = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16)
            b = torch.empty(64, columns, device="cuda", dtype=torch.bfloat16)
            tiled_matmul(a, b, epilogue="logsumexp", return_product=return_product)

        return oomph.predict(step).peak.allocated

    inputs, partials = 2 * rows * 64 * 2, rows * (columns // 256) * 4
    assert 0 <= peak(False) - inputs - partials - rows * 4 <= MiB // 8
    assert peak(True) - peak(False) == rows * columns * 2


def test_bad_arguments(monkeypatch):
    for a, b, options, message in (
        (rand(3, 4), rand(5, 6), {}, r"\[3, 4\] and b \[5, 6\]; valid"),
        (rand(4), rand(4, 6), {}, r"\[4\] and b \[4, 6\]; valid"),
        (rand(2, 3, 4), rand(3, 4, 6), {}, r"\[2, 3, 4\] and b \[3, 4, 6\]; valid"),
        (rand(3, 4), rand(4, 6), {"epilogue": "softmax"}, "epilogue='softmax' is not valid"),
        (rand(3, 4), rand(4, 6), {"impl": "cublas"}, "impl='cublas' is not valid"),
        (rand(3, 4), rand(4, 6), {"return_product": False}, "return_product=False"),
        (rand(3, 4), torch.ones(4, 5, dtype=torch.long), {}, "b has dtype"),
        (rand(3, 4), rand(4, 5).double(), {}, "one dtype"),
        (rand(3, 4).double(), rand(4, 5).double(), {"impl": "triton"}, "impl='triton' cannot run"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tiled_matmul(a, b, **options)
    with pytest.raises(ArgumentError, match=r"k=8.* is not valid"):
        MatmulTile(16, 16, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ArgumentError, match="impl='triton' cannot run"):
        tiled_matmul(rand(3, 4), rand(4, 5), impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tile", [None, MatmulTile(16, 16, 16, warps=1), MatmulTile(64, 64, 64), MatmulTile(128, 128, 64, warps=8)]
)
def test_the_kernel_on_a_gpu_agrees_with_the_host_and_with_itself(dtype, tile):
    a, b = rand(257, 1000, dtype=dtype), rand(1000, 300, dtype=dtype)
    want = tiled_matmul(a, b, epilogue="logsumexp", impl="reference")
    runs = [tiled_matmul(a.cuda(), b.cuda(), tile=tile, epilogue="logsumexp") for _ in range(2)]
    for i in range(2):
        torch.testing.assert_close(runs[0][i].cpu(), want[i], rtol=2**-7, atol=1e-3)
        assert torch.equal(runs[0][i], runs[1][i])
