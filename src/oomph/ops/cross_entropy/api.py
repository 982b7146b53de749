"""The public functions: arguments are checked, an implementation is chosen, and it runs."""

import functools
import sys
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.cross_entropy import vocab_parallel
from oomph.ops.cross_entropy.chunked import (
    DEFAULT_BUDGET,
    LinearCrossEntropy,
    LogitTileShape,
    TiledLoss,
    choose_tile_shape,
    plain_linear_cross_entropy,
)
from oomph.ops.cross_entropy.reference import CrossEntropyOptions, linear_cross_entropy_reference
from oomph.ops.cross_entropy.rows import make_token_rows, shift_left
from oomph.units import MiB, counted, format_bytes

IMPLS = ("auto", "plain", "chunked", "triton", "reference")
REDUCTIONS = ("mean", "sum", "none")

# Up to this many bytes of fp32 logits "auto" chooses "plain": it starts fewer kernels, and the four copies
# of the logits that it holds are 64 MiB at most. Report 002 switched at 10 GB: there they are 40 GB.
PLAIN_LOGITS_BYTES = 16 * MiB
_PLAIN_COPIES = 4


def explain_choice(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> common.Choice:
    checked = CrossEntropyOptions(**options)
    check_arguments(x, weight, target, bias, checked)
    return _choose(x, weight, target, checked)


# Not compiled: the compiler would have to look into a loop over buffers that are overwritten.
@common.explained_by(explain_choice)
@common.opaque_op
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    shift: bool = False,
    return_lse: bool = False,
    accumulate_into_grad: bool = False,
    check: bool = False,
    memory_budget: str | int | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `x @ weight.T + bias` against `target`, without materializing the logits.

    x [..., D], weight [V, D], target [...] (int), bias [V]. The loss and everything after the logits are fp32
    (float64 for float64 inputs); the logits have the inputs' dtype, or autocast's. Semantics as
    `F.cross_entropy`, with these additions:

    - "mean" is over the valid (not ignored) targets, weighted by `class_weight[target] * token_weight`. Where
      none is valid, and for an empty batch, the loss is 0 and so are all gradients.
    - `z_loss`: this coefficient times the squared log-sum-exp is added to each valid token's loss.
    - `softcap` c: the logits are c * tanh(logits / c).
    - `token_weight` [...]: multiplies each token's loss; 0 ignores it (its lse is still returned).
    - `shift`: next-token prediction; position t is compared with target t + 1. x is not copied. With
      reduction="none" the result has one position less.
    - `return_lse`: also returns the log-sum-exp of each token's logits, differentiable, 0 where ignored.
    - `accumulate_into_grad`: if weight.grad exists, backward adds to it in place, so no second gradient of
      the weight's size exists. torch.autograd.grad() and hooks on the weight get the gradient as usual. Not
      for DDP or FSDP, which wait for the gradient.
    - `check`: raise if a target is out of range (waits for the GPU). Without it such a target gives NaN.
    - `memory_budget` ("256MiB", or bytes): memory beside inputs and gradients, 512 MiB by default; without
      copies that the arguments make necessary (autocast's of a weight in fp32, of a sliced x), and never less
      than a tile of 16 tokens by 128 classes.
      If it holds fewer than 384 rows of logits (128 on a CPU), the logits are computed twice.
    - `impl`: "auto", "triton" (kernels, on CUDA), "chunked" (plain torch, any device), "plain" (all logits at
      once; auto chooses it for small ones), "reference" (float64). `oomph.ops.explain` shows the choice.

    A `weight` that is a DTensor sharded by rows is a vocabulary-parallel head; x and target must then be the
    same on all ranks, or the loss is NaN. Under FSDP2 call this inside the wrapped module's forward.

    Saved for backward: x, weight, a few numbers per token, and for "mean" and "sum" the gradients, which are
    computed in forward.
    """
    arguments = locals()
    options = CrossEntropyOptions(**{name: arguments[name] for name in _OPTION_NAMES})
    check_arguments(x, weight, target, bias, options)
    choice = common.log_choice("linear_cross_entropy", _choose(x, weight, target, options))
    return _run(x, weight, target, bias, options, choice)


_OPTION_NAMES = tuple(CrossEntropyOptions.__dataclass_fields__)


def compute_loss_chunked(
    hidden_states: Tensor, labels: Tensor, lm_head: nn.Module, chunk_size: int = 4096
) -> Tensor:
    """Next-token loss of `lm_head(hidden_states)` in tiles of at most `chunk_size` tokens.

    hidden_states [..., T, D], labels [..., T] (-100: ignored), lm_head an nn.Linear. Report 002's function of
    this name kept every chunk's log-softmax for backward, so in training it saved nothing; this one keeps
    none. Small logits are computed at once, as in linear_cross_entropy.
    """
    weight, bias = getattr(lm_head, "weight", None), getattr(lm_head, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError(
            f"lm_head must be a linear layer with a weight [V, D]; given: {type(lm_head).__name__}"
        )
    return _compute_loss_chunked(hidden_states, labels, weight, bias, chunk_size)


@common.opaque_op
def _compute_loss_chunked(
    hidden_states: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int
) -> Tensor:
    common.check_whole(chunk_size=chunk_size)
    options = CrossEntropyOptions(shift=True)
    check_arguments(hidden_states, weight, labels, bias, options)
    choice = _choose(hidden_states, weight, labels, options)
    if choice.impl in ("chunked", "triton"):
        settings = {**choice.settings, "rows": chunk_size, "columns": weight.shape[0]}
        choice = common.Choice(
            choice.impl, f"blocks of {counted(chunk_size, 'token')}, as asked for", settings
        )
    common.log_choice("compute_loss_chunked", choice)
    loss = _run(hidden_states, weight, labels, bias, options, choice)
    assert isinstance(loss, Tensor)
    return loss


def _run(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: CrossEntropyOptions,
    choice: common.Choice,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of checked arguments, by the chosen implementation."""
    if options.check and common.has_values(target):
        _check_values(target, weight.shape[0], options)
    if choice.impl == "reference":
        loss, lse = linear_cross_entropy_reference(x, weight, target, bias, options)
        return (loss, lse) if options.return_lse else loss
    shard = _vocab_shard(weight)
    n_classes, dtype, triton = weight.shape[0], common.matmul_dtype(x), choice.impl == "triton"
    if shard is not None:
        x, weight, bias = shard.local_tensors(x, weight, bias)
    rows = make_token_rows(
        target,
        n_classes,
        options,
        dtype=common.wide_dtype(dtype),
        triton=triton or (choice.impl == "plain" and x.device.type == "cuda" and choice.settings["kernels"]),
        first_class=0 if shard is None else shard.offset,
        last_class=None if shard is None else shard.offset + shard.size,
    )
    if shard is not None:
        differs = shard.differs_between_ranks(x, target)
        if options.check and bool(differs):
            raise ArgumentError(
                "weight is sharded over ranks by classes, but x differs between them; x must be the same on "
                "all (under FSDP2, call linear_cross_entropy inside the wrapped module's forward)"
            )
        # A loss over other tokens than those of the other ranks would be plausible and wrong.
        rows = replace(rows, scale=torch.where(differs, torch.nan, rows.scale))
    x_ND = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    value: Tensor
    row_lse: Tensor | None
    if choice.impl == "plain":
        value, row_lse = plain_linear_cross_entropy(x_ND, weight, bias, rows, options)
    else:
        tiled_loss = TiledLoss(
            options,
            LogitTileShape(choice.settings["rows"], choice.settings["columns"]),
            triton,
            dtype,
            needs_grad=tuple(  # type: ignore[arg-type]
                torch.is_grad_enabled() and each is not None and each.requires_grad
                for each in (x, weight, bias)
            ),
            accumulate_into=weight if options.accumulate_into_grad else None,
            shard=shard,
        )
        with common.no_autocast(x):
            value, row_lse = LinearCrossEntropy.apply(x_ND, weight, bias, rows, tiled_loss)

    def per_token(values_N: Tensor) -> Tensor:
        values = values_N.reshape(target.shape)
        # With shift, the last position of each sequence has no target.
        return values[..., :-1] if options.shift else values

    if options.reduction == "none":
        value = per_token(value)
    if not options.return_lse:
        return value
    assert row_lse is not None
    return value, per_token(row_lse)


def _vocab_shard(weight: Tensor) -> vocab_parallel.VocabShard | None:
    """How `weight` is sharded by rows over ranks; None for an ordinary tensor."""
    # A program that has a DTensor has imported its module; the others need not wait for it.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(weight, module.DTensor):
        return None
    return vocab_parallel.shard_of_dtensor(weight)


# Choice ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)  # small models wait for the host, and ask the same at every step
def _tile_shape(n_tokens: int, hidden: int, n_classes: int, **rest: Any) -> tuple[LogitTileShape, str]:
    tile = choose_tile_shape(n_tokens, hidden, n_classes, **rest)
    return tile, tile.describe(n_tokens, n_classes, rest["bytes_per_logit"])


def _choose(x: Tensor, weight: Tensor, target: Tensor, options: CrossEntropyOptions) -> common.Choice:
    impl, dtype = options.impl, common.matmul_dtype(x)
    wide_itemsize = max(4, dtype.itemsize)
    n_tokens = target.numel()
    n_classes, hidden = weight.shape
    shard = _vocab_shard(weight)
    if shard is not None:
        n_classes = shard.largest
        if impl in ("plain", "reference"):
            raise ArgumentError(
                f"impl={impl!r} takes no vocabulary-sharded weight; choose from 'auto', 'chunked', 'triton'"
            )
    no_kernels = common.why_not_triton(x) or (
        "float64 is computed in float64" if dtype == torch.float64 else None
    )
    if impl == "triton" and no_kernels:
        raise ArgumentError(f"impl='triton' cannot run: {no_kernels}; choose 'auto' or 'chunked'")

    triton = impl == "triton" or (impl == "auto" and no_kernels is None and x.device.type == "cuda")
    bytes_per_logit = dtype.itemsize
    if not triton:
        # Plain torch: a widened copy of half-precision logits, one in log-sum-exp, and the softcap's slope.
        copies = 1 + (dtype.itemsize < wide_itemsize) + (options.softcap is not None)
        bytes_per_logit += wide_itemsize * copies
    budget = common.parse_memory_budget(options.memory_budget)
    tile, tiles = _tile_shape(
        n_tokens,
        hidden,
        n_classes,
        bytes_per_logit=bytes_per_logit,
        wide_itemsize=wide_itemsize,
        device=x.device.type,
        budget=budget or DEFAULT_BUDGET,
    )
    settings = {"rows": tile.rows, "columns": tile.columns, "kernels": no_kernels is None}
    if impl != "auto":
        return common.Choice(impl, f"asked for; {tiles}", settings)

    logits = n_tokens * n_classes * wide_itemsize
    limit = PLAIN_LOGITS_BYTES if budget is None else min(PLAIN_LOGITS_BYTES, budget // _PLAIN_COPIES)
    if logits <= limit and not options.accumulate_into_grad and shard is None:
        reason = f"the logits are {format_bytes(logits)} in fp32, at most {format_bytes(limit)}"
        return common.Choice("plain", reason, settings)
    size = f"the logits would be {format_bytes(logits)} in fp32; {tiles}"
    if triton:
        return common.Choice("triton", size, settings)
    return common.Choice(
        "chunked", f"{size}; no kernels: {no_kernels or 'the interpreter is for tests'}", settings
    )


# Checks ----------------------------------------------------------------------------------------------


def check_arguments(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: CrossEntropyOptions
) -> None:
    """Everything that can be checked without reading the tensors' values."""
    common.check_one_of("impl", options.impl, IMPLS)
    common.check_one_of("reduction", options.reduction, REDUCTIONS)
    flags = ("shift", "return_lse", "accumulate_into_grad", "check")
    common.check_flags(**{name: getattr(options, name) for name in flags})
    weights = {"class_weight": options.class_weight, "token_weight": options.token_weight}
    common.check_floating(x=x, weight=weight, **common.not_none(bias=bias, **weights))
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        found = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentError(f"target must be a tensor of class numbers (int64 or int32); given: {found}")
    _check_shapes(x, weight, target, bias, options)
    common.check_same_device(x=x, weight=weight, target=target, bias=bias, **weights)
    if not common.autocast_enabled(x):
        common.check_same_dtype(x=x, weight=weight, bias=bias)
    for name, tensor in weights.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(f"{name} requires a gradient, which is not computed; give {name}.detach()")
    smoothing = {"label_smoothing": options.label_smoothing}
    common.check_number("a number from 0 to 1", lambda number: 0 <= number <= 1, **smoothing)
    common.check_number("0 or a positive number", lambda number: number >= 0, z_loss=options.z_loss)
    softcap = common.not_none(softcap=options.softcap)
    common.check_number("a positive number, or None", lambda number: number > 0, **softcap)
    is_whole = {"ignore_index": options.ignore_index}
    common.check_number("a whole number", lambda number: isinstance(number, Integral), **is_whole)
    if options.accumulate_into_grad and not weight.is_leaf:
        raise ArgumentError(
            "accumulate_into_grad=True needs a weight that owns its .grad (a parameter); "
            "the one given is the result of a computation"
        )
    if options.accumulate_into_grad and _vocab_shard(weight) is not None:
        raise ArgumentError("accumulate_into_grad=True is not supported for a vocabulary-sharded weight")


def _check_shapes(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: CrossEntropyOptions
) -> None:
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ArgumentError(f"weight must be [classes, hidden size]; given: {list(weight.shape)}")
    n_classes, hidden = weight.shape
    if x.dim() < 1 or x.shape[-1] != hidden:
        raise ArgumentError(
            f"x must be [..., {hidden}] to match weight {list(weight.shape)}; given: {list(x.shape)}"
        )
    if target.shape != x.shape[:-1]:
        hint = " (with shift=True too: oomph shifts, not the caller)" if options.shift else ""
        raise ArgumentError(
            f"target must have x's leading shape {list(x.shape[:-1])}, one class per token; "
            f"given: {list(target.shape)}{hint}"
        )
    if options.shift and target.dim() < 1:
        raise ArgumentError("shift=True needs a sequence dimension: x [..., T, hidden size], target [..., T]")
    common.check_shape([n_classes], ", one per class", bias=bias, class_weight=options.class_weight)
    common.check_shape(target.shape, ", one per target", token_weight=options.token_weight)


def _check_values(target: Tensor, n_classes: int, options: CrossEntropyOptions) -> None:
    """Reads the targets, and so waits for the GPU."""
    ignore_index = options.ignore_index
    if options.shift:
        target = shift_left(target, ignore_index)
    wrong = (target != ignore_index) & ((target < 0) | (target >= n_classes))
    if bool(wrong.any()):
        raise ArgumentError(
            f"target {int(target[wrong][0])} is out of range; valid: 0 to {n_classes - 1}, "
            f"or ignore_index={ignore_index}"
        )
