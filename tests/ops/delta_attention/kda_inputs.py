"""Inputs, results and comparisons that the tests of kda share."""

import torch
from checks import relative_error

NAMES = ("q", "k", "v", "log_alpha", "beta", "initial_state")


def inputs(
    batch=2, tokens=37, heads=2, keys=5, values=7, *, states=None, decay=1.0, dtype=torch.float64, seed=0
):
    """Unit keys, log_alpha uniform in [-decay, 0], beta in [0, 1]."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=make, dtype=torch.float64)

    lead = (batch, tokens, heads)
    made = {
        "q": normal(*lead, keys),
        "k": torch.nn.functional.normalize(normal(*lead, keys), dim=-1),
        "v": normal(*lead, values),
        "log_alpha": -decay * uniform(*lead, keys),
        "beta": uniform(*lead),
        "initial_state": normal(batch if states is None else states, heads, keys, values),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def half(given, dtype, *names):
    """The inputs named (q, k and v by default) in another dtype."""
    return {name: x.to(dtype) if name in (names or NAMES[:3]) else x for name, x in given.items()}


def outcome(run, given, **options):
    """o, the final state, and the gradient of every input, for fixed gradients of both results."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    o, state = run(**leaves, **options)
    make = torch.Generator().manual_seed(9)
    grads = [torch.randn(x.shape, generator=make, dtype=torch.float64) for x in (o, state)]
    torch.autograd.backward([o, state], [grad.to(x) for grad, x in zip(grads, (o, state), strict=True)])
    made = {f"grad of {name}": x.grad for name, x in leaves.items() if x.grad is not None}
    return {"o": o.detach(), "state": state.detach(), **made}


def in_double(given):
    return {name: x.double() for name, x in given.items()}


def relative_errors(found, right):
    assert found.keys() == right.keys()
    return {name: relative_error(found[name], right[name]) for name in right}


def assert_close(found, right, tolerance):
    errors = relative_errors(found, right)
    assert max(errors.values()) <= tolerance, errors
    assert all(torch.isfinite(x).all() for x in found.values())


def one_by_one(run, lengths):
    """`run` called once per packed sequence."""

    def each(initial_state, **given):
        outputs, states, start = [], [], 0
        for index, length in enumerate(lengths):
            part = {name: x[:, start : start + length] for name, x in given.items()}
            o, state = run(**part, initial_state=initial_state[index : index + 1])
            outputs.append(o)
            states.append(state)
            start += length
        return torch.cat(outputs, 1), torch.cat(states)

    return each


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)
