"""Tiled MLPs: a few thousand tokens at a time, so the wide activations of all tokens are never in memory.

MLPs are found by their structure, and tried on a few random tokens before they are changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError, UserError
from oomph.fixes.journal import Journal, WrappedForward, module_of
from oomph.fixes.modules import chosen_modules
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.nn.mlp import GatedMLP, TiledMLP as TiledMLPModule
from oomph.ops.common import no_compile, version_of
from oomph.ops.mlp import (
    MLPWeights,
    NotRecognised,
    check_options,
    has_batch_norm,
    is_conv1d,
    recognise,
    tiled_mlp,
)
from oomph.torch_internals import MODULE_HOOKS, FakeTensor
from oomph.units import counted

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_TRIAL_TOKENS = 5  # in tiles of two
# Largest difference between tiled and whole, relative to the largest entry: sums in another order.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class TiledMLP(Fix):
    name = "tiled_mlp"
    kind = "exact"
    changes = "MLPs run a few thousand tokens at a time, in forward and again in backward."

    def targets(self, context: FixContext) -> Iterable[Target]:
        found = find_mlps(context.model)
        names = [mlp.name for mlp in found if mlp.obstacle() is None]
        if names:
            yield Target(tuple(names), {} if len(names) == len(found) else {"modules": names})

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        modules: Sequence[str] | None = None,
        tile: int | None = None,
        memory_budget: str | int | None = None,
    ) -> None:
        """`modules`: names; by default every MLP that is found. `tile`: its tokens; or `memory_budget`: bytes
        for a tile's buffers, e.g. "64MiB"."""
        try:
            check_options(tile, memory_budget, "auto")
        except ArgumentError as error:
            raise UserError(f"fix {self.name!r}: {error}") from None
        if modules is None:
            found = find_mlps(model)
        else:
            named = chosen_modules(model, modules, self.name)
            found = [MLP.at(name, module) for name, module in named.items()]
        if not found:
            raise UserError(
                f"fix {self.name!r}: the model has no MLPs that are found and not tiled already; "
                "name modules=[...]"
            )
        for mlp in found:
            obstacle = mlp.obstacle()
            if obstacle is not None:
                raise UserError(f"fix {self.name!r}: {mlp.name or 'the model'}: {obstacle}")
        _try_each_kind(found)
        size = (
            counted(tile, "token") if tile is not None else str(memory_budget or "tiles of the default size")
        )
        for mlp in found:
            tiled = partial(_tiled, method=mlp.method, tile=tile, memory_budget=memory_budget)
            wrapped = WrappedForward(getattr(mlp.module, mlp.method), tiled)
            journal.set(mlp.module, mlp.method, wrapped, mlp.name, f"tiled: {size}")


@dataclass(frozen=True)
class MLP:
    """A method of a module that is an MLP, mostly `forward`."""

    name: str
    module: nn.Module
    method: str = "forward"

    @classmethod
    def at(cls, name: str, module: nn.Module) -> MLP:
        return cls(name, module, "feed_forward_chunk" if _is_two_part_layer(module) else "forward")

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that the method calls."""
        if self.method == "forward":
            return [self.module]
        return [self.module.intermediate, self.module.output]  # type: ignore[list-item]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts for parameter in part.parameters()]

    def obstacle(self) -> str | None:
        """Why it cannot be tiled."""
        if isinstance(self.module, GatedMLP | TiledMLPModule):
            return "it is tiled already"
        own = vars(self.module).get(self.method)
        if own is not None and not isinstance(own, WrappedForward):
            return f"its {self.method} was replaced already"
        if not _takes_one_argument(getattr(self.module, self.method)):
            return f"its {self.method} does not take exactly one argument"
        for part in self.parts:
            for path, inner in part.named_modules():
                where = path or type(inner).__name__
                if isinstance(inner, _DROPOUTS) and inner.p > 0:
                    return f"{where} has dropout with p={inner.p:g}, drawn again by each tile; set p=0"
                if inner is not self.module and any(getattr(inner, hooks) for hooks in MODULE_HOOKS):
                    return f"{where} has hooks, which would run once per tile"
                for tensor in inner._parameters.values():
                    if tensor is not None and type(tensor) not in (nn.Parameter, FakeTensor):
                        return f"{where} holds a {type(tensor).__name__}"
            if has_batch_norm(part):
                return "batch norm computes statistics over all tokens"
        return None


def find_mlps(model: nn.Module) -> list[MLP]:
    """Modules with two or three matrices that widen and narrow again, and no other parameters.

    Modules that tile themselves are left out: tiles of tiles would cost time and save nothing.
    """
    found: list[MLP] = []
    excluded: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, GatedMLP | TiledMLPModule):
            excluded += (f"{name}.",)
        if f"{name}.".startswith(excluded):
            continue
        if _is_two_part_layer(module):
            found.append(MLP(name, module, "feed_forward_chunk"))
        elif _looks_like_mlp(module):
            found.append(MLP(name, module))
            excluded += (f"{name}.",)
    return found


def _looks_like_mlp(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    holders = [inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None]
    if len(holders) not in (2, 3) or not all(map(_is_matrix, holders)):
        return False
    *ups, (down_in, _) = [_in_and_out(holder) for holder in holders]
    if len(set(ups)) != 1 or not _takes_one_argument(module.forward):
        return False
    width, hidden = ups[0]
    fused_gate = len(ups) == 1 and hidden == 2 * down_in
    return hidden > width and (hidden == down_in or fused_gate)


def _is_two_part_layer(module: nn.Module) -> bool:
    """BERT and its like: `intermediate` widens; `output` narrows, adds the residual and normalises."""
    parts = getattr(module, "intermediate", None), getattr(module, "output", None)
    return hasattr(type(module), "feed_forward_chunk") and all(isinstance(part, nn.Module) for part in parts)


def _is_matrix(module: nn.Module) -> bool:
    """Also a class of the library's own, as Falcon's: its forward is called as it is, with fewer tokens."""
    is_linear = isinstance(module, nn.Linear) and module._parameters.keys() <= {"weight", "bias"}
    return (is_linear and not hasattr(module, "parametrizations")) or is_conv1d(module)


def _in_and_out(module: nn.Module) -> tuple[int, int]:
    rows, columns = module.weight.shape  # type: ignore[union-attr, misc]
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def _takes_one_argument(method: Callable[..., Any]) -> bool:
    parameters = list(inspect.signature(method).parameters.values())
    return len(parameters) == 1 and parameters[0].kind not in (
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )


# Running ---------------------------------------------------------------------------------------------


@no_compile
def _tiled(
    call: Callable[..., Any],
    *args: Any,
    method: str,
    tile: int | None,
    memory_budget: str | int | None = None,
    **kwargs: Any,
) -> Any:
    """`call(x)` in tiles. Known MLPs are computed from their weights, others by calling the method."""
    given, module = [*args, *kwargs.values()], module_of(call)
    if len(given) != 1 or not isinstance(given[0], Tensor) or module is None:
        return call(*args, **kwargs)
    (x,) = given
    if method == "forward":
        try:
            return tiled_mlp(_weights(module), x, tile=tile, memory_budget=memory_budget)
        except NotRecognised:
            pass
    parameters = MLP("", module, method).parameters

    def on_rows(rows: Tensor) -> Any:
        """With [1, rows, features] for [rows, features]: many take batches of sequences only."""
        return call(rows.unsqueeze(0)).squeeze(0) if x.dim() == 3 else call(rows)

    buffers = [(buffer, version_of(buffer)) for buffer in module.buffers()]
    result = tiled_mlp(on_rows, x, tile=tile, memory_budget=memory_budget, parameters=parameters)
    if any(version_of(buffer) != version for buffer, version in buffers):
        raise UserError(f"fix 'tiled_mlp': a {type(module).__name__} would write a buffer for every tile")
    return result


def _weights(module: nn.Module) -> MLPWeights:
    """The weights of a known MLP, recognised by its class's forward and not by the one that this fix set."""
    bare = object.__new__(type(module))
    bare.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    return recognise(bare)


def _try_each_kind(found: Sequence[MLP]) -> None:
    """Run each kind of MLP on a few random tokens, whole and in tiles, where the model has data."""
    tried: set[Any] = set()
    for mlp in found:
        first = next(iter(mlp.parameters), None)
        if first is None or isinstance(first, FakeTensor) or first.is_meta:
            continue
        shapes = tuple(tuple(parameter.shape) for parameter in mlp.parameters)
        kind = (type(mlp.module), repr(mlp.module), shapes, first.dtype)
        if kind not in tried:
            tried.add(kind)
            _try(mlp, first)


def _try(mlp: MLP, first: Tensor) -> None:
    method, width = getattr(mlp.module, mlp.method), first.shape[-1]
    for inner in (inner for part in mlp.parts for inner in part.modules()):
        if _is_matrix(inner):
            width = _in_and_out(inner)[0]
            break
    x = torch.randn(1, _TRIAL_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(first)
    buffers = [(buffer, buffer.clone()) for part in mlp.parts for buffer in part.buffers()]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        try:
            whole, tiled = method(x), _tiled(method, x, method=mlp.method, tile=2)
        except Exception as error:
            raise UserError(f"fix 'tiled_mlp': {mlp.name} cannot be run on single tokens: {error}") from error
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    same_form = isinstance(whole, Tensor) and whole.shape == tiled.shape and whole.dtype == tiled.dtype
    tolerance = _TOLERANCE.get(x.dtype, 1e-4)
    if not same_form or (tiled - whole).abs().max() > tolerance * whole.abs().max():
        raise UserError(f"fix 'tiled_mlp': {mlp.name} is not a function of single tokens, so it has no tiles")
