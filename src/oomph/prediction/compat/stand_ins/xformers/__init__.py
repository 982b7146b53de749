"""A stand-in for xformers: of its ops, those that plain models call."""

from oomph.prediction.compat.stand_ins import VERSIONS

__version__ = VERSIONS["xformers"]
