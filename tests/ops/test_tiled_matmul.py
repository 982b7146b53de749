"""The tiled product of the Pythia report: values, row statistics, gradients, memory, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import oomph
from oomph.ops.launch import interpreted

pytest.importorskip("triton")

from oomph.errors import ArgumentError
from oomph.systems.pythia import tiled_matmul as module
from oomph.systems.pythia.tiled_matmul import MatmulTile, tiled_matmul
from oomph.units import MiB


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

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(interpreter, a), _widened(interpreter, b), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _widened(interpreter: Any, operand: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    if not operand.dtype.scalar.is_bf16():
        return operand
    import triton.language as tl

    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


IMPLS = ["reference", "chunked", "triton"]


FAST = ["chunked", "triton"]


STATISTICS = ["rowmax", "logsumexp"]


# The interpreter computes with NumPy, which remarks on what a kernel does on purpose: log(0), rows of NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
    # torch's own, on CPUs without bfloat16 instructions
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


SIZES = [(1, 1, 1), (17, 33, 31), (40, 70, 127), (5, 7, 257)]


@pytest.fixture(autouse=True)
def _kernels_run_on_the_gpu_where_there_is_one(request: pytest.FixtureRequest) -> Iterator[None]:
    impl = request.getfixturevalue("impl") if "impl" in request.fixturenames else None
    with torch.device("cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"):
        yield


def rand(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.get_default_device(), dtype).requires_grad_(grad)


def exact_statistic(product: torch.Tensor, epilogue: str) -> torch.Tensor:
    return product.amax(-1) if epilogue == "rowmax" else product.exp().sum(-1).log()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "inner"), SIZES)
def test_the_product_is_the_exact_one_rounded_once_at_odd_sizes(impl, dtype, rows, columns, inner):
    a, b = rand(rows, inner, dtype=dtype), rand(inner, columns, dtype=dtype)
    got = tiled_matmul(a, b, tile=32, impl=impl)
    want = a.double() @ b.double()
    sums = a.double().abs() @ b.double().abs()  # what float32 additions may lose is relative to this
    cuts = impl == "triton" and dtype == torch.bfloat16 and interpreted()  # it does not round to bfloat16
    bound = want.abs() * torch.finfo(dtype).eps * (1 if cuts else 0.51) + sums * 1e-6
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("epilogue", STATISTICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "inner"), SIZES)
def test_the_statistic_is_that_of_the_unrounded_product(impl, epilogue, dtype, rows, columns, inner):
    a, b = rand(rows, inner, dtype=dtype), rand(inner, columns, dtype=dtype)
    product, statistic = tiled_matmul(a, b, tile=32, epilogue=epilogue, impl=impl)
    want = exact_statistic(a.double() @ b.double(), epilogue)
    assert statistic.dtype == torch.float32
    torch.testing.assert_close(statistic.double(), want, rtol=1e-5, atol=2e-5)
    alone = tiled_matmul(a, b, tile=32, epilogue=epilogue, return_product=False, impl=impl)
    assert torch.equal(alone, statistic)
    assert product.shape == (rows, columns)


@pytest.mark.parametrize("tile", [16, 32, MatmulTile(16, 32, 64), MatmulTile(32, 16, 32, group=3, stages=1)])
@pytest.mark.parametrize("impl", ["triton"])
def test_every_tile_gives_the_same(impl, tile):
    a, b = rand(100, 50), rand(50, 90)
    product, statistic = tiled_matmul(a, b, tile=tile, epilogue="logsumexp", impl=impl)
    torch.testing.assert_close(product, a @ b, rtol=0, atol=1e-4)
    torch.testing.assert_close(statistic, (a @ b).logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_transposed_sliced_and_reversed_layouts_need_no_copy(impl):
    want_a, want_b = rand(20, 30), rand(30, 24)
    a_wide = torch.zeros(20, 90)
    a_wide[:, 1::3] = want_a
    for a in (want_a.t().contiguous().t(), a_wide[:, 1::3]):
        for b in (want_b, want_b.t().contiguous().t()):
            got = tiled_matmul(a, b, tile=16, impl=impl)
            torch.testing.assert_close(got, want_a @ want_b, rtol=0, atol=1e-4)
    expanded = tiled_matmul(rand(1, 30).expand(20, 30), want_b, tile=16, impl=impl)
    torch.testing.assert_close(expanded, (rand(1, 30) @ want_b).expand(20, 24), rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [True, False])
def test_batches_with_one_b_or_a_b_each(impl, shared):
    a, b = rand(2, 3, 18, 20), rand(20, 25) if shared else rand(2, 3, 20, 25)
    product, statistic = tiled_matmul(a, b, tile=16, epilogue="rowmax", impl=impl)
    torch.testing.assert_close(product, a @ b, rtol=0, atol=1e-4)
    torch.testing.assert_close(statistic, (a @ b).amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("epilogue", STATISTICS)
def test_float64_stays_float64(impl, epilogue):
    a, b = rand(9, 40, dtype=torch.float64), rand(40, 11, dtype=torch.float64)
    product, statistic = tiled_matmul(a, b, epilogue=epilogue, impl=impl)
    torch.testing.assert_close(product, a @ b, rtol=0, atol=1e-13)
    torch.testing.assert_close(statistic, exact_statistic(a @ b, epilogue), rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("epilogue", STATISTICS)
def test_nan_and_infinities_come_out_in_their_rows_only(impl, epilogue):
    b = torch.eye(40)
    a = rand(5, 40)
    a[0, 35] = math.nan
    a[1] = -1e30
    got = tiled_matmul(a, b, tile=16, epilogue=epilogue, return_product=False, impl=impl)
    assert got[0].isnan()
    assert got[1] == -1e30
    assert got[2:].isfinite().all()
    a = torch.ones(3, 1)
    b = torch.full((1, 40), -math.inf)
    assert (tiled_matmul(a, b, tile=16, epilogue=epilogue, impl=impl)[1] == -math.inf).all()
    b[0, 3] = math.inf
    assert (tiled_matmul(a, b, tile=16, epilogue=epilogue, impl=impl)[1] == math.inf).all()
    b[0, 39] = math.nan
    assert tiled_matmul(a, b, tile=16, epilogue=epilogue, impl=impl)[1].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_large_entries_do_not_overflow_the_logsumexp(impl):
    a, b = torch.tensor([[1e4], [-1e4]]), torch.ones(1, 33)
    got = tiled_matmul(a, b, tile=16, epilogue="logsumexp", return_product=False, impl=impl)
    torch.testing.assert_close(got, torch.tensor([1e4, -1e4]) + math.log(33))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_sides_are_defined(impl, rows, columns, inner):
    a, b = rand(rows, inner, grad=True), rand(inner, columns, grad=True)
    for epilogue in STATISTICS:
        product, statistic = tiled_matmul(a, b, epilogue=epilogue, impl=impl, tile=16)
        assert product.shape == (rows, columns)
        assert torch.equal(product, torch.zeros(rows, columns))
        nothing = -math.inf if columns == 0 else 0.0 if epilogue == "rowmax" else math.log(columns)
        torch.testing.assert_close(statistic, torch.full((rows,), nothing))
        (product.sum() + statistic.sum()).backward()
    assert a.grad is not None
    assert torch.equal(a.grad, torch.zeros_like(a))


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(
    ("epilogue", "wanted"),
    [(None, "product"), *((e, w) for e in STATISTICS for w in ("product", "statistic", "both"))],
)
def test_gradients_are_those_of_the_reference(impl, epilogue, wanted, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3 * 21 * 4)  # several blocks of rows
    dtype = torch.float32 if impl == "triton" else torch.float64
    grads = []
    for chosen, kind in (("reference", torch.float64), (impl, dtype)):
        a, b = rand(2, 10, 8, dtype=kind, grad=True), rand(2, 8, 21, dtype=kind, grad=True)
        got = tiled_matmul(
            a, b, tile=16, epilogue=epilogue, impl=chosen, return_product=wanted != "statistic"
        )
        results = got if isinstance(got, tuple) else (got,)
        used = results[:1] if wanted == "product" else results
        sum((r * torch.arange(r.numel()).view(r.shape).to(kind).sin()).sum() for r in used).backward()
        grads.append((a.grad, b.grad))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-11 if impl == "chunked" else 2e-5)


def test_a_tie_sends_the_gradient_of_the_largest_to_one_element():
    a, b = torch.ones(1, 1, requires_grad=True), torch.ones(1, 6, requires_grad=True)
    tiled_matmul(a, b, epilogue="rowmax", return_product=False).sum().backward()
    assert b.grad is not None
    assert sorted(b.grad[0].tolist()) == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("impl", FAST)
def test_frozen_inputs_skip_their_work_and_no_grad_is_respected(impl):
    a, b = rand(9, 8, grad=True), rand(8, 12)
    product, statistic = tiled_matmul(a, b, epilogue="logsumexp", impl=impl, tile=16)
    (product.sum() + statistic.sum()).backward(retain_graph=True)
    first = a.grad.clone()
    (product.sum() + statistic.sum()).backward()
    torch.testing.assert_close(a.grad, 2 * first)
    assert b.grad is None
    with torch.no_grad():
        assert not tiled_matmul(a, b, impl=impl, tile=16).requires_grad


def test_autocast_casts_as_for_torch_matmul():
    a, b = rand(9, 8, grad=True), rand(8, 12, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        product, statistic = tiled_matmul(a, b, epilogue="rowmax")
        statistic.sum().backward()
    assert product.dtype == torch.bfloat16
    assert statistic.dtype == torch.float32
    assert torch.equal(product, tiled_matmul(a.bfloat16(), b))
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


def test_a_statistic_alone_never_holds_the_product():
    rows = columns = 8192

    def run(return_product: bool) -> int:
        def step() -> None:
            a = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16)
            b = torch.empty(64, columns, device="cuda", dtype=torch.bfloat16)
            tiled_matmul(a, b, epilogue="logsumexp", return_product=return_product)

        return oomph.predict(step).peak.allocated

    inputs = 2 * rows * 64 * 2
    partials = rows * (columns // 256) * 4
    alone = run(False) - inputs - partials - rows * 4
    assert 0 <= alone <= MiB // 8
    assert run(True) - run(False) == rows * columns * 2


def test_the_plain_version_holds_one_block_of_the_product():
    def step() -> None:
        a = torch.empty(16384, 64, device="cuda")
        b = torch.empty(64, 16384, device="cuda")
        tiled_matmul(a, b, epilogue="rowmax", return_product=False, impl="chunked")

    beside = oomph.predict(step).peak.allocated - 2 * 16384 * 64 * 4
    assert beside <= 50 * MiB  # one block and cuBLAS's workspace; the product would be 1 GiB


def test_tensors_without_data_give_shapes():
    a, b = torch.empty(2, 3, 4, device="meta"), torch.empty(4, 5, device="meta")
    product, statistic = tiled_matmul(a, b, epilogue="logsumexp")
    assert product.shape == (2, 3, 5)
    assert statistic.shape == (2, 3)


BAD = [
    ((3, 4), (5, 6), {}, r"a has shape \[3, 4\] and b \[5, 6\]; the last of a"),
    ((4,), (4, 6), {}, r"a has shape \[4\] and b \[4, 6\]; valid"),
    ((2, 3, 4), (3, 4, 6), {}, r"a has shape \[2, 3, 4\] and b \[3, 4, 6\]; b is \[K, N\] or has"),
    ((3, 4), (4, 6), {"epilogue": "softmax"}, "epilogue='softmax' is not valid; choose from None, 'rowmax'"),
    ((3, 4), (4, 6), {"impl": "cublas"}, "impl='cublas' is not valid"),
    ((3, 4), (4, 6), {"return_product": False}, "return_product=False leaves nothing to return"),
    ((3, 4), (4, 6), {"tile": 48}, "tile=48 is not valid; give a MatmulTile or a side"),
    ((3, 4), (4, 6), {"tile": "big"}, "tile='big' is not valid"),
]


@pytest.mark.parametrize(("a", "b", "options", "message"), BAD)
def test_bad_arguments_are_refused_in_one_line(a, b, options, message):
    with pytest.raises(ArgumentError, match="^" + message) as caught:
        tiled_matmul(rand(*a), rand(*b), **options)
    assert "\n" not in str(caught.value)


def test_bad_dtypes_devices_and_tiles_are_refused():
    with pytest.raises(ArgumentError, match="b has dtype"):
        tiled_matmul(rand(3, 4), torch.ones(4, 5, dtype=torch.long))
    with pytest.raises(ArgumentError, match="one dtype"):
        tiled_matmul(rand(3, 4), rand(4, 5, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="one device"):
        tiled_matmul(rand(3, 4), torch.ones(4, 5, device="meta"))
    with pytest.raises(ArgumentError, match="tile 16x16x8 is not valid"):
        MatmulTile(16, 16, 8)
    with pytest.raises(ArgumentError, match="warps is 1, 2, 4, 8 or 16"):
        MatmulTile(16, 16, 16, warps=3)


def test_the_kernel_refuses_float64_and_the_cpu_with_the_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ArgumentError, match="cannot run: the kernel adds in float32"):
        tiled_matmul(rand(3, 4, dtype=torch.float64), rand(4, 5, dtype=torch.float64), impl="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ArgumentError, match=r"impl='triton' cannot run: .*; choose 'auto' or 'chunked'"):
        tiled_matmul(rand(3, 4), rand(4, 5), impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, 16, 64, 128])
def test_the_kernel_on_a_gpu_agrees_with_the_host_and_with_itself(dtype, tile):
    a, b = rand(257, 1000, dtype=dtype), rand(1000, 300, dtype=dtype)
    want = tiled_matmul(a, b, epilogue="logsumexp", impl="reference")
    runs = [tiled_matmul(a.cuda(), b.cuda(), tile=tile, epilogue="logsumexp") for _ in range(2)]
    for i in range(2):
        torch.testing.assert_close(runs[0][i].cpu(), want[i], rtol=2**-7, atol=1e-3)
        assert torch.equal(runs[0][i], runs[1][i])
