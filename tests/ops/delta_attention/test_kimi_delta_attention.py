"""KimiDeltaAttention against its formulas token by token; generation, parameters."""

import math

import pytest
import torch

from oomph.nn.delta_attention import KimiDeltaAttention

HIDDEN, HEADS, D, TAPS = 12, 2, 4, 4


def layer():
    torch.manual_seed(0)
    made = KimiDeltaAttention(HIDDEN, HEADS, D, dtype=torch.float64)
    torch.nn.init.normal_(made.o_norm.weight)
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_formula(made, x_TC):
    """One sequence, token by token and head by head, from the parameters alone."""
    p = dict(made.named_parameters())

    def convolved(name):
        rows = [x @ p[f"{name}_proj.weight"].T for x in x_TC]
        kernel = p[f"{name}_conv1d.weight"]
        out = []
        for t in range(len(rows)):
            total = torch.zeros_like(rows[0])
            for tap in range(TAPS):
                if t - tap >= 0:
                    total = total + kernel[:, 0, TAPS - 1 - tap] * rows[t - tap]
            out.append(total * torch.sigmoid(total))
        return out

    q, k, v = (convolved(name) for name in "qkv")
    states = [torch.zeros(D, D, dtype=torch.float64) for _ in range(HEADS)]
    ys = []
    for t, x in enumerate(x_TC):
        f = p["f_proj.1.weight"] @ (p["f_proj.0.weight"] @ x)
        gate = p["g_proj.1.weight"] @ (p["g_proj.0.weight"] @ x) + p["g_proj.1.bias"]
        outputs = []
        for head in range(HEADS):
            keys = slice(head * D, (head + 1) * D)
            unit = [each[t][keys] / torch.sqrt(each[t][keys].square().sum() + 1e-6) for each in (q, k)]
            step = torch.log1p(torch.exp(f[keys] + p["dt_bias"][keys]))
            alpha = torch.exp(-torch.exp(p["A_log"][head]) * step)
            beta = torch.sigmoid(p["b_proj.weight"][head] @ x)
            transition = torch.diag(alpha) - beta * torch.outer(unit[1], alpha * unit[1])
            states[head] = transition @ states[head] + beta * torch.outer(unit[1], v[t][keys])
            o = states[head].T @ unit[0] / math.sqrt(D)
            o = o / torch.sqrt(o.square().mean() + 1e-5) * p["o_norm.weight"]
            outputs.append(o * torch.sigmoid(gate[keys]))
        ys.append(p["o_proj.weight"] @ torch.cat(outputs))
    return torch.stack(ys)


def test_the_layer_and_every_gradient_match_its_formulas():
    made, x = layer(), tokens(2, 9).requires_grad_()
    parameters = [x, *made.parameters()]
    y, _ = made(x)
    right = torch.stack([by_formula(made, each) for each in x])
    torch.testing.assert_close(y, right, rtol=1e-10, atol=1e-12)
    pull = tokens(2, 9, seed=2)
    found = torch.autograd.grad(y, parameters, pull)
    for each, wanted in zip(found, torch.autograd.grad(right, parameters, pull), strict=True):
        assert each.any()
        torch.testing.assert_close(each, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cuts", [[1] * 11, [4, 1, 6]], ids=str)
def test_continuing_from_a_state_equals_the_whole_sequence(cuts):
    made, x = layer(), tokens(2, 11).requires_grad_()
    whole, last = made(x)
    state, parts = None, []
    for part in x.split(cuts, dim=1):
        y, state = made(part, state)
        parts.append(y)
    pieces = torch.cat(parts, dim=1)
    torch.testing.assert_close(pieces, whole, rtol=1e-10, atol=1e-12)
    assert state is not None
    for name in ("conv_q", "conv_k", "conv_v", "memory"):
        torch.testing.assert_close(getattr(state, name), getattr(last, name))
        assert not getattr(state.detach(), name).requires_grad
    pull = tokens(2, 11, seed=3)
    torch.testing.assert_close(
        torch.autograd.grad(pieces, x, pull)[0], torch.autograd.grad(whole, x, pull)[0], rtol=1e-8, atol=1e-10
    )


def test_parameters_have_the_published_names_shapes_and_initial_values():
    made = KimiDeltaAttention(64, 4, 16, dtype=torch.float64)
    shapes = {name: tuple(each.shape) for name, each in made.named_parameters()}
    square, convolution = ((64, 64), (64, 1, 4))
    assert shapes == {
        **{f"{name}_proj.weight": square for name in "qkvo"},
        **{f"{name}_conv1d.weight": convolution for name in "qkv"},
        **{f"{name}_proj.0.weight": (16, 64) for name in "fg"},
        **{f"{name}_proj.1.weight": (64, 16) for name in "fg"},
        "b_proj.weight": (4, 64),
        "g_proj.1.bias": (64,),
        "A_log": (4,),
        "dt_bias": (64,),
        "o_norm.weight": (16,),
    }
    step = torch.nn.functional.softplus(made.dt_bias)
    assert step.min() >= 0.001
    assert step.max() <= 0.1
    assert made.A_log.exp().min() >= 1
    assert made.A_log.exp().max() <= 16
