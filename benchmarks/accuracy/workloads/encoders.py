"""Encoders and encoder-decoders for text, images and speech, from Hugging Face configs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as tr

from benchmarks.accuracy.workloads.entry import images, library_entry, tokens

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
    "bert-mlm-fp16-autocast": library_entry(
        "BERT base, masked tokens, fp16 autocast, padding mask, dropout",
        tr.BertConfig,
        tr.BertForMaskedLM,
        tokens(30522, 16, 512, padded=True),
        autocast="float16",
    ),
    "bert-mlm-fp32": library_entry(
        "BERT base, masked tokens, fp32, no mask", tr.BertConfig, tr.BertForMaskedLM, tokens(30522, 16, 256)
    ),
    "albert-shared-layers": library_entry(
        "ALBERT base, fp32: one block's weights used twelve times",
        _ALBERT_BASE,
        tr.AlbertForMaskedLM,
        tokens(30000, 8, 512),
    ),
    "deberta-v2": library_entry(
        "DeBERTa-v2 (small), fp32, disentangled attention",
        _DEBERTA_SMALL,
        tr.DebertaV2ForMaskedLM,
        tokens(32000, 8, 384),
        attention="eager",
    ),
    "t5-small": library_entry(
        "T5 small, fp32, encoder and decoder", _T5_SMALL, tr.T5ForConditionalGeneration, tokens(32128, 8, 512)
    ),
    "t5-small-eager-bf16": library_entry(
        "T5 small, bf16, eager attention",
        _T5_SMALL,
        tr.T5ForConditionalGeneration,
        tokens(32128, 8, 512),
        attention="eager",
        dtype="bfloat16",
    ),
    "vit-b16-autocast": library_entry(
        "ViT-B/16, bf16 autocast",
        partial(tr.ViTConfig, num_labels=1000),
        tr.ViTForImageClassification,
        images(64, 224),
        autocast="bfloat16",
        convolutions=True,
    ),
    "swin-tiny": library_entry(
        "Swin tiny, fp32, shifted windows",
        partial(tr.SwinConfig, num_labels=1000, drop_path_rate=0.0),
        tr.SwinForImageClassification,
        images(32, 224),
        attention="eager",
        convolutions=True,
    ),
    "convnext-tiny": library_entry(
        "ConvNeXt tiny, fp32, depthwise convolutions",
        partial(tr.ConvNextConfig, num_labels=1000),
        tr.ConvNextForImageClassification,
        images(32, 224),
        attention="eager",
        convolutions=True,
    ),
    "clip": library_entry(
        "CLIP B/32, bf16 autocast, contrastive loss",
        tr.CLIPConfig,
        tr.CLIPModel,
        _captioned,
        autocast="bfloat16",
        convolutions=True,
    ),
    "whisper-tiny": library_entry(
        "Whisper tiny, fp32, 1-D convolutions, encoder and decoder",
        tr.WhisperConfig,
        tr.WhisperForConditionalGeneration,
        _speech,
        convolutions=True,
    ),
}
