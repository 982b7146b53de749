"""state-spaces/mamba, mamba_ssm/models/mixer_seq_simple.py, without attention layers and generation."""

from __future__ import annotations

import math
from collections import namedtuple
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.block import Block
from ..modules.mamba2 import Mamba2
from ..modules.mamba_simple import Mamba
from ..modules.mlp import GatedMLP
from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn
from ..utils.generation import GenerationMixin
from .config_mamba import MambaConfig

CausalLMOutput = namedtuple("CausalLMOutput", ["logits"])


def create_block(
    d_model: int,
    d_intermediate: int = 0,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: list[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Block:
    if layer_idx in (attn_layer_idx or ()):
        raise NotImplementedError("oomph's stand-in for mamba_ssm has no attention layers")
    made = {"device": device, "dtype": dtype}
    config = dict(ssm_cfg or {})
    mixer: Any = {"Mamba1": Mamba, "Mamba2": Mamba2}[config.pop("layer", "Mamba1")]
    norm: Any = RMSNorm if rms_norm else nn.LayerNorm
    mlp: Any = nn.Identity
    if d_intermediate:
        mlp = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **made)
    block = Block(
        d_model,
        partial(mixer, layer_idx=layer_idx, **config, **made),
        mlp,
        partial(norm, eps=norm_epsilon, **made),
        fused_add_norm,
        residual_in_fp32,
    )
    block.layer_idx = layer_idx  # type: ignore[assignment]
    return block


def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        if not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                with torch.no_grad():
                    parameter.div_(math.sqrt(n_residuals_per_layer * n_layer))


class MixerModel(nn.Module):
    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int,
        vocab_size: int,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: list[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.embedding = nn.Embedding(vocab_size, d_model, device=device, dtype=dtype)
        of_block = partial(
            create_block,
            d_model,
            d_intermediate,
            ssm_cfg,
            attn_layer_idx,
            attn_cfg,
            norm_epsilon,
            rms_norm,
            residual_in_fp32,
            fused_add_norm,
            device=device,
            dtype=dtype,
        )
        self.layers = nn.ModuleList([of_block(layer_idx=index) for index in range(n_layer)])
        norm: Any = RMSNorm if rms_norm else nn.LayerNorm
        self.norm_f = norm(d_model, eps=norm_epsilon, device=device, dtype=dtype)
        per_layer = 2 if d_intermediate else 1
        config = initializer_cfg or {}
        self.apply(partial(_init_weights, n_layer=n_layer, n_residuals_per_layer=per_layer, **config))

    def forward(self, input_ids: Tensor, inference_params: Any = None, **mixer_kwargs: Any) -> Tensor:
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, inference_params=inference_params, **mixer_kwargs)
        norm = self.norm_f
        if not self.fused_add_norm:
            residual = hidden if residual is None else hidden + residual
            normed: Tensor = norm(residual.to(dtype=norm.weight.dtype))
            return normed
        fused: Tensor = layer_norm_fn(
            hidden,
            norm.weight,
            norm.bias,
            residual=residual,
            residual_in_fp32=self.residual_in_fp32,
            eps=norm.eps,
            is_rms_norm=isinstance(norm, RMSNorm),
        )
        return fused


class MambaLMHeadModel(nn.Module, GenerationMixin):
    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        multiple = config.pad_vocab_size_multiple
        vocabulary = -(-config.vocab_size // multiple) * multiple
        self.backbone = MixerModel(
            config.d_model,
            config.n_layer,
            config.d_intermediate,
            vocabulary,
            config.ssm_cfg,
            config.attn_layer_idx,
            config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            device=device,
            dtype=dtype,
        )
        self.lm_head = nn.Linear(config.d_model, vocabulary, bias=False, device=device, dtype=dtype)
        self.apply(partial(_init_weights, n_layer=config.n_layer, **(initializer_cfg or {})))
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        hidden = self.backbone(input_ids, inference_params=inference_params, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden = hidden[:, -num_last_tokens:]
        return CausalLMOutput(logits=self.lm_head(hidden))
