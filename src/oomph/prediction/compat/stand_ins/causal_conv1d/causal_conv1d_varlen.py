"""Memory: Dao-AILab/causal-conv1d, causal_conv1d/causal_conv1d_varlen.py."""

from functools import partial

from torch import Tensor

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "causal_conv1d")


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last columns of each sequence in x [rows, channels]."""
    states = x.new_empty(cu_seqlens.shape[0] - 1, state_len, x.shape[1])
    _kernel((x, cu_seqlens, states))
    return states.transpose(1, 2)
