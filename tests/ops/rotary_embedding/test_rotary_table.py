"""The table: right at a million positions, small while it is made, on the positions' device."""

import math

import pytest
import torch

import oomph
from oomph.ops.rotary_embedding import RotaryTable, rotary_table, table as table_module
from oomph.units import MiB

FAR = 2**20 + 3


def exact(position, dim, theta):
    """By Python's own floats, one angle at a time, brought into one turn before its cosine is taken."""
    angles = [math.fmod(position * theta ** (-2 * i / dim), 2 * math.pi) for i in range(dim // 2)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


@pytest.mark.parametrize(("dim", "theta"), [(128, 1e4), (64, 5e5), (6, 1e6)])
def test_every_cosine_and_sine_is_the_exact_one_rounded_to_float32_up_to_a_million_positions(dim, theta):
    places = [0, 1, 255, 256, 257, 4097, 131071, 999_999, FAR - 1, FAR]
    with torch.autocast("cpu", torch.bfloat16):  # has no effect
        made = rotary_table(torch.tensor(places), dim, theta=theta)
    want = torch.tensor([exact(place, dim, theta) for place in places], dtype=torch.float64)
    assert made.cos.dtype == made.sin.dtype == torch.float32
    for got, column in ((made.cos, 0), (made.sin, 1)):
        # half a unit in the last place of float32, and the 1e-9 rad by which two float64 angles may differ
        assert (got.double() - want[..., column]).abs().max() <= 2**-25 + 1e-9
    wide = rotary_table(torch.tensor(places), dim, theta=theta, dtype=torch.float64)
    torch.testing.assert_close(wide.cos, want[..., 0], rtol=0, atol=1e-9)


def test_a_table_computed_in_slices_is_the_table_of_one_slice(monkeypatch):
    positions = torch.randint(0, FAR, (3, 41))
    whole = rotary_table(positions, 10)
    monkeypatch.setattr(table_module, "_SLICE_BYTES", 7 * 5 * 8)
    sliced = rotary_table(positions, 10)
    assert torch.equal(whole.cos, sliced.cos)
    assert torch.equal(whole.sin, sliced.sin)
    assert whole.cos.shape == (3, 41, 5)


def test_a_million_positions_need_little_beside_the_table():
    def make():
        rotary_table(torch.arange(2**20, device="cuda"), 128)

    # two halves of 64 float32 numbers each, and the positions
    table = 2 * 2**20 * 64 * 4 + 2**20 * 8
    beside = oomph.predict(make).peak.allocated - table
    assert 0 < beside <= 34 * MiB


def test_positions_may_be_any_integers_or_wide_floats_and_of_any_shape():
    want = rotary_table(torch.arange(100), 8).cos
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float32, torch.float64):
        assert torch.equal(rotary_table(torch.arange(100).to(dtype), 8).cos, want)
    assert rotary_table(torch.tensor(7), 8).cos.shape == (4,)
    assert rotary_table(torch.arange(5, device="meta"), 8).cos.is_meta
    assert rotary_table(torch.empty(0, dtype=torch.long), 8).cos.shape == (0, 4)
    assert torch.equal(rotary_table(torch.tensor([-5]), 8).sin, -rotary_table(torch.tensor([5]), 8).sin)


@pytest.mark.gpu
def test_cuda_makes_the_table_of_the_host():
    places = torch.tensor([0, 257, 131_071, FAR])
    host, made = rotary_table(places, 128), rotary_table(places.cuda(), 128)
    assert isinstance(made, RotaryTable)
    torch.testing.assert_close(made.cos.cpu(), host.cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(made.sin.cpu(), host.sin, rtol=0, atol=1e-7)
