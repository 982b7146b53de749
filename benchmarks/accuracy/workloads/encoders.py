"""Encoders and encoder-decoders for text, pictures and speech, from Hugging Face configs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as tr

from benchmarks.accuracy.workloads.entry import Entry, adamw, from_config, images, tokens
from oomph.workload import Workload

_DEBERTA_SMALL = partial(
    tr.DebertaV2Config,
    vocab_size=32000,
    hidden_size=768,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=3072,
    relative_attention=True,
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
)
_ALBERT_BASE = partial(
    tr.AlbertConfig, hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=12
)
# A pretrained checkpoint brings this setting along; a fresh config does not.
_T5_SMALL = partial(tr.T5Config, decoder_start_token_id=0)


def _speech(device: torch.device) -> dict[str, Any]:
    return {
        "input_features": torch.randn(8, 80, 3000, device=device),
        "labels": torch.randint(0, 51865, (8, 128), device=device),
    }


def _captioned(device: torch.device) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(0, 49400, (64, 77), device=device),
        "pixel_values": torch.randn(64, 3, 224, 224, device=device),
        "return_loss": True,
    }


ENCODERS = {
    "bert-mlm-fp16-autocast": Entry(
        Workload(
            from_config(tr.BertConfig, tr.BertForMaskedLM),
            tokens(30522, 16, 512, padded=True),
            optimizer=adamw,
            autocast="float16",
        ),
        "BERT base, masked tokens, fp16 autocast, padding mask, dropout",
    ),
    "bert-mlm-fp32": Entry(
        Workload(from_config(tr.BertConfig, tr.BertForMaskedLM), tokens(30522, 16, 256), optimizer=adamw),
        "BERT base, masked tokens, fp32, no mask",
    ),
    "albert-shared-layers": Entry(
        Workload(from_config(_ALBERT_BASE, tr.AlbertForMaskedLM), tokens(30000, 8, 512), optimizer=adamw),
        "ALBERT base, fp32: one block's weights used twelve times",
    ),
    "deberta-v2": Entry(
        Workload(
            from_config(_DEBERTA_SMALL, tr.DebertaV2ForMaskedLM, attention="eager"),
            tokens(32000, 8, 384),
            optimizer=adamw,
        ),
        "DeBERTa-v2 (small), fp32, disentangled attention",
    ),
    "t5-small": Entry(
        Workload(
            from_config(_T5_SMALL, tr.T5ForConditionalGeneration), tokens(32128, 8, 512), optimizer=adamw
        ),
        "T5 small, fp32, encoder and decoder",
    ),
    "t5-small-eager-bf16": Entry(
        Workload(
            from_config(_T5_SMALL, tr.T5ForConditionalGeneration, attention="eager"),
            tokens(32128, 8, 512),
            optimizer=adamw,
            dtype="bfloat16",
        ),
        "T5 small, bf16, eager attention",
    ),
    "vit-b16-autocast": Entry(
        Workload(
            from_config(partial(tr.ViTConfig, num_labels=1000), tr.ViTForImageClassification),
            images(64, 224),
            optimizer=adamw,
            autocast="bfloat16",
        ),
        "ViT-B/16, bf16 autocast",
        convolutions=True,
    ),
    "swin-tiny": Entry(
        Workload(
            from_config(
                partial(tr.SwinConfig, num_labels=1000, drop_path_rate=0.0),
                tr.SwinForImageClassification,
                attention="eager",
            ),
            images(32, 224),
            optimizer=adamw,
        ),
        "Swin tiny, fp32, shifted windows",
        convolutions=True,
    ),
    "convnext-tiny": Entry(
        Workload(
            from_config(
                partial(tr.ConvNextConfig, num_labels=1000),
                tr.ConvNextForImageClassification,
                attention="eager",
            ),
            images(32, 224),
            optimizer=adamw,
        ),
        "ConvNeXt tiny, fp32, depthwise convolutions",
        convolutions=True,
    ),
    "clip": Entry(
        Workload(from_config(tr.CLIPConfig, tr.CLIPModel), _captioned, optimizer=adamw, autocast="bfloat16"),
        "CLIP B/32, bf16 autocast, contrastive loss",
        convolutions=True,
    ),
    "whisper-tiny": Entry(
        Workload(from_config(tr.WhisperConfig, tr.WhisperForConditionalGeneration), _speech, optimizer=adamw),
        "Whisper tiny, fp32, 1-D convolutions, encoder and decoder",
        convolutions=True,
    ),
}
