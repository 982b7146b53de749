"""A model's name as a program: what is traced is a Trainer's step."""

import importlib.util
import json

import pytest
import torch

import oomph
from oomph.errors import UserError
from oomph.models.finetuning import FineTuning, parse
from oomph.units import MiB

pytest.importorskip("accelerate")
pytest.importorskip("transformers").Trainer  # noqa: B018  # imported once, and not in each prediction
WIDTH, VOCAB, BLOCKS, LENGTH = 256, 4096, 4, 64
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
PARAMETERS = 2 * VOCAB * WIDTH + BLOCKS * (4 * WIDTH**2 + 3 * 4 * WIDTH**2 + 2 * WIDTH) + WIDTH
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None or importlib.util.find_spec("bitsandbytes") is None,
    reason="needs peft and bitsandbytes",
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_words_are_parsed_back():
    asked = FineTuning("org/name", "lora", batch=2, checkpointing=False, optimizer="sgd")
    assert parse(asked.words()) == asked


def test_full_has_weights_gradients_and_adam_in_bf16(folder):
    found = oomph.predict(oomph.finetune(folder, length=LENGTH), gpu="rtx4090")
    assert found.peak.allocated >= 4 * 2 * PARAMETERS
    assert found.peak.allocated < 4 * 2 * PARAMETERS + 24 * MiB
    assert len(found.steps) == 3
    assert not any("was stopped" in note.text for note in found.notes)


def test_what_transformers_found_out_about_the_machine_before_is_asked_again(folder):
    from transformers.utils import is_torch_bf16_gpu_available

    assert not is_torch_bf16_gpu_available() or torch.cuda.is_available()  # and transformers keeps the answer
    assert oomph.predict(oomph.finetune(folder, length=LENGTH), gpu="rtx4090").peak.allocated


def test_tied_weights_are_there_once(folder, tmp_path):
    untied = oomph.predict(oomph.finetune(folder, length=LENGTH), gpu="rtx4090")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    tied = oomph.predict(oomph.finetune(folder, length=LENGTH), gpu="rtx4090")
    assert tied.peak.allocated <= untied.peak.allocated - 2 * 2 * VOCAB * WIDTH


def test_full_in_fp32_has_twice_of_them(folder):
    found = oomph.predict(oomph.finetune(folder, "full-fp32", length=LENGTH), gpu="rtx4090")
    assert found.peak.allocated >= 4 * 4 * PARAMETERS


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_trains_its_adapters_alone(folder):
    found = oomph.predict(oomph.finetune(folder, "lora", length=LENGTH, lora_rank=8), gpu="rtx4090")
    assert found.peak.allocated < 2 * PARAMETERS + 26 * MiB


@needs_bitsandbytes
def test_qlora_has_blocks_in_4_bits_and_the_rest_in_fp32(folder):
    found = oomph.predict(oomph.finetune(folder, "qlora", length=LENGTH, lora_rank=8), gpu="rtx4090")
    blocks = PARAMETERS - 2 * VOCAB * WIDTH
    weights = blocks // 2 + 4 * 2 * VOCAB * WIDTH
    assert weights <= found.peak.allocated < weights + 28 * MiB


@needs_bitsandbytes
def test_qlora_where_bitsandbytes_was_imported_without_a_gpu_is_one_line(folder):
    importlib.import_module("bitsandbytes")
    if torch.cuda.is_available():
        pytest.skip("it has kernels for CUDA")
    with pytest.raises(UserError, match="imported before the prediction"):
        oomph.predict(oomph.finetune(folder, "qlora", length=LENGTH, lora_rank=1024), gpu="rtx4090")


def test_generation_holds_the_keys_and_values_of_every_token(folder):
    peaks = [
        oomph.predict(oomph.finetune(folder, "generate", batch=8, length=length, new=2), gpu="rtx4090").peak
        for length in (128, 1152)
    ]
    cache = 2 * BLOCKS * WIDTH * 2 * 8 * 1024  # of the tokens that the second has more
    assert peaks[1].allocated - peaks[0].allocated >= cache


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"method": "lorra"}, "method 'lorra' is not valid; valid: full, full-fp32, lora, qlora, generate"),
        ({"batch": 0}, "batch 0 is not valid; give a whole number >= 1"),
        ({"rank": 8}, "finetune has no option 'rank'; valid: accumulate, batch, checkpointing"),
        ({"optimizer": "adamw9"}, "optimizer 'adamw9' is not valid; valid: adamw_torch"),
    ],
)
def test_bad_options(folder, options, line):
    with pytest.raises(UserError, match=line):
        oomph.predict(oomph.finetune(folder, **options))


@pytest.mark.parametrize(
    ("config", "options", "line"),
    [
        ({"model_type": "frob"}, {}, "knows no architecture 'frob'"),
        ({**CONFIG, "architectures": ["FrobForCausalLM"]}, {}, "knows no model 'FrobForCausalLM'"),
        ({"hidden_size": 8}, {}, "it has no model_type"),
        (
            {"model_type": "gpt2", "n_positions": 512},
            {"length": 513},
            "length 513 is beyond the 512 positions",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            {"method": "generate", "length": 8},
            "method 'generate' does not apply",
        ),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, config, options, line):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=line):
        oomph.predict(oomph.finetune(str(tmp_path), **options))


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora_of_a_convolutional_network(tmp_path):
    config = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no linear layers, so method 'lora' does not apply"):
        oomph.predict(oomph.finetune(str(tmp_path), "lora"))
