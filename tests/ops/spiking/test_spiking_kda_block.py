"""SpikingKDABlock against its formulas token by token; silence, dropped tokens, states."""

import pytest
import torch

from oomph.nn.spiking_kda import SpikingKDABlock, forward_fill

HIDDEN, HEADS, D, RANK = 10, 3, 4, 6


def block(**options):
    torch.manual_seed(0)
    shape = {"gate_rank": RANK, "dtype": torch.float64}
    made = SpikingKDABlock(HIDDEN, HEADS, D, **{**shape, **options})
    # At initialization spikes have no effect, and norms have unit weights.
    for each in (made.spike_decay, made.spike_write, made.norm.weight, made.o_norm.weight):
        torch.nn.init.normal_(each)
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x, weight):
    return x / torch.sqrt(x.square().mean() + 1e-6) * weight


def silu(x):
    return x * torch.sigmoid(x)


def by_formula(made, x_TC, dropped):
    """One sequence, token by token and head by head; and which heads were silent when."""
    p = dict(made.named_parameters())
    normed = [rms(x, p["norm.weight"]) for x in x_TC]
    kernel = p["conv.weight"]
    states = [torch.zeros(D, D, dtype=torch.float64) for _ in range(HEADS)]
    membrane = torch.zeros(HEADS, D, dtype=torch.float64)
    shown = torch.zeros(HEADS, D, dtype=torch.float64)
    ys, silent = [], []
    for t, x in enumerate(x_TC):
        h = silu(sum(kernel[:, 0, 2 - back] * normed[t - back] for back in range(3) if t >= back))
        qk, v, drive = (p[f"{name}_proj.weight"] @ h for name in ("qk", "v", "drive"))
        q, k = qk.chunk(2)
        membrane = 0.92 * membrane + (drive + p["drive_proj.bias"]).view(HEADS, D)
        smooth = torch.sigmoid(9.0 * (membrane - 0.35))
        spikes = (membrane > 0.35).double() + smooth - smooth.detach()
        membrane = membrane - 0.35 * spikes
        f = (p["decay_down.weight"] @ silu(p["decay_up.weight"] @ h)).view(HEADS, D)
        outputs = []
        silent.append([not bool(spikes[head].detach().any()) for head in range(HEADS)])
        for head in range(HEADS):
            keys = slice(head * D, (head + 1) * D)
            unit_q, unit_k = (each[keys] / torch.sqrt(each[keys].square().sum() + 1e-6) for each in (q, k))
            alpha = torch.sigmoid(f[head] + p["spike_decay"][head] * spikes[head])
            beta = torch.sigmoid(
                p["write_proj.weight"][head] @ h + (p["spike_write"][head] * spikes[head]).sum()
            )
            if not silent[t][head] and not dropped[t]:
                transition = torch.diag(alpha) - beta * torch.outer(unit_k, alpha * unit_k)
                states[head] = transition @ states[head] + beta * torch.outer(unit_k, v[keys])
            outputs.append(states[head].T @ unit_q)
        shown = shown.detach() if dropped[t] else torch.stack(outputs)
        normed_o = torch.cat([rms(each, p["o_norm.weight"]) for each in shown])
        gate = torch.sigmoid(p["gate_down.weight"] @ silu(p["gate_up.weight"] @ x))
        ys.append(x + (p["o_proj.weight"] @ normed_o) * gate)
    return torch.stack(ys), silent


@pytest.mark.parametrize("drop", [False, True])
def test_the_block_and_every_gradient_match_its_formulas(drop):
    made, x = block(), tokens(2, 12).requires_grad_()
    dropped = torch.zeros(2, 12, dtype=torch.bool)
    if drop:
        dropped[0, [0, 1, 5, 6, 11]] = True
        dropped[1, [3, 8]] = True
    y, _ = made(x, dropped=dropped)
    rows = [by_formula(made, each, mask.tolist()) for each, mask in zip(x, dropped, strict=True)]
    heads = [quiet for _, silent in rows for token in silent for quiet in token]
    assert any(heads)  # or silence would not be tested
    assert not all(heads)
    right = torch.stack([each for each, _ in rows])
    torch.testing.assert_close(y, right, rtol=1e-10, atol=1e-12)
    parameters, pull = [x, *made.parameters()], tokens(2, 12, seed=2)
    found = torch.autograd.grad(y, parameters, pull)
    for each, wanted in zip(found, torch.autograd.grad(right, parameters, pull), strict=True):
        assert each.any()
        torch.testing.assert_close(each, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cuts", [[1] * 11, [4, 1, 6]], ids=str)
def test_continuing_from_a_state_equals_the_whole_sequence(cuts):
    made, x = block(), tokens(2, 11)
    dropped = torch.rand(2, 11, generator=torch.Generator().manual_seed(4)) < 0.4
    whole, last = made(x, dropped=dropped)
    state, parts = None, []
    for part, mask in zip(x.split(cuts, dim=1), dropped.split(cuts, dim=1), strict=True):
        y, state = made(part, state, dropped=mask)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)
    assert state is not None
    for name in ("conv", "membrane", "memory", "output"):
        torch.testing.assert_close(getattr(state, name), getattr(last, name))
        assert not getattr(state.detach(), name).requires_grad


def test_tokens_are_dropped_in_training_only_by_seed():
    made, x = block(token_drop=0.5), tokens(2, 30)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(made(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    made.eval()
    right, _ = block()(x)
    torch.testing.assert_close(made(x)[0], right)
    torch.manual_seed(1)
    mask = torch.rand(2, 30) < 0.5
    torch.testing.assert_close(made(x, dropped=mask)[0], outputs[0])


def test_a_head_that_never_fires_adds_nothing():
    made = block(threshold=1e6)
    x = tokens(1, 8)
    y, state = made(x)
    assert torch.equal(y, x)
    assert not state.memory.any()


def test_forward_fill_repeats_the_last_kept_row_without_gradient():
    x = torch.arange(1.0, 13.0).view(2, 6, 1).requires_grad_()
    dropped = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1]], dtype=torch.bool)
    filled = forward_fill(x, dropped)
    assert filled[..., 0].tolist() == [[0, 2, 2, 2, 5, 5], [7, 8, 8, 10, 10, 10]]
    filled.sum().backward()
    assert torch.equal(x.grad[..., 0], (~dropped).float())
    before = torch.tensor([[-1.0], [-2.0]])
    assert forward_fill(x, dropped, before)[0, 0].tolist() == [-1]
    assert forward_fill(x[:, :0], dropped[:, :0]).shape == (2, 0, 1)
