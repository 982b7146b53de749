"""When an op may add a weight's gradient to `.grad` itself, instead of handing it to autograd to be added."""

import torch
from torch import Tensor

from oomph.ops.launch import is_fake


def has_hooks(weight: Tensor) -> bool:
    """Does somebody wait for its next gradient to arrive?"""
    return bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def may_add_to_grad(weight: Tensor) -> bool:
    """Is there a plain gradient already, and no hook? Whether autograd would add, backward alone can tell."""
    there = weight.grad
    return (
        there is not None
        and (type(there) is Tensor or is_fake(there))
        and there.layout == torch.strided
        and there.dtype == weight.dtype
        and there.shape == weight.shape
        and not there.requires_grad
        and not has_hooks(weight)
    )


def adds_to_grad(weight: Tensor) -> bool:
    """In a backward pass: is adding to `.grad` the same as handing the gradient to autograd?"""
    return may_add_to_grad(weight) and weight.requires_grad and _autograd_would_add(weight)


def _autograd_would_add(weight: Tensor) -> bool:
    """In loss.backward() it would; torch.autograd.grad() hands the gradient out and leaves .grad alone."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # what it answers inside torch.autograd.grad
        return False
