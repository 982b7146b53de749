"""The public function of linear_cross_entropy: checks, choice, call."""

from dataclasses import replace

import torch
from torch import Tensor

from oomph.ops.common import Choice, explained_by, log_choice, no_autocast, no_compile
from oomph.ops.cross_entropy.arguments import Arguments, check_arguments
from oomph.ops.cross_entropy.choose import choose, explain_choice
from oomph.ops.cross_entropy.function import LinearCrossEntropy, Plan
from oomph.ops.cross_entropy.plain import plain_linear_cross_entropy
from oomph.ops.cross_entropy.prepare import check_values, make_rows, shifted, shifted_weight
from oomph.ops.cross_entropy.problem import LossOptions
from oomph.ops.cross_entropy.reference import linear_cross_entropy_reference
from oomph.ops.cross_entropy.sharded import (
    differ_between_ranks,
    local_part,
    refuse_different_ranks,
    shard_of,
)
from oomph.ops.cross_entropy.tiling import Tiling


# Uncompiled: the compiler would have to look into a loop over buffers that are overwritten.
@explained_by(explain_choice)
@no_compile
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
    num_valid: int | None = None,
    accumulate_into_grad: bool = False,
    check: bool = False,
    memory_budget: str | int | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of `x @ weight.T + bias` against `target`, without ever holding the logits.

    x [..., D], weight [V, D], target [...] (int), bias [V]. The loss is fp32 (float64 for float64 inputs),
    and so is everything after the logits; the logits have the inputs' dtype, or autocast's. Semantics as
    `F.cross_entropy`, with these additions:

    - "mean" is over the kept targets, weighted by `class_weight[target] * token_weight`. Where nothing is
      kept, and for an empty batch, the loss is 0 and so are all gradients.
    - `z_loss`: this coefficient times the squared log-sum-exp is added to each kept token's loss.
    - `softcap` c: the logits are c * tanh(logits / c).
    - `token_weight` [...]: multiplies each token's loss; 0 ignores it (its lse is returned all the same).
    - `shift`: next-token prediction; position t is compared with target t + 1. x is not copied. With
      reduction="none" the result has one position less.
    - `return_lse`: also returns the log-sum-exp of each token's logits, differentiable, 0 where ignored.
    - `num_valid`: the number of kept targets, or more. Ignored rows are then dropped before the matrix
      products. Where more are kept than that, the loss is NaN.
    - `accumulate_into_grad`: where weight.grad is already there, the backward pass adds to it in place, and
      no second gradient of the weight's size exists. torch.autograd.grad() and hooks on the weight get the
      gradient as ever. Not with DDP or FSDP, which must see it arrive.
    - `check`: raise where a target is out of range (waits for the GPU). Without it such a target gives NaN.
    - `memory_budget` ("256MiB", or bytes): what may be held beside inputs and gradients, by default 512 MiB;
      without copies that the arguments make necessary (autocast's of a weight in fp32, of a sliced x), and
      never less than a block of 16 tokens by 128 classes.
      Where it holds fewer than 384 rows of logits (128 on a CPU), these are computed twice.
    - `impl`: "auto", "triton" (kernels, on CUDA), "chunked" (plain torch, any device), "plain" (all logits at
      once; auto takes it for small ones), "reference" (float64). `oomph.ops.explain` tells what auto takes.

    A `weight` that is a DTensor sharded by rows is a vocabulary split over ranks; x and target must then be
    the same on all of them, or the loss is NaN. Under FSDP2 call this inside the wrapped module's forward.

    Kept for backward: x, weight, a few numbers per token, and for "mean" and "sum" the gradients, which are
    made in the forward pass.
    """
    call = Arguments(
        x,
        weight,
        target,
        bias=bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        class_weight=class_weight,
        token_weight=token_weight,
        shift=shift,
        return_lse=return_lse,
        num_valid=num_valid,
        accumulate_into_grad=accumulate_into_grad,
        check=check,
        memory_budget=memory_budget,
        impl=impl,
    )
    check_arguments(call)
    return compute(call, log_choice("linear_cross_entropy", choose(call)))


def compute(call: Arguments, choice: Choice) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of checked arguments, by the implementation chosen."""
    if call.check:
        check_values(call)
    loss, lse = _reference(call) if choice.impl == "reference" else _run(call, choice)
    shape, shift = call.target.shape, call.shift
    if call.reduction == "none":
        loss = loss.reshape(shape)
        loss = loss[..., :-1] if shift else loss
    if not call.return_lse:
        return loss
    assert lse is not None
    lse = lse.reshape(shape)
    return loss, lse[..., :-1] if shift else lse


def _reference(a: Arguments) -> tuple[Tensor, Tensor]:
    target, token_weight = a.target, a.token_weight
    if a.shift:
        target = shifted(target, a.ignore_index)
        token_weight = None if token_weight is None else shifted_weight(token_weight)
    return linear_cross_entropy_reference(
        a.x,
        a.weight,
        target,
        bias=a.bias,
        reduction=a.reduction,
        ignore_index=a.ignore_index,
        label_smoothing=a.label_smoothing,
        z_loss=a.z_loss,
        softcap=a.softcap,
        class_weight=a.class_weight,
        token_weight=token_weight,
    )


def _run(a: Arguments, choice: Choice) -> tuple[Tensor, Tensor | None]:
    shard = shard_of(a.weight)
    x, weight, bias = a.x, a.weight, a.bias
    if shard is not None:
        x, weight, bias = local_part(x, weight, bias, shard)
    dtype = a.compute_dtype
    triton = choice.impl == "triton"
    rows = make_rows(
        a,
        wide=torch.promote_types(dtype, torch.float32),
        triton=triton
        or (choice.impl == "plain" and a.x.device.type == "cuda" and choice.settings["kernels"]),
        offset=0 if shard is None else shard.offset,
        size=None if shard is None else shard.size,
    )
    if shard is not None:
        differ = differ_between_ranks(x, a.target, shard)
        if a.check:
            refuse_different_ranks(differ)
        # A loss of tokens that the other ranks do not have would be plausible and wrong.
        rows = replace(rows, scale=torch.where(differ, torch.nan, rows.scale))
    options = LossOptions(a.label_smoothing, a.z_loss, a.softcap)
    per_token = a.reduction == "none"
    x_ND = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if choice.impl == "plain":
        return plain_linear_cross_entropy(
            x_ND, weight, bias, rows, options, per_token=per_token, with_lse=a.return_lse
        )
    recording = torch.is_grad_enabled()
    plan = Plan(
        options=options,
        tiling=Tiling(choice.settings["rows"], choice.settings["columns"]),
        triton=triton,
        dtype=dtype,
        per_token=per_token,
        wants=(
            recording and x.requires_grad,
            recording and weight.requires_grad,
            recording and bias is not None and bias.requires_grad,
        ),
        accumulate_into=weight if a.accumulate_into_grad else None,
        shard=shard,
    )
    with no_autocast(x):
        loss, lse = LinearCrossEntropy.apply(x_ND, weight, bias, rows, plan)
    return loss, lse
