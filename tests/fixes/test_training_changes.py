"""Fixes that change what is trained: smaller batches, sequences and vocabularies."""

from dataclasses import dataclass, replace

import pytest
import torch
from architectures import ARCHITECTURES
from short_training import not_found, proposed
from small import TinyLM, gradients, plain_loss, seeded, state_of, tiny_batch, uneven, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse
from oomph.workload import default_loss


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


def test_positions_and_lengths_are_left_as_they_are():
    large, lengths = torch.arange(1000).view(2, 500), torch.tensor([500, 400])

    def changed(batch, fix="smaller_vocabulary:size=100,unknown=7"):
        work = fixes.apply(fix, replace(workload(), batch=lambda device: batch))
        return work.make_batch(torch.device("cpu"))

    cut = large.masked_fill(large >= 100, 7)
    named = {"input_ids": large, "labels": large, "position_ids": large, "lengths": lengths, "ratio": 0.5}
    expected = {**named, "input_ids": cut, "labels": cut}
    torch.testing.assert_close(changed(named), expected, rtol=0, atol=0)
    torch.testing.assert_close(changed((large, cut, lengths)), (cut, cut, lengths), rtol=0, atol=0)
    assert torch.equal(changed(large), cut)
    own = changed({"source": large, "ids": large}, "smaller_vocabulary:size=100,unknown=7,tokens=source")
    torch.testing.assert_close(own, {"source": cut, "ids": large}, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "BERT", "T5"])
def test_hugging_face_models_lose_words_and_stay_tied(kind):
    model = ARCHITECTURES[kind]().model()
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


def test_a_config_that_other_models_are_built_from_is_left_as_it_is():
    config = Config()
    model = Configured(config)
    state = state_of(model)
    fixes.apply_to_model(FixUse("smaller_vocabulary", {"size": 40}), model)
    assert (model.config.vocab_size, config.vocab_size) == (40, 97)
    fixes.undo(model)
    assert model.config is config
    assert state_of(model) == state


def test_the_cap_is_proposed_for_large_vocabularies():
    work = workload(layers=1, vocabulary=32000, width=64)
    work = replace(work, batch=lambda device: tiny_batch(device, 4, 64, vocabulary=32000))
    (proposal,) = proposed("smaller_vocabulary", work)
    assert proposal.options == {"size": 16000}
    assert proposal.saving > 0
    assert proposal.where == ("embed", "head")
    assert not_found("smaller_vocabulary", workload(layers=1))
