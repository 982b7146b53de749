"""Batches in parts, smaller, shorter, and with fewer words."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from short_training import not_found, proposed
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.micro_batches import shifts_labels
from oomph.fixes.vocabulary_cap import vocabulary_of
from oomph.records import FixUse
from oomph.workload import default_loss


def step_gradients(work):
    """The loss of a whole step and its gradients, as the Workload says that a step goes."""
    torch.manual_seed(0)
    model = work.model().double()
    total = torch.zeros((), dtype=torch.float64)
    for part, factor in work.passes(work.make_batch(torch.device("cpu"))):
        loss = work.scaled(work.loss(model, part), factor)
        loss.backward()
        total += loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def uneven(device, key="targets", tokens="tokens"):
    """Rows with very different numbers of labels that count; the last row has none."""
    batch = tiny_batch(device, rows=6)
    labels = batch["targets"].clone()
    for row in range(6):
        labels[row, : 4 * row + 4] = -100
    return {tokens: batch["tokens"], key: labels}


# -- micro-batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 4, 6])
def test_parts_give_the_gradients_of_the_whole(parts):
    work = replace(workload(layers=1), batch=uneven)
    fixed = fixes.apply(FixUse("micro_batches", {"parts": parts}), work)
    (loss, before), (new_loss, after) = step_gradients(work), step_gradients(fixed)
    assert fixed.micro_batches.parts == parts
    same_gradients((loss, before), (new_loss, after), 1e-12)


def test_a_batch_whose_labels_are_all_ignored_has_no_gradient():
    def ignored(device):
        return {**uneven(device), "targets": torch.full((6, 24), -100, device=device)}

    loss, grads = step_gradients(fixes.apply("micro_batches", replace(workload(layers=1), batch=ignored)))
    assert loss == 0
    assert all(grad is None or (grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda tokens, labels: (tokens, labels), lambda batch: batch),
        (lambda tokens, labels: (tokens, labels, torch.ones_like(tokens)), lambda batch: batch[:2]),
        (lambda tokens, labels: [{"y": labels, "x": tokens}], lambda batch: (batch[0]["x"], batch[0]["y"])),
        (lambda tokens, labels: {"x": tokens, "y": {"labels": labels}}, lambda b: (b["x"], b["y"]["labels"])),
    ],
    ids=["pair", "with mask", "other names", "nested"],
)
def test_labels_are_found_in_batches_of_any_form(form, read):
    def loss(model, batch):
        tokens, labels = read(batch)
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    work = replace(workload(layers=1), batch=lambda device: form(*uneven(device).values()), loss=loss)
    same_gradients(step_gradients(work), step_gradients(fixes.apply("micro_batches", work)), 1e-12)


def test_one_label_a_row_may_be_ignored_too():
    def batch(device):
        labels = torch.tensor([3, -100, -100, -100, 1, 2], device=device)
        return {"x": torch.arange(18.0, device=device).view(6, 3).sin(), "label": labels}

    work = oomph.Workload(
        lambda: seeded(lambda: nn.Linear(3, 4)),
        batch,
        lambda model, batch: F.cross_entropy(model(batch["x"].to(model.weight)), batch["label"]),
    )
    same_gradients(step_gradients(work), step_gradients(fixes.apply("micro_batches", work)), 1e-12)


def test_by_rows_uneven_labels_would_be_wrong():
    """What the weights are for: a test that the test above can fail."""
    work = replace(workload(layers=1), batch=uneven)
    by_rows = fixes.apply(FixUse("micro_batches", {"weights": "rows"}), work)
    with pytest.raises(AssertionError):
        same_gradients(step_gradients(work), step_gradients(by_rows), 1e-3)


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "attention_dropout": 0.0}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97,
            n_embd=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **sizes))
    if kind == "bert":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=97, **sizes, **none))
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_labels_are_counted_as_hugging_face_models_count_them(kind):
    work = oomph.Workload(
        lambda: seeded(lambda: hugging_face(kind)), lambda device: uneven(device, "labels", "input_ids")
    )
    assert shifts_labels(work.model()) == (kind in ("gpt2", "llama"))
    (loss, before), (new_loss, after) = (
        step_gradients(work),
        step_gradients(fixes.apply("micro_batches", work)),
    )
    # The models compute their loss in float32; and a key's bias changes nothing, its gradient is rounding.
    for grads in (before, after):
        grads.pop("bert.encoder.layer.0.attention.self.key.bias", None)
    same_gradients((loss, before), (new_loss, after), 1e-6)


class Wrapper(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inside = hugging_face(kind)

    def forward(self, **batch):
        return self.inside(**batch)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_labels_are_counted_so_for_a_model_inside_another(kind):
    work = oomph.Workload(
        lambda: seeded(lambda: Wrapper(kind)), lambda device: uneven(device, "labels", "input_ids")
    )
    assert shifts_labels(work.model()) == (kind == "llama")
    same_gradients(step_gradients(work), step_gradients(fixes.apply("micro_batches", work)), 1e-6)


def test_models_that_divide_by_the_whole_themselves_add_up():
    def loss(model, batch):
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]

    def batch(device):
        made = uneven(device)
        return {**made, "num_items_in_batch": (made["targets"] != -100).sum()}

    work = replace(workload(layers=1), batch=batch, loss=loss)
    same_gradients(step_gradients(work), step_gradients(fixes.apply("micro_batches", work)), 1e-12)


def test_parts_are_proposed_as_they_divide_the_rows():
    work = workload(layers=1, width=128, longest=256)
    work = replace(work, batch=lambda device: tiny_batch(device, 12, 256))
    proposals = proposed("micro_batches", work)
    assert [proposal.options["parts"] for proposal in proposals] == [4, 2]  # 8 does not divide 12
    savings = [proposal.saving for proposal in proposals]
    assert savings[0] > savings[1] > 0
    assert all(proposal.slowdown > 1 for proposal in proposals)
    for proposal in proposals:
        assert "mean over labels that count" in proposal.note
        assert "a sum, or a loss that compares rows" in proposal.note


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x))


def test_batch_statistics_are_seen_and_refused():
    work = oomph.Workload(
        WithBatchNorm, lambda device: torch.ones(4, 3, device=device), lambda m, x: m(x).sum()
    )
    assert not_found("micro_batches", work)
    with pytest.raises(UserError, match="norm normalises by the statistics of the batch"):
        fixes.apply("micro_batches", work).model()


def test_micro_batch_mistakes_are_told():
    work = workload(layers=1)
    for options, message in (
        ({"parts": 1}, "parts=1 is not valid; give a whole number >= 2"),
        ({"weights": "tokens"}, "weights='tokens' is not valid; valid: auto, rows, labels"),
        ({"ignore_index": None}, "ignore_index=None is not valid"),
        ({"shifted": 1}, "shifted=1 is not valid; valid: true, false"),
    ):
        with pytest.raises(UserError, match=message):
            fixes.apply(FixUse("micro_batches", options), work)
    with pytest.raises(UserError, match="comes in 2 parts already"):
        fixes.apply("micro_batches", replace(work, micro_batches=oomph.workload.MicroBatches(2)))
    images = oomph.Workload(
        lambda: nn.Linear(3, 1), lambda device: torch.ones(4, 3), lambda m, x: m(x).mean()
    )
    with pytest.raises(UserError, match="the batch has no labels: no tensor of whole numbers"):
        step_gradients(fixes.apply(FixUse("micro_batches", {"weights": "labels"}), images))


# -- smaller and shorter ----------------------------------------------------------------------------------


def sized(device, B, T):
    return tiny_batch(device, B, T)


@pytest.mark.parametrize(("fix", "size"), [("smaller_batch", "B"), ("shorter_sequence", "T")])
def test_a_size_of_the_workload_is_halved(fix, size):
    work = replace(workload(layers=1), batch=sized, sizes={"B": 8, "T": 32})
    assert fixes.apply(fix, work).sizes == {**work.sizes, size: work.sizes[size] // 2}
    assert fixes.apply(FixUse(fix, {"value": 3}), work).sizes[size] == 3
    assert fixes.apply(FixUse(fix, {"size": "B"}), work).sizes["B"] == 4
    with pytest.raises(UserError, match="there is no size 'W'; the workload's sizes are B, T"):
        fixes.apply(FixUse(fix, {"size": "W"}), work)
    with pytest.raises(UserError, match="value=99 is not valid; it is"):
        fixes.apply(FixUse(fix, {"value": 99}), work)


def test_a_batch_without_sizes_is_cut():
    work = workload(layers=1)
    batch = work.make_batch(torch.device("cpu"))
    smaller = fixes.apply("smaller_batch", work).make_batch(torch.device("cpu"))
    shorter = fixes.apply(FixUse("shorter_sequence", {"value": 5}), work).make_batch(torch.device("cpu"))
    for key, tensor in batch.items():
        assert torch.equal(smaller[key], tensor[:2])
        assert torch.equal(shorter[key], tensor[:, :5])
        assert smaller[key].untyped_storage().nbytes() == smaller[key].numel() * 8  # the rest is freed
    both = fixes.apply(["smaller_batch", "shorter_sequence"], work).make_batch(torch.device("cpu"))
    assert both["tokens"].shape == (2, 12)


@pytest.mark.parametrize("fix", ["smaller_batch", "shorter_sequence"])
def test_less_of_a_batch_is_proposed_with_a_saving(fix):
    work = workload(layers=1, width=128, longest=512)
    work = replace(work, batch=lambda device: tiny_batch(device, 8, 512))
    (proposal,) = proposed(fix, work)
    assert proposal.saving > 0
    assert proposal.kind == "training"
    alone = oomph.Workload(
        lambda: nn.Linear(3, 1), lambda device: torch.ones(1, 3, device=device), lambda m, x: m(x).mean()
    )
    assert not_found(fix, alone)


def test_what_cannot_be_cut_is_told():
    work = oomph.Workload(lambda: nn.Linear(3, 1), lambda device: torch.ones(4, 3), lambda m, x: m(x).mean())
    with pytest.raises(UserError, match="no integers of shape"):
        fixes.apply("shorter_sequence", work)
    with pytest.raises(UserError, match="no tensor with rows"):
        fixes.apply("smaller_batch", replace(work, batch=lambda device: {"n": 3}))


# -- vocabulary -------------------------------------------------------------------------------------------


def test_the_vocabulary_is_cut_in_model_and_batch_and_undone():
    model = seeded(TinyLM)
    state, weight = state_of(model), model.head.weight
    fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 50}), model)
    assert model.embed.weight.shape == model.head.weight.shape == (50, 32)
    assert torch.equal(model.head.weight, weight[:50])
    assert (model.embed.num_embeddings, model.head.out_features) == (50, 50)
    work = fixes.apply(
        FixUse("smaller_vocabulary", {"size": 50, "unknown": 7}), replace(workload(), batch=uneven)
    )
    batch, before = work.make_batch(torch.device("cpu")), uneven("cpu")
    assert torch.equal(batch["tokens"], torch.where(before["tokens"] >= 50, 7, before["tokens"]))
    assert batch["targets"].min() == -100
    assert batch["targets"].max() < 50
    gradients(model, plain_loss, batch)
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face_models_lose_words_and_stay_tied(kind):
    model = seeded(lambda: hugging_face(kind))
    state = state_of(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 40}), model)
    assert model.config.vocab_size == 40
    assert embedding.weight.shape[0] == head.weight.shape[0] == 40
    assert (embedding.weight is head.weight) == tied
    batch = uneven("cpu", "labels", "input_ids")
    loss = default_loss(model, {key: value.masked_fill(value >= 40, 0) for key, value in batch.items()})
    loss.backward()
    assert embedding.weight.grad.shape == embedding.weight.shape
    fixes.undo(model)
    assert state_of(model) == state


@dataclass
class Config:
    vocab_size: int = 97


class Configured(TinyLM):
    def __init__(self, config):
        super().__init__(vocabulary=config.vocab_size)
        self.config = config


@pytest.mark.parametrize("kind", ["llama", "own"])
def test_a_config_that_other_models_are_built_from_is_left_as_it_is(kind):
    if kind == "own":
        config, build = Config(), Configured
    else:
        config = hugging_face(kind).config
        build = pytest.importorskip("transformers").LlamaForCausalLM
    model = build(config)
    state = state_of(model)
    fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 40}), model)
    assert (model.config.vocab_size, config.vocab_size) == (40, 97)
    assert vocabulary_of(build(config)) == 97
    fixes.undo(model)
    assert model.config is config
    assert state_of(model) == state


@pytest.mark.parametrize("config", [{"vocab_size": 97}, Config, None])
def test_configs_that_are_no_objects_are_left_alone(config):
    model = seeded(TinyLM)
    model.config = config
    fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 40}), model)
    assert model.config is config
    assert vocabulary_of(model) == 40


def test_the_cap_is_proposed_for_large_vocabularies():
    work = workload(layers=1, vocabulary=32000, width=64)
    work = replace(work, batch=lambda device: tiny_batch(device, 4, 64, vocabulary=32000))
    (proposal,) = proposed("smaller_vocabulary", work)
    assert proposal.options == {"size": 16000}
    assert proposal.saving > 0
    assert proposal.where == ("embed", "head")
    assert not_found("smaller_vocabulary", workload(layers=1))


def test_vocabulary_mistakes_are_told_and_change_nothing():
    model = seeded(TinyLM)
    state = state_of(model)
    for options, message in (
        ({"size": 97}, "size=97 is not valid; the model knows 97 words"),
        ({"size": 1}, "size=1 is not valid; give a whole number >= 2"),
        ({"size": 5, "unknown": 5}, "unknown=5 is not valid; give 0 to 4"),
        ({}, "needs the option 'size'"),
    ):
        with pytest.raises(UserError, match=message):
            fixes.apply_to_model(FixUse("smaller_vocabulary", options), model)
    with pytest.raises(UserError, match="no embedding with a head"):
        fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 5}), nn.Linear(3, 4))
    assert state_of(model) == state
