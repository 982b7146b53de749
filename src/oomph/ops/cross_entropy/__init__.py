"""Linear layer and cross-entropy in one op: the loss of a language model without its logits."""

from oomph.ops.cross_entropy.api import compute_loss_chunked, linear_cross_entropy

__all__ = ["compute_loss_chunked", "linear_cross_entropy"]
