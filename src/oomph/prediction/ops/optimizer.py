"""Optimizers: ops over lists of tensors."""

from oomph.prediction.ops.registry import op

op("_foreach_zero_ _foreach_copy_", reads_first=False)
