"""Models, and the fixes that are tried on each: of a size at which a GPU is busy, none of them a test's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload
from oomph.records import FixUse


@dataclass(frozen=True)
class MeasuredModel:
    workload: Workload
    tries: tuple[tuple[FixUse, ...], ...]  # each is one way of fixing it


def fix(name: str, **options: Any) -> FixUse:
    return FixUse(name, options)


RECOMPUTE, MATMULS = fix("activation_checkpointing"), fix("activation_checkpointing", keep="matmuls")
LOSS, OFFLOAD, MLP = fix("fused_linear_cross_entropy"), fix("activation_offloading"), fix("tiled_mlp")
HALVES, BACKEND = fix("micro_batches", parts=2), fix("attn_implementation")
FUSED, ONE_BY_ONE, EIGHT = fix("fused_optimizer"), fix("no_foreach"), fix("optimizer_8bit")
IN_BACKWARD, ROUNDED = fix("optimizer_in_backward"), fix("stochastic_rounding")


def tokens(device: torch.device, B: int, T: int, vocabulary: int = 20000) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (B, T), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def images(device: torch.device, B: int, side: int = 224) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(B, 3, side, side, device=device),
        "labels": torch.randint(0, 1000, (B,), device=device),
    }


def hugging_face(model: str, config: str, attention: str = "sdpa", **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        return getattr(transformers, model)._from_config(made, attn_implementation=attention)

    return build


class Attention(nn.Module):
    """Written out, with a stored mask."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, longest)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class HandWritten(nn.Module):
    """A language model as people write it after a tutorial."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, longest) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), batch["labels"][:, 1:].reshape(-1))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-5)


QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
GPT2 = {
    "n_embd": 1024,
    "n_layer": 12,
    "n_head": 16,
    "n_positions": 1024,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
BERT = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_labels": 1000,
}

MODELS: dict[str, MeasuredModel] = {
    "qwen3-bf16": MeasuredModel(
        Workload(
            hugging_face("Qwen3ForCausalLM", "Qwen3Config", **QWEN), tokens, optimizer=adamw,
            dtype="bfloat16", sizes={"B": 4, "T": 4096},
        ),
        (
            (LOSS,), (RECOMPUTE,), (MATMULS,), (MLP,), (OFFLOAD,), (RECOMPUTE, OFFLOAD), (HALVES,),
            (LOSS, RECOMPUTE), (EIGHT,), (ROUNDED,), (IN_BACKWARD,), (FUSED,),
        ),
    ),
    "llama-bf16": MeasuredModel(
        Workload(
            hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), tokens, optimizer=adamw,
            dtype="bfloat16", sizes={"B": 8, "T": 2048},
        ),
        ((LOSS,), (RECOMPUTE,), (MLP,), (IN_BACKWARD, LOSS), (LOSS, RECOMPUTE, MLP), (ONE_BY_ONE,)),
    ),
    "gpt2-eager-autocast": MeasuredModel(
        Workload(
            hugging_face("GPT2LMHeadModel", "GPT2Config", "eager", **GPT2), tokens, optimizer=adamw,
            autocast="bfloat16", sizes={"B": 8, "T": 1024},
        ),
        ((BACKEND,), (LOSS,), (RECOMPUTE,), (BACKEND, LOSS), (FUSED,)),
    ),
    "bert-fp32": MeasuredModel(
        Workload(
            hugging_face("BertForMaskedLM", "BertConfig", **BERT), tokens, optimizer=adamw,
            sizes={"B": 16, "T": 512},
        ),
        ((LOSS,), (RECOMPUTE,), (fix("autocast"),), (fix("bf16_parameters"),), (HALVES,)),
    ),
    "vit-autocast": MeasuredModel(
        Workload(
            hugging_face("ViTForImageClassification", "ViTConfig", **VIT), images, optimizer=adamw,
            autocast="bfloat16", sizes={"B": 128},
        ),
        ((RECOMPUTE,), (HALVES,), (OFFLOAD,)),
    ),
    "hand-written-bf16": MeasuredModel(
        Workload(
            partial(HandWritten, 50000, 1024, 16, 12, 2048), tokens, next_token_loss, adamw,
            dtype="bfloat16", sizes={"B": 4, "T": 2048},
        ),
        (
            (fix("fused_attention"),), (LOSS,), (RECOMPUTE,), (fix("fused_attention"), LOSS, RECOMPUTE),
        ),
    ),
}  # fmt: skip
