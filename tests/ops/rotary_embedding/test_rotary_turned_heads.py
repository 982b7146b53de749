"""`turned_heads`: the first heads of a packed projection are turned, the others copied."""

from __future__ import annotations

import pytest
import torch

from oomph.errors import ArgumentError
from oomph.nn import RotaryEmbedding
from oomph.ops.rotary_embedding import rotary, rotary_table

IMPLS = ["reference", "chunked", "triton"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 9, 12), (5, 9, 12)])
def test_the_first_heads_are_turned_and_the_rest_is_copied(impl, interleaved, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    options = {"fraction": 0.5, "interleaved": interleaved, "heads_first": False, "impl": impl}
    for heads in (1, 6):
        y = rotary(x, turned_heads=heads, **options)
        expected = torch.cat((rotary(x[..., :heads, :], **options), x[..., heads:, :]), -2)
        torch.testing.assert_close(y, expected)
        assert torch.equal(y[..., heads:, :], x[..., heads:, :])
        weight = torch.randn(shape)
        grads = [torch.autograd.grad(each, x, weight)[0] for each in (y, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("impl", IMPLS)
def test_heads_may_come_first_and_gradients_have_gradients(impl):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, turned_heads=2, impl=impl), x)
    assert torch.autograd.gradgradcheck(lambda x: rotary(x, turned_heads=2, impl=impl), x)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_copied_keeps_infinities_to_itself(impl):
    x = torch.full((1, 4, 3, 8), torch.inf)
    y = rotary(x, turned_heads=2, impl=impl)
    assert torch.equal(y[:, 2:], x[:, 2:])


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_module_turns_the_first_heads_in_its_own_form(heads_first):
    rope = RotaryEmbedding(8, fraction=0.5, heads_first=heads_first)
    x = torch.randn(1, 4, 4, 8)
    table = rotary_table(torch.arange(4), 4)
    expected = rotary(x, table=table, fraction=0.5, heads_first=heads_first, turned_heads=3)
    assert torch.equal(rope.rotate_first(x, 3, table), expected)


def test_the_compiled_formula_turns_the_same_heads():
    x = torch.randn(1, 4, 3, 8)
    compiled = torch.compile(lambda x: rotary(x, turned_heads=3), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), rotary(x, turned_heads=3))


@pytest.mark.parametrize("given", [0, 5, 1.0, True])
def test_a_wrong_number_of_heads_is_refused(given):
    with pytest.raises(ArgumentError, match=rf"^turned_heads={given} is not valid; q has heads 1 to 4$"):
        rotary(torch.randn(1, 4, 3, 8), turned_heads=given)


def test_keys_beside_a_packed_tensor_are_refused():
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(ArgumentError, match=r"^turned_heads is for q alone"):
        rotary(x, x, turned_heads=2)
