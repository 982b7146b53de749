"""A small part of `python -m benchmarks.ops.fuzz`; torch.func; calls without tokens."""

import pytest
import torch
from benchmarks.ops.fuzz import OPS, TRANSFORMS, Draw, Input, build, check_meta, check_transform, fuzz

from oomph.errors import ArgumentError
from oomph.ops import attention, explain, kda, lif_gate, linear_cross_entropy, selective_scan

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own jvp
]


# Calls of the fast ops; 8 of the others.
CALLS = {"linear_cross_entropy": 30, "attention": 10, "tiled_mlp": 15, "modulated_linear": 15, "rotary": 10}


@pytest.mark.parametrize("name", OPS)
def test_random_calls_are_right_or_refused_in_one_line(name):
    _, failures = fuzz(CALLS.get(name, 8), seed=0, only=name)
    assert not failures


@pytest.mark.parametrize("name", OPS)
def test_every_op_runs_on_meta_tensors_and_under_transforms_or_says_why_not(name):
    arguments = OPS[name].draw(Draw(f"seed/{name}"))
    check_meta(OPS[name], arguments)
    inputs = [key for key, value in arguments.items() if isinstance(value, Input) and value.requires_grad]
    for transform in TRANSFORMS:
        for key in inputs[:2]:
            check_transform(OPS[name], arguments, key, transform)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if hasattr(op.run, "choose")])
def test_the_choice_is_explained_and_kernels_are_refused_without_a_gpu(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run, drawn = OPS[name].run, OPS[name].draw(Draw(f"choice/{name}"))
    arguments = {key: build(value, []) for key, value in drawn.items()} | {"impl": "auto"}
    choice = explain(run, **arguments)
    assert choice.impl in ("chunked", "plain", "sdpa", "torch")
    assert choice.reason
    with pytest.raises(ArgumentError, match=r"^impl='triton' "):
        run(**arguments | {"impl": "triton"})


def kda_inputs(batch, tokens):
    shape = batch, tokens, 2, 4
    tensors = {name: torch.randn(shape) for name in ("q", "k", "v")}
    return {**tensors, "log_alpha": -torch.rand(shape), "beta": torch.rand(shape[:3])}


def test_a_refused_transform_names_the_op_and_what_to_use_instead():
    a, x, weight = kda_inputs(1, 20), torch.randn(3, 5), torch.randn(4, 5)
    long = torch.randn(2, 9, 3)
    scan = {"A": -torch.rand(3, 2), "B": torch.randn(2, 9, 2), "C": torch.randn(2, 9, 2)}
    calls = {
        "kda .* mode='sequential' can": lambda q: kda(**a | {"q": q}, mode="chunked")[0].sum(),
        "linear_cross_entropy .* impl='plain'": lambda x: linear_cross_entropy(
            x, weight, torch.arange(3), impl="chunked"
        ),
        "selective_scan .* impl='reference' can": lambda x: selective_scan(x, long.abs(), **scan).sum(),
        "lif_gate .* impl='reference' can": lambda x: lif_gate(
            x, decay=0.5, threshold=1.0, surrogate_beta=4.0
        )[0].sum(),
    }
    for (message, call), given in zip(calls.items(), (a["q"], x, long, long), strict=True):
        for transform in (torch.func.grad, torch.func.vmap, torch.func.jacfwd):
            with pytest.raises(ArgumentError, match=message):
                transform(call)(given[None] if transform is torch.func.vmap else given)
    q = torch.randn(1, 2, 9, 4)
    assert torch.func.grad(lambda q: attention(q, q, q).sum())(q).shape == q.shape  # torch's own kernel
    with pytest.raises(ArgumentError, match="attention has no forward-mode derivative"):
        torch.func.jvp(lambda q: attention(q, q, q), (q,), (q,))
