"""The last linear layer of a model and its cross-entropy in one module, without the logits."""

import dataclasses
import difflib
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.common import check_whole
from oomph.ops.cross_entropy import linear_cross_entropy
from oomph.ops.cross_entropy.reference import CrossEntropyOptions

# forward takes these: they differ from call to call.
_PER_CALL = ("bias", "token_weight")
_OPTIONS = tuple(
    field.name for field in dataclasses.fields(CrossEntropyOptions) if field.name not in _PER_CALL
)


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module that holds the weight [num_classes, in_features] and the options.

    Parameters, their names and their initialization are those of nn.Linear(in_features, num_classes), so
    either loads the other's state_dict. `options` are those of linear_cross_entropy; a `class_weight` moves
    with the module but is not in its state_dict.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole(in_features=in_features, num_classes=num_classes)
        self.in_features, self.num_classes = in_features, num_classes
        _check_names(options)
        self.register_buffer("class_weight", options.pop("class_weight", None), persistent=False)
        self.options = options
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        own = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Module, **options: Any) -> "LinearCrossEntropyLoss":
        """Around an nn.Linear, or the nn.Embedding a model ties its head to. Its parameters are shared."""
        if not isinstance(linear, nn.Linear | nn.Embedding):
            raise ArgumentError(
                f"linear is a {type(linear).__name__}; valid: an nn.Linear or an nn.Embedding"
            )
        weight, bias = linear.weight, getattr(linear, "bias", None)
        if not isinstance(weight, nn.Parameter):
            raise ArgumentError("linear's weight is computed (parametrized), so it cannot be shared")
        num_classes, in_features = weight.shape
        made = cls(in_features, num_classes, bias=bias is not None, device="meta", **options)
        made.weight, made.bias = weight, bias
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        # nn.Linear's own, whatever that is in the torch that is installed.
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, target: Tensor, token_weight: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., in_features], target [...] -> loss; (loss, lse) with return_lse=True."""
        return linear_cross_entropy(
            x,
            self.weight,
            target,
            bias=self.bias,
            class_weight=self.class_weight,
            token_weight=token_weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        parts = [
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}"
        ]
        parts += [f"{name}={value!r}" for name, value in self.options.items()]
        parts += [] if self.class_weight is None else ["class_weight=given"]
        return ", ".join(parts)


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name in _PER_CALL:
            raise ArgumentError(f"{name} is given per call: loss(x, target, {name}=...)")
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(_OPTIONS)}"
            raise ArgumentError(f"option {name!r} is not known; {hint}")
