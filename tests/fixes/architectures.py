"""Ten Hugging Face architectures and two hand-written models, each tiny, seeded and without dropout.

`ARCHITECTURES[name]()` is a Workload in float32 that runs on a CPU.
"""

from functools import partial

import torch
import torch.nn.functional as F
from small import TinyLM, plain_loss, seeded, tiny_batch
from torch import nn

import oomph

VOCABULARY = 101
WIDTH, HEADS, LAYERS, LENGTH, ROWS = 32, 4, 2, 20, 3
_LAYERS = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_SIZES = {**_LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
# Hugging Face's defaults lie outside so small a vocabulary.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _random(seed):
    return torch.Generator().manual_seed(seed)


def _causal(device):
    """Tokens that are their own labels; a few of these are -100."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=_random(1)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def _masked(device):
    """Most targets are -100, and some tokens are padding."""
    made = _random(2)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=made).to(device)
    chosen = (torch.rand(ROWS, LENGTH, generator=made) < 0.3).to(device)
    attended = torch.ones_like(tokens)
    attended[-1, -4:] = 0
    labels = torch.where(chosen & (attended == 1), tokens, -100)
    return {"input_ids": torch.where(chosen, 1, tokens), "attention_mask": attended, "labels": labels}


def _translated(device):
    made = _random(3)
    tokens = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=made)
    labels = torch.randint(2, VOCABULARY, (ROWS, 12), generator=made)
    labels[0, -3:] = -100
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def _images(device, rows=ROWS, name="pixel_values", classes="labels"):
    made = _random(4)
    images = torch.randn(rows, 3, 16, 16, generator=made)
    return {name: images.to(device), classes: torch.randint(0, 10, (rows,), generator=made).to(device)}


# Each class of transformers, what its config is given, and its batch.
HUGGING_FACE = {
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        _causal,
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0}, _causal),
    "Llama": ("LlamaForCausalLM", {**_SIZES, **_TOKENS, "num_key_value_heads": 2}, _causal),
    "Qwen3": ("Qwen3ForCausalLM", {**_SIZES, **_GROUPED, "tie_word_embeddings": True}, _causal),
    "Gemma-2": (  # caps its logits and its attention scores, and slides a window in every second layer
        "Gemma2ForCausalLM",
        {**_SIZES, **_TOKENS, **_GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 8}
        | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
        _causal,
    ),
    "Mistral": ("MistralForCausalLM", {**_SIZES, **_TOKENS, **_GROUPED, "sliding_window": 12}, _causal),
    "Phi": (
        "PhiForCausalLM",
        {**_SIZES, **_TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
        _causal,
    ),
    "BERT": ("BertForMaskedLM", {**_SIZES, **_NO_DROPOUT, "pad_token_id": 0}, _masked),
    "T5": (  # the tied head is given hidden states times width^-0.5
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS}
        | {"num_heads": HEADS, "dropout_rate": 0.0}
        | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
        _translated,
    ),
    "ViT": (
        "ViTForImageClassification",
        {**_LAYERS, **_NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 10},
        _images,
    ),
}


def _hugging_face(name):
    import transformers

    kind, config, batch = HUGGING_FACE[name]
    model = getattr(transformers, kind)  # imported here: a prediction runs in a process of its own

    def build():
        return model(model.config_class(**config))

    return oomph.Workload(partial(seeded, build), batch)  # the loss is model(**batch).loss


def _classified(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["classes"])


def _own(model, batch=tiny_batch, loss=plain_loss):
    return oomph.Workload(lambda: seeded(model), batch, loss)


ARCHITECTURES = {
    **{name: partial(_hugging_face, name) for name in HUGGING_FACE},
    "TinyLM": lambda: _own(TinyLM),
    "Classifier": lambda: _own(
        Classifier, partial(_images, rows=6, name="images", classes="classes"), _classified
    ),
}


def prepared(workload):
    """The model and the batch of a Workload, on the CPU, ready for a pass."""
    return workload.model().train(), workload.make_batch(torch.device("cpu"))


class Classifier(nn.Module):
    """Convolutions with batch norm, then linear layers; nothing in it is a sequence."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.ModuleList(Residual(16) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(16 * 16, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, images):
        x = self.stem(images)
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
        return self.mlp(x.flatten(1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))
