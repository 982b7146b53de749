"""The gate inside larger programs: what it keeps, checkpointing, autocast, compilation, predictions."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from spiking_inputs import NEURON, normal, results

import oomph
from oomph.errors import ArgumentError
from oomph.ops import choice
from oomph.ops.common import explain
from oomph.ops.spiking import lif_gate

FAST = ["chunked", "triton"]


def kept_bytes(drive: torch.Tensor, **options: object) -> int:
    storages: dict[int, int] = {}

    def pack(each: torch.Tensor) -> torch.Tensor:
        storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        spikes, _ = lif_gate(drive, **{**NEURON, **options})  # type: ignore[arg-type]
    assert spikes.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_keeps_as_much_as_the_drive_takes_and_twice_that_for_a_trained_decay(
    dtype: torch.dtype, impl: str
) -> None:
    drive = normal(1, 30, 16, dtype=dtype).requires_grad_()
    size = drive.numel() * drive.element_size()
    assert kept_bytes(drive, impl=impl) == size
    decay = torch.full((16,), 0.9, requires_grad=True)
    assert kept_bytes(drive, impl=impl, decay=decay) == 2 * size + 16 * 4


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("train", ["drive", "initial", "decay"])
def test_each_input_alone_gets_the_gradient_it_gets_among_others(train: str, impl: str) -> None:
    alone = results(impl, train=train, decay_shape=(3, 5))
    together = results(impl, decay_shape=(3, 5))
    assert set(alone) == {"spikes", "membrane", train}
    torch.testing.assert_close(alone[train], together[train])


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("decay_shape", [(), (1,), (5,), (3, 1), (3, 5)], ids=str)
def test_a_decay_that_broadcasts_gets_the_sum_of_what_it_was_broadcast_to(
    decay_shape: tuple[int, ...], impl: str
) -> None:
    found, right = (results(each, decay_shape=decay_shape) for each in (impl, "reference"))
    assert found["decay"].shape == decay_shape
    torch.testing.assert_close(found["decay"], right["decay"])


@pytest.mark.parametrize("impl", FAST)
def test_backward_can_run_twice_and_only_one_output_may_be_used(impl: str) -> None:
    drive = (0.4 * normal(2, 9, 4)).requires_grad_()
    spikes, membrane = lif_gate(drive, impl=impl, **NEURON)
    first, again = (torch.autograd.grad(spikes.sum(), drive, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    by_membrane = torch.autograd.grad(membrane.sum(), drive)[0]
    spikes, membrane = lif_gate(drive, impl="reference", **NEURON)
    torch.testing.assert_close(by_membrane, torch.autograd.grad(membrane.sum(), drive)[0])


@pytest.mark.parametrize("impl", FAST)
def test_second_derivatives_are_refused_where_the_reference_gives_them(impl: str) -> None:
    drive = (0.4 * normal(1, 4, 2)).requires_grad_()
    spikes, _ = lif_gate(drive, impl=impl, **NEURON)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(spikes.sum(), drive, create_graph=True)
    spikes, _ = lif_gate(drive, impl="reference", **NEURON)
    (grad,) = torch.autograd.grad(spikes.sum(), drive, create_graph=True)
    assert torch.autograd.grad(grad.sum(), drive)[0].any()


def test_it_works_without_gradients_under_autocast_and_under_checkpointing() -> None:
    drive = (0.4 * normal(2, 9, 4, dtype=torch.float32)).requires_grad_()
    spikes, _ = lif_gate(drive, **NEURON)
    (right,) = torch.autograd.grad(spikes.sum(), drive)
    with torch.no_grad():
        assert torch.equal(lif_gate(drive, **NEURON)[0], spikes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = lif_gate(drive, **NEURON)
    assert under.dtype == torch.float32  # no product here that autocast would make smaller
    assert torch.equal(under, spikes)
    again, _ = torch.utils.checkpoint.checkpoint(
        lambda each: lif_gate(each, **NEURON), drive, use_reentrant=False
    )
    again.sum().backward()
    assert torch.equal(drive.grad, right)


# The compiler looks at .grad of whatever crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_it_runs_in_a_compiled_program() -> None:
    drive = (0.4 * normal(2, 9, 4)).requires_grad_()
    compiled = torch.compile(lambda x: 2 * lif_gate(x, **NEURON)[0], backend="eager")
    compiled(drive).sum().backward()
    spikes, _ = lif_gate(drive, **NEURON)
    torch.testing.assert_close(drive.grad, 2 * torch.autograd.grad(spikes.sum(), drive)[0])


def test_a_prediction_sees_the_spikes_the_slopes_and_the_gradient() -> None:
    size = 4 * 64 * 512 * 2

    def train():  # type: ignore[no-untyped-def]
        drive = torch.randn(4, 64, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(drive)

        def step() -> None:
            spikes, _ = lif_gate(drive, **NEURON)
            spikes.backward(grad)
            drive.grad = None

        return step

    state = 4 * 512 * 4
    # drive, its gradient from above, spikes, slopes, the gradient; the final membrane and initial's gradient
    assert oomph.predict(train, gpu="h200").peak.allocated == 5 * size + 2 * state


def test_without_gradients_no_slopes_are_made_even_for_a_drive_that_has_some() -> None:
    def run():  # type: ignore[no-untyped-def]
        drive = torch.randn(4, 64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return lambda: torch.no_grad()(lif_gate)(drive, **NEURON)

    drive_and_spikes, state = 2 * 4 * 64 * 512 * 2, 4 * 512 * 4
    assert oomph.predict(run, gpu="h200").peak.allocated == drive_and_spikes + state


def test_the_choice_is_explained_and_announced_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_announced", set())  # what earlier tests were told
    drive = torch.zeros(1, 2, 3)
    assert explain(lif_gate, drive, **NEURON).impl == "chunked"
    assert "on cpu" in explain(lif_gate, drive, **NEURON).reason
    assert explain(lif_gate, drive, impl="triton", **NEURON).impl == "triton"
    with caplog.at_level(logging.INFO, logger="oomph.ops"):
        lif_gate(drive, impl="chunked", **NEURON)
        lif_gate(drive, impl="chunked", **NEURON)
    assert [record.message for record in caplog.records] == ["lif_gate: chunked (asked for)"]


BAD = [
    ({"drive": torch.zeros(2, 3, dtype=torch.int64)}, "drive has dtype torch.int64; valid: float16"),
    ({"drive": [1.0]}, "drive is a list, not a tensor"),
    ({"drive": torch.zeros(3)}, r"drive has shape \[3\]; valid: \[B, T, ...\]"),
    ({"decay": 1.01}, r"decay=1.01 is not valid; give a number in \[0, 1\]"),
    ({"decay": -0.1}, "decay=-0.1 is not valid"),
    ({"decay": float("nan")}, "decay=nan is not valid"),
    ({"decay": None}, "decay=None is not valid"),
    ({"decay": torch.tensor(1.5)}, r"decay has values outside \[0, 1\]"),
    ({"decay": torch.tensor(float("nan"))}, r"decay has values outside \[0, 1\]"),
    ({"decay": torch.zeros(2)}, r"decay has shape \[2\]; valid for drive \[2, 3, 4\]: a number, or .* \[4\]"),
    ({"decay": torch.zeros(1, 4)}, r"decay has shape \[1, 4\]"),
    ({"decay": torch.zeros(4, dtype=torch.int32)}, "decay has dtype torch.int32"),
    ({"threshold": 0}, "threshold=0 is not valid; give a number > 0"),
    ({"threshold": True}, "threshold=True is not valid"),
    ({"threshold": float("inf")}, "threshold=inf is not valid"),
    ({"surrogate_beta": 0.0}, "surrogate_beta=0.0 is not valid; give a number > 0"),
    ({"surrogate_beta": "9"}, "surrogate_beta='9' is not valid"),
    ({"initial": torch.zeros(2, 3, 4)}, r"initial has shape \[2, 3, 4\]; valid: \[B, ...\] = \[2, 4\]"),
    ({"initial": torch.zeros(2, 4, dtype=torch.int8)}, "initial has dtype torch.int8"),
    ({"initial": torch.zeros(2, 4, device="meta")}, "all tensors must be on one device"),
    ({"impl": "cuda"}, "impl='cuda' is not valid; choose from 'auto', 'reference', 'chunked', 'triton'"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_argument_is_named_with_what_is_valid(wrong: dict, message: str) -> None:
    arguments = {"drive": torch.zeros(2, 3, 4), **NEURON, **wrong}
    with pytest.raises(ArgumentError, match=message):
        lif_gate(arguments.pop("drive"), **arguments)


def test_the_kernel_is_refused_with_the_reason_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ArgumentError, match=r"impl='triton' cannot run: .*; choose 'auto' or 'chunked'"):
        lif_gate(torch.zeros(1, 2, 3), impl="triton", **NEURON)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oomph.ops.spiking import triton as kernels

def compiled(kernel, types, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(names, types.split(), strict=True))
    constants |= {name: None for name, kind in types.items() if kind == "None"}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    options = {"num_warps": 1, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

tile = dict(BLOCK=64, STEPS=1)
sizes = "i32 i32 i32 i32 fp64 fp64 fp64"
plain = compiled(kernels.lif_forward, "*bf16 *bf16 *bf16 None *fp32 None None " + sizes, HAS_INITIAL=False,
                 HAS_DECAY=False, KEEP_SLOPE=True, KEEP_BEFORE=False, DOUBLE=False, **tile)
assert "fma.rn" not in plain
compiled(kernels.lif_backward, "*fp16 *fp16 *fp32 *fp16 *fp32 *fp16 *fp32 *fp32 " + sizes, HAS_DECAY=True,
         HAS_GRAD_SPIKES=True, HAS_GRAD_MEMBRANE=True, WANT_DECAY=True, DOUBLE=False, **tile)
print("compiled")
"""


def test_the_kernels_compile_for_hopper_and_round_as_torch_does() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
