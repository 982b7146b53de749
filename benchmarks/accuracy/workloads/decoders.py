"""Decoder language models from Hugging Face configs, and the optimizers that train them."""

from __future__ import annotations

from functools import partial

import torch
import transformers as tr

from benchmarks.accuracy.workloads.entry import (
    Entry,
    KeepsGradients,
    adamw,
    clipped,
    from_config,
    library_entry,
    tokens,
)
from oomph.workload import Workload

_GPT2 = from_config(tr.GPT2Config, tr.GPT2LMHeadModel)
_LLAMA_SMALL = partial(
    tr.LlamaConfig,
    vocab_size=32000,
    hidden_size=1024,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    intermediate_size=2816,
    max_position_embeddings=8192,
)
_QWEN3_600M = partial(
    tr.Qwen3Config,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
_GEMMA2_SMALL = partial(
    tr.Gemma2Config,
    vocab_size=32000,
    hidden_size=1152,
    intermediate_size=4608,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    sliding_window=512,
)
_GEMMA3_SMALL = partial(
    tr.Gemma3TextConfig,
    vocab_size=64000,
    hidden_size=1152,
    intermediate_size=4608,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    sliding_window=512,
)
_MISTRAL_SMALL = partial(
    tr.MistralConfig,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    sliding_window=512,
)
_PHI_SMALL = partial(
    tr.PhiConfig,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
)
_MIXTRAL_TINY = partial(
    tr.MixtralConfig,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=4,
    num_local_experts=8,
    max_position_embeddings=4096,
)
_QWEN3_MOE_TINY = partial(
    tr.Qwen3MoeConfig,
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=4,
)
_BLOOM_SMALL = partial(tr.BloomConfig, vocab_size=50304, hidden_size=1024, n_layer=8, n_head=16)
_OPT_350M = partial(
    tr.OPTConfig, hidden_size=1024, word_embed_proj_dim=1024, num_hidden_layers=16, num_attention_heads=16,
    ffn_dim=4096,
)  # fmt: skip

DECODERS = {
    "qwen3-0.6b-ckpt": library_entry(
        "Qwen3 0.6B, bf16, GQA, gradient checkpointing, tied head",
        _QWEN3_600M,
        tr.Qwen3ForCausalLM,
        tokens(151936, 2, 2048),
        checkpointing=True,
        dtype="bfloat16",
    ),
    "gemma2-eager": library_entry(
        "Gemma-2 (small), bf16, eager attention with soft caps",
        _GEMMA2_SMALL,
        tr.Gemma2ForCausalLM,
        tokens(32000, 4, 1024),
        attention="eager",
        dtype="bfloat16",
    ),
    "gemma3-text": library_entry(
        "Gemma-3 text (small), bf16, head size 256, sliding and full layers",
        _GEMMA3_SMALL,
        tr.Gemma3ForCausalLM,
        tokens(64000, 4, 1024),
        dtype="bfloat16",
    ),
    "mistral-sliding": library_entry(
        "Mistral (small), bf16, sliding window of 512 over 2048 tokens",
        _MISTRAL_SMALL,
        tr.MistralForCausalLM,
        tokens(32000, 4, 2048),
        dtype="bfloat16",
    ),
    "mistral-sliding-fp32": library_entry(
        "Mistral (small), fp32, GQA with a mask",
        _MISTRAL_SMALL,
        tr.MistralForCausalLM,
        tokens(32000, 2, 1024),
        dtype="float32",
    ),
    "phi-autocast": library_entry(
        "Phi (small), bf16 autocast, partial rotary",
        _PHI_SMALL,
        tr.PhiForCausalLM,
        tokens(51200, 4, 1024),
        autocast="bfloat16",
    ),
    "bloom-alibi": library_entry(
        "BLOOM (small), bf16, ALiBi",
        _BLOOM_SMALL,
        tr.BloomForCausalLM,
        tokens(50304, 4, 1024),
        attention="eager",
        dtype="bfloat16",
    ),
    "opt-fp16": library_entry(
        "OPT (small), pure fp16, dropout, SGD with momentum",
        _OPT_350M,
        tr.OPTForCausalLM,
        tokens(50272, 4, 1024),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9),
        dtype="float16",
    ),
    "mixtral-eager-experts": library_entry(
        "Mixtral (tiny), bf16, one expert after another: shapes depend on the routing",
        _MIXTRAL_TINY,
        tr.MixtralForCausalLM,
        tokens(32000, 4, 1024),
        experts="eager",
        dtype="bfloat16",
    ),
    "qwen3-moe": library_entry(
        "Qwen3-MoE (tiny), bf16, the library's default expert kernel",
        _QWEN3_MOE_TINY,
        tr.Qwen3MoeForCausalLM,
        tokens(32000, 4, 1024),
        dtype="bfloat16",
    ),
    "llama-eager-4096": library_entry(
        "Llama (small), bf16, eager attention over 4096 tokens",
        _LLAMA_SMALL,
        tr.LlamaForCausalLM,
        tokens(32000, 1, 4096),
        attention="eager",
        dtype="bfloat16",
    ),
    "llama-padded": library_entry(
        "Llama (small), bf16 autocast, padding mask",
        _LLAMA_SMALL,
        tr.LlamaForCausalLM,
        tokens(32000, 4, 1024, padded=True),
        autocast="bfloat16",
    ),
    "llama-adafactor": library_entry(
        "Llama (small), bf16, Adafactor",
        _LLAMA_SMALL,
        tr.LlamaForCausalLM,
        tokens(32000, 4, 1024),
        optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-3),
        dtype="bfloat16",
    ),
    "llama-forward-backward": library_entry(
        "Llama (small), fp32, no optimizer: gradients stay",
        _LLAMA_SMALL,
        tr.LlamaForCausalLM,
        tokens(32000, 4, 1024),
        optimizer=None,
        dtype="float32",
    ),
    "gpt2-clip-accumulate": Entry(
        Workload(_GPT2, tokens(50257, 4, 512), optimizer=clipped(adamw), autocast="bfloat16", accumulate=4),
        "GPT-2, bf16 autocast, four micro-batches, clipped gradients",
    ),
    "gpt2-fused-adamw": Entry(
        Workload(
            _GPT2,
            tokens(50257, 4, 256),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        ),
        "GPT-2, fp32, fused AdamW, small batch: the optimizer matters",
    ),
    "gpt2-foreach-peak": Entry(
        Workload(_GPT2, tokens(50257, 1, 64), optimizer=adamw),
        "GPT-2, fp32, tiny batch: the peak is in the foreach optimizer",
    ),
    "gpt2-sgdm-forloop": Entry(
        Workload(
            _GPT2,
            tokens(50257, 1, 64),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, foreach=False),
        ),
        "GPT-2, fp32, tiny batch, SGD with momentum, one parameter at a time",
    ),
    "gpt2-keeps-gradients": Entry(
        Workload(_GPT2, tokens(50257, 4, 512), optimizer=lambda params: KeepsGradients(params, lr=1e-4)),
        "GPT-2, fp32, zero_grad(set_to_none=False)",
    ),
}
