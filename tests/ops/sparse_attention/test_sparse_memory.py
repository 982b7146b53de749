"""Memory, through oomph.predict: linear in the length, below a dense kernel's, and nothing large held."""

import pytest
import torch
from sparse_cases import learned

import oomph
from oomph.ops.common import explain
from oomph.ops.sparse_attention import nsa
from oomph.ops.sparse_attention.selection.select import segment_tokens
from oomph.units import MiB


def over_inputs(tokens, heads=16, key_heads=4, width=64, compress="mean", backward=True, **options):
    """(bytes beyond the inputs and the incoming gradient; what was chosen) in bf16."""
    chosen = []

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
        chosen.append(explain(nsa, *tensors[:6], compress=kind, **options))

        def step():
            if not backward:
                with torch.no_grad():
                    nsa(*tensors[:6], compress=kind, **options)
                return
            nsa(*tensors[:6], compress=kind, **options).backward(grad)
            for tensor in tensors:
                tensor.grad = None

        return step

    peak = oomph.predict(target, gpu="h200").peak.allocated
    inputs = tokens * (2 * heads * width + 2 * key_heads * width + 3 * heads) * 2
    return peak - inputs, chosen[0].impl


@pytest.mark.parametrize("compress", ["mean", "learned"])
def test_memory_grows_no_faster_than_the_length(compress):
    shorter, impl = over_inputs(16384, compress=compress)
    longer, _ = over_inputs(65536, compress=compress)
    assert impl == "triton"
    assert longer <= 4.05 * shorter


def test_a_training_step_takes_less_than_a_dense_kernel():
    tokens, heads, width = 32768, 64, 128
    found, _ = over_inputs(tokens, heads, 4, width)
    assert found < 3152 * MiB  # cuDNN's, measured


def test_without_gradients_less_is_held():
    queries = 32768 * 16 * 64 * 2
    found, _ = over_inputs(32768, backward=False)
    # Three results and parts that take the room of a fourth; the blocks, their index, the compressed keys.
    assert found < 4.8 * queries


@pytest.mark.parametrize("tokens", [4096, 131072, 1048576])
def test_importances_are_held_for_a_segment_of_tokens(tokens):
    blocks = -(-tokens // 64)
    assert 8 * blocks * segment_tokens(8, tokens, blocks) * 4 <= max(128 * MiB, 8 * blocks * 64 * 4)


def test_plain_torch_holds_a_chunk_at_a_time():
    options = {"impl": "chunked", "heads": 4, "key_heads": 1, "width": 16}
    shorter, impl = over_inputs(512, **options)
    longer, _ = over_inputs(1024, **options)
    assert impl == "chunked"
    # A chunk of constant size, and what is linear.
    assert longer <= 2.1 * shorter
