"""Activation checkpointing of functions of single tokens (norms, gates, short convolutions), in slices.

Autograd would save the float32 intermediates of every step of such a function. Here it runs on one slice of
tokens after the other, saves its inputs only, and runs again in backward: a little arithmetic for a multiple
of the memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, no_autocast, no_compile, refuse_second_derivatives
from oomph.units import MiB

# Of one float32 intermediate; a function has a handful of them.
_SLICE_BYTES = 32 * MiB


@no_compile
def tokenwise_checkpoint(
    function: Callable[..., Tensor], tokens: Sequence[Tensor], shared: Sequence[Tensor] = (), *, halo: int = 0
) -> Tensor:
    """function(*tokens, *shared) [B, T, ...], where row t of the result depends on row t of `tokens` only.

    tokens: [B, T, ...] each. With `halo`, the first of them is [B, T + halo, ...] and row t of the result
    depends on its rows t .. t + halo. shared: parameters; the function may reach others, but only these get
    gradients. It must not draw random numbers. Saved for backward: tokens and shared.
    """
    return _TokenwiseCheckpoint.apply(function, halo, len(tokens), *tokens, *shared)  # type: ignore[no-any-return]


class _TokenwiseCheckpoint(OpFunction):
    op = "this layer"
    instead = "call it outside of them"

    @staticmethod
    def forward(ctx: Any, function: Any, halo: int, count: int, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        tokens, shared = tensors[:count], tensors[count:]
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.halo, ctx.count = function, halo, count
        length = tokens[0].shape[1] - halo
        slices = _slices(tokens[0], length)
        result: Tensor | None = None
        with no_autocast(tokens[0]):
            if len(slices) == 1:
                return function(*tensors)  # type: ignore[no-any-return]
            for start, stop in slices:
                part = function(*_rows(tokens, start, stop, halo), *shared)
                if result is None:
                    result = part.new_empty(part.shape[0], length, *part.shape[2:])
                result[:, start:stop].copy_(part)
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("this layer", "its gradients are computed by hand")
        saved, count, halo, wanted = ctx.saved_tensors, ctx.count, ctx.halo, ctx.needs_input_grad[3:]
        tokens, shared = saved[:count], saved[count:]
        slices = _slices(tokens[0], grad.shape[1])
        whole = len(slices) == 1
        grads: list[Tensor | None] = [None] * len(saved)
        with no_autocast(grad), torch.enable_grad():
            for start, stop in slices:
                inputs = [*(tokens if whole else _rows(tokens, start, stop, halo)), *shared]
                inputs = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
                trained = [index for index, want in enumerate(wanted) if want]
                part = ctx.function(*inputs)
                found = torch.autograd.grad(
                    part, [inputs[index] for index in trained], grad if whole else grad[:, start:stop]
                )
                del part
                for index, new in zip(trained, found, strict=True):
                    old = grads[index]
                    if index >= count:  # a parameter: summed in float32 or wider
                        wide = torch.promote_types(new.dtype, torch.float32)
                        grads[index] = new.to(wide) if old is None else old.add_(new)
                    elif whole:
                        grads[index] = new
                    else:
                        if old is None:
                            old = grads[index] = torch.zeros_like(tokens[index])
                        _add_rows(old, new, start, halo if index == 0 else 0)
        shared_grads = (
            None if each is None else each.to(x.dtype) for each, x in zip(grads[count:], shared, strict=True)
        )
        return (None, None, None, *grads[:count], *shared_grads)


def _rows(tokens: Sequence[Tensor], start: int, stop: int, halo: int) -> list[Tensor]:
    return [x[:, start : stop + halo] if index == 0 else x[:, start:stop] for index, x in enumerate(tokens)]


def _add_rows(whole: Tensor, part: Tensor, start: int, halo: int) -> None:
    """Neighbouring slices share the rows of the halo, whose gradients add up."""
    whole[:, start : start + halo] += part[:, :halo]
    whole[:, start + halo : start + part.shape[1]].copy_(part[:, halo:])


def _slices(x: Tensor, length: int) -> list[tuple[int, int]]:
    """At least one, also of no tokens."""
    row_bytes = max(1, 4 * x.numel() // max(1, x.shape[1]))
    step = max(1, min(length, _SLICE_BYTES // row_bytes))
    return [(start, min(start + step, length)) for start in range(0, max(1, length), step)]
