"""CUDA autocast on fake tensors: which ops are cast, which casts are kept, where regions end."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from oomph.prediction.compat.registry import FLOAT32_OPS
from oomph.prediction.ops.autocast import AUTOCAST_OPS, cuda_autocast
from oomph.torch_internals import CHECKPOINT_DEFAULT_DEVICE

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


class OpLog(TorchDispatchMode):
    """The ops that reach the bottom of the dispatcher; answers host reads of GPU values with zero."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default:
            return 0.0
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.ops.append((func, tuple(out.shape), out.dtype))
        return out

    @property
    def casts(self):
        return [(shape, dtype) for func, shape, dtype in self.ops if func is aten._to_copy.default]


def is_on_gpu(tensor):
    return isinstance(tensor, FakeTensor)


def on(dtype=bf16, **options):
    return torch.autocast("cuda", dtype, **options)


@pytest.fixture
def gpu_claimed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True)
    # Fake tensors say "cpu" here, so a checkpoint would fall back on the machine's own kind of device.
    monkeypatch.setattr(*CHECKPOINT_DEFAULT_DEVICE, "cuda")


@pytest.fixture
def log(gpu_claimed):
    with cuda_autocast(is_on_gpu), FakeTensorMode(), OpLog() as mode:
        yield mode


def test_the_tables_name_exactly_the_ops_that_torch_casts_on_cuda():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cast_by_torch = {n.removeprefix("aten::") for n in names if has_kernel(n, "AutocastCUDA")}
    # Named dimensions (torch <= 2.12) and cuDNN's recurrent layers never come up in a trace.
    left_out = {op for op in cast_by_torch if "imname" in op or "names_" in op or op == "_cudnn_rnn"}
    assert AUTOCAST_OPS.keys() == cast_by_torch - left_out


@pytest.mark.parametrize("dtype", [bf16, fp16])
@pytest.mark.parametrize(
    "op",
    [
        lambda a: a @ a,
        lambda a: F.conv2d(a[None, None], torch.ones(1, 1, 3, 3)),
        lambda a: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None], a),
    ],
)
def test_products_run_in_the_autocast_dtype(log, op, dtype):
    a = torch.randn(8, 8, requires_grad=True)
    with on(dtype):
        y = op(a)
    assert y.dtype == dtype
    y.sum().backward()
    assert a.grad.dtype == fp32


@pytest.mark.parametrize(
    "op",
    [lambda a: F.layer_norm(a, (8,)), lambda a: a**2, lambda a: F.binary_cross_entropy_with_logits(a, a)],
)
def test_delicate_ops_get_their_arguments_in_float32(log, op):
    a = torch.randn(8, 8, dtype=bf16, requires_grad=True)
    with on():
        y = op(a)
    assert y.dtype == fp32
    assert log.casts[0] == ((8, 8), fp32)
    y.sum().backward()
    assert a.grad.dtype == bf16


@pytest.mark.parametrize(
    "op",
    [
        lambda a: a.sum(0),
        lambda a: torch.linalg.vector_norm(a),
        lambda a: aten.norm.Scalar(a),
        lambda a: aten.norm.ScalarOpt_dim(a, 2, [0], True),
    ],
)
def test_reductions_widen_inside_the_op_without_a_cast_of_the_input(log, op):
    a = torch.randn(8, 8, dtype=bf16)
    with on():
        y = op(a)
    assert y.dtype == fp32
    assert log.casts == []


def test_softmax_answers_in_float32_and_its_gradient_returns_in_the_input_dtype(log):
    a = torch.randn(8, 8, dtype=bf16, requires_grad=True)
    with on():
        for y in (a.softmax(-1), F.softmax(a, -1), F.log_softmax(a, -1), F.cross_entropy(a, a.argmax(-1))):
            assert y.dtype == fp32
            y.sum().backward()
    assert a.grad.dtype == bf16


def test_promoting_ops_take_the_widest_dtype(log):
    low, wide = torch.randn(8, 8, dtype=bf16), torch.randn(8, 8)
    index = torch.zeros(8, 8, dtype=torch.long)
    with on():
        assert torch.addcmul(low, low, wide).dtype == fp32
        assert torch.addcmul(low, low, low).dtype == bf16
        assert torch.atan2(low, wide).dtype == torch.dot(wide[0], low[0]).dtype == fp32
        assert low.scatter_add(0, index, wide).dtype == fp32
        assert low.index_put((index[0],), wide).dtype == fp32
        bias = torch.randn(4)
        weight = torch.randn(4, 8, 8, dtype=bf16)
        assert F.bilinear(low, low, weight, bias).dtype == bf16


def test_binary_cross_entropy_is_refused(log):
    p = torch.rand(4)
    with on(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, p)
    with on(enabled=False):
        F.binary_cross_entropy(p, p)


def test_float64_and_integers_are_left_alone(log):
    with on():
        a = torch.randn(4, 4, dtype=fp64)
        assert (a @ a).dtype == a.exp().dtype == a.sum().dtype == torch.norm(a).dtype == fp64
        assert torch.ones(4, dtype=torch.long).sum().dtype == torch.long
    assert log.casts == []


def test_linear_casts_bias_then_weight_then_input_and_gradients_return_to_float32(log):
    layer, x = nn.Linear(3, 5), torch.randn(2, 3, requires_grad=True)
    with on():
        y = layer(x)
    assert y.dtype == bf16
    assert log.casts == [((5,), bf16), ((5, 3), bf16), ((2, 3), bf16)]
    log.ops.clear()
    y.backward(torch.ones_like(y))
    assert {dtype for _, dtype in log.casts} == {fp32}
    assert len(log.casts) == 3
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == fp32


def test_a_weight_used_twice_in_a_region_is_cast_once(log):
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with on():
        layer(layer(x))
    assert log.casts == [((4, 4), bf16), ((2, 4), bf16)]
    with on():
        layer(x)
    assert log.casts[2:] == [((4, 4), bf16), ((2, 4), bf16)]


@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 4, requires_grad=True) * 2,
        lambda: torch.randn(16, requires_grad=True).view(4, 4),
        lambda: torch.randn(16).view(4, 4).requires_grad_(),
    ],
    ids=["no gradient", "not a leaf", "view", "leaf view"],
)
def test_only_leaves_that_need_a_gradient_and_are_no_views_are_kept(log, weight):
    w, x = weight(), torch.randn(2, 4)
    log.ops.clear()
    with on():
        x @ w, x @ w
    assert [shape for shape, _ in log.casts] == [(4, 4), (2, 4)] * 2


def has_python_kernel(op):
    """Torch names the file in which a kernel was registered; Python kernels name a Python file."""
    lines = torch._C._dispatch_dump(f"aten::{op}").splitlines()
    return any(line.startswith("AutocastCUDA") and ".py" in line for line in lines)


def test_a_disabled_region_inside_casts_nothing_and_the_outer_one_resumes(log):
    a = torch.randn(4, 4)
    with on():
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == bf16
        with on(enabled=False):
            assert not torch.is_autocast_enabled("cuda")
            assert (a @ a).dtype == fp32
        with on(fp16):
            assert (a @ a).dtype == fp16
        assert (a @ a).dtype == bf16
    assert not torch.is_autocast_enabled("cuda")
    assert (a @ a).dtype == fp32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_under_the_autocast_of_the_forward(log, reentrant):
    layer, x = nn.Linear(3, 5), torch.randn(2, 3, requires_grad=True)
    with on():
        y = checkpoint(layer, x, use_reentrant=reentrant)
    assert y.dtype == bf16
    log.ops.clear()
    y.sum().backward()
    assert log.casts[:3] == [((5,), bf16), ((5, 3), bf16), ((2, 3), bf16)]
    assert x.grad.dtype == layer.weight.grad.dtype == fp32


def test_a_recomputation_in_backward_clears_the_cache_even_inside_autocast(log):
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4, requires_grad=True)
    with on():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        log.ops.clear()
        layer(x)
    assert ((4, 4), bf16) in log.casts


def test_real_cpu_tensors_are_untouched(gpu_claimed):
    a, p = torch.randn(4, 4), torch.rand(4)
    with cuda_autocast(is_on_gpu), on():
        assert (a @ a).dtype == fp32
        assert a.to(bf16).exp().dtype == a.to(bf16).sum().dtype == bf16
        assert torch.norm(a).dtype == fp32
        assert aten.norm.Scalar(a.to(bf16)).dtype == bf16
        assert F.binary_cross_entropy(p, p).dtype == fp32


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_the_process_is_changed_afterwards(gpu_claimed, failing):
    functions = (
        torch.clear_autocast_cache,
        torch.autocast_increment_nesting,
        torch.autocast_decrement_nesting,
    )
    with contextlib.suppress(ZeroDivisionError), cuda_autocast(is_on_gpu):
        assert has_python_kernel("linear")
        with FakeTensorMode(), on():
            nn.Linear(4, 4)(torch.randn(2, 4))
            if failing:
                1 / 0  # noqa: B018
    assert not any(has_python_kernel(op) for op in AUTOCAST_OPS)
    assert functions == (
        torch.clear_autocast_cache,
        torch.autocast_increment_nesting,
        torch.autocast_decrement_nesting,
    )
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastCUDA)
    assert not torch.is_autocast_enabled("cuda")
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", bf16):
        y = layer(x)
        assert y.dtype == bf16
        assert y.softmax(-1).dtype == bf16
    with FakeTensorMode(), on():
        assert nn.Linear(4, 4)(torch.randn(2, 4)).dtype == fp32


def test_custom_forward_and_backward_follow_the_state_of_the_forward(log):
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            seen.append((a @ a).dtype)
            return grad.float() @ a.float()

    a = torch.randn(4, 4, requires_grad=True)
    with on():
        y = Product.apply(a)
    y.backward(torch.ones_like(y))
    assert y.dtype == bf16
    assert seen == [bf16]


def test_ops_of_torchvision_that_are_loaded_later_compute_in_float32(gpu_claimed, monkeypatch):
    """Up to 0.27, their kernels for autocast are in a library that is loaded on import."""
    library = torch.library.Library("torchvision", "FRAGMENT")

    def load(ops, path):
        library.define("ps_roi_pool(Tensor input, Tensor rois) -> (Tensor, Tensor)")
        library.impl("ps_roi_pool", lambda x, rois: x, "AutocastCUDA")
        kernel = "CompositeExplicitAutograd"
        library.impl("ps_roi_pool", lambda x, rois: (x + rois, rois.long()), kernel)

    monkeypatch.setattr(type(torch.ops), "load_library", load)
    try:
        with cuda_autocast(is_on_gpu, FLOAT32_OPS), FakeTensorMode(), OpLog() as log, on(fp16):
            torch.ops.load_library("_C.so")
            x, rois = torch.ones(2, dtype=fp16), torch.ones(2)
            values, positions = torch.ops.torchvision.ps_roi_pool(x, rois)
    finally:
        library._destroy()
    assert (values.dtype, positions.dtype) == (fp16, torch.int64)
    assert log.casts == [((2,), fp32), ((2,), fp16)]
