"""nn.RotaryEmbedding: one table for all layers, and nothing in it that a cast could harm."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from oomph.errors import ArgumentError
from oomph.nn.rotary import RotaryEmbedding
from oomph.ops.rotary_embedding import rotary, rotary_table


def test_it_holds_no_tensors_so_a_cast_cannot_harm_it():
    rope = RotaryEmbedding(64, 5e5)
    before = rope(torch.tensor([2**20 + 3]))
    frequencies = rope.inv_freq
    rope = rope.to(torch.bfloat16).half()
    assert not list(rope.parameters())
    assert not list(rope.buffers())
    assert not rope.state_dict()
    assert rope.inv_freq.dtype == torch.float64
    assert torch.equal(rope.inv_freq, frequencies)
    after = rope(torch.tensor([2**20 + 3]))
    assert after.cos.dtype == torch.float32
    assert torch.equal(after.cos, before.cos)


def test_it_can_be_built_on_meta_and_used_on_the_host():
    with torch.device("meta"):
        rope = RotaryEmbedding(16)
    rope = rope.to_empty(device="cpu")
    assert torch.equal(rope(torch.arange(5)).sin, rotary_table(torch.arange(5), 16).sin)
    assert rope.inv_freq.device.type == "cpu"


@pytest.mark.parametrize("heads_first", [True, False])
def test_rotate_is_rotary_in_the_form_of_the_module(heads_first):
    rope = RotaryEmbedding(16, 500.0, fraction=0.5, interleaved=True, heads_first=heads_first)
    q, k = torch.randn(2, 4, 4, 16), torch.randn(2, 4, 4, 16)
    positions = torch.randint(0, 9, (2, 4))
    got = rope.rotate(q, k, rope(positions))
    want = rotary(
        q, k, positions=positions, theta=500.0, fraction=0.5, interleaved=True, heads_first=heads_first
    )
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_float64_model_asks_for_a_float64_table():
    rope = RotaryEmbedding(8)
    q = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    table = rope(torch.arange(3), dtype=torch.float64)
    assert rope.rotate(q, q, table)[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 7}, "head size 7 turns 7 numbers"),
        ({"dim": 0}, "dim=0 is not valid; give the head size"),
        ({"dim": 8, "fraction": 2}, "fraction=2 is not valid"),
        ({"dim": 8, "theta": "big"}, "theta='big' is not valid"),
        ({"dim": 8, "scaling": 0}, "scaling=0 is not valid"),
    ],
)
def test_bad_arguments_are_refused_when_it_is_built(options, message):
    with pytest.raises(ArgumentError, match=message):
        RotaryEmbedding(**options)


def test_it_says_what_it_is():
    assert repr(RotaryEmbedding(8, fraction=0.5)) == "RotaryEmbedding(dim=8, theta=10000.0, fraction=0.5)"


def test_the_ops_are_imported_without_the_compiler_which_takes_seconds_to_load() -> None:
    program = "import sys; from oomph.ops import rotary, tiled_matmul; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr[-2000:]
