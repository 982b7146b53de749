"""Which ops CUDA autocast casts, and to what. Here every fake tensor counts as one on a GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from autocast_log import OpLog, aten, bf16, fp16, fp32, fp64, on
from torch import nn

from oomph.prediction.cuda.autocast import (
    BANNED,
    FLOAT32,
    FLOAT32_RESULT,
    FLOAT32_RESULT_BY_OVERLOAD,
    LOWER_PRECISION,
    PROMOTE,
    autocast_ops,
)


def test_the_tables_name_exactly_the_ops_that_torch_casts_on_cuda() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    cast_by_torch = {n.removeprefix("aten::") for n in names if has_kernel(n, "AutocastCUDA")}
    # Named dimensions (torch <= 2.12) and cuDNN's recurrent layers never come up in a trace.
    left_out = {op for op in cast_by_torch if "imname" in op or "names_" in op or op == "_cudnn_rnn"}
    assert autocast_ops() == cast_by_torch - left_out


def test_no_op_has_two_policies_and_no_tensor_is_passed_by_keyword() -> None:
    tables = [LOWER_PRECISION, FLOAT32, FLOAT32_RESULT, set(FLOAT32_RESULT_BY_OVERLOAD), PROMOTE, BANNED]
    assert sum(map(len, tables)) == len(set().union(*tables))
    for op in autocast_ops():
        name, _, overload = op.partition(".")
        schema = getattr(getattr(aten, name), overload or "default")._schema
        assert not any(a.kwarg_only and "Tensor" in str(a.type) for a in schema.arguments), op


@pytest.mark.parametrize("dtype", [bf16, fp16])
@pytest.mark.parametrize(
    "op",
    [
        lambda a: a @ a,
        lambda a: torch.mm(a, a),
        lambda a: torch.einsum("ij,jk->ik", a, a),
        lambda a: torch.addmm(a, a, a),
        lambda a: F.conv2d(a[None, None], torch.ones(1, 1, 3, 3)),
        lambda a: F.conv2d(a[None, None], torch.ones(1, 1, 3, 3), padding="same"),
        lambda a: F.conv_transpose2d(a[None, None], torch.ones(1, 1, 3, 3)),
        lambda a: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None], a),
        lambda a: F.prelu(a, torch.ones(1)),
        lambda a: nn.MultiheadAttention(8, 2)(a[None], a[None], a[None])[0],
    ],
)
def test_products_run_in_the_autocast_dtype(
    log: OpLog, op: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    a = torch.randn(8, 8, requires_grad=True)
    with on(dtype):
        y = op(a)
    assert y.dtype == dtype
    y.sum().backward()
    assert a.grad.dtype == fp32


@pytest.mark.parametrize(
    "op",
    [
        lambda a: F.layer_norm(a, (8,)),
        lambda a: F.group_norm(a, 2),
        lambda a: torch.exp(a),
        lambda a: a**2,
        lambda a: a.square(),
        lambda a: a.pow(a),
        lambda a: 2**a,
        lambda a: torch.logsumexp(a, 0),
        lambda a: F.mse_loss(a, a),
        lambda a: F.nll_loss(a, torch.zeros(8, dtype=torch.long)),
        lambda a: F.binary_cross_entropy_with_logits(a, a),
        lambda a: F.interpolate(a[None], scale_factor=2),
        lambda a: torch.cdist(a, a),
    ],
)
def test_delicate_ops_get_their_arguments_in_float32(
    log: OpLog, op: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    a = torch.randn(8, 8, dtype=bf16, requires_grad=True)
    with on():
        y = op(a)
    assert y.dtype == fp32
    assert log.casts[0] == ((8, 8), fp32) or log.casts[0] == ((1, 8, 8), fp32)
    y.sum().backward()
    assert a.grad.dtype == bf16


@pytest.mark.parametrize(
    "op",
    [
        lambda a: a.sum(),
        lambda a: a.sum(0),
        lambda a: a.sum(0, keepdim=True),
        lambda a: a.prod(),
        lambda a: a.prod(0),
        lambda a: a.cumsum(0),
        lambda a: a.cumprod(0),
        lambda a: torch.linalg.vector_norm(a),
        lambda a: torch.linalg.vector_norm(a, 3, 0),
        lambda a: torch.norm(a),
        lambda a: aten.norm.Scalar(a),
        lambda a: aten.norm.Scalar(a, 3),
        lambda a: aten.norm.ScalarOpt_dim(a, 2, [0]),
        lambda a: aten.norm.ScalarOpt_dim(a, 2, [0], True),
    ],
)
def test_reductions_widen_inside_the_op_without_a_cast_of_the_input(
    log: OpLog, op: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    a = torch.randn(8, 8, dtype=bf16)
    with on():
        y = op(a)
    assert y.dtype == fp32
    assert log.casts == []


def test_softmax_answers_in_float32_and_its_gradient_returns_in_the_input_dtype(log: OpLog) -> None:
    a = torch.randn(8, 8, dtype=bf16, requires_grad=True)
    with on():
        for y in (a.softmax(-1), F.softmax(a, -1), F.log_softmax(a, -1), F.cross_entropy(a, a.argmax(-1))):
            assert y.dtype == fp32
            y.sum().backward()
    assert a.grad.dtype == bf16


def test_a_dtype_named_by_the_caller_stands(log: OpLog) -> None:
    a = torch.randn(8, 8, dtype=bf16)
    with on():
        assert a.softmax(-1, dtype=bf16).dtype == a.sum(dtype=bf16).dtype == bf16
        assert a.sum(0, dtype=fp64).dtype == F.softmax(a, -1, dtype=fp64).dtype == fp64


def test_other_ops_keep_or_promote_dtypes_as_without_autocast(log: OpLog) -> None:
    low, wide = torch.randn(8, 8, dtype=bf16), torch.randn(8, 8)
    with on():
        assert F.gelu(low).dtype == F.silu(low).dtype == low.mean().dtype == F.relu(low).dtype == bf16
        assert (low + wide).dtype == (low * wide).dtype == torch.cat([low, wide]).dtype == fp32
    assert all(func is not aten._to_copy.default or dtype == fp32 for func, _, dtype in log.ops)


def test_promoting_ops_take_the_widest_dtype(log: OpLog) -> None:
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


def test_promoting_a_dtype_that_is_neither_float32_nor_the_autocast_dtype_fails_as_on_cuda(
    log: OpLog,
) -> None:
    a = torch.randn(8, dtype=fp16)
    with (
        on(bf16),
        pytest.raises(RuntimeError, match=r"cannot promote a torch\.float16 argument of aten\.dot"),
    ):
        torch.dot(a, a)


def test_binary_cross_entropy_is_refused(log: OpLog) -> None:
    p = torch.rand(4)
    with on(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, p)
    with on(enabled=False):
        F.binary_cross_entropy(p, p)


def test_float64_and_integers_are_left_alone(log: OpLog) -> None:
    with on():
        a = torch.randn(4, 4, dtype=fp64)
        assert (a @ a).dtype == a.exp().dtype == a.sum().dtype == torch.norm(a).dtype == fp64
        assert torch.ones(4, dtype=torch.long).sum().dtype == torch.long
    assert log.casts == []
