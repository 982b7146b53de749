"""What fixes are called elsewhere: in other libraries, papers and flags."""

from __future__ import annotations

ELSEWHERE = {  # what it is here, in words -> names elsewhere
    "'recompute'": (
        "gradient_checkpointing grad_checkpointing activation_checkpointing checkpointing checkpoint "
        "activation_recomputation recomputation remat"
    ),
    "'fused_attention' for attention in your own code, or 'attention_backend' for Hugging Face's": (
        "flash_attention flash_attention_2 flash_attention_3 flash_attn flash sdpa xformers "
        "memory_efficient_attention"
    ),
    "'micro_batches'": (
        "gradient_accumulation grad_accumulation gradient_accumulation_steps accumulation accumulate "
        "microbatching micro_batching"
    ),
    "'offload_activations' for activations, or 'optimizer_offload' for the optimizer's state": (
        "cpu_offload cpu_offloading offload offloading"
    ),
    "'offload_activations'": "activation_offload activation_offloading",
    "'optimizer_offload'": "offload_optimizer cpu_adam cpu_adamw zero_offload",
    "'shard'": "fsdp fsdp2 fully_shard zero zero1 zero2 zero3 deepspeed sharding",
    "'optimizer_8bit'": "8bit_adam adam_8bit adam8bit 8bit_adamw adamw_8bit adamw8bit 8bit_optimizer bnb",
    "'fused_loss'": (
        "liger liger_kernel cut_cross_entropy fused_cross_entropy linear_cross_entropy "
        "fused_linear_cross_entropy chunked_loss chunked_cross_entropy"
    ),
    "'autocast' with float32 parameters, or 'bf16_parameters' without": (
        "mixed_precision amp bf16 bfloat16 half"
    ),
    "'fused_optimizer'": "fused_adam fused_adamw",
    "'optimizer_in_backward'": "backward_optimizer lomo",
    "'allocator'": "expandable_segments cuda_alloc_conf pytorch_cuda_alloc_conf",
}
_BY_NAME = {name: here for here, names in ELSEWHERE.items() for name in names.split()}


def hint_for(name: str) -> str | None:
    """Which fix it is here, in words; None where the name is not known."""
    here = _BY_NAME.get(name.strip().lower().replace("-", "_").replace(" ", "_"))
    return None if here is None else f"here that is {here}"
