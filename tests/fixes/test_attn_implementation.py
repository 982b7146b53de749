"""Hugging Face attention from eager to fused: the same gradients, the configs of others left alone."""

import copy
import re

import pytest
import torch
from architectures import ARCHITECTURES, prepared
from short_training import not_found
from small import gradients, same_gradients, state_of

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import FixContext
from oomph.records import FixUse

pytest.importorskip("transformers")
HUGGING_FACE = ["GPT-2", "GPT-NeoX", "Llama", "Qwen3", "Mistral", "Phi", "BERT", "T5", "ViT"]


def eager(name):
    """A Workload of that architecture with eager attention."""
    work = ARCHITECTURES[name]()

    def build():
        model = work.model()
        for module in _with_config(model):  # its own method leaves out the two halves of T5
            module.config._attn_implementation_internal = "eager"
        return model

    return oomph.Workload(build, work.batch, work.loss)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_gradients_are_the_same_and_undo_restores_the_model(name):
    work = eager(name)
    model, batch = prepared(work)
    before, state = gradients(model, work.loss, batch), state_of(model)
    configs = {id(module.config): copy.deepcopy(vars(module.config)) for module in _with_config(model)}
    changed = fixes.apply_to_model("attn_implementation", model)
    assert any("eager -> sdpa" in change.what for change in changed)
    assert all(module.config._attn_implementation == "sdpa" for module in _with_config(model))
    same_gradients(_seen(before), _seen(gradients(model, work.loss, batch)), 2e-5)
    fixes.undo(model)
    assert state_of(model) == state
    assert {id(module.config): vars(module.config) for module in _with_config(model)} == configs


def _seen(run):
    """Without biases of keys, which a softmax does not see: their gradients are nothing but rounding."""
    loss, grads = run
    return loss, {name: grad for name, grad in grads.items() if not re.search(r"\.(key|k_proj)\.bias$", name)}


def _with_config(model):
    return [module for module in model.modules() if hasattr(module, "config")]


def test_a_config_that_others_use_is_left_alone():
    from transformers import LlamaConfig, LlamaForCausalLM

    shared = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attn_implementation="eager",
    )
    model, other = LlamaForCausalLM(shared), LlamaForCausalLM(shared)
    fixes.apply_to_model("attn_implementation", model)
    assert model.config._attn_implementation == "sdpa"
    assert shared._attn_implementation == other.config._attn_implementation == "eager"


def test_it_is_proposed_for_eager_attention_and_saves_memory():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation="eager",
    )

    def batch(device):
        tokens = torch.zeros(4, 1024, dtype=torch.int64, device=device)
        return {"input_ids": tokens, "labels": tokens}

    work = oomph.Workload(lambda: LlamaForCausalLM(config), batch, dtype="bfloat16")
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("attn_implementation",))
    assert proposal.where == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert proposal.saving > 2 * 4 * 4 * 1024 * 1024 * 2
    assert proposal.slowdown < 1
    fixed = oomph.apply(proposal, work)
    after = oomph.predict(fixed, gpu="h200")
    assert list(fixes.find("attn_implementation").targets(FixContext(after, fixed))) == []
    assert list(fixes.find("fused_attention").targets(FixContext(prediction, work))) == []


@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "TinyLM"])
def test_it_is_not_proposed_where_it_does_not_apply(name):
    # fused already; caps its scores; not a Hugging Face model
    assert not_found("attn_implementation", ARCHITECTURES[name]())


def test_invalid_options_are_reported_and_change_nothing():
    def refused(model, words, **options):
        state = state_of(model)
        with pytest.raises(UserError, match=words):
            fixes.apply_to_model(FixUse("attn_implementation", options), model)
        assert state_of(model) == state

    refused(ARCHITECTURES["Llama"]().model(), "attention is not eager; it is 'sdpa' already")
    refused(eager("Gemma-2").model(), "caps its attention scores .*, which sdpa leaves out")
    looking = eager("Llama").model()
    looking.config.output_attentions = True
    refused(looking, "returns attention weights")
    dropping = eager("GPT-2").model()
    dropping.transformer.h[1].attn.attn_dropout.p = 0.1
    refused(dropping, "attention dropout of 0.1, for which a fused kernel draws other random numbers")
    fixes.apply_to_model(FixUse("attn_implementation", {"other_random_numbers": True}), dropping)
    unable = eager("Llama").model()
    unable._supports_sdpa = False
    refused(unable, "LlamaForCausalLM does not support implementation='sdpa'")
