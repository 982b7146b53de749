"""Where CUDA autocast is on: nested regions, backward, checkpoints; and what it leaves alone."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocast_log import OpLog, aten, bf16, fp16, fp32, is_on_gpu, on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from oomph.prediction.cuda.autocast import autocast_ops, cuda_autocast


def has_python_kernel(op: str) -> bool:
    """Torch names the file in which a kernel was registered; Python kernels name a Python file."""
    lines = torch._C._dispatch_dump(f"aten::{op}").splitlines()
    return any(line.startswith("AutocastCUDA") and ".py" in line for line in lines)


def test_a_disabled_region_inside_casts_nothing_and_the_outer_one_resumes(log: OpLog) -> None:
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


def test_decorators_and_the_older_spellings_work(log: OpLog) -> None:
    a = torch.randn(4, 4)
    assert torch.autocast("cuda", bf16)(lambda: a @ a)().dtype == bf16
    with torch.amp.autocast("cuda"):
        assert (a @ a).dtype == fp16
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=bf16):
        assert (a @ a).dtype == bf16


def test_custom_forward_and_backward_follow_the_state_of_the_forward(log: OpLog) -> None:
    seen: list[torch.dtype] = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a)
            return a @ a

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (a,) = ctx.saved_tensors
            seen.append((a @ a).dtype)
            return grad.float() @ a.float()

    a = torch.randn(4, 4, requires_grad=True)
    with on():
        y = Product.apply(a)
    y.backward(torch.ones_like(y))
    assert y.dtype == bf16
    assert seen == [bf16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_under_the_autocast_of_the_forward(log: OpLog, reentrant: bool) -> None:
    layer, x = nn.Linear(3, 5), torch.randn(2, 3, requires_grad=True)
    with on():
        y = checkpoint(layer, x, use_reentrant=reentrant)
    assert y.dtype == bf16
    log.ops.clear()
    y.sum().backward()
    assert log.casts[:3] == [((5,), bf16), ((5, 3), bf16), ((2, 3), bf16)]
    assert x.grad.dtype == layer.weight.grad.dtype == fp32


def test_a_recomputation_in_backward_clears_the_cache_even_inside_autocast(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4, requires_grad=True)
    with on():
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        log.ops.clear()
        layer(x)
    assert ((4, 4), bf16) in log.casts


def test_backward_inside_autocast_casts_as_forward_does(log: OpLog) -> None:
    a = torch.randn(4, 4, requires_grad=True)
    with on():
        (a @ a).sum().backward()
    products = [dtype for func, _, dtype in log.ops if func is aten.mm.default]
    assert products == [bf16] * 3


def test_casts_are_invisible_to_a_torch_function_mode(gpu_claimed: None) -> None:
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    a = torch.randn(4, 4, requires_grad=True)
    call = torch._C._dispatch_call_boxed  # a call as C++ makes it, so that the mode is on inside the kernel
    with cuda_autocast(lambda tensor: True), on():
        with Watch():
            product = call(aten.matmul.default._handle, a, a)
            sum_ = call(aten.addcmul.default._handle, product, a, a)
            probabilities = call(aten.softmax.int._handle, product, -1)
            norm = call(aten.norm.Scalar._handle, product)
        assert seen == []
    assert (product.dtype, sum_.dtype, probabilities.dtype, norm.dtype) == (bf16, fp32, fp32, fp32)


def test_fake_tensors_work_with_no_fake_mode_active(gpu_claimed: None) -> None:
    with FakeTensorMode():
        layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with cuda_autocast(is_on_gpu), on():
        y = layer(x)
        assert y.dtype == bf16
    y.sum().backward()
    assert layer.weight.grad.dtype == fp32


def test_real_cpu_tensors_are_untouched(gpu_claimed: None) -> None:
    a, p = torch.randn(4, 4), torch.rand(4)
    with cuda_autocast(is_on_gpu), on():
        assert (a @ a).dtype == fp32
        assert a.to(bf16).exp().dtype == a.to(bf16).sum().dtype == bf16
        assert torch.norm(a).dtype == fp32
        assert aten.norm.Scalar(a.to(bf16)).dtype == bf16
        assert F.binary_cross_entropy(p, p).dtype == fp32


def test_cpu_autocast_keeps_its_own_lists_beside_cuda_autocast(gpu_claimed: None) -> None:
    a = torch.randn(4, 4)
    with cuda_autocast(is_on_gpu), on(fp16), torch.autocast("cpu", bf16):
        assert (a @ a).dtype == F.linear(a, a).dtype == bf16
        assert a.to(bf16).sum().dtype == bf16


def test_a_grad_scaler_scales_unscales_and_steps(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    assert scaler.is_enabled()
    for _ in range(2):
        with on(fp16):
            loss = layer(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [func for func, _, _ in log.ops].count(aten._amp_update_scale_.default) == 2


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_of_the_process_is_changed_afterwards(gpu_claimed: None, failing: bool) -> None:
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
    assert not any(has_python_kernel(op) for op in autocast_ops())
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


def test_a_second_context_inside_is_refused() -> None:
    with cuda_autocast(is_on_gpu):
        with pytest.raises(RuntimeError, match="already active"), cuda_autocast(is_on_gpu):
            pass
        assert has_python_kernel("linear")
    assert not has_python_kernel("linear")


def test_the_callers_function_and_the_kept_casts_are_let_go(gpu_claimed: None) -> None:
    class Label:
        def __call__(self, tensor: torch.Tensor) -> bool:
            return is_on_gpu(tensor)

    label = Label()
    gone = weakref.ref(label)
    with FakeTensorMode(), cuda_autocast(label):
        layer = nn.Linear(4, 4)
        region = on()
        region.__enter__()
        layer(torch.randn(2, 4))
    region.__exit__(None, None, None)
    weight = weakref.ref(layer.weight)
    del label, layer, region
    gc.collect()
    assert gone() is None
    assert weight() is None
