"""Checkpoints: asynchronous, atomic, rotating, loaded without executing code; and export to safetensors."""

from oomph.training.checkpoints.checkpoints import Checkpoints
from oomph.training.checkpoints.export import export
from oomph.training.checkpoints.manifest import Unsound
from oomph.training.checkpoints.rng import rng_state, set_rng_state
from oomph.training.checkpoints.saved import Saved, find, load

__all__ = ["Checkpoints", "Saved", "Unsound", "export", "find", "load", "rng_state", "set_rng_state"]
