"""Data, tensor and context parallelism, applied to a model from outside."""

from oomph.parallel.parallelize import Parallel, parse_parallel

__all__ = ["Parallel", "parse_parallel"]
