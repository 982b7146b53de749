"""The kernels of selective_scan, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from scan_inputs import inputs, results, worst_error

from oomph.ops.common import explain
from oomph.ops.state_space import fused, selective_scan

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="needs the interpreter; test_scan_gpu.py runs there"
    ),
]


def both_of(given, programs, monkeypatch, dtype=torch.float32, **options):
    """Results of the reference in float64 and of the kernels, with that many programs to fill."""
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    rounded = {name: None if each is None else each.to(dtype).double() for name, each in given.items()}
    right = results(rounded, torch.float64, impl="reference", **options)
    return right, results(rounded, dtype, impl="triton", chunk_size=8, **options)


ONE_SEGMENT, SEGMENTS = 1, 1024


@pytest.mark.parametrize(
    ("direction", "own_x", "shape", "programs"),
    [
        ("forward", False, (1, 1, 1, 1), SEGMENTS),
        ("forward", False, (2, 9, 3, 2), ONE_SEGMENT),
        ("backward", False, (1, 13, 2, 3), SEGMENTS),
        ("both", False, (1, 10, 3, 1), ONE_SEGMENT),
        ("both", True, (1, 11, 2, 2), SEGMENTS),
    ],
)
def test_every_result_of_the_kernels_is_the_references(direction, own_x, shape, programs, monkeypatch):
    given = inputs(*shape, direction, own_x)
    right, found = both_of(given, programs, monkeypatch, direction=direction)
    assert worst_error(found, right) < 3e-6


def test_the_kernels_do_without_what_is_optional(monkeypatch):
    given = {**inputs(1, 5, 3, 2), "D": None, "z": None, "delta_bias": None, "initial_state": None}
    right, found = both_of(given, 1024, monkeypatch, delta_softplus=False)
    assert worst_error(found, right) < 3e-6


def test_the_kernels_round_half_precision_only_at_the_ends(monkeypatch):
    right, found = both_of(inputs(1, 5, 3, 2), 1, monkeypatch, dtype=torch.float16)
    assert worst_error(found, right) < 2 * torch.finfo(torch.float16).eps


def test_several_blocks_of_channels_add_up(monkeypatch):
    tile = fused.Tile(channels=2, numbers=2, warps=1, step=4, registers=128)
    monkeypatch.setattr(fused, "tile_of", lambda d, n: tile)
    right, found = both_of(inputs(1, 5, 3, 2), 1, monkeypatch)
    assert worst_error(found, right) < 3e-6


@pytest.mark.parametrize("name", ["x", "B", "delta_bias"])
def test_the_kernels_make_a_single_gradient_as_they_make_all(name, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 1)
    given = {other: each.float() for other, each in inputs(1, 5, 3, 2).items()}
    right = results(given, torch.float32, delta_softplus=True)
    given[name].requires_grad_()
    y, final = selective_scan(
        **given, delta_softplus=True, return_final_state=True, impl="triton", chunk_size=8
    )
    torch.autograd.backward([y, final], [torch.linspace(-1, 2, e.numel()).view(e.shape) for e in (y, final)])
    torch.testing.assert_close(given[name].grad, right[name], rtol=1e-5, atol=1e-5)


def test_the_kernels_read_tensors_where_they_lie(monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 1)
    given = {name: each.float() for name, each in inputs(1, 5, 3, 2, "both").items()}
    turned = {
        name: each.transpose(-1, -2).contiguous().transpose(-1, -2) if each.dim() > 2 else each
        for name, each in given.items()
    }
    y = selective_scan(**turned, direction="both", impl="triton")
    torch.testing.assert_close(y, selective_scan(**given, direction="both"), rtol=1e-5, atol=1e-5)


def test_large_and_small_raw_deltas_keep_their_digits_in_the_kernels_softplus():
    raw = torch.tensor([-80.0, -20.0, -8.0, 0.0, 8.0, 19.9, 30.0, 100.0])
    shape = (1, 1, len(raw))
    ones = torch.ones(1, 1, 1)
    given = {"x": torch.ones(shape), "delta": raw.view(shape), "A": -torch.ones(len(raw), 1) * 0.0}
    y = selective_scan(**given, B=ones, C=ones, delta_softplus=True, impl="triton")
    right = torch.nn.functional.softplus(raw.double())
    torch.testing.assert_close(y.view(-1).double(), right, rtol=1e-6, atol=0)


def test_nan_is_carried_on_by_the_kernels():
    given = {name: each.float() for name, each in inputs(1, 6, 2, 2).items()}
    given["delta"][0, 4, 1] = float("nan")
    y = selective_scan(**given, delta_softplus=True, impl="triton")
    assert y[0, 4:, 1].isnan().all()
    assert y[0, :, 0].isfinite().all()
    assert y[0, :4].isfinite().all()


def test_a_chunk_of_the_kernels_is_a_whole_number_of_steps():
    given = {name: each.float() for name, each in inputs().items()}
    assert explain(selective_scan, **given, impl="triton", chunk_size=9).settings == {"chunk_size": 16}


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oomph.ops.state_space import triton as scan, triton_segments as segments

def compiled(kernel, pointers, absent=(), **constants):
    constants = {**constants, **{name: None for name in absent}}
    def kind(name):
        if name in constants:
            return "constexpr"
        return "*" + pointers.get(name, "fp32") if name.endswith("_ptr") else "i32"
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})

half = {f"{name}_ptr": "bf16" for name in "y g x delta B C z dx ddelta dz value vector".split()}
sizes = dict(WAYS=2, LEFTWARD=False, SOFTPLUS=True, BD=32, N=2)
compiled(scan.scan_forward, half, K=16, S=1, **sizes)
compiled(scan.scan_backward, half, SHARED_X=True, K=16, S=1, **sizes)
compiled(segments.segment_ends, half, GRADIENT=True, **sizes)
compiled(segments.link_segments, half, absent=["entry_ptr"], LEFTWARD=False, GRADIENT=False, BD=32, N=2)
print("compiled")
"""


def test_the_kernels_of_the_scan_compile_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
