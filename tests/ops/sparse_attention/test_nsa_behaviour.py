"""nsa, apart from its values: autograd, autocast, compilation, memory."""

import pytest
import torch
from nsa_inputs import SMALL, inputs, learned

import oomph
from oomph.ops.common import explain
from oomph.ops.sparse_attention import nsa
from oomph.units import MiB


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_short_sequences_call_no_compressor(impl):
    tensors, _ = inputs(7)

    def never(blocks):
        raise AssertionError("called")

    out = nsa(*tensors, compress=never, impl=impl, **SMALL)
    assert torch.isfinite(out).all()


def test_nan_reaches_later_tokens_only():
    tensors, _ = inputs(40)
    tensors[1][:, 20] = torch.nan
    out = nsa(*tensors, compress="mean", impl="chunked", **SMALL)
    assert torch.isfinite(out[:, :20]).all()
    assert torch.isnan(out[:, 20]).all()


def test_autocast():
    tensors, _ = inputs(37, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = nsa(*tensors, compress="mean", **SMALL)
    assert out.dtype == torch.bfloat16
    half = [x.bfloat16() for x in tensors[:3]]
    torch.testing.assert_close(out, nsa(*half, *tensors[3:], compress="mean", **SMALL))
    for number in range(3):  # as where a norm left one of them in float32
        mixed = [x.float() if at != number else x for at, x in enumerate(half)]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(nsa(*mixed, *tensors[3:], compress="mean", **SMALL), out)


# Memory, through oomph.predict


def over_inputs(tokens, heads=16, key_heads=4, width=64, compress="mean", backward=True, **options):
    """Bytes beyond the inputs and the incoming gradient, in bf16."""

    def target():
        q, grad = (torch.randn(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for _ in "qg")
        k, v = (torch.randn(1, tokens, key_heads, width, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        gates = [torch.rand(1, tokens, heads, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        tensors = [q, k, v, *gates]
        for tensor in tensors:
            tensor.requires_grad_()
        kind = compress
        if compress == "learned":
            weight = torch.randn(2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            kind = learned(weight)
            tensors.append(weight)
        assert explain(nsa, *tensors[:6], compress=kind, **options).impl == options.get("impl", "triton")
        with torch.set_grad_enabled(backward):
            found = nsa(*tensors[:6], compress=kind, **options)
        if backward:
            found.backward(grad)

    peak = oomph.predict(target, gpu="h200").peak.allocated
    inputs = tokens * (2 * heads * width + 2 * key_heads * width + 3 * heads) * 2
    return peak - inputs


@pytest.mark.parametrize("compress", ["mean", "learned"])
def test_memory_is_linear_in_the_length(compress):
    assert over_inputs(65536, compress=compress) <= 4.05 * over_inputs(16384, compress=compress)


def test_a_training_step_takes_less_than_a_dense_kernel():
    tokens, heads, width = 32768, 64, 128
    assert over_inputs(tokens, heads, 4, width) < 3152 * MiB  # cuDNN's, measured


def test_less_memory_without_gradients():
    queries = 32768 * 16 * 64 * 2
    # Three results, parts of the size of a fourth, the blocks, their index and the compressed keys.
    assert over_inputs(32768, backward=False) < 4.8 * queries


def test_chunked_memory_is_linear_in_the_length():
    options = {"impl": "chunked", "heads": 4, "key_heads": 1, "width": 16}
    # A chunk of constant size, and what is linear.
    assert over_inputs(1024, **options) <= 2.1 * over_inputs(512, **options)
