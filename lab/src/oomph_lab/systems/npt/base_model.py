"""The frozen base model of an NPT: a known shape with random weights, or a local Hugging Face folder; and its
linear layers, in the base model's dtype or in 8 bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.nn.modulated import FrozenLinear, weight_of
from oomph.ops.mlp import is_conv1d
from oomph.ops.modulation import Int8Weight, modulated_linear, quantize_int8

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

_ADVICE = "give a folder with config.json and weights that transformers can read, or none"


def load_base(model_name: str, weights: str | None, dtype: torch.dtype) -> nn.Module:
    """The weights in the local folder `weights`, or random ones of the shape `model_name`."""
    models = _transformers().AutoModelForCausalLM
    device = torch.empty(0).device  # the default device
    if weights is None or device.type == "meta":  # only the shape is needed
        made: nn.Module = models.from_config(_config(model_name, weights), dtype=dtype)
        return made
    with torch.device("cpu"):  # on other devices, transformers needs accelerate
        loaded, info = _read(models, weights, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):  # transformers makes them at random
        raise UserError(f"weights={weights!r} have no {missing[0]} and {len(missing) - 1} others; {_ADVICE}")
    return loaded.to(device)  # type: ignore[no-any-return]


def base_vocab_size(model_name: str, weights: str | None) -> int:
    """Without building the model."""
    return int(_config(model_name, weights).vocab_size)


def _config(model_name: str, weights: str | None) -> Any:
    configs = _transformers().AutoConfig
    if weights is not None:
        return _read(configs, weights)
    kind, options = SHAPES[model_name]
    return configs.for_model(kind, **options)


def _read(kind: Any, weights: str, **options: Any) -> Any:
    """What `from_pretrained` of a class of transformers finds in the folder."""
    if not Path(weights).is_dir():
        raise UserError(f"weights={weights!r} is not a folder; {_ADVICE}")
    try:
        return kind.from_pretrained(weights, local_files_only=True, **options)
    except Exception as error:  # transformers, safetensors and huggingface_hub each have their own
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"weights={weights!r} cannot be loaded ({type(error).__name__}: {first:.200}); {_ADVICE}"
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("NPT needs Hugging Face transformers: pip install 'oomph[hf]'") from None
    return transformers


# Linear layers ---------------------------------------------------------------------------------------


def frozen_linear(h: Tensor, weight_df: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """h W + bias: [..., d] -> [..., f]. An 8-bit W is dequantized slice by slice, in forward and backward."""
    if isinstance(weight_df, Tensor):
        return F.linear(h, weight_df.t(), bias)
    # The low-rank change of nothing: zeros, of which the products take no time beside that with W.
    d, f = weight_df.shape
    none = h.new_zeros(1)
    return modulated_linear(h, weight_df, none.expand(d, 1), none.expand(1, f), none, bias)


class Int8Linear(FrozenLinear):
    """A frozen linear layer whose weight has 8 bits, with a float32 scale per output feature."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(quantize_int8(weight_of(linear)), getattr(linear, "bias", None))

    def forward(self, h: Tensor) -> Tensor:
        return frozen_linear(h, self.base_weight, self.bias)


def quantize_linear_layers(module: nn.Module) -> None:
    """Replace every linear layer inside `module` by an Int8Linear."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) or is_conv1d(child):
            setattr(module, name, Int8Linear(child))
        else:
            quantize_linear_layers(child)
