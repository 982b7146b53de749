"""The options of a Workload, each with its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from predict_samples import Stack, linear_workload, made, requested, stack_workload
from small_programs import MiB, mean_square
from torch import nn

import oomph
from oomph import Workload


def test_accumulation_keeps_the_activations_of_one_part_only():
    once = oomph.predict(stack_workload(optimizer=None))
    four = oomph.predict(stack_workload(optimizer=None, accumulate=4))
    assert four.peak.allocated == pytest.approx(once.peak.allocated, rel=0.05)
    forwards = [event for event in four.events if event.label == "forward"]
    assert len(forwards) == 3 * 4


def test_without_an_optimizer_there_is_no_state_and_gradients_stay():
    prediction = oomph.predict(linear_workload(optimizer=None))
    assert not made(prediction, stage="optimizer state")
    assert not made(prediction, stage="optimizer step")
    # Nothing sets them to None: the second backward adds to the gradients of the first.
    assert prediction.steps[1].end - prediction.steps[0].end <= MiB
    assert len(made(prediction, kind="gradient")) == 1


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4096, 256)
            self.head = nn.Linear(256, 4096, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    prediction = oomph.predict(
        Workload(Tied, lambda device: torch.randint(0, 4096, (64,), device=device), mean_square)
    )
    assert requested(prediction, stage="parameters") == 4096 * 256 * 4
    assert requested(prediction, stage="optimizer state") == 2 * 4096 * 256 * 4


def test_frozen_parameters_have_neither_gradient_nor_state():
    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 256, bias=False))
        layers[0].requires_grad_(False)
        return layers

    prediction = oomph.predict(
        Workload(model, lambda device: torch.randn(64, 512, device=device), mean_square)
    )
    assert requested(prediction, stage="parameters") == (512 * 512 + 512 * 256) * 4
    assert {each.shape for each in made(prediction, kind="gradient")} == {(256, 512)}
    assert {each.shape for each in made(prediction, kind="optimizer state")} == {(256, 512)}


def test_bfloat16_halves_parameters_gradients_and_state(linear):
    half = oomph.predict(
        linear_workload(
            dtype="bfloat16", batch=lambda device: torch.randn(64, 1024, device=device, dtype=torch.bfloat16)
        )
    )
    for stage in ("parameters", "gradients", "optimizer state"):
        assert requested(half, stage=stage) * 2 == requested(linear, stage=stage)


def test_autocast_keeps_float32_weights_and_adds_a_cast_that_goes_when_nothing_needs_it():
    cast = oomph.predict(linear_workload(autocast="bfloat16"))
    assert requested(cast, stage="parameters") == 4 * MiB
    assert {each.dtype for each in made(cast, kind="gradient")} == {"float32"}
    weights = [each for each in cast.allocations if each.shape == (1024, 1024) and each.dtype == "bfloat16"]
    casts = [each for each in weights if each.during == "forward activations"]
    assert len(casts) == 3  # one per step
    # The batch needs no gradient, so backward has no use for the weight: it goes when autocast ends.
    assert not any(each.saved for each in casts)


def test_under_autocast_a_weight_used_twice_is_cast_once_and_saved():
    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(model(batch)).float().square().mean()

    prediction = oomph.predict(linear_workload(autocast="bfloat16", loss=twice))
    casts = made(prediction, shape=(1024, 1024), dtype="bfloat16", during="forward activations", step=1)
    assert [each.saved for each in casts] == [True]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_lowers_the_peak_by_the_inner_activations(stack, use_reentrant):
    less = oomph.predict(stack_workload(lambda: Stack(use_reentrant=use_reentrant)))
    inner = 8192 * 1024 * 4
    # Of four blocks, only the one being recomputed holds its inner activation.
    assert stack.peak.allocated - less.peak.allocated >= 2 * inner
    assert requested(less, stage="parameters") == requested(stack, stage="parameters")


def test_activations_offloaded_to_the_host_are_not_counted(stack):
    def offloaded(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model, batch)

    less = oomph.predict(stack_workload(loss=offloaded))
    inner = 8192 * 1024 * 4
    assert stack.peak.allocated - less.peak.allocated >= 2 * inner


def test_foreach_holds_temporaries_of_all_parameters_and_the_loop_of_one():
    def state_and_temporaries(**options: Any) -> tuple[int, int]:
        prediction = oomph.predict(
            Workload(
                model=lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)]),
                batch=lambda device: torch.randn(8, 512, device=device),
                loss=mean_square,
                optimizer=lambda params: torch.optim.AdamW(params, **options),
            )
        )
        held, most = 0, 0
        sizes = {each.id: each.bytes for each in made(prediction, stage="optimizer step")}
        for event in prediction.events:
            if event.id in sizes:
                held += sizes[event.id] if event.action == "alloc" else -sizes[event.id]
                most = max(most, held)
        return sum(each.bytes for each in made(prediction, kind="optimizer state")), most

    matrix = 512 * 512 * 4
    state, foreach = state_and_temporaries()
    assert state == pytest.approx(2 * 8 * matrix, rel=0.001)
    assert foreach >= 8 * matrix
    assert state_and_temporaries(foreach=True) == (state, foreach)
    _, loop = state_and_temporaries(foreach=False)
    assert matrix <= loop <= 3 * matrix
    fused_state, fused = state_and_temporaries(fused=True)
    assert fused < matrix
    assert fused_state == pytest.approx(state, rel=0.001)


def test_the_sizes_of_a_workload_reach_its_batch():
    sizes = {"B": 16, "T": 32}
    prediction = oomph.predict(
        linear_workload(batch=lambda device, B, T: torch.randn(B, T, 1024, device=device), sizes=sizes)
    )
    assert made(prediction, stage="batch")[0].shape == (16, 32, 1024)
