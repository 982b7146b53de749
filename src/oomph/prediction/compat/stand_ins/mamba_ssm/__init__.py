"""A stand-in for mamba-ssm."""

from oomph.prediction.compat.stand_ins import VERSIONS

from .models.mixer_seq_simple import MambaLMHeadModel
from .modules.mamba2 import Mamba2
from .modules.mamba_simple import Mamba
from .ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn

__version__ = VERSIONS["mamba_ssm"]
__all__ = ["Mamba", "Mamba2", "MambaLMHeadModel", "mamba_inner_fn", "selective_scan_fn"]
