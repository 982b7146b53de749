"""Arguments, the choice of an implementation, autograd, compute_loss_chunked and the module."""

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, expected, inputs, leaves, numbers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.errors import ArgumentError
from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.ops import explain, linear_cross_entropy

PLAIN_LIMIT = 16 << 20


def explained(n, v, d=2, device="cpu", dtype=torch.float32, **options):
    with FakeTensorMode():
        x, weight = (torch.empty(rows, d, device=device, dtype=dtype) for rows in (n, v))
        target = torch.zeros(n, device=device, dtype=torch.int64)
        return explain(linear_cross_entropy, x, weight, target, **options)


@pytest.mark.parametrize(("device", "above"), [("cpu", "chunked"), ("cuda", "triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_up_to_16_mebibytes_of_fp32_logits_auto_is_plain(device, above, dtype):
    v = 1 << 14
    n = PLAIN_LIMIT // 4 // v
    small = explained(n, v, device=device, dtype=dtype)
    assert small.impl == "plain"
    assert "the logits are 16 MiB in fp32, at most 16 MiB" in small.reason
    large = explained(n + 1, v, device=device, dtype=dtype)
    assert large.impl == above
    assert "the logits would be 16 MiB in fp32; 1 block of 257 tokens" in large.reason


def test_what_else_decides_whether_auto_is_plain():
    assert explained(64, 1 << 14, memory_budget="16MiB").impl == "plain"  # four copies of the logits must fit
    assert explained(64, 1 << 14, memory_budget="15MiB").impl == "chunked"
    assert explained(4, 4, accumulate_into_grad=True).impl == "chunked"
    assert explained(4096, 1 << 14, device="cuda", dtype=torch.float64).impl == "chunked"
    assert explained(4096, 1 << 14).impl == "chunked"


def test_blocks_shrink_with_the_budget():
    shape = {"n": 16384, "v": 151936, "d": 2560, "device": "cuda", "dtype": torch.bfloat16}
    default, small, tiny = (explained(**shape, memory_budget=budget) for budget in (None, "256MiB", "64MiB"))
    assert default.settings["rows"] >= 1024
    assert default.settings["columns"] == 151936
    assert 384 <= small.settings["rows"] < default.settings["rows"]
    assert small.settings["columns"] == 151936
    assert tiny.settings["columns"] < 151936
    assert "logits computed twice" in tiny.reason


WAYS = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
    {"impl": "chunked", "reduction": "none"},
]


WAY_NAMES = ["plain", "one tile", "small tiles", "per token"]


every_way = pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)


def loss_of(i, **options):
    """One number, whatever the reduction."""
    loss = linear_cross_entropy(i.x, i.weight, i.target, bias=i.bias, **options)
    assert isinstance(loss, Tensor)
    return loss.sum() / 13 if options.get("reduction") == "none" else loss


def gradients(i, loss, **options):
    return list(torch.autograd.grad(loss, [i.x, i.weight, i.bias], **options))


def truth(i):
    wide = leaves(Inputs(i.x.double(), i.weight.double(), i.target, i.bias.double()))
    loss = F.cross_entropy(F.linear(wide.x, wide.weight, wide.bias), wide.target)
    return gradients(wide, loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_the_gradient_may_come_through_the_log_sum_exp_alone(impl, reduction):
    case = leaves(inputs(20, bias=True))
    options = {"impl": impl, "reduction": reduction, "return_lse": True}
    _, lse = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **options)
    kept = case.target != -100
    theirs = F.linear(case.x[kept], case.weight, case.bias).logsumexp(1).square().sum()
    assert_close(gradients(case, lse.square().sum()), gradients(case, theirs), 1e-12)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_half_precision_and_gradients_keep_their_dtypes(dtype, way):
    case = inputs(40, v=200, bias=True, dtype=torch.float32)
    case = leaves(case.but(x=case.x.to(dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **way)
    assert loss.dtype == torch.float32
    ours = gradients(case, loss.sum() / (case.target != -100).sum() if loss.dim() else loss)
    assert [each.dtype for each in ours] == [dtype, torch.float32, torch.float32]
    assert_close(ours, truth(case), TOLERANCE[torch.bfloat16])
    assert not torch.equal(ours[0], truth(case)[0].to(dtype))  # it did compute in half precision


def test_a_large_loss_scale_does_not_underflow_in_float16():
    """As with a GradScaler: what is below float16's smallest number is scaled before it is rounded."""
    case = leaves(inputs(4096, v=3, d=2, dtype=torch.float16, ignored=None))
    tiny = case.but(weight=(case.weight.detach() * 1e-3).requires_grad_())
    loss = linear_cross_entropy(tiny.x, tiny.weight, tiny.target, impl="chunked")
    (x_grad,) = torch.autograd.grad(loss * 2.0**14, tiny.x)
    # `expected` lets a number arrive as gradient; here it is 2**14.
    exact = expected(tiny).gradients[0] / numbers() * 2.0**14
    assert_close([x_grad], [exact], TOLERANCE[torch.float16])


@pytest.mark.parametrize("changed", ["target", "class_weight"])
def test_a_backward_that_makes_the_logits_again_refuses_what_was_changed_since(changed):
    case = leaves(inputs(20, v=200, bias=True))
    class_weight = torch.rand(200, dtype=case.x.dtype)
    loss = loss_of(case, class_weight=class_weight, reduction="none", impl="chunked")
    (case.target if changed == "target" else class_weight).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_layer_and_a_cross_entropy_with_the_options_of_the_op(bias):
    case = inputs(4, 5)
    torch.manual_seed(0)
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    loss = LinearCrossEntropyLoss(6, 13, bias=bias, dtype=torch.float64, **options)
    torch.manual_seed(0)
    linear = nn.Linear(6, 13, bias=bias, dtype=torch.float64)
    assert torch.equal(loss.weight, linear.weight)
    linear.load_state_dict(loss.state_dict())
    x = case.x.requires_grad_()
    ours = loss(x, case.target)
    theirs = F.cross_entropy(linear(x).reshape(-1, 13), case.target.reshape(-1), **options)
    assert_close([ours], [theirs], 1e-12)
    assert_close(
        torch.autograd.grad(ours, [x, *loss.parameters()]),
        torch.autograd.grad(theirs, [x, *linear.parameters()]),
        1e-12,
    )


def test_what_differs_per_call_is_given_per_call():
    case, token_weight = inputs(20), numbers(20)
    loss = LinearCrossEntropyLoss(6, 13, dtype=torch.float64, reduction="sum", return_lse=True)
    losses = F.cross_entropy(F.linear(case.x, loss.weight), case.target, reduction="none")
    ours, lse = loss(case.x, case.target, token_weight=token_weight)
    assert_close([ours], [(losses * token_weight).sum()], 1e-12)
    assert lse.shape == (20,)


@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_the_parameters(bias):
    linear = nn.Linear(6, 13, bias=bias).eval()
    loss = LinearCrossEntropyLoss.from_linear(linear, z_loss=0.1)
    assert loss.weight is linear.weight
    assert loss.bias is linear.bias
    assert not loss.training
    assert (loss.in_features, loss.num_classes, loss.options) == (6, 13, {"z_loss": 0.1})
    case = inputs(20, dtype=torch.float32)
    loss(case.x, case.target).backward()
    assert linear.weight.grad is not None
    table = nn.Embedding(13, 6)  # a tied head
    assert LinearCrossEntropyLoss.from_linear(table).weight is table.weight
    with pytest.raises(ArgumentError, match="weight is computed"):
        LinearCrossEntropyLoss.from_linear(nn.utils.parametrizations.weight_norm(linear))


def test_class_weights_move_with_the_module_and_are_not_saved():
    loss = LinearCrossEntropyLoss(6, 13, class_weight=torch.ones(13)).double()
    assert loss.class_weight.dtype == torch.float64
    assert "class_weight" not in loss.state_dict()
    loss.load_state_dict(nn.Linear(6, 13, bias=False).state_dict())
