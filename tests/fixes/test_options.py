"""Invalid options, and models that a fix does not apply to: one line that names them; nothing is changed."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES
from short_training import trained
from small import TinyLM, seeded, state_of, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse

DEFAULTS = {fix.name: fix.with_defaults({}) for fix in fixes.all_fixes()}
NAMES = [
    (fix, one)
    for fix in DEFAULTS
    for one in DEFAULTS[fix]
    if one in ("blocks", "modules", "heads", "buffers")
]
FLAGS = [
    (fix, one) for fix in DEFAULTS for one, default in DEFAULTS[fix].items() if isinstance(default, bool)
]


def refused(use, *words, model=TinyLM, **changes):
    """Applied to a model, or to a workload with these changes."""
    fix, made = fixes.find(use.fix), seeded(model)
    state, work = state_of(made), replace(workload(), **changes)
    of_model = fix.changes_model and use.fix != "smaller_vocabulary"
    with pytest.raises(UserError) as error:
        fixes.apply_to_model(use, made) if of_model else trained(oomph.apply(use, work))
    assert state_of(made) == state
    for word in (use.fix, *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fix", "option"), NAMES)
def test_names_of_modules(fix, option):
    for value in (3, [], [3]):
        refused(FixUse(fix, {option: value}), f"{option}={value!r} is not valid")
    refused(FixUse(fix, {option: ["nowhere"]}), "nowhere")


@pytest.mark.parametrize(("fix", "option"), FLAGS)
def test_flags(fix, option):
    for value in (1, None):
        refused(FixUse(fix, {option: value}), f"{option}={value} is not valid", "true, false")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("activation_checkpointing:keep=all", ("keep='all'", "nothing, attention, matmuls")),
        ("activation_checkpointing:blocks=blocks", ("'blocks' is a ModuleList", "'blocks.0'")),
        ("activation_offloading:blocks=blocks.2", ("'blocks.2' is the last block",)),
        ("activation_offloading:blocks=blocks.*.nothing", ("'blocks.*.nothing'",)),
        ("tiled_mlp:tile=0", ("tile=0",)),
        ("tiled_mlp:tile=4,memory_budget=1MiB", ("tile and memory_budget both",)),
        ("fused_linear_cross_entropy:memory_budget=much", ("memory_budget", "much")),
        ('fused_linear_cross_entropy:heads=["head","embed"]', ("'embed' is a Embedding",)),
        ('gradient_accumulation_fusion:modules=["head","norm"]', ("'norm' is a LayerNorm",)),
        ("attn_implementation:implementation=fast", ("implementation='fast'", "sdpa, flash_attention_2")),
        ("attn_implementation", ("TinyLM holds no Hugging Face model",)),
        ("fsdp2:ranks=4", ("torchrun --nproc-per-node=4",)),
        ("micro_batches:weights=tokens", ("weights='tokens'", "auto, rows, labels")),
        ("micro_batches:labels=1.5", ("labels=1.5", "a name or a position")),
        ("allocator:max_split_size_mb=20", ("max_split_size_mb=20", ">= 21")),
        ("allocator:expandable_segments=false", ("nothing to set",)),
        ("stochastic_rounding:state=int4", ("state='int4'", "bfloat16, float32")),
        ("smaller_batch:size=W", ("no size 'W'",)),
        ("shorter_sequence:value=99", ("value=99", "give 1 to")),
        ("smaller_vocabulary:size=97", ("size=97", "97 tokens")),
        ("smaller_vocabulary:size=5,unknown=5", ("unknown=5", "0 to 4")),
    ],
)
def test_values(use, words):
    (parsed,) = fixes.uses_of(use)
    refused(parsed, *words)


@pytest.mark.parametrize(
    ("fix", "word"),
    [
        ("fused_attention", "no code of its own"),
        ("fused_linear_cross_entropy", "no linear head as wide as its vocabulary"),
        ("gradient_accumulation_fusion", "no plain nn.Linear that is trained"),
        ("tiled_mlp", "no MLPs"),
    ],
)
def test_models_without_a_target(fix, word):
    refused(FixUse(fix), word, model=lambda: nn.LayerNorm(3))


class Coupled(torch.optim.SGD):
    """Not torch's own."""


@pytest.mark.parametrize(
    ("fix", "changes", "word"),
    [
        ("optimizer_in_backward", {"accumulate": 2}, "accumulates over 2 batches"),
        ("optimizer_in_backward", {"micro_batches": oomph.MicroBatches(2)}, "comes in 2 parts"),
        ("optimizer_in_backward", {"optimizer": None}, "no optimizer"),
        ("optimizer_in_backward", {"optimizer": torch.optim.LBFGS}, "LBFGS needs all gradients"),
        ("optimizer_in_backward", {"optimizer": Coupled}, "independent=true"),
        ("optimizer_cpu_offload", {"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ("optimizer_8bit", {"optimizer": torch.optim.LBFGS}, "LBFGS; valid: Adam, AdamW"),
        ("optimizer_8bit", {"optimizer": partial(torch.optim.Adam, amsgrad=True)}, "amsgrad=True"),
        ("optimizer_8bit", {"dtype": "float64"}, "float64"),
        ("fused_optimizer", {"optimizer": torch.optim.RMSprop}, "RMSprop; valid: Adam, AdamW, SGD, Adagrad"),
        ("fused_optimizer", {"optimizer": partial(torch.optim.SGD, differentiable=True)}, "cannot be fused"),
        ("no_foreach", {"optimizer": torch.optim.LBFGS}, "LBFGS has no foreach option"),
        ("no_foreach", {"optimizer": partial(torch.optim.SGD, foreach=False)}, "already updates one"),
        ("micro_batches", {"micro_batches": oomph.MicroBatches(2)}, "already comes in 2 parts"),
        ("allocator", {"allocator": "max_split_size_mb:64"}, "already has allocator='max_split_size_mb:64'"),
        ("autocast", {"dtype": "bfloat16"}, "bfloat16"),
        ("bf16_parameters", {"dtype": "bfloat16"}, "already torch.bfloat16"),
        ("shorter_sequence", {"batch": lambda device: torch.ones(4, 3)}, "no integers of shape"),
        ("smaller_batch", {"batch": lambda device: {"n": 3}}, "no tensor with rows"),
    ],
)
def test_workloads_that_a_fix_does_not_apply_to(fix, changes, word):
    (use,) = fixes.uses_of(fix)
    refused(use, word, **changes)


def test_models_with_checkpointing_of_their_own():
    def build():
        model = ARCHITECTURES["Llama"]().model()
        model.gradient_checkpointing_enable()
        return model

    for fix in ("activation_checkpointing", "activation_offloading"):
        refused(FixUse(fix), "checkpoints activations by itself (gradient_checkpointing)", model=build)


def test_nothing_is_proposed_for_a_model_without_targets():
    def batch(device):
        return torch.ones(1, 64, device=device)

    def loss(model, x):
        return model(x.to(model[0].weight)).sum()

    work = oomph.Workload(lambda: nn.Sequential(nn.Linear(64, 64)), batch, loss, None, dtype="bfloat16")
    assert fixes.propose(oomph.predict(work, gpu="h200"), work) == []
