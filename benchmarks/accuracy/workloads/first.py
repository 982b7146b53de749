"""The eight workloads that were measured first; their names and sizes stay as they are."""

from __future__ import annotations

from functools import partial

import transformers as tr

from benchmarks.accuracy.workloads.entry import Entry, adamw, from_config, images, library_entry, sgd, tokens
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
    "gpt2-eager-attn": library_entry(
        "GPT-2, eager attention",
        tr.GPT2Config,
        tr.GPT2LMHeadModel,
        tokens(50257, 4, 1024),
        attention="eager",
        dtype="float32",
    ),
    "pythia70m": library_entry(
        "Pythia 70M, fp32", _PYTHIA_70M, tr.GPTNeoXForCausalLM, tokens(10000, 32, 128), dtype="float32"
    ),
    "llama1b-bf16": library_entry(
        "Llama 1B, bf16, GQA", _LLAMA_1B, tr.LlamaForCausalLM, tokens(128256, 2, 2048), dtype="bfloat16"
    ),
    "llama1b-bf16-ckpt": library_entry(
        "Llama 1B, bf16, gradient checkpointing",
        _LLAMA_1B,
        tr.LlamaForCausalLM,
        tokens(128256, 2, 4096),
        checkpointing=True,
        dtype="bfloat16",
    ),
    "llama1b-sgd": library_entry(
        "Llama 1B, fp32, GQA, SGD",
        _LLAMA_1B_SMALL_VOCABULARY,
        tr.LlamaForCausalLM,
        tokens(32000, 2, 1024),
        optimizer=sgd,
        dtype="float32",
    ),
    "resnet50": library_entry(
        "ResNet-50, fp32",
        partial(tr.ResNetConfig, num_labels=1000),
        tr.ResNetForImageClassification,
        images(64, 224),
        attention="eager",
        dtype="float32",
        convolutions=True,
    ),
}
