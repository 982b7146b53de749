"""Report 002's chunked loss, by its own name: what it meant to do, with the memory it meant to save."""

from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.common import Choice, log_choice, no_compile
from oomph.ops.cross_entropy.arguments import Arguments, check_arguments
from oomph.ops.cross_entropy.choose import choose
from oomph.ops.cross_entropy.loss import compute
from oomph.units import counted


@no_compile
def compute_loss_chunked(
    hidden_states: Tensor, labels: Tensor, lm_head: nn.Module, chunk_size: int = 4096
) -> Tensor:
    """Next-token loss of `lm_head(hidden_states)` in blocks of at most `chunk_size` tokens.

    hidden_states [..., T, D], labels [..., T] (-100: ignored), lm_head an nn.Linear. Small logits are made in
    one go, as in linear_cross_entropy. The report kept every chunk's log-softmax for backward, so in training
    it saved nothing; here no chunk outlives its turn.
    """
    weight, bias = getattr(lm_head, "weight", None), getattr(lm_head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError(
            f"lm_head must be a linear layer with a weight [V, D]; given: {type(lm_head).__name__}"
        )
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ArgumentError(f"chunk_size={chunk_size!r} is not valid; give a positive number of tokens")
    call = Arguments(hidden_states, weight, labels, bias=bias, shift=True)
    check_arguments(call)
    choice = choose(call)
    if choice.impl in ("chunked", "triton"):
        settings = {**choice.settings, "rows": chunk_size, "columns": weight.shape[0]}
        choice = Choice(choice.impl, f"blocks of {counted(chunk_size, 'token')}, as asked for", settings)
    loss = compute(call, log_choice("compute_loss_chunked", choice))
    assert isinstance(loss, Tensor)
    return loss
