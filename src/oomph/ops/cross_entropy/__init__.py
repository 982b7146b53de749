"""Linear layer and cross-entropy in one: the loss of a language model without its logits."""

from oomph.ops.cross_entropy.chunked_loss import compute_loss_chunked
from oomph.ops.cross_entropy.loss import linear_cross_entropy

__all__ = ["compute_loss_chunked", "linear_cross_entropy"]
