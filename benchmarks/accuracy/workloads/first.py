"""The eight workloads that were measured first; their names and sizes stay as they are."""

from __future__ import annotations

from functools import partial

import transformers as tr

from benchmarks.accuracy.workloads.entry import Entry, adamw, from_config, images, sgd, tokens
from oomph.workload import Workload

_LLAMA_1B = partial(
    tr.LlamaConfig,
    vocab_size=128256,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=8192,
    max_position_embeddings=8192,
)
_LLAMA_1B_SMALL_VOCABULARY = partial(
    tr.LlamaConfig,
    vocab_size=32000,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=8192,
)
_PYTHIA_70M = partial(
    tr.GPTNeoXConfig,
    vocab_size=10000,
    hidden_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    intermediate_size=2048,
    max_position_embeddings=2048,
)
_GPT2 = from_config(tr.GPT2Config, tr.GPT2LMHeadModel)

FIRST = {
    "gpt2-fp32": Entry(
        Workload(_GPT2, tokens(50257, 8, 512), optimizer=adamw, dtype="float32"),
        "GPT-2, fp32",
    ),
    "gpt2-autocast": Entry(
        Workload(_GPT2, tokens(50257, 8, 1024), optimizer=adamw, dtype="float32", autocast="bfloat16"),
        "GPT-2, bf16 autocast",
    ),
    "gpt2-eager-attn": Entry(
        Workload(
            from_config(tr.GPT2Config, tr.GPT2LMHeadModel, attention="eager"),
            tokens(50257, 4, 1024),
            optimizer=adamw,
            dtype="float32",
        ),
        "GPT-2, eager attention",
    ),
    "pythia70m": Entry(
        Workload(
            from_config(_PYTHIA_70M, tr.GPTNeoXForCausalLM),
            tokens(10000, 32, 128),
            optimizer=adamw,
            dtype="float32",
        ),
        "Pythia 70M, fp32",
    ),
    "llama1b-bf16": Entry(
        Workload(
            from_config(_LLAMA_1B, tr.LlamaForCausalLM),
            tokens(128256, 2, 2048),
            optimizer=adamw,
            dtype="bfloat16",
        ),
        "Llama 1B, bf16, GQA",
    ),
    "llama1b-bf16-ckpt": Entry(
        Workload(
            from_config(_LLAMA_1B, tr.LlamaForCausalLM, checkpointing=True),
            tokens(128256, 2, 4096),
            optimizer=adamw,
            dtype="bfloat16",
        ),
        "Llama 1B, bf16, gradient checkpointing",
    ),
    "llama1b-sgd": Entry(
        Workload(
            from_config(_LLAMA_1B_SMALL_VOCABULARY, tr.LlamaForCausalLM),
            tokens(32000, 2, 1024),
            optimizer=sgd,
            dtype="float32",
        ),
        "Llama 1B, fp32, GQA, SGD",
    ),
    "resnet50": Entry(
        Workload(
            from_config(
                partial(tr.ResNetConfig, num_labels=1000), tr.ResNetForImageClassification, attention="eager"
            ),
            images(64, 224),
            optimizer=adamw,
            dtype="float32",
        ),
        "ResNet-50, fp32",
        convolutions=True,
    ),
}
