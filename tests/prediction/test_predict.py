"""oomph.predict on models small enough to count by hand: bytes, stages, modules, events and limits."""

import pytest
import torch
from small_programs import MiB, Stack, linear_workload, made, mean_square, requested, stack_workload
from torch import nn

import oomph
from oomph import Workload
from oomph.prediction.tracer.work import RELEASE_SECONDS

pytestmark = pytest.mark.usefixtures("in_process")


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


def test_the_optimizer_state_appears_in_the_first_step_and_then_nothing_grows(linear):
    first, second, third = linear.steps
    assert first.end == second.end == third.end
    states = made(linear, stage="optimizer state")
    assert {state.step for state in states} == {1}


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


def test_parameters_gradients_and_optimizer_state_carry_the_path_of_their_module(stack):
    owners = {f"blocks.{index}.{name}" for index in range(4) for name in ("up", "down")}
    gradients = [
        each for each in made(stack, kind="gradient") if each.shape != (8192, 256)
    ]  # the batch's own
    assert {each.module for each in made(stack, kind="parameter")} == owners
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


def test_without_a_gpu_there_is_no_verdict():
    prediction = oomph.predict(linear_workload())
    assert prediction.fits is prediction.limit is prediction.capacity is prediction.gpu is None


def test_a_limit_below_the_peak_refuses_a_request_and_names_it(stack):
    prediction = oomph.predict(stack_workload(), gpu="h200", max=stack.peak.allocated - 1)
    assert prediction.fits is False
    assert prediction.refused in prediction.allocations
    assert prediction.peak == stack.peak  # what it would need does not depend on what there is


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(100, "fits"), (82, "too close to call"), (79, "too close to call"), (72, "does not fit")],
)
def test_cached_segments_are_released_before_a_request_is_refused(limit, verdict):
    def train():
        def step():
            for size in (40, 60, 80):  # each is free again before the next, and too small for it
                torch.empty(size * MiB, dtype=torch.uint8, device="cuda")

        return step

    prediction = oomph.predict(train, max=f"{limit}MiB")
    assert prediction.peak.reserved == 180 * MiB
    assert prediction.peak.allocated == 80 * MiB
    assert 2 * MiB < prediction.margin <= 0.03 * 180 * MiB
    assert (prediction.verdict, prediction.fits) == (verdict, verdict == "fits")
    assert (prediction.refused is None) == (limit >= 80)


def test_the_time_of_releasing_cached_memory_in_every_step_is_counted():
    def train():
        def step():
            small = [torch.empty(MiB, dtype=torch.uint8, device="cuda") for _ in range(60)]
            del small  # 30 segments of 2 MiB, which serve no larger request
            torch.empty(100 * MiB, dtype=torch.uint8, device="cuda")

        return step

    without, within = (oomph.predict(train, gpu="h200", max=limit) for limit in ("200MiB", "130MiB"))
    assert (without.verdict, within.verdict) == ("fits", "fits")
    assert within.step_seconds - without.step_seconds == pytest.approx(31 * RELEASE_SECONDS)
    assert any("releases cached memory in every step" in note.text for note in within.notes)
    assert not any("releases" in note.text for note in without.notes)


def test_the_margin_holds_where_addresses_decide_what_is_reserved():
    """Two free blocks of 28 MiB: which one is taken decides whether 56 MiB stay in one piece."""

    def setup():
        whole = torch.empty(56 * MiB, dtype=torch.uint8, device="cuda")
        other = torch.empty(28 * MiB, dtype=torch.uint8, device="cuda")
        del whole
        first = torch.empty(28 * MiB, dtype=torch.uint8, device="cuda")
        del other
        second = torch.empty(28 * MiB, dtype=torch.uint8, device="cuda")
        del first
        kept = torch.empty(56 * MiB, dtype=torch.uint8, device="cuda"), second
        return lambda: kept

    prediction = oomph.predict(setup, gpu="h200")
    assert prediction.peak.reserved == 84 * MiB
    assert prediction.margin == 56 * MiB
    assert oomph.predict(setup, max="110MiB").verdict == "too close to call"
    assert oomph.predict(setup, max="116MiB").verdict == "fits"


def test_a_prediction_prints_as_one_short_line(stack):
    assert repr(stack).startswith("Prediction(fits: needs ")
    assert len(repr(stack)) < 120
    assert "\n" not in repr(stack)


def test_accumulation_keeps_the_activations_of_one_part_only():
    once = oomph.predict(stack_workload(optimizer=None))
    four = oomph.predict(stack_workload(optimizer=None, accumulate=4))
    assert four.peak.allocated == pytest.approx(once.peak.allocated, rel=0.05)
    forwards = [event for event in four.events if event.label == "forward"]
    assert len(forwards) == 3 * 4


class _Recurrent(nn.GRU):  # whose gradients share one allocation
    def __init__(self):
        super().__init__(1024, 256)

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("model", [lambda: nn.Linear(1024, 1024), _Recurrent])
def test_passes_that_are_repeated_are_like_those_of_a_loop_that_is_traced(model):
    workload = linear_workload(model=model, accumulate=4)

    def setup():
        model = workload.model().to("cuda")
        optimizer, batch = workload.make_optimizer(model), workload.make_batch(torch.device("cuda"))

        def step():
            for part, factor in workload.passes(batch):
                loss = workload.loss(model, part)
                (loss * factor).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    repeated, traced = oomph.predict(workload), oomph.predict(setup)
    assert [step.allocated for step in repeated.steps] == [step.allocated for step in traced.steps]
    assert repeated.work.host_seconds == pytest.approx(traced.work.host_seconds, rel=0.01)


def test_a_term_of_the_loss_that_begins_after_an_update_is_seen_where_passes_accumulate():
    def workload(begins):
        updates = 0

        def optimizer(parameters):
            def stepped(*_):
                nonlocal updates
                updates += 1

            made = torch.optim.SGD(parameters)
            made.register_step_post_hook(stepped)
            return made

        def loss(model, x):
            y = model(x)
            return y.square().mean() + (model(x + 1).mean() if updates >= begins else 0)

        layers = lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))  # noqa: E731
        batch = lambda device: torch.randn(4096, 64, device=device)  # noqa: E731
        return Workload(layers, batch, loss, optimizer, accumulate=4)

    always, later = (oomph.predict(workload(begins), gpu="h200") for begins in (0, 1))
    assert later.steps[0].allocated < later.steps[1].allocated == always.steps[1].allocated


def test_without_an_optimizer_there_is_no_state_and_gradients_stay():
    prediction = oomph.predict(linear_workload(optimizer=None))
    assert not made(prediction, stage="optimizer state")
    assert not made(prediction, stage="optimizer step")
    # Nothing sets them to None: the second backward adds to the gradients of the first.
    assert prediction.steps[1].end - prediction.steps[0].end <= MiB
    assert len(made(prediction, kind="gradient")) == 1


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4096, 256)
            self.head = nn.Linear(256, 4096, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    prediction = oomph.predict(
        Workload(Tied, lambda device: torch.randint(0, 4096, (64,), device=device), mean_square)
    )
    assert requested(prediction, stage="parameters") == 4096 * 256 * 4
    assert requested(prediction, stage="optimizer state") == 2 * 4096 * 256 * 4


def test_frozen_parameters_have_neither_gradient_nor_state():
    def model():
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


@pytest.fixture(params=[True, False])
def checkpointed(request):
    return oomph.predict(stack_workload(lambda: Stack(use_reentrant=request.param)))


def test_checkpointing_lowers_the_peak_by_the_inner_activations(stack, checkpointed):
    inner = 8192 * 1024 * 4
    # Of four blocks, only the one being recomputed holds its inner activation.
    assert stack.peak.allocated - checkpointed.peak.allocated >= 2 * inner
    assert requested(checkpointed, stage="parameters") == requested(stack, stage="parameters")


def test_activations_offloaded_to_the_host_are_not_counted(stack):
    def offloaded(model, batch):
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model, batch)

    less = oomph.predict(stack_workload(loss=offloaded))
    inner = 8192 * 1024 * 4
    assert stack.peak.allocated - less.peak.allocated >= 2 * inner


def test_foreach_holds_temporaries_of_all_parameters_and_the_loop_of_one():
    def state_and_temporaries(**options):
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


def test_recomputed_tensors_belong_to_the_block_that_is_recomputed(checkpointed):
    recomputed = made(checkpointed, op="aten.tanh", during="backward")
    assert {each.module for each in recomputed} == {f"blocks.{index}" for index in range(4)}
    assert {each.stage for each in recomputed} == {"backward"}


def test_sparse_gradients_of_a_workload_are_predicted():
    found = oomph.predict(
        Workload(
            model=lambda: nn.Embedding(5000, 64, sparse=True),
            batch=lambda device: torch.zeros(4096, dtype=torch.long, device=device),
            loss=lambda model, x: model(x).square().mean(),
            optimizer=torch.optim.SGD,
        ),
        gpu="h200",
    )
    assert found.steps[-1].allocated > 5000 * 64 * 4
