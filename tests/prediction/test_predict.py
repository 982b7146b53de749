"""oomph.predict on models small enough to count by hand: bytes, stages, modules and events."""

from __future__ import annotations

from predict_samples import Stack, made, requested
from small_programs import MiB

from oomph.prediction.replay import replay
from oomph.records import STAGES


def test_parameters_gradients_and_optimizer_state_are_exact(linear):
    assert requested(linear, stage="parameters") == 4 * MiB
    assert requested(linear, stage="gradients") == 4 * MiB
    assert requested(linear, stage="optimizer state") == 8 * MiB
    assert requested(linear, stage="batch") == 64 * 1024 * 4


def test_the_tensors_at_the_peak_add_up_to_it(linear, stack):
    for prediction in (linear, stack):
        assert sum(alive.bytes for alive in prediction.at_peak) == prediction.peak.allocated
        assert sum(size for _, size in prediction.by_stage()) == prediction.peak.allocated
        assert sum(size for _, size in prediction.by_module()) == prediction.peak.allocated


def test_tensors_at_the_peak_come_largest_first(stack):
    sizes = [alive.bytes for alive in stack.at_peak]
    assert sizes == sorted(sizes, reverse=True)


def test_three_steps_are_reported_and_the_peak_is_the_highest(linear):
    assert [step.step for step in linear.steps] == [1, 2, 3]
    assert max(step.allocated for step in linear.steps) == linear.peak.allocated
    assert max(step.reserved for step in linear.steps) == linear.peak.reserved
    assert linear.steps[linear.peak.step - 1].allocated == linear.peak.allocated


def test_the_optimizer_state_appears_in_the_first_step_and_then_nothing_grows(linear):
    first, second, third = linear.steps
    assert first.end == second.end == third.end
    states = made(linear, stage="optimizer state")
    assert {state.step for state in states} == {1}


def test_the_device_peak_adds_the_context_to_what_is_reserved(linear):
    assert linear.capacity is not None
    assert linear.limit is not None
    assert linear.peak.device - linear.peak.reserved == linear.capacity - linear.limit
    assert linear.peak.allocated <= linear.peak.reserved


def test_every_stage_of_a_step_is_present(stack):
    seen = {allocation.stage for allocation in stack.allocations}
    wanted = {
        "parameters",
        "gradients",
        "optimizer state",
        "batch",
        "forward activations",
        "backward",
        "workspace",
    }
    assert wanted | {"loss", "optimizer step"} <= seen <= set(STAGES)


def test_what_happens_after_the_model_is_the_loss(stack):
    squares = [
        each for each in stack.allocations if each.op.startswith("aten.pow") and each.during != "backward"
    ]
    assert squares
    assert {each.stage for each in squares} == {"loss"}


def test_module_paths_are_those_of_named_modules(stack):
    paths = {path for path, _ in Stack().named_modules()}
    seen = {allocation.module for allocation in stack.allocations}
    assert seen <= paths
    assert {"blocks.0.up", "blocks.3.down", "blocks.2"} <= seen


def test_parameters_carry_the_path_of_their_owner(stack):
    owners = {each.module for each in made(stack, kind="parameter")}
    assert owners == {f"blocks.{index}.{name}" for index in range(4) for name in ("up", "down")}


def test_gradients_and_optimizer_state_carry_the_path_of_their_parameter(stack):
    owners = {f"blocks.{index}.{name}" for index in range(4) for name in ("up", "down")}
    gradients = [
        each for each in made(stack, kind="gradient") if each.shape != (8192, 256)
    ]  # the batch's own
    assert {each.module for each in gradients} == owners
    assert {each.module for each in made(stack, kind="optimizer state")} == owners


def test_only_what_backward_still_needs_is_marked_as_saved(stack):
    inner = 8192 * 1024 * 4
    first_step = made(stack, step=1, during="forward activations", bytes=inner)
    # tanh saves its result; the product before it is free as soon as tanh has run.
    assert [each.saved for each in first_step if each.op == "aten.tanh"] == [True] * 4
    assert [each.saved for each in first_step if each.op == "aten.addmm"] == [False] * 4
    assert not [each for each in made(stack, during="backward") if each.saved]


def test_blocks_of_a_list_are_marked_on_entry_and_exit(stack):
    labels = [event.label for event in stack.events if event.action == "mark"]
    first = labels[labels.index("step 1") : labels.index("step 2")]
    blocks = [label for label in first if label.startswith(("enter", "exit"))]
    assert blocks == [f"{way} blocks.{index}" for index in range(4) for way in ("enter", "exit")]
    assert [label for label in first if label in ("forward", "backward", "optimizer")] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_backward_allocations_name_the_forward_line_that_caused_them(stack):
    (line,) = {
        each.site.line for each in made(stack, during="forward activations", op="aten.tanh") if each.site
    }
    grads = [each for each in made(stack, during="backward") if each.op.startswith("aten.tanh_backward")]
    assert {each.site.line for each in grads if each.site} == {line}
    assert {each.site.function for each in grads if each.site} == {"Block.forward"}


# -- events can be replayed and edited ---------------------------------------------------------------


def test_replaying_the_events_gives_the_same_peak(stack):
    again = replay(stack.events, stack.allocations)
    assert again.peak_allocated == stack.peak.allocated
    assert again.peak_reserved == stack.peak.reserved
    assert again.at_peak == stack.at_peak
    assert [(one.allocated, one.reserved, one.end) for one in again.steps] == [
        (one.allocated, one.reserved, one.end) for one in stack.steps
    ]
    assert all(one.device > one.reserved for one in stack.steps)


def test_dropping_an_allocation_from_the_events_lowers_the_peak_by_it(stack):
    victim = next(alive for alive in stack.at_peak if alive.allocation.op == "aten.tanh")
    kept = [event for event in stack.events if event.id != victim.allocation.id]
    lower = replay(kept, stack.allocations).steps[stack.peak.step - 1].allocated
    assert lower == stack.peak.allocated - victim.bytes


def test_the_events_never_contradict_themselves(stack):
    alive: set[int] = set()
    for event in stack.events:
        if event.action == "alloc":
            assert event.id not in alive
            alive.add(event.id)
        elif event.action == "free":
            alive.remove(event.id)
