"""Linear layers with a frozen weight, in the base model's dtype or in 8 bits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.ops.common import matmul_dtype, no_autocast, no_compile
from oomph.ops.modulation import Int8Weight, quantize_int8
from oomph.ops.modulation.weights import add_times_weight, add_times_weight_transposed


def frozen_linear(h: Tensor, weight_df: Tensor | Int8Weight, bias: Tensor | None = None) -> Tensor:
    """h W + bias: [..., d] -> [..., f]. An 8-bit W is dequantized slice by slice, in forward and backward."""
    if isinstance(weight_df, Tensor):
        return F.linear(h, weight_df.t(), bias)
    return _int8_linear(h.to(matmul_dtype(h)), weight_df, bias)


@no_compile
def _int8_linear(h: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    return _Int8Linear.apply(h, weight.values, weight.scale, bias)  # type: ignore[no-any-return]


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(values, scale)
        h_Nd = h.reshape(-1, h.shape[-1])
        with no_autocast(h):
            y_Nf = h.new_zeros(len(h_Nd), values.shape[1])
            if bias is not None:
                y_Nf += bias
            add_times_weight(y_Nf, h_Nd, values, scale)
        return y_Nf.view(*h.shape[:-1], values.shape[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        values, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        g_Nf = g.reshape(-1, g.shape[-1]).contiguous()
        with no_autocast(g):
            grad_Nd = g.new_zeros(len(g_Nf), values.shape[0])
            add_times_weight_transposed(grad_Nd, g_Nf, values, scale)
        return grad_Nd.view(*g.shape[:-1], values.shape[0]), None, None, None


class Int8Linear(nn.Module):
    """A frozen linear layer whose weight has 8 bits, with a float32 scale per output feature."""

    weight_values: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Module) -> None:
        """From an nn.Linear, whose weight is [f, d], or GPT-2's Conv1D, whose weight is [d, f]."""
        super().__init__()
        weight = linear.weight
        assert isinstance(weight, Tensor)
        weight_df = weight.detach().t() if isinstance(linear, nn.Linear) else weight.detach()
        quantised = quantize_int8(weight_df)
        self.in_features, self.out_features = weight_df.shape
        self.register_buffer("weight_values", quantised.values)
        self.register_buffer("weight_scale", quantised.scale)
        bias = linear.bias
        frozen = nn.Parameter(bias.detach(), requires_grad=False) if isinstance(bias, Tensor) else None
        self.register_parameter("bias", frozen)

    def forward(self, h: Tensor) -> Tensor:
        return frozen_linear(h, Int8Weight(self.weight_values, self.weight_scale), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, base=8-bit"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        # `.to(dtype)` must not round the scales: they only follow the module's device.
        exact = self.weight_scale
        super()._apply(fn, recurse)
        device = self.weight_scale.device
        meta_to_real = exact.is_meta and device.type != "meta"
        self.weight_scale = torch.empty_like(exact, device=device) if meta_to_real else exact.to(device)
        return self


def is_linear(module: nn.Module) -> bool:
    """nn.Linear or GPT-2's Conv1D, recognised by name so that transformers need not be installed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def quantize_linear_layers(module: nn.Module) -> None:
    """Replace every linear layer inside `module` by an Int8Linear."""
    for name, child in list(module.named_children()):
        if is_linear(child):
            setattr(module, name, Int8Linear(child))
        else:
            quantize_linear_layers(child)
