"""activation_checkpointing: the same gradients, less memory, exact undo; which modules count as blocks."""

import copy

import pytest
import torch
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.activation_checkpointing import KEEP
from oomph.nn.blocks import block_names, blocks
from oomph.records import FixUse


@pytest.mark.parametrize(
    "options", [{}, {"keep": "matmuls"}, {"keep": "attention"}, {"blocks": ["blocks.0", "blocks.2"]}]
)
def test_gradients_are_the_same_and_undo_restores_the_model(options):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    before, state = gradients(model, plain_loss, batch), state_of(model)
    changed = fixes.apply_to_model(FixUse("activation_checkpointing", options), model)
    assert [change.where for change in changed] == options.get("blocks", ["blocks.0", "blocks.1", "blocks.2"])
    same_gradients(before, gradients(model, plain_loss, batch), 0)
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize("options", [{"keep": keep} for keep in KEEP])
def test_recomputation_draws_the_same_random_numbers(options):
    def grads(changed):
        model = seeded(TinyLM)
        for block in model.blocks:
            block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Dropout(0.5))
        if changed:
            fixes.apply_to_model(FixUse("activation_checkpointing", options), model)
        torch.manual_seed(1)
        return gradients(model, plain_loss, tiny_batch("cpu"))

    same_gradients(grads(False), grads(True), 1e-6)


def test_the_peak_falls_and_the_step_gets_slower():
    work = workload(layers=3, width=128, heads=4, longest=256)
    work = oomph.Workload(work.model, lambda device: tiny_batch(device, 16, 256), work.loss)
    prediction = oomph.predict(work, gpu="h200")
    proposals = fixes.propose(prediction, work, only=("activation_checkpointing",))
    whole, half, products = proposals  # by saving
    assert whole.saving > products.saving > 0
    assert whole.saving > half.saving > 0
    assert whole.slowdown > half.slowdown > 1


@pytest.mark.parametrize("options", [{}, {"blocks": ["blocks.0", "blocks.2"]}])
def test_a_block_that_is_listed_several_times_is_wrapped_once(options):
    model, batch, calls = seeded(TinyLM), tiny_batch("cpu"), []
    model.blocks = torch.nn.ModuleList([model.blocks[0]] * 3)
    before = gradients(model, plain_loss, batch)
    changed = fixes.apply_to_model(FixUse("activation_checkpointing", options), model)
    assert [change.where for change in changed] == ["blocks.0"]
    model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    same_gradients(before, gradients(model, plain_loss, batch), 0)
    assert len(calls) == 2 * 3


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Mixed(TinyLM):
    """Two kinds of layers that take turns."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([self.blocks[0], Mixer(), self.blocks[1], Mixer()])


def test_layers_of_several_kinds_that_take_turns_are_all_wrapped():
    model, batch = seeded(Mixed), tiny_batch("cpu")
    before = gradients(model, plain_loss, batch)
    changed = fixes.apply_to_model("activation_checkpointing", model)
    assert [change.where for change in changed] == [f"blocks.{number}" for number in range(4)]
    same_gradients(before, gradients(model, plain_loss, batch), 0)


class Encoder(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)


class TwoParts(torch.nn.Module):
    """No list of blocks; the body holds nearly all parameters."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Module()
        self.body.encoder, self.body.decoder = Encoder(64), Encoder(32)
        self.head = torch.nn.Linear(8, 2)


@pytest.mark.parametrize("fix", ["activation_checkpointing", "activation_offloading"])
def test_without_blocks_the_error_suggests_modules(fix):
    with pytest.raises(UserError, match=r"blocks=body\.encoder \(the largest are body\.encoder, "):
        fixes.apply_to_model(fix, TwoParts())
    bare = torch.nn.Module()
    bare.large, bare.small = torch.nn.Linear(64, 64), torch.nn.Linear(8, 8)
    with pytest.raises(UserError, match="make the blocks modules of their own"):
        fixes.apply_to_model(fix, bare)
    changed = fixes.apply_to_model("activation_checkpointing:blocks=body.encoder", TwoParts())
    assert [change.where for change in changed] == ["body.encoder"]


class LongAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = torch.nn.Linear(256, 768), torch.nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def test_keeping_attention_costs_little_memory_and_saves_its_time():
    work = oomph.Workload(
        lambda: torch.nn.Sequential(*(LongAttention() for _ in range(4))),
        lambda device: torch.randn(1, 65536, 256, device=device, dtype=torch.bfloat16),
        lambda model, batch: model(batch).float().mean(),
        dtype="bfloat16",
    )
    keep = "activation_checkpointing:keep=attention"
    all_saved, nothing, attention, offloaded = (
        oomph.predict(oomph.apply(chosen, work), gpu="h200")
        for chosen in ([], "activation_checkpointing", keep, [keep, "activation_offloading"])
    )
    assert nothing.peak.allocated < attention.peak.allocated < all_saved.peak.allocated
    assert attention.peak.allocated - nothing.peak.allocated < 4 * (65536 * 256 * 2 * 1.1)
    assert attention.step_seconds < 1.05 * all_saved.step_seconds < 1.1 * nothing.step_seconds
    # At most two blocks' tensors are on the GPU at once: the one computed and the one fetched.
    assert offloaded.peak.allocated < attention.peak.allocated
    assert offloaded.step_seconds < nothing.step_seconds
    assert sum(phase.to_host for phase in offloaded.work.phases) >= 3 * (65536 * 256 * 2)


@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_running_statistics_are_updated_once(keep):
    def trained(*chosen):
        model = seeded(
            lambda: torch.nn.Sequential(
                *(
                    torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3, padding=1), torch.nn.BatchNorm1d(4))
                    for _ in range(3)
                )
            )
        )
        fixes.apply_to_model(list(chosen), model)
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(8, 4, 16)).square().mean().backward()
        return dict(model.named_buffers())

    plain, checkpointed = trained(), trained(f"activation_checkpointing:keep={keep}")
    for name, buffer in plain.items():
        assert torch.equal(buffer, checkpointed[name]), name


class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Mixer(), Mixer()])


def test_stages_of_several_kinds_do_not_hide_the_layers_inside_them():
    stages = torch.nn.ModuleList([Mixer(), Mixer(), Stage(), Stage()])
    names = [[name for name, _ in group] for group in blocks(torch.nn.ModuleDict({"stages": stages}))]
    assert names == [["stages.2.layers.0", "stages.2.layers.1"], ["stages.3.layers.0", "stages.3.layers.1"]]


def test_a_list_with_a_kind_of_its_own_in_it_is_no_list_of_blocks():
    model = Mixed()
    model.blocks.append(torch.nn.TransformerEncoderLayer(32, 2))
    assert blocks(model) == []


def test_lists_in_a_list_are_one_list_of_blocks():
    level = [torch.nn.TransformerEncoderLayer(32, 2), torch.nn.Sequential(torch.nn.Linear(32, 32))]
    model = torch.nn.Module()
    model.down = torch.nn.ModuleList(
        torch.nn.ModuleList([*copy.deepcopy(level), torch.nn.Linear(32, 32)]) for _ in range(2)
    )
    assert block_names(model) == ["down.0.0", "down.0.1", "down.1.0", "down.1.1"]


class Writing(torch.nn.Module):
    """Autograd sees no view in the result of the product, and the caller writes what is returned."""

    def __init__(self):
        super().__init__()
        self.weight, self.norm = torch.nn.Parameter(torch.randn(8, 8) / 3), torch.nn.BatchNorm1d(5)

    def forward(self, x):
        y = x @ self.weight
        y += 1
        z = y.sin_() @ self.weight
        return z, (2 * z).sin() + self.norm(x)


class Calling(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            first, x = block(x)
            first *= 3
        return x


@pytest.mark.parametrize("offloading", [[], ["activation_offloading:smallest=64"]])
@pytest.mark.parametrize("keep", KEEP)
def test_kept_results_that_are_written_are_computed_again_in_every_backward(keep, offloading):
    found = []
    for names in ([], [f"activation_checkpointing:keep={keep}", *offloading]):
        model = seeded(lambda: Calling(Writing)).double()
        fixes.apply_to_model(names, model)
        loss = model(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).double()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((loss.detach(), {name: one.grad for name, one in model.named_parameters()}))
    same_gradients(*found, 1e-12)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x + 1, self.layer(x).sin() * self.steps.clone()


class Adding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, inputs):
        inputs["x"] += 1
        return None, self.layer(inputs["x"]).sin()


class Keyword(Calling):
    def forward(self, x):
        for block in self.blocks:
            x = block(inputs={"x": x * 1})[1]
        return x


@pytest.mark.parametrize(
    ("build", "written"),
    [(lambda: Calling(Counting), "buffer 'steps' of a Counting"), (lambda: Keyword(Adding), "an argument")],
)
def test_a_block_that_writes_what_it_would_recompute_from_is_refused(build, written):
    work = oomph.Workload(build, lambda device: torch.ones(3, 8, device=device), lambda m, x: m(x).sum())
    assert fixes.propose(oomph.predict(work, gpu="h200"), work, only=("activation_checkpointing",)) == []
    model = build()
    fixes.apply_to_model("activation_checkpointing", model)
    with pytest.raises(UserError, match=f"{written} was written after the forward of its block began"):
        model(torch.ones(3, 8)).sum().backward()
