"""What every op promises a training program: checkpoints, compile, repeated backward, no second derivative.

An op adds a case: a function of leaves, which returns one tensor. Values and gradients against float64 are
tested per op.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from oomph.errors import ArgumentError
from oomph.ops import (
    MLPWeights,
    attention,
    kda,
    lif_gate,
    linear_cross_entropy,
    locality_bias,
    modulated_linear,
    nsa,
    rotary,
    selective_scan,
    tiled_mlp,
)
from oomph.ops.short_convolution import short_convolution

# The compiler looks at .grad of whatever crosses a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def leaf(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def cross_entropy(**options):
    target = torch.arange(20) % 7
    target[3] = -100
    loss = functools.partial(linear_cross_entropy, **options)
    return lambda x, weight, bias: loss(x, weight, target, bias=bias), [leaf(20, 6), leaf(200, 6), leaf(200)]


def mlp(**options):
    def run(x, up, down, gate):
        return tiled_mlp(MLPWeights(up, down, gate), x, tile=8, **options)

    return run, [leaf(20, 6), leaf(9, 6), leaf(6, 9), leaf(9, 6)]


def dense_attention(**options):
    run = functools.partial(attention, causal=True, impl="chunked", **options)
    return run, [leaf(1, 2, 5, 4), leaf(1, 1, 7, 4), leaf(1, 1, 7, 4)]


def biased_attention():
    run, leaves = dense_attention()
    return lambda q, k, v, bias: run(q, k, v, bias=bias), [*leaves, leaf(2, 5, 7)]


def sparse_attention():
    sizes = {"block_size": 4, "compress_block": 4, "compress_stride": 2, "top_n": 3, "window": 3}
    run = functools.partial(nsa, compress="mean", impl="chunked", **sizes)
    return run, [leaf(1, 20, 2, 4), *(leaf(1, 20, 1, 4) for _ in "kv"), *(leaf(1, 20, 2) for _ in range(3))]


def scan():
    def run(x, delta, a, b, c, d, z):
        return selective_scan(x, delta, -a.exp(), b, c, d, z=z, delta_softplus=True, chunk_size=4)

    tokens = [leaf(2, 9, 3), leaf(2, 9, 3)]
    return run, [*tokens, leaf(3, 2), leaf(2, 9, 2), leaf(2, 9, 2), leaf(3), leaf(2, 9, 3)]


def delta_attention():
    def run(q, k, v, decay, beta, state):
        alpha, beta = -decay.abs(), beta.sigmoid()
        o, final = kda(q, k, v, alpha, beta, initial_state=state, mode="chunked", memory_chunk_size=32)
        return torch.cat((o.flatten(), final.flatten()))

    return run, [*(leaf(1, 40, 2, 3) for _ in range(4)), leaf(1, 40, 2), leaf(1, 2, 3, 3)]


def spikes():
    def run(drive, initial):
        fired, membrane = lif_gate(drive, decay=0.6, threshold=0.5, surrogate_beta=4.0, initial=initial)
        return torch.cat((fired.flatten(), membrane.flatten()))

    return run, [leaf(2, 9, 3), leaf(2, 3)]


CASES = {
    "attention": dense_attention,
    "attention with a bias": biased_attention,
    "attention to near points": lambda: dense_attention(
        bias=locality_bias(leaf(5, 2).detach(), leaf(7, 2).detach())
    ),
    "cross entropy, one tile": lambda: cross_entropy(impl="chunked"),
    "cross entropy, small tiles": lambda: cross_entropy(impl="chunked", memory_budget=1),
    "cross entropy, per token": lambda: cross_entropy(impl="chunked", reduction="none"),
    "known MLP": lambda: mlp(impl="chunked"),
    "generic MLP": lambda: mlp(impl="generic"),
    "modulated linear": lambda: (
        modulated_linear,
        [leaf(2, 5, 7), leaf(7, 11), leaf(7, 3), leaf(3, 11), leaf(2, 5, 3), leaf(11)],
    ),
    "Kimi Delta Attention": delta_attention,
    "leaky integrate and fire": spikes,
    "short convolution": lambda: (
        functools.partial(short_convolution, unit_size=3),
        [leaf(2, 9, 6), leaf(6, 1, 3)],
    ),
    "native sparse attention": sparse_attention,
    "selective scan": scan,
}
# Linear in its input, so that second derivatives come for free.
LINEAR = {
    "rotary": lambda: (functools.partial(rotary, impl="chunked"), [leaf(1, 2, 3, 4)]),
    "rotary, which the compiler traces": lambda: (
        functools.partial(rotary, turned_heads=1),
        [leaf(1, 2, 3, 4)],
    ),
}
SAME_OP = ("attention", "attention to near points", "cross entropy, one tile", "cross entropy, per token")
every_op = pytest.mark.parametrize("case", [*CASES.values(), *LINEAR.values()], ids=[*CASES, *LINEAR])


def gradients(result, leaves, **options):
    weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    return torch.autograd.grad((result * weights).sum(), leaves, **options)


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@every_op
def test_checkpointing_gives_the_same_gradients(case):
    run, leaves = case()
    expected = gradients(run(*leaves), leaves)
    assert_equal(gradients(checkpoint(run, *leaves, use_reentrant=False), leaves), expected)
    checkpoint(run, *leaves, use_reentrant=True).sum().backward()
    assert_equal(tuple(each.grad for each in leaves), torch.autograd.grad(run(*leaves).sum(), leaves))


# Once for each op: what the compiler sees does not depend on the options.
@pytest.mark.parametrize("name", [name for name in [*CASES, *LINEAR] if name not in SAME_OP])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo instantiates autograd functions
def test_inside_a_compiled_function_results_are_the_same(name):
    run, leaves = (CASES | LINEAR)[name]()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, *others: run(x * 1.0, *others) * 2, backend="aot_eager", fullgraph=True
    )
    result = compiled(*leaves)
    assert_equal((result,), (run(*leaves) * 2,))
    assert_equal(gradients(result, leaves), gradients(run(*leaves) * 2, leaves))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_compiled_call_is_not_taken_for_one_with_an_equal_argument_of_another_type():
    x, up, down = torch.randn(6, 4), torch.randn(8, 4), torch.randn(4, 8)

    def run(tile):
        return torch.compile(
            lambda x, up, down: tiled_mlp(MLPWeights(up, down), x, tile=tile), backend="aot_eager"
        )(x, up, down)

    run(1)
    with pytest.raises(Exception, match="tile=True is not valid"):
        run(True)


@every_op
def test_a_retained_graph_gives_the_same_gradients_again_together_or_one_at_a_time(case):
    run, leaves = case()
    result = run(*leaves)
    first = gradients(result, leaves, retain_graph=True)
    copies = tuple(each.clone() for each in first)
    assert_equal(gradients(result, leaves, retain_graph=True), copies)
    for each, expected in zip(leaves, copies, strict=True):
        assert_equal(gradients(result, [each], retain_graph=True), (expected,))
    assert_equal(first, copies)  # what was returned before is not overwritten


@every_op
def test_the_same_inputs_give_the_same_bits(case):
    run, leaves = case()
    one, two = (gradients(run(*leaves), leaves) for _ in range(2))
    assert all(torch.equal(each, other) for each, other in zip(one, two, strict=True))


@every_op
def test_without_gradients_nothing_is_recorded(case):
    run, leaves = case()
    with torch.no_grad():
        result = run(*leaves)
    assert not result.requires_grad
    assert_equal((result,), (run(*leaves),))
    assert not run(*(each.detach() for each in leaves)).requires_grad


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_second_derivatives_are_refused_and_not_silently_zero(case):
    run, leaves = case()
    # Of a plain sum too: the incoming gradient has no graph then, and a penalty would be a constant.
    for scalar in (run(*leaves).square().sum(), run(*leaves).sum()):
        with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
            torch.autograd.grad(scalar, leaves[0], create_graph=True)


@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR)
def test_linear_ops_have_second_derivatives(case):
    run, leaves = case()
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)
