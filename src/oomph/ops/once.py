"""Second derivatives, which backward passes written by hand do not have."""

import torch

from oomph.errors import ArgumentError


def refuse_second_derivatives(op: str, others: str = "impl='reference' can") -> None:
    """Called by a backward, which runs with gradients enabled for create_graph=True only.

    torch's once_differentiable is not enough: where the gradient that arrives has no graph, as from a sum, it
    returns gradients without one, and a penalty on them is a constant in silence.
    """
    if torch.is_grad_enabled():
        raise ArgumentError(f"{op} cannot be differentiated twice (create_graph=True); {others}")
