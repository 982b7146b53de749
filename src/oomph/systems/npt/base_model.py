"""The frozen base model of an NPT: a known shape with random weights, or a local Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomph.errors import UserError

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# With the usual initializer_range, attention in such narrow layers would be nearly uniform.
_TINY = {"initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0}

# name -> (model type of transformers, arguments of its config)
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": _LLAMA_3_ROPE,
        },
    ),
    # d_ffn 11008, which the report computes with.
    "llama-2-7b": ("llama", {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "gpt2": ("gpt2", {}),
    "llama-tiny": (
        "llama",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            **_TINY,
        },
    ),
    "gpt2-tiny": (
        "gpt2",
        {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, **_TINY},
    ),
}


def load_base(model_name: str, weights: str | None, dtype: torch.dtype) -> nn.Module:
    """The weights in the local folder `weights`, or random ones of the shape `model_name`."""
    models = _transformers().AutoModelForCausalLM
    device = torch.empty(0).device  # the default device
    if weights is None or device.type == "meta":  # only the shape is needed
        made: nn.Module = models.from_config(_config(model_name, weights), dtype=dtype)
        return made
    _check_is_folder(weights)
    with torch.device("cpu"):  # on other devices, transformers needs accelerate
        loaded: nn.Module = models.from_pretrained(weights, dtype=dtype, local_files_only=True)
    return loaded.to(device)


def base_vocab_size(model_name: str, weights: str | None) -> int:
    """Without building the model."""
    return int(_config(model_name, weights).vocab_size)


def _config(model_name: str, weights: str | None) -> Any:
    configs = _transformers().AutoConfig
    if weights is not None:
        _check_is_folder(weights)
        return configs.from_pretrained(weights, local_files_only=True)
    kind, options = SHAPES[model_name]
    return configs.for_model(kind, **options)


def _check_is_folder(weights: str) -> None:
    if not Path(weights).is_dir():
        raise UserError(
            f"weights={weights!r} is not a folder; give one with config.json and weights, or none"
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("NPT needs Hugging Face transformers: pip install 'oomph[hf]'") from None
    return transformers
