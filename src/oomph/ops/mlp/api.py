"""The public op: arguments are checked, the implementation and tile are chosen, a module's hooks run once."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.mlp.autograd import TiledMLP, TiledMLPConfig
from oomph.ops.mlp.generic import checkpoint_in_tiles
from oomph.ops.mlp.weights import MLPWeights, NotRecognised, mlp_reference, recognise
from oomph.units import MiB, counted, format_bytes

FunctionOrModule = MLPWeights | nn.Module | Callable[[Tensor], Tensor]
IMPLS = ("auto", "reference", "chunked", "triton", "generic")

# On a GPU: large enough for a tile's products to run at full speed, small beside one layer's activations.
_GPU_BUFFERS = 224 * MiB
# On a CPU products reach full speed with fewer rows, and small buffers stay nearer to the caches.
_CPU_BUFFERS = 32 * MiB
# Every tile reads and writes the whole fp32 gradient of each weight. Below about 2048 rows that traffic takes
# a third of the products' own time or more, however wide the layer, so no default goes lower.
_GPU_ROWS = 2048
_CPU_ROWS = 256
# GPU products work on blocks of 128 rows; a tile of whole blocks wastes none.
_ROW_BLOCK = 128


def _choose(
    fn_or_module: FunctionOrModule,
    x: Tensor,
    parameters: Iterable[Tensor] | None,
    tile: int | None,
    memory_budget: str | int | None,
    impl: str,
) -> tuple[common.Choice, MLPWeights | None]:
    """What `tiled_mlp` does, and the weights if it is a known MLP that is computed from them.

    The choice's settings: kind; tile: its rows; buffers: its bytes.
    """
    budget = _check_arguments(fn_or_module, x, tile, memory_budget, impl)
    if impl == "reference":
        return common.Choice("reference", "asked for: the whole at once, in plain torch", {}), None
    weights, why_generic = _weights_of(fn_or_module, impl)
    tokens = x.shape[:-1].numel()
    if weights is None:
        row_bytes = _estimated_row_bytes(_parameters(fn_or_module, parameters), x)
        rows = _tile_rows(tokens, row_bytes, x.device.type, tile, budget)
        settings = {"kind": "generic", "tile": rows, "buffers": rows * row_bytes}
        reason = f"each tile is computed by calling the function: {why_generic}"
        return common.Choice("generic", reason, settings), None
    _check_fit(x, weights)
    hidden_bytes = max(weights.up.shape[0], 1) * _product_dtype(x, weights).itemsize
    # Backward holds most: (gate,) up and grad hidden.
    row_bytes = (2 if weights.gate is None else 3) * hidden_bytes
    rows = _tile_rows(tokens, row_bytes, x.device.type, tile, budget)
    settings = {"kind": weights.kind, "tile": rows, "buffers": rows * row_bytes}
    choice = common.choose_triton_or_torch(
        impl,
        x,
        common.why_not_triton(x),
        kernels="one kernel for the elementwise part",
        plain="elementwise part in plain torch",
    )
    reason = f"a known MLP, {weights.kind}; {choice.reason}"
    return common.Choice(choice.impl, reason, settings), weights


@common.explained_by(lambda **arguments: _choose(**arguments)[0])
def tiled_mlp(
    fn_or_module: FunctionOrModule,
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
    tile: rows of a tile. memory_budget: bytes for a tile's buffers, instead; the default is 224 MiB on a GPU
        (never under 2048 rows), and on a CPU 32 MiB (never under 256 rows). For functions that are not known
        MLPs, their size is an estimate.
    parameters: tensors that a plain callable trains, for that estimate. Leaves that it trains are found;
        list a trained tensor that was computed outside of the function, so that its own graph runs once.
    impl: "auto"; "chunked" and "triton" for known MLPs (`explain` says whether a module is one); "generic"
        calls the function per tile; "reference" calls it once.

    Returns [..., O] in the dtype that the function gives; for known MLPs that is x's, under autocast its own.
    Gradients have the dtypes of x and of the parameters; those of parameters are summed over tiles in fp32
    (float64 for float64) and rounded once; impl="generic" gets each tile's from autograd, rounded already. A
    gradient of gradients is refused, except by impl="reference".

    Saved for backward: x and the weights, nothing [tokens, hidden]. Known MLPs, those that compute
    `down(act(up x))` or `down(act(gate x) * up x)`, hold two or three [tile, hidden] buffers and compute gate
    and up again in backward. Others are called once on a single token, to find what they train, then
    per tile, and again per tile in backward with autocast and random generators as in forward: active dropout
    is consistent, though its mask is not the one of a single call.
    The hooks of a module run once, around all tiles, so FSDP2 gathers its parameters once; hooks of modules
    inside it run per tile.
    """
    options = {"tile": tile, "memory_budget": memory_budget, "impl": impl}
    if isinstance(fn_or_module, MLPWeights) and parameters is None:
        return _run_weights(fn_or_module, x, **options)
    return _run(fn_or_module, x, parameters, options)


@common.opaque_op
def _run_weights(weights: MLPWeights, x: Tensor, **options: Any) -> Tensor:
    return _run_in_tiles(weights, functools.partial(mlp_reference, weights), x, None, options)


@common.no_compile
def _run(
    given: FunctionOrModule, x: Tensor, parameters: Iterable[Tensor] | None, options: dict[str, Any]
) -> Tensor:
    if not isinstance(given, nn.Module):
        function = functools.partial(mlp_reference, given) if isinstance(given, MLPWeights) else given
        return _run_in_tiles(given, function, x, parameters, options)
    _check_arguments(given, x, **options)
    # The instance (not its class) gets another forward for this call, so that its hooks run around all tiles.
    attributes, forward = vars(given), given.forward
    own = common.not_none(forward=attributes.get("forward"))

    def put_back() -> None:
        attributes.pop("forward", None)
        attributes.update(own)

    def tiled_forward(x_given: Tensor) -> Tensor:
        # Inside the call: FSDP2 has gathered the parameters by now, and may have changed x's dtype.
        put_back()
        return _run_in_tiles(given, forward, x_given, parameters, options)

    attributes["forward"] = tiled_forward
    try:
        out: Tensor = given(x)
    finally:
        put_back()
    return out


def _run_in_tiles(
    given: FunctionOrModule,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: Iterable[Tensor] | None,
    options: dict[str, Any],
) -> Tensor:
    parameters = None if parameters is None else list(parameters)
    choice, weights = _choose(given, x, parameters, **options)
    common.log_choice("tiled_mlp", choice)
    if choice.impl == "reference":
        return function(x)
    tile = choice.settings["tile"]
    if weights is None:
        return checkpoint_in_tiles(function, x, _parameters(given, parameters), tile)
    config = TiledMLPConfig(weights.activation, tile, _product_dtype(x, weights), choice.impl == "triton")
    out: Tensor = TiledMLP.apply(x, *weights.tensors, config)
    return out


def _weights_of(given: FunctionOrModule, impl: str) -> tuple[MLPWeights | None, str]:
    """(weights of a known MLP, "") or (None, why not)."""
    if impl == "generic":
        return None, "asked for"
    if isinstance(given, MLPWeights):
        return given, ""
    why = "a plain callable"
    if isinstance(given, nn.Module):
        try:
            return recognise(given), ""
        except NotRecognised as reason:
            why = str(reason)
    if impl in ("chunked", "triton"):
        raise ArgumentError(
            f"impl={impl!r} is for known MLPs: {why}; valid here: 'auto', 'generic', 'reference'"
        )
    return None, why


def _parameters(given: Any, listed: Iterable[Tensor] | None) -> list[Tensor]:
    """The tensors of the function, each once: its own and those listed."""
    own: Iterable[Tensor] = ()
    if isinstance(given, MLPWeights):
        own = given.named().values()
    elif isinstance(given, nn.Module):
        own = given.parameters()
    found = {id(each): each for each in (*own, *(listed or ()))}
    for each in found.values():
        if not isinstance(each, Tensor):
            raise ArgumentError(f"parameters holds a {type(each).__name__}; valid: tensors")
    return list(found.values())


def _product_dtype(x: Tensor, weights: MLPWeights) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it applies, else the one that all tensors have."""
    if not common.autocast_enabled(x) or x.dtype == torch.float64:
        common.check_same_dtype(x=x, **weights.named())
    return common.matmul_dtype(x)


# Sizes: a rule in bytes, so that it fits any width of model ------------------------------------------


def _tile_rows(tokens: int, row_bytes: int, device: str, tile: int | None, memory_budget: int | None) -> int:
    """Rows of a tile: `tile` if given, else as many as the budget (or the device's default) holds."""
    if tile is not None:
        return max(1, min(tile, tokens))
    if memory_budget is not None:
        most = memory_budget // row_bytes
        if most < 1:
            raise ArgumentError(
                f"memory_budget={format_bytes(memory_budget)} is too small; one token's buffers take "
                f"{format_bytes(row_bytes)}"
            )
    elif device == "cpu":
        most = max(_CPU_BUFFERS // row_bytes, _CPU_ROWS)
    else:
        most = max(_GPU_BUFFERS // row_bytes, _GPU_ROWS)
    if tokens <= most:
        return max(tokens, 1)
    if most < _ROW_BLOCK:
        return most
    # Whole blocks, and tiles of equal size: a small last one would run below full speed.
    most -= most % _ROW_BLOCK
    tiles = -(-tokens // most)
    rows = -(-tokens // tiles)
    return min(most, -(-rows // _ROW_BLOCK) * _ROW_BLOCK)


def _estimated_row_bytes(parameters: Sequence[Tensor], x: Tensor) -> int:
    """An estimate for one row inside an unknown function: its matrices show how wide it gets.

    Each matrix makes one tensor of at most its longer side; autograd saves about two of each.
    """
    widths = sum(max(parameter.shape[-2:]) for parameter in parameters if parameter.dim() >= 2)
    return max(1, 2 * x.element_size() * (widths or 8 * x.shape[-1]))


# Checks ----------------------------------------------------------------------------------------------


def _check_arguments(
    given: Any, x: Tensor, tile: int | None, memory_budget: str | int | None, impl: str
) -> int | None:
    """Returns the budget in bytes."""
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
        _product_dtype(x, given)
    if isinstance(given, nn.Module):
        _check_tileable(given)
    return budget


def check_options(tile: int | None, memory_budget: str | int | None, impl: str) -> int | None:
    """The checks that need no x; returns the budget in bytes."""
    common.check_one_of("impl", impl, IMPLS)
    common.check_whole(**common.not_none(tile=tile))
    if tile is not None and memory_budget is not None:
        raise ArgumentError("tile and memory_budget both set the size of a tile; give one of them")
    return common.parse_memory_budget(memory_budget)


def _check_fit(x: Tensor, weights: MLPWeights) -> None:
    up = weights.up
    if x.shape[-1] != up.shape[1]:
        features = counted(x.shape[-1], "feature")
        raise ArgumentError(f"x has {features}; up {tuple(up.shape)} takes {up.shape[1]}")
    common.check_same_device(x=x, up=up)


def _check_tileable(module: nn.Module) -> None:
    if has_batch_norm(module):
        raise ArgumentError("the module has batch norm in training mode, which looks at all tokens at once")
    for name, inner in module.named_modules():
        if inner is not module and any(base.__name__ == "FSDPModule" for base in type(inner).__mro__):
            raise ArgumentError(
                f"{name} inside the module is sharded on its own, and would be gathered once per tile; "
                "apply fully_shard to the MLP or to the block around it"
            )


def has_batch_norm(module: nn.Module) -> bool:
    """Whether some layer computes statistics over all tokens: in tiles they would be different ones."""
    norms = nn.modules.batchnorm._BatchNorm
    return any(isinstance(each, norms) and each.training for each in module.modules())
