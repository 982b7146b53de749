"""What fixes are called elsewhere: in other libraries, papers and flags."""

from __future__ import annotations

_OTHERS: dict[tuple[str, ...], str] = {  # a fix's names here, as one line tells them -> names elsewhere
    ("recompute",): (
        "gradient_checkpointing grad_checkpointing activation_checkpointing checkpointing checkpoint "
        "activation_recomputation recomputation remat"
    ),
    ("fused_attention", "attention_backend"): (
        "flash_attention flash_attention_2 flash_attention_3 flash_attn flash sdpa xformers "
        "memory_efficient_attention"
    ),
    ("micro_batches",): (
        "gradient_accumulation grad_accumulation gradient_accumulation_steps accumulation accumulate "
        "microbatching micro_batching"
    ),
    ("offload_activations", "optimizer_offload"): "cpu_offload cpu_offloading offload offloading",
    ("offload_activations",): "activation_offload activation_offloading",
    ("optimizer_offload",): "offload_optimizer cpu_adam cpu_adamw zero_offload",
    ("shard",): "fsdp fsdp2 fully_shard zero zero1 zero2 zero3 deepspeed sharding",
    ("optimizer_8bit",): "8bit_adam adam_8bit adam8bit 8bit_adamw adamw_8bit adamw8bit 8bit_optimizer bnb",
    ("fused_loss",): (
        "liger liger_kernel cut_cross_entropy fused_cross_entropy linear_cross_entropy "
        "fused_linear_cross_entropy chunked_loss chunked_cross_entropy"
    ),
    ("autocast", "bf16_parameters"): "mixed_precision amp bf16 bfloat16 half",
    ("fused_optimizer",): "fused_adam fused_adamw",
    ("optimizer_in_backward",): "backward_optimizer lomo galore_layerwise",
    ("allocator",): "expandable_segments cuda_alloc_conf pytorch_cuda_alloc_conf",
}
_APART = {
    ("fused_attention", "attention_backend"): "for attention in your own code, or 'attention_backend' for "
    "Hugging Face's",
    (
        "offload_activations",
        "optimizer_offload",
    ): "for activations, or 'optimizer_offload' for the optimizer's state",
    ("autocast", "bf16_parameters"): "with float32 parameters, or 'bf16_parameters' without",
}
_BY_NAME = {word: own for own, words in _OTHERS.items() for word in words.split()}


def hint_for(name: str) -> str | None:
    """Which fix it is here, in words; None where the name is not known."""
    own = _BY_NAME.get(name.strip().lower().replace("-", "_").replace(" ", "_"))
    if own is None:
        return None
    more = f" {_APART[own]}" if own in _APART else ""
    return f"here that is {own[0]!r}{more}"


def names_in_hints() -> set[str]:
    return {name for own in _OTHERS for name in own}
