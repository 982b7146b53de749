"""The public op: arguments checked, the way chosen and named, and a module's hooks run once around it all."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import Choice, explained_by, log_choice, matmul_dtype, no_compile
from oomph.ops.launch import why_not_triton
from oomph.ops.mlp import chunked, reference, tiles
from oomph.ops.mlp.generic import tile_function
from oomph.ops.mlp.recognise import NotRecognised, recognise, trained_by
from oomph.ops.mlp.weights import MLPWeights
from oomph.units import counted

Given = MLPWeights | nn.Module | Callable[[Tensor], Tensor]
IMPLS = ("auto", "reference", "chunked", "triton", "generic")


def choose(
    fn_or_module: Given,
    x: Tensor,
    *,
    tile: int | None = None,
    memory_budget: str | int | None = None,
    parameters: Iterable[Tensor] | None = None,
    impl: str = "auto",
) -> Choice:
    """What `tiled_mlp` would do: impl, reason, and the sizes in settings.

    kind; tile: its rows; buffers: its bytes; kept: of how many rows gate and up are kept for backward.
    """
    budget = _checked(fn_or_module, x, tile, memory_budget, impl)
    if impl == "reference":
        return Choice("reference", "asked for: the whole at once, in plain torch", {})
    why_generic, known = _known(fn_or_module, impl)
    tokens = x.shape[:-1].numel()
    if known is None:
        trained = _parameters(fn_or_module, parameters)
        per_row = tiles.bytes_by_parameters(trained, x.shape[-1], x.element_size())
        rows = tiles.rows_of_a_tile(tokens, per_row, x.device.type, tile, budget)
        settings = {"kind": "generic", "tile": rows, "buffers": rows * per_row, "kept": 0}
        return Choice("generic", f"each tile is computed by calling the function: {why_generic}", settings)
    _check_fit(x, known)
    dtype = _product_dtype(x, known)
    widths = known.up.shape[0], dtype.itemsize, known.gate is not None
    rows, kept = tiles.tile_and_kept(tokens, *widths, x.device.type, tile, budget)
    buffers = rows * tiles.bytes_of_buffers(*widths)
    # Without gradients there is no backward to keep anything for.
    kept = kept if torch.is_grad_enabled() else 0
    settings = {"kind": known.kind, "tile": rows, "buffers": buffers, "kept": kept}
    no_triton = why_not_triton(x)
    if impl == "triton" and no_triton is not None:
        raise ArgumentError(
            f"impl='triton' cannot run: {no_triton}; valid here: 'auto', 'chunked', 'generic'"
        )
    if impl == "triton" or (impl == "auto" and no_triton is None and x.device.type == "cuda"):
        return Choice("triton", f"a known MLP, {known.kind}; one kernel for the elementwise part", settings)
    why = "asked for" if impl == "chunked" else no_triton or f"the tensors are on {x.device.type}"
    return Choice("chunked", f"a known MLP, {known.kind}; elementwise part in plain torch: {why}", settings)


@explained_by(choose)
def tiled_mlp(
    fn_or_module: Given,
    x: Tensor,
    *,
    tile: int | None = None,
    memory_budget: str | int | None = None,
    parameters: Iterable[Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """`fn_or_module(x)` for a function of single tokens, in tiles of tokens; exact values and gradients.

    fn_or_module: an `MLPWeights`; a module; or any callable that maps [rows, D] to [rows, ...] and treats
        every row alone (no batch norm, no attention).
    x: [..., D], any floating dtype; without autocast a known MLP has x's dtype in all its tensors. x is
        flattened to tokens; where its layout does not allow that without a copy, a copy is made (in backward
        too).
    tile: rows of a tile. memory_budget: bytes for a tile's buffers and for what is kept (below), instead; the
        default is 224 MiB on a GPU (never under 2048 rows), nothing kept, and on a CPU 32 MiB (never under
        256 rows) and 64 MiB kept. For functions that are not known MLPs, their size is an estimate.
    parameters: what a plain callable trains, where that cannot be seen from its closure. A tensor that is
        trained and not known of is an error, not a lost gradient.
    impl: "auto"; "chunked" and "triton" for known MLPs (`explain` says whether a module is one); "generic"
        calls the function per tile; "reference" calls it once.

    Returns [..., O] in the dtype that the function gives; for known MLPs that is x's, under autocast its own.
    Gradients have the dtypes of x and of the parameters; those of parameters are summed over tiles in fp32
    (float64 for float64) and rounded once; impl="generic" gets each tile's from autograd, rounded already. A
    gradient of gradients is refused, except by impl="reference".

    Saved for backward: x and the weights, nothing [tokens, hidden]. Known MLPs hold two or three [tile,
    hidden] buffers, and compute gate and up again in backward; on a CPU they keep them for the first tiles,
    up to 64 MiB per call, because there time is scarcer than memory. Others are called once on a single
    token, to see what they train, then per tile, and again per tile in backward with autocast and random
    generators as in forward: active dropout is consistent, though its mask is not the one of a single call.
    The hooks of a module run once, around all tiles, so FSDP2 gathers its parameters once; hooks of modules
    inside it run per tile.
    """
    options = {"tile": tile, "memory_budget": memory_budget, "impl": impl}
    return _run(fn_or_module, x, parameters, options)


@no_compile
def _run(given: Given, x: Tensor, parameters: Iterable[Tensor] | None, options: dict[str, Any]) -> Tensor:
    if isinstance(given, MLPWeights):
        return _tiled(given, functools.partial(reference.mlp, given), x, parameters, options)
    if not isinstance(given, nn.Module):
        return _tiled(given, given, x, parameters, options)
    _checked(given, x, options["tile"], options["memory_budget"], options["impl"])

    def tiled_forward(x_given: Tensor) -> Tensor:
        # Inside the call: FSDP2 has gathered the parameters by now, and may have changed x's dtype.
        with _forward_replaced(given, original_on_instance):
            return _tiled(given, original, x_given, parameters, options)

    original_on_instance = vars(given).get("forward")
    original = given.forward
    with _forward_replaced(given, tiled_forward):
        out: Tensor = given(x)
    return out


def _tiled(
    given: Given,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: Iterable[Tensor] | None,
    options: dict[str, Any],
) -> Tensor:
    parameters = None if parameters is None else list(parameters)
    choice = log_choice("tiled_mlp", choose(given, x, parameters=parameters, **options))
    if choice.impl == "reference":
        return function(x)
    if choice.impl == "generic":
        return tile_function(function, x, _parameters(given, parameters), choice.settings["tile"])
    _, known = _known(given, options["impl"])
    assert known is not None
    dtype = _product_dtype(x, known)
    tile, kept = choice.settings["tile"], choice.settings["kept"]
    plan = chunked.Plan(known.activation, tile, kept, dtype, use_triton=choice.impl == "triton")
    return chunked.mlp(known, x, plan)


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Give this instance (not its class) another forward for a while; None means the class's own."""
    before = vars(module).get("forward")
    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, before)


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


def _known(given: Given, impl: str) -> tuple[str, MLPWeights | None]:
    """(why not, None) or ("", the weights of a known MLP)."""
    if impl == "generic":
        return "asked for", None
    if isinstance(given, MLPWeights):
        return "", given
    if not isinstance(given, nn.Module):
        why = "a plain callable"
    else:
        try:
            return "", recognise(given)
        except NotRecognised as reason:
            why = str(reason)
    if impl in ("chunked", "triton"):
        raise ArgumentError(
            f"impl={impl!r} is for known MLPs: {why}; valid here: 'auto', 'generic', 'reference'"
        )
    return why, None


def _parameters(given: Any, listed: Iterable[Tensor] | None) -> list[Tensor]:
    """What the function trains, each once: a module's own and those listed, or what a closure shows."""
    own: Iterable[Tensor] = ()
    if isinstance(given, MLPWeights):
        own = given.named().values()
    elif isinstance(given, nn.Module):
        own = given.parameters()
    elif listed is None:
        own = trained_by(given)
    found = {id(each): each for each in (*own, *(listed or ()))}
    for each in found.values():
        if not isinstance(each, Tensor):
            raise ArgumentError(f"parameters holds a {type(each).__name__}; valid: tensors")
    return list(found.values())


def _product_dtype(x: Tensor, weights: MLPWeights) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it applies, else the one that all tensors have."""
    kind = x.device.type
    # Devices without autocast, such as meta, raise an error when asked whether it is enabled.
    converts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not converts or x.dtype == torch.float64:
        common.check_same_dtype(x=x, **weights.named())
    return matmul_dtype(x)


def _checked(
    given: Any, x: Tensor, tile: int | None, memory_budget: str | int | None, impl: str
) -> int | None:
    """Every argument in its valid range; returns the budget in bytes."""
    budget = check_options(tile, memory_budget, impl)
    if not isinstance(given, MLPWeights) and not callable(given):
        raise ArgumentError(
            f"fn_or_module is a {type(given).__name__}; valid: a module, a function, or MLPWeights"
        )
    common.check_floating(x=x)
    if x.dim() < 1:
        raise ArgumentError("x has no dimensions; valid: [..., features]")
    if isinstance(given, MLPWeights):
        _check_fit(x, given)
    if isinstance(given, nn.Module):
        _refuse_modules_that_cannot_be_tiled(given)
    return budget


def check_options(tile: int | None, memory_budget: str | int | None, impl: str) -> int | None:
    """What can be said before there is an x; returns the budget in bytes."""
    common.check_one_of("impl", impl, IMPLS)
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ArgumentError(f"tile={tile!r} is not valid; give a number of tokens, 1 or more")
    if tile is not None and memory_budget is not None:
        raise ArgumentError("tile and memory_budget both say how large a tile is; give one of them")
    return common.parse_memory_budget(memory_budget)


def _check_fit(x: Tensor, weights: MLPWeights) -> None:
    up = weights.up
    if x.shape[-1] != up.shape[1]:
        features = counted(x.shape[-1], "feature")
        raise ArgumentError(f"x has {features}; up {tuple(up.shape)} takes {up.shape[1]}")
    common.check_same_device(x=x, up=up)


def _refuse_modules_that_cannot_be_tiled(module: nn.Module) -> None:
    if tiles.has_batch_norm(module):
        raise ArgumentError("the module has batch norm in training mode, which looks at all tokens at once")
    for name, inner in module.named_modules():
        if inner is not module and any(base.__name__ == "FSDPModule" for base in type(inner).__mro__):
            raise ArgumentError(
                f"{name} inside the module is sharded on its own, and would be gathered once per tile; "
                "apply fully_shard to the MLP or to the block around it"
            )
