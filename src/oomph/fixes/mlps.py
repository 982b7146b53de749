"""MLPs in a model: found by their structure, and tried on a few tokens before they are changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from oomph.errors import UserError
from oomph.fixes.modules import is_plain_linear
from oomph.nn.mlp import GatedMLP, TiledMLP
from oomph.ops.common import no_compile
from oomph.ops.mlp import MLPWeights, NotRecognised, has_batch_norm, recognise, tiled_mlp

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TOKENS = 5  # on which a module is tried, in tiles of two
# How far the tiles may be off the whole, beside the largest entry: sums in another order, and no more.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Found:
    """A method of a module that is an MLP: mostly its forward."""

    name: str
    module: nn.Module
    method: str = "forward"


def mlps(model: nn.Module) -> list[Found]:
    """All that look like one: two or three matrices that widen and narrow again, and no other parameters.

    Those that tile themselves are none: tiles of tiles would cost time and save nothing.
    """
    found: list[Found] = []
    tiled: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{other.name}.") and other.method == "forward" for other in found):
            continue
        if isinstance(module, GatedMLP | TiledMLP):
            tiled.append(f"{name}.")
        if name.startswith(tuple(tiled)) or f"{name}." in tiled:
            continue
        if _has_two_part_mlp(module):
            found.append(Found(name, module, "feed_forward_chunk"))
        elif _looks_like_mlp(module):
            found.append(Found(name, module))
    return found


def at(name: str, module: nn.Module) -> Found:
    """The MLP that a name given by a person stands for."""
    return Found(name, module, "feed_forward_chunk" if _has_two_part_mlp(module) else "forward")


def why_not(found: Found) -> str | None:
    """Why it cannot be run in tiles, in a few words."""
    module, inside = found.module, _parts(found)
    if isinstance(module, GatedMLP | TiledMLP):
        return "it is tiled already"
    if found.method in vars(module):
        return f"its {found.method} was replaced already"
    arguments = _arguments(getattr(module, found.method))
    if arguments != 1:
        return f"its {found.method} takes {'no' if arguments == 0 else 'more than one'} argument"
    for part in inside:
        for path, inner in part.named_modules():
            where = path or type(inner).__name__
            if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
                return f"{where} drops out {inner.p:g} of its features, which tiles would draw anew; set p=0"
            if inner is not module and any(getattr(inner, hooks) for hooks in _HOOKS):
                return f"{where} has hooks, which would run once per tile"
            for tensor in inner._parameters.values():
                if tensor is not None and type(tensor) not in (nn.Parameter, FakeTensor):
                    return f"{where} holds a {type(tensor).__name__}"
        if has_batch_norm(part):
            return "batch norm looks at all tokens at once"
    return None


@no_compile
def run(
    method: Callable[..., Any],
    module: nn.Module,
    x: Tensor,
    *,
    tile: int | None = None,
    memory_budget: str | int | None = None,
) -> Tensor:
    """`method(x)`, a few tokens at a time. Known MLPs are computed from their weights, others by calling."""
    if method.__name__ == "forward":
        try:
            return tiled_mlp(_known(module), x, tile=tile, memory_budget=memory_budget)
        except NotRecognised:
            pass
    call = _Rows(method) if x.dim() == 3 else method
    parts = _parts(Found("", module, method.__name__))
    parameters = [parameter for part in parts for parameter in part.parameters()]
    return tiled_mlp(call, x, tile=tile, memory_budget=memory_budget, parameters=parameters)


def check(founds: Sequence[Found], fix: str) -> None:
    """Try each kind of them on a few random tokens, where there is data: tiles must give what the whole does.

    A UserError names the first that is not a function of single tokens.
    """
    tried: set[Any] = set()
    for found in founds:
        first = next((p for part in _parts(found) for p in part.parameters()), None)
        if first is None or isinstance(first, FakeTensor) or first.is_meta:
            continue
        shapes = tuple(tuple(p.shape) for part in _parts(found) for p in part.parameters())
        kind = (type(found.module), repr(found.module), shapes, first.dtype)
        if kind not in tried:
            tried.add(kind)
            _try(found, first, fix)


def _try(found: Found, first: Tensor, fix: str) -> None:
    method = getattr(found.module, found.method)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, _width(found), generator=generator).to(first)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        try:
            whole, tiled = method(x), run(method, found.module, x, tile=2)
        except Exception as error:
            raise UserError(f"fix {fix!r}: {found.name} cannot be run on single tokens: {error}") from error
        same_form = isinstance(whole, Tensor) and whole.shape == tiled.shape and whole.dtype == tiled.dtype
        tolerance = _TOLERANCE.get(x.dtype, 1e-4)
        if not same_form or (tiled - whole).abs().max() > tolerance * whole.abs().max():
            raise UserError(
                f"fix {fix!r}: {found.name} is not a function of single tokens, so it has no tiles"
            )


class _Rows:
    """Gives a method [1, rows, features] for [rows, features]: many take batches of sequences only."""

    def __init__(self, method: Callable[[Tensor], Tensor]) -> None:
        self.method = method

    def __call__(self, x: Tensor) -> Tensor:
        return self.method(x.unsqueeze(0)).squeeze(0)


def _known(module: nn.Module) -> MLPWeights:
    """The weights it has now. Its class's forward is read, not the one on the instance, which is ours."""
    bare = object.__new__(type(module))
    bare.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    return recognise(bare)


def _looks_like_mlp(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    holders = [inner for inner in module.modules() if next(inner.parameters(recurse=False), None) is not None]
    if len(holders) not in (2, 3) or not all(map(_is_matrix, holders)):
        return False
    *ups, down = [_sizes(holder) for holder in holders]
    if len(set(ups)) != 1 or _arguments(module.forward) != 1:
        return False
    (width, hidden), (narrows_from, _) = ups[0], down
    fused_gate = len(ups) == 1 and hidden == 2 * narrows_from
    return hidden > width and (hidden == narrows_from or fused_gate)


def _has_two_part_mlp(module: nn.Module) -> bool:
    """BERT and its like: `intermediate` widens; `output` narrows, adds the residual and normalises."""
    parts = getattr(module, "intermediate", None), getattr(module, "output", None)
    return hasattr(type(module), "feed_forward_chunk") and all(isinstance(part, nn.Module) for part in parts)


def _parts(found: Found) -> list[nn.Module]:
    """The modules that its method calls."""
    if found.method == "forward":
        return [found.module]
    return [found.module.intermediate, found.module.output]  # type: ignore[list-item]


def _width(found: Found) -> int:
    """Of its input: what its first matrix takes."""
    for module in (inner for part in _parts(found) for inner in part.modules()):
        if _is_matrix(module):
            return _sizes(module)[0]
    first = next(p for part in _parts(found) for p in part.parameters())
    return first.shape[-1]


def _is_matrix(module: nn.Module) -> bool:
    return is_plain_linear(module) or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _sizes(module: nn.Module) -> tuple[int, int]:
    """In, out."""
    rows, columns = module.weight.shape  # type: ignore[union-attr, misc]
    return (rows, columns) if _is_transposed(module) else (columns, rows)


def _arguments(method: Callable[..., Any]) -> int:
    parameters = inspect.signature(method).parameters.values()
    return len(list(_all_of(parameters)))


def _all_of(parameters: Any) -> Iterator[inspect.Parameter]:
    for parameter in parameters:
        yield parameter
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield parameter  # any number: more than one
