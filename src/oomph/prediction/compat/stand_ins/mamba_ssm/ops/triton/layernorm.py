"""The name of layer_norm.py in mamba_ssm 1."""

from .layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn

__all__ = ["RMSNorm", "layer_norm_fn", "rms_norm_fn"]
