"""What backward refuses, for known MLPs and for any function alike."""

import torch

from oomph.errors import ArgumentError


def refuse_second_derivatives() -> None:
    """Called by backward, which runs with gradients enabled for create_graph=True only.

    torch's once_differentiable is not enough: where the gradient that arrives has no graph, as from a sum, it
    returns gradients without one, and a penalty on them is a constant in silence.
    """
    if torch.is_grad_enabled():
        raise ArgumentError(
            "tiled_mlp cannot be differentiated twice (create_graph=True); impl='reference' can"
        )
