"""Names of fixes. Imports no torch, so that a wrong name is refused at once."""

from __future__ import annotations

import difflib

from oomph.errors import UserError

# Fixes -> their modules of oomph.fixes and classes, in the order in which they are applied. Shapes and dtypes
# change first; then what modules compute; then what is saved for backward (checkpointing encloses the
# computation, offloading encloses the checkpoint), and how all of it is compiled; then batch and optimizer.
# The last ones do not change the model.
APPLICATION_ORDER: dict[str, tuple[str, str]] = {
    "smaller_vocabulary": ("training_changes", "SmallerVocabulary"),
    "smaller_batch": ("training_changes", "SmallerBatch"),
    "shorter_sequence": ("training_changes", "ShorterSequence"),
    "bf16_parameters": ("workload_settings", "BFloat16Parameters"),
    "autocast": ("workload_settings", "Autocast"),
    "attn_implementation": ("attn_implementation", "AttnImplementation"),
    "fused_attention": ("fused_attention", "FusedAttention"),
    "tiled_mlp": ("tiled_mlp", "TiledMLP"),
    "fused_linear_cross_entropy": ("fused_linear_cross_entropy", "FusedLinearCrossEntropy"),
    "gradient_accumulation_fusion": ("gradient_accumulation_fusion", "GradientAccumulationFusion"),
    "activation_checkpointing": ("activation_checkpointing", "ActivationCheckpointing"),
    "activation_offloading": ("activation_offloading", "ActivationOffloading"),
    "compile": ("compile", "Compile"),
    "micro_batches": ("micro_batches", "MicroBatching"),
    "trainer_optim": ("trainers", "TrainerOptim"),
    "fused_optimizer": ("optimizers.conversion", "FusedOptimizer"),
    "no_foreach": ("optimizers.conversion", "NoForeach"),
    "optimizer_8bit": ("optimizers.low_bit", "Optimizer8Bit"),
    "stochastic_rounding": ("optimizers.low_bit", "StochasticRounding"),
    "optimizer_in_backward": ("optimizers.in_backward", "OptimizerInBackward"),
    "optimizer_cpu_offload": ("optimizers.cpu_offload", "OptimizerCPUOffload"),
    "set_to_none": ("optimizers.conversion", "SetToNone"),
    "allocator": ("workload_settings", "Allocator"),
    "fsdp2": ("fsdp2", "FSDP2"),
}

NAMES_ELSEWHERE = {  # fixes -> what other libraries, papers and flags call them
    "'activation_checkpointing'": (
        "gradient_checkpointing grad_checkpointing checkpointing checkpoint activation_recomputation "
        "recomputation recompute remat"
    ),
    "'fused_attention' for attention in your own code, or 'attn_implementation' for Hugging Face's": (
        "flash_attention flash_attention_2 flash_attention_3 flash_attn flash sdpa xformers "
        "memory_efficient_attention"
    ),
    "'micro_batches'": (
        "gradient_accumulation grad_accumulation gradient_accumulation_steps accumulation accumulate "
        "microbatching micro_batching"
    ),
    "'activation_offloading' for activations, or 'optimizer_cpu_offload' for the optimizer's state": (
        "cpu_offload cpu_offloading offload offloading"
    ),
    "'activation_offloading'": "activation_offload",
    "'optimizer_cpu_offload'": "offload_optimizer cpu_adam cpu_adamw zero_offload",
    "'fsdp2'": "fsdp fully_shard zero zero1 zero2 zero3 deepspeed sharding",
    "'optimizer_8bit'": "8bit_adam adam_8bit adam8bit 8bit_adamw adamw_8bit adamw8bit 8bit_optimizer bnb",
    "'fused_linear_cross_entropy'": (
        "liger liger_kernel cut_cross_entropy fused_cross_entropy linear_cross_entropy chunked_loss "
        "chunked_cross_entropy"
    ),
    "'autocast' with float32 parameters, or 'bf16_parameters' without": (
        "mixed_precision amp bf16 bfloat16 half"
    ),
    "'fused_optimizer'": "fused_adam fused_adamw",
    "'optimizer_in_backward'": "backward_optimizer lomo",
    "'compile'": "torch.compile torch_compile inductor",
    "'compile:activation_memory_budget=0.5'": "activation_memory_budget memory_budget",
    "'allocator'": "expandable_segments cuda_alloc_conf pytorch_cuda_alloc_conf",
}


def _hint(name: str) -> str:
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    for here, names in NAMES_ELSEWHERE.items():
        if plain in names.split():
            return f"here that is {here}"
    close = difflib.get_close_matches(plain, APPLICATION_ORDER, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"the fixes are {', '.join(APPLICATION_ORDER)}"


def check_name(name: str) -> None:
    if name not in APPLICATION_ORDER:
        raise UserError(f"there is no fix {name!r}; {_hint(name)}")
