"""Any function of tokens, tile by tile: forward without a graph, backward with the graph of one tile.

Saved for backward: x, the parameters, the autocast settings, and per tile the state of the random generators
(as `torch.utils.checkpoint` does), so that dropout drops the same features when a tile is computed again.
Parameters are inputs of the autograd function: each receives its gradient once, added up over tiles in fp32.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from oomph.errors import ArgumentError
from oomph.ops.common import refuse_second_derivatives
from oomph.ops.mlp.products import wide
from oomph.ops.mlp.tiles import spans


@dataclass
class _Tiles:
    """What backward needs to compute every tile again."""

    function: Callable[[Tensor], Any]
    rows: int
    context: "_Autocast"
    # Is a graph being made? Inside an autograd function that can no longer be asked.
    trained: bool
    # Filled by forward: per tile the generators' states before it ran.
    generators: list["_Generators"] = field(default_factory=list)

    def run(self, x_TD: Tensor) -> Tensor:
        with self.context.restored():
            out = self.function(x_TD)
        if not isinstance(out, Tensor):
            raise ArgumentError(f"the function returned a {type(out).__name__}; valid: one tensor")
        if out.dim() < 1 or out.shape[0] != x_TD.shape[0]:
            raise ArgumentError(
                f"the function made {tuple(out.shape)} of {tuple(x_TD.shape)}; valid: one row per token"
            )
        return out


def tile_function(
    function: Callable[[Tensor], Any], x: Tensor, parameters: Sequence[Tensor], rows: int
) -> Tensor:
    """`function` over the tokens of x [..., D]; it sees tiles [rows, D] and returns [rows, ...]."""
    tiles = _Tiles(function, rows, _Autocast.now(x.device.type), torch.is_grad_enabled())
    out: Tensor = _TiledFunction.apply(tiles, x, *parameters)
    return out


class _TiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.tiles = tiles
        # The parameters too, for autograd to see whether they were written since.
        ctx.save_for_backward(x, *parameters)
        # What is saved may come back as another tensor, as from a checkpoint; hooks are on the leaf itself.
        ctx.leaves = [parameter if parameter.is_leaf else None for parameter in parameters]
        x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        if tiles.trained:
            _refuse_hidden_parameters(tiles, x_ND, parameters, ctx.needs_input_grad[1])
        out = None
        for start, stop in spans(x_ND.shape[0], tiles.rows):
            if tiles.trained:
                tiles.generators.append(_Generators.now(x))
            part = tiles.run(x_ND[start:stop])
            if out is None:
                out = part.new_empty(x_ND.shape[0], *part.shape[1:])
            out[start:stop] = part
            del part
        assert out is not None
        return out.view(*x.shape[:-1], *out.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        refuse_second_derivatives("tiled_mlp")
        tiles: _Tiles = ctx.tiles
        x, *saved = ctx.saved_tensors
        parameters = [own if leaf is None else leaf for own, leaf in zip(saved, ctx.leaves, strict=True)]
        _, x_needed, *needed = ctx.needs_input_grad
        x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        grad_out = grad_out.reshape(x_ND.shape[0], *grad_out.shape[x.dim() - 1 :])
        dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if x_needed else None
        wanted = [parameter for parameter, need in zip(parameters, needed, strict=True) if need]
        sums: list[Tensor | None] = [None] * len(wanted)
        bounds = list(spans(x_ND.shape[0], tiles.rows))
        with _generators_kept(x), _hooks_put_aside(wanted):
            for (start, stop), generators in zip(bounds, tiles.generators, strict=True):
                generators.restore()
                x_TD = x_ND[start:stop].requires_grad_(x_needed)
                grads = _gradients(tiles, x_TD, grad_out[start:stop], wanted)
                if dx_ND is not None:
                    dx_ND[start:stop] = 0 if grads[0] is None else grads[0]
                for index in range(len(wanted)):
                    sums[index] = _added(sums[index], grads[index + 1], last=len(bounds) == 1)
                del grads
        totals = iter(wanted)
        rounded: list[Tensor | None] = []
        for need in needed:
            if not need:
                rounded.append(None)
                continue
            parameter, total = next(totals), sums.pop(0)
            rounded.append(None if total is None else total.to(parameter.dtype))
            del total  # each fp32 sum goes before the next is rounded
        return (None, None if dx_ND is None else dx_ND.view(x.shape), *rounded)


def _gradients(tiles: _Tiles, x_TD: Tensor, grad: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
    """Of x (None where it needs none) and of each parameter, for one tile computed again."""
    with torch.enable_grad():
        out = tiles.run(x_TD)
        inputs = [x_TD, *wanted] if x_TD.requires_grad else list(wanted)
        if not out.requires_grad:
            return [None] * (1 + len(wanted))
        found: list[Tensor | None] = [*torch.autograd.grad(out, inputs, grad, allow_unused=True)]
    return found if x_TD.requires_grad else [None, *found]


@contextlib.contextmanager
def _hooks_put_aside(parameters: list[Tensor]) -> Iterator[None]:
    """A hook on a parameter is for its whole gradient; a tile's part must not run it."""
    hooks = [(each, each._backward_hooks) for each in parameters if each.is_leaf and each._backward_hooks]
    for each, _ in hooks:
        each._backward_hooks = None
    try:
        yield
    finally:
        for each, kept in hooks:
            each._backward_hooks = kept


def _added(total: Tensor | None, grad: Tensor | None, last: bool) -> Tensor | None:
    if grad is None or last:
        return total if grad is None else grad
    if total is not None:
        return total.add_(grad)
    # A copy, because autograd may hand out memory that it shares with something else.
    return grad.to(wide(grad.dtype), copy=True)


def _refuse_hidden_parameters(
    tiles: _Tiles, x_ND: Tensor, parameters: Sequence[Tensor], x_needed: bool
) -> None:
    """Fail now if the function trains a tensor that it was not given: its gradient would be lost in silence.

    One token is run with a graph, and the graph is searched for leaves that are not listed.
    """
    with _generators_kept(x_ND), torch.enable_grad():
        probe = x_ND[:1].clone().requires_grad_(x_needed)
        out = tiles.run(probe)
    known = {id(each) for each in (probe, *parameters)}
    # The graph goes on behind a listed tensor that was itself computed; that part is the caller's.
    seen: set[Any] = {each.grad_fn for each in parameters}
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ArgumentError(
                f"the function trains a tensor of shape {tuple(leaf.shape)} that tiled_mlp does not know of; "
                "list it in parameters="
            )
        waiting.extend(each for each, _ in node.next_functions)


@dataclass(frozen=True)
class _Generators:
    """The states of the random generators at one moment."""

    host: Tensor
    devices: list[int]
    states: list[Tensor]

    @classmethod
    def now(cls, x: Tensor) -> "_Generators":
        return cls(torch.get_rng_state(), *get_device_states(x))

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        set_device_states(self.devices, self.states)


@contextlib.contextmanager
def _generators_kept(x: Tensor) -> Iterator[None]:
    before = _Generators.now(x)
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True)
class _Autocast:
    """Autocast as it was in forward, for the device of x and for the CPU."""

    settings: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, device: str) -> "_Autocast":
        return cls(
            tuple(
                (each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each))
                for each in dict.fromkeys((device, "cpu"))
                # Of the others, such as meta, the settings cannot even be asked for.
                if torch.amp.is_autocast_available(each)
            )
        )

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self.settings:
                # Without its cache: a weight that was converted without a graph must not be found by code
                # that needs one.
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
