"""BidirectionalMamba: its formula and initialisation."""

import copy

import pytest
import torch
import torch.nn.functional as F

from oomph.nn.mamba import BidirectionalMamba
from oomph.ops.state_space import reference


def by_formula(block, h):
    """One direction after the other, the second on the reversed sequence, token by token."""
    x, z = block.in_proj(h).chunk(2, dim=-1)
    total = torch.zeros_like(x)
    for i in (0, 1):
        one = x.flip(1) if i else x
        padded = F.pad(one, (0, 0, block.d_conv - 1, 0))
        taps = block.conv_weight[i]
        one = (
            sum(padded[:, k : k + h.shape[1]] * taps[:, k] for k in range(block.d_conv)) + block.conv_bias[i]
        )
        one = F.silu(one)
        low, B, C = (one @ block.x_proj[i].T).split([block.dt_rank, block.d_state, block.d_state], dim=-1)
        delta = F.softplus(low @ block.dt_proj[i].T + block.dt_bias[i])
        y = reference.selective_scan(one, delta, -block.A_log[i].exp(), B, C, block.D[i])
        total = total + (y.flip(1) if i else y)
    return block.out_proj(total * F.silu(z))


@pytest.mark.parametrize(("length", "d_conv"), [(1, 4), (3, 4), (40, 4), (7, 1)])
def test_values_and_gradients_are_those_of_the_formula(length, d_conv):
    torch.manual_seed(0)
    block = BidirectionalMamba(6, d_state=3, d_conv=d_conv, chunk_size=16).double()
    other = copy.deepcopy(block)
    h = torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True)
    twin = h.detach().clone().requires_grad_()
    weight = torch.randn(2, length, 6, dtype=torch.float64)
    for one, mine in ((block, h), (other, twin)):
        y = one(mine) if one is block else by_formula(one, mine)
        (y * weight).sum().backward()
    torch.testing.assert_close(h.grad, twin.grad, rtol=1e-10, atol=1e-11)
    for (name, mine), theirs in zip(block.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-11, msg=name)


def test_initialisation_is_that_of_mamba():
    block = BidirectionalMamba(64, d_state=5)
    assert (block.inner, block.dt_rank) == (128, 4)
    torch.testing.assert_close(-block.A_log.exp(), -torch.arange(1.0, 6).expand(2, 128, 5))
    assert (block.D == 1).all()
    delta = F.softplus(block.dt_bias)
    assert delta.min() >= 0.001 * 0.999
    assert delta.max() <= 0.1 * 1.001
    assert delta.log().std() > 1  # uniform over two decades: 1.33
    assert block.dt_proj.abs().max() <= 4**-0.5


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8)])
def test_no_rows_or_tokens(shape):
    y = BidirectionalMamba(8)(torch.zeros(shape))
    assert y.shape == shape
