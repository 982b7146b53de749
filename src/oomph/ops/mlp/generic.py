"""Any function of single tokens in tiles: forward without a graph, backward with the graph of one tile.

Saved for backward: x, the parameters, the autocast settings, and per tile the state of the random generators
(as `torch.utils.checkpoint` does), so that dropout drops the same features when a tile is computed again.
Parameters are inputs of the autograd function: each gets its gradient once, summed over tiles in fp32.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from oomph.errors import ArgumentError
from oomph.ops.common import OpFunction, refuse_second_derivatives, version_of, wide_dtype
from oomph.ops.mlp.autograd import spans

AutocastSettings = list[tuple[str, torch.dtype, bool]]
GeneratorStates = tuple[Tensor, list[int], list[Tensor]]


@dataclass
class _TiledFunction:
    """What backward needs to compute every tile again."""

    function: Callable[[Tensor], Any]
    tile: int
    autocast: AutocastSettings
    generators: list[GeneratorStates] = field(default_factory=list)  # before each tile; filled by forward

    def __call__(self, x_TD: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.autocast:
                # Without its cache: code that needs a graph must not find a weight that was cast without one.
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            out = self.function(x_TD)
        if not isinstance(out, Tensor):
            raise ArgumentError(f"the function returned a {type(out).__name__}; valid: one tensor")
        if out.dim() < 1 or out.shape[0] != x_TD.shape[0]:
            raise ArgumentError(
                f"the function made {tuple(out.shape)} of {tuple(x_TD.shape)}; valid: one row per token"
            )
        return out


def checkpoint_in_tiles(
    function: Callable[[Tensor], Any], x: Tensor, parameters: Sequence[Tensor], tile: int
) -> Tensor:
    """`function` over the tokens of x [..., D]; it gets tiles [tile, D] and returns [tile, ...]."""
    tiled = _TiledFunction(function, tile, _autocast_settings(x))
    if torch.is_grad_enabled():
        parameters = list(
            {id(each): each for each in (*parameters, *_trained_leaves(tiled, x, parameters))}.values()
        )
    out: Tensor = _CheckpointInTiles.apply(tiled, torch.is_grad_enabled(), x, *parameters)
    return out


def _trained_leaves(tiled: _TiledFunction, x: Tensor, listed: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the function trains: one token runs with a graph, whose leaves these are."""
    token = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])[:1].clone()
    with _restored_generators(x), torch.enable_grad():
        waiting = [tiled(token).grad_fn]
    # The graph of a listed tensor that was itself computed is the caller's.
    seen: set[Any] = {None, *(each.grad_fn for each in listed)}
    leaves = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)  # type: ignore[union-attr]
    return leaves


class _CheckpointInTiles(OpFunction):
    op = "tiled_mlp"

    @staticmethod
    def forward(
        ctx: Any, tiled: _TiledFunction, with_backward: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        # Saved parameters serve one purpose: autograd raises if they change before backward. What is saved
        # may come back as another tensor, as from a checkpoint, so the gradients are taken with these.
        ctx.save_for_backward(x, *parameters)
        ctx.tiled, ctx.parameters = tiled, parameters
        x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        out, version = None, version_of(x_ND)
        for start, stop in spans(x_ND.shape[0], tiled.tile):
            if with_backward:
                tiled.generators.append(_generator_states(x))
            part = tiled(x_ND[start:stop])
            if version_of(x_ND) != version:
                raise ArgumentError("the function writes into its tokens, which backward needs as they were")
            if out is None:
                out = part.new_empty(x_ND.shape[0], *part.shape[1:])
            out[start:stop] = part
            del part
        assert out is not None
        return out.view(*x.shape[:-1], *out.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        refuse_second_derivatives("tiled_mlp")
        tiled: _TiledFunction = ctx.tiled
        x, *_ = ctx.saved_tensors
        _, _, needs_x, *needs = ctx.needs_input_grad
        x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        grad_out = grad_out.reshape(x_ND.shape[0], *grad_out.shape[x.dim() - 1 :])
        grad_x = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if needs_x else None
        wanted = [parameter for parameter, need in zip(ctx.parameters, needs, strict=True) if need]
        sums: list[Tensor | None] = [None] * len(wanted)
        tiles = list(spans(x_ND.shape[0], tiled.tile))
        with _restored_generators(x), _without_hooks(wanted):
            for (start, stop), states in zip(tiles, tiled.generators, strict=True):
                _set_generator_states(states)
                x_TD = x_ND[start:stop].requires_grad_(needs_x)
                with torch.enable_grad():
                    out = tiled(x_TD)
                if out.requires_grad:
                    # The graph is retained for tensors that were computed outside of the function: every tile
                    # goes through their graph. That of the tile itself is freed with its result.
                    inputs = [x_TD, *wanted] if needs_x else wanted
                    grads = torch.autograd.grad(
                        out, inputs, grad_out[start:stop], allow_unused=True, retain_graph=True
                    )
                else:
                    grads = (None,) * (len(wanted) + needs_x)
                del out
                if grad_x is not None:
                    grad_x[start:stop] = 0 if grads[0] is None else grads[0]
                for index, grad in enumerate(grads[1:] if needs_x else grads):
                    sums[index] = _add(sums[index], grad, only_one=len(tiles) == 1)
                del grads
        rounded: list[Tensor | None] = []
        for parameter, need in zip(ctx.parameters, needs, strict=True):
            total = sums.pop(0) if need else None
            rounded.append(None if total is None else total.to(parameter.dtype))
            del total  # each fp32 sum is freed before the next is rounded
        return (None, None, None if grad_x is None else grad_x.view(x.shape), *rounded)


def _add(total: Tensor | None, grad: Tensor | None, only_one: bool) -> Tensor | None:
    if grad is None or only_one:
        return total if grad is None else grad
    if total is not None:
        return total.add_(grad)
    # A copy, because autograd may return memory that it shares with something else.
    return grad.to(wide_dtype(grad.dtype), copy=True)


@contextlib.contextmanager
def _without_hooks(parameters: list[Tensor]) -> Iterator[None]:
    """A hook on a parameter is for its whole gradient; it must not run on a tile's part."""
    hooks = [(each, each._backward_hooks) for each in parameters if each.is_leaf and each._backward_hooks]
    for each, _ in hooks:
        each._backward_hooks = None
    try:
        yield
    finally:
        for each, own in hooks:
            each._backward_hooks = own


def _generator_states(x: Tensor) -> GeneratorStates:
    return torch.get_rng_state(), *get_device_states(x)


def _set_generator_states(states: GeneratorStates) -> None:
    host, devices, of_devices = states
    torch.set_rng_state(host)
    set_device_states(devices, of_devices)


@contextlib.contextmanager
def _restored_generators(x: Tensor) -> Iterator[None]:
    before = _generator_states(x)
    try:
        yield
    finally:
        _set_generator_states(before)


def _autocast_settings(x: Tensor) -> AutocastSettings:
    return [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in dict.fromkeys((x.device.type, "cpu"))
        # Other devices, such as meta, have no settings.
        if torch.amp.is_autocast_available(device)
    ]
