"""Report 002's chunked loss, by its own name: what it meant to do, with the memory it meant to save."""

from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.cross_entropy.loss import linear_cross_entropy


def compute_loss_chunked(
    hidden_states: Tensor, labels: Tensor, lm_head: nn.Module, chunk_size: int = 4096
) -> Tensor:
    """Next-token loss of `lm_head(hidden_states)` in blocks of at most `chunk_size` tokens.

    hidden_states [..., T, D], labels [..., T] (-100: ignored), lm_head an nn.Linear. The report kept every
    chunk's log-softmax for backward, so in training it saved nothing; here no chunk outlives its turn.
    """
    weight, bias = getattr(lm_head, "weight", None), getattr(lm_head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError(
            f"lm_head must be a linear layer with a weight [V, D]; given: {type(lm_head).__name__}"
        )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ArgumentError(f"chunk_size={chunk_size!r} is not valid; give a positive number of tokens")
    tokens = min(chunk_size, max(1, labels.numel()))
    budget = tokens * (weight.shape[0] * hidden_states.element_size()) + 32 * labels.numel()
    loss = linear_cross_entropy(hidden_states, weight, labels, bias=bias, shift=True, memory_budget=budget)
    assert isinstance(loss, Tensor)
    return loss
