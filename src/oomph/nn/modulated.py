"""A frozen linear layer with a trained low-rank change of its weight per token."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.common import check_whole
from oomph.ops.mlp import is_conv1d
from oomph.ops.modulation import (
    Int8Weight,
    TokenIndex,
    compute_weight_delta,
    modulated_linear,
    quantize_int8,
    weight_delta_norm,
)


class FrozenLinear(nn.Module):
    """A weight W [d, f] and a bias that are not trained.

    W shares the memory of the original layer, or is in 8 bits (`weight_values`, `weight_scale`).
    """

    weight: Tensor | None
    weight_values: Tensor | None
    weight_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor | Int8Weight, bias: Tensor | None = None) -> None:
        """A transposed view is kept as such."""
        super().__init__()
        if not isinstance(weight, Tensor | Int8Weight) or len(weight.shape) != 2:
            given = list(weight.shape) if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
            raise ArgumentError(
                f"weight is {given}; valid: a matrix [d, f] or an Int8Weight "
                "(for a layer, use ModulatedLinear.from_linear)"
            )
        self.in_features, self.out_features = weight.shape
        base = (None, weight.values, weight.scale) if isinstance(weight, Int8Weight) else (weight, None, None)
        self.register_parameter("weight", _frozen(base[0]))
        self.register_buffer("weight_values", base[1])
        self.register_buffer("weight_scale", base[2])
        self.register_parameter("bias", _frozen(bias))

    @property
    def base_weight(self) -> Tensor | Int8Weight:
        """W [d, f] as it is stored."""
        if self.weight is not None:
            return self.weight
        assert self.weight_values is not None
        assert self.weight_scale is not None
        return Int8Weight(self.weight_values, self.weight_scale)

    def extra_repr(self) -> str:
        base = "8-bit" if self.weight is None else str(self.weight.dtype).removeprefix("torch.")
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, base={base}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving the module to bfloat16 must not round the scales: each multiplies a whole column of W.
        exact = self.weight_scale
        super()._apply(fn, recurse)
        moved = self.weight_scale
        if exact is not None and moved is not None and moved.dtype != exact.dtype:
            keep = not exact.is_meta or moved.is_meta
            self.weight_scale = exact.to(moved.device) if keep else torch.empty_like(moved, dtype=exact.dtype)
        return self


def weight_of(linear: nn.Module) -> Tensor:
    """[d, f], of an nn.Linear, or of a GPT-2 Conv1D, whose weight is transposed."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError(f"{_name(linear)} has no weight matrix; valid: nn.Linear, GPT-2's Conv1D")
    if isinstance(linear, nn.Linear):
        return weight.detach().t()
    if not is_conv1d(linear):
        raise ArgumentError(f"{_name(linear)} is not known; valid: nn.Linear, GPT-2's Conv1D")
    return weight.detach()


class ModulatedLinear(FrozenLinear):
    """y = h W + ((h A) * mod) B + bias: W and bias frozen, A [d, r] and B [r, f] trained, mod per token.

    B is initialized to zero, so that the layer starts as the one it was made from; A is normal with standard
    deviation 1 / sqrt(d).
    """

    def __init__(
        self,
        weight: Tensor | Int8Weight,
        rank: int,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`weight` [d, f]. `dtype` of A and B: default the weight's."""
        check_whole(rank=rank)
        super().__init__(weight, bias)
        self.rank = rank
        stored = weight.scale if isinstance(weight, Int8Weight) else weight
        options: dict[str, Any] = {"device": weight.device, "dtype": dtype or stored.dtype}
        self.A = nn.Parameter(torch.empty(self.in_features, rank, **options))
        self.B = nn.Parameter(torch.empty(rank, self.out_features, **options))
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Module, rank: int, *, eight_bit: bool = False) -> "ModulatedLinear":
        """From an nn.Linear or a GPT-2 Conv1D, which is not changed.

        The weight is shared with it, not copied; with `eight_bit` it is rounded to 8 bits and not shared.
        """
        weight = weight_of(linear)
        base = quantize_int8(weight) if eight_bit else weight
        bias = getattr(linear, "bias", None)
        made = cls(base, rank, bias, dtype=weight.dtype)
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.A, std=self.in_features**-0.5)
        nn.init.zeros_(self.B)

    def forward(self, h: Tensor, mod: Tensor) -> Tensor:
        """h [..., d], mod [..., r] -> [..., f]."""
        return modulated_linear(h, self.base_weight, self.A, self.B, mod, self.bias)

    def compute_weight_delta(self, mod: Tensor, token_idx: TokenIndex) -> Tensor:
        """The change of W at the given tokens: [..., d, f]."""
        return compute_weight_delta(self.A, self.B, mod, token_idx)

    def weight_delta_norm(self, mod: Tensor, *, squared: bool = False) -> Tensor:
        """The Frobenius norm of W's change per token: [...]."""
        return weight_delta_norm(self.A, self.B, mod, squared=squared)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)


def _name(module: object) -> str:
    return type(module).__name__
