"""What the tests of several ops measure."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def relative_error(found, right):
    found, right = found.detach().double().cpu(), right.detach().double().cpu()
    return float((found - right).norm() / right.norm().clamp(min=1e-30))


def saved_beside(given, call):
    """What autograd saves for backward in a call, other than the tensors given."""
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    assert any(each.requires_grad for each in (result if isinstance(result, tuple) else (result,)))
    return [
        tensor for at, tensor in saved.items() if at not in {x.untyped_storage().data_ptr() for x in given}
    ]


class Products(TorchDispatchMode):
    """The shapes of the results of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.shapes.append(tuple(result.shape))
        return result
