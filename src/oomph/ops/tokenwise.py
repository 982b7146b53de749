"""Functions of single tokens (norms, gates, short convolutions) of which only the inputs are kept.

Autograd would keep the float32 intermediates of every step of such a function. Here it runs on one slice of
tokens after the other, keeps its inputs, and runs again in backward: a little arithmetic for a multiple of
the memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_autocast, no_compile, refuse_second_derivatives
from oomph.units import MiB

# Of one float32 intermediate; a function has a handful of them.
_SLICE_BYTES = 32 * MiB


@no_compile
def tokenwise_checkpoint(
    function: Callable[..., Tensor],
    tokens: Sequence[Tensor],
    shared: Sequence[Tensor] = (),
    *,
    halo: int = 0,
) -> Tensor:
    """function(*tokens, *shared) [B, T, ...], where row t of the result depends on row t of `tokens` only.

    tokens: [B, T, ...] each. With `halo`, the first of them is [B, T + halo, ...] and row t of the result
    depends on its rows t .. t + halo. shared: parameters, which the function may also know as attributes of
    something, but only those given here get gradients. It must not draw random numbers.
    """
    return _Recomputed.apply(function, halo, len(tokens), *tokens, *shared)  # type: ignore[no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, halo: int, count: int, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        tokens, shared = tensors[:count], tensors[count:]
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.halo, ctx.count = function, halo, count
        result: Tensor | None = None
        length = tokens[0].shape[1] - halo
        slices = _slices(tokens[0], length)
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
        saved, count, halo = ctx.saved_tensors, ctx.count, ctx.halo
        tokens, shared = saved[:count], saved[count:]
        wanted = ctx.needs_input_grad[3:]
        slices = _slices(tokens[0], grad.shape[1])
        whole: list[Tensor | None] = [None] * count
        sums: list[Tensor | None] = [None] * len(shared)
        with no_autocast(grad), torch.enable_grad():
            for start, stop in slices:
                of_slice = tokens if len(slices) == 1 else _rows(tokens, start, stop, halo)
                rows = [
                    each.detach().requires_grad_(want) for each, want in zip(of_slice, wanted, strict=False)
                ]
                own = [
                    each.detach().requires_grad_(want)
                    for each, want in zip(shared, wanted[count:], strict=True)
                ]
                part = ctx.function(*rows, *own)
                trained = [each for each in (*rows, *own) if each.requires_grad]
                grad_part = grad if len(slices) == 1 else grad[:, start:stop]
                found = iter(torch.autograd.grad(part, trained, grad_part))
                del part
                for index, each in enumerate(rows):
                    if each.requires_grad and len(slices) == 1:
                        whole[index] = next(found)
                    elif each.requires_grad:
                        if start == 0:
                            whole[index] = torch.zeros_like(tokens[index])
                        _place(whole[index], next(found), start, halo if index == 0 else 0)
                for index, each in enumerate(own):
                    if each.requires_grad:
                        new, old = next(found), sums[index]
                        wide = torch.promote_types(new.dtype, torch.float32)
                        sums[index] = new.to(wide) if old is None else old.add_(new)
        grads = [
            None if each is None else each.to(like.dtype) for each, like in zip(sums, shared, strict=True)
        ]
        return (None, None, None, *whole, *grads)


def _rows(tokens: Sequence[Tensor], start: int, stop: int, halo: int) -> list[Tensor]:
    return [
        each[:, start : stop + halo] if index == 0 else each[:, start:stop]
        for index, each in enumerate(tokens)
    ]


def _place(whole: Tensor | None, part: Tensor, start: int, halo: int) -> None:
    """Neighbouring slices share the halo's rows, whose gradients add up."""
    assert whole is not None
    whole[:, start : start + halo] += part[:, :halo]
    whole[:, start + halo : start + part.shape[1]].copy_(part[:, halo:])


def _slices(x: Tensor, length: int) -> list[tuple[int, int]]:
    """At least one, also of no tokens."""
    row_bytes = max(1, 4 * x.numel() // max(1, x.shape[1]))
    step = max(1, min(length, _SLICE_BYTES // row_bytes))
    return [(start, min(start + step, length)) for start in range(0, max(1, length), step)]
