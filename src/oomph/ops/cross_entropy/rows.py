"""Rows of the [N, V] logits: the other values that a token's loss depends on, and the softmax of a tile.

Each step has two forms: a Triton kernel (kernels.py) and plain torch. N tokens, V classes; with a sharded
vocabulary V counts this rank's classes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oomph.ops.common import Kernels
from oomph.ops.cross_entropy.reference import CrossEntropyOptions

_KERNELS = Kernels("oomph.ops.cross_entropy.kernels")


@dataclass(frozen=True)
class TokenRows:
    """The values per token. All [N]; float32, or float64 for float64 inputs."""

    target: Tensor  # int64, relative to the first class of this rank
    valid: Tensor  # bool: not ignored
    scale: Tensor  # factor of the token's loss; 0 for ignored tokens, NaN for targets out of range
    target_weight: Tensor | None  # class weight of the target
    class_weight: Tensor | None  # [V]
    weight_total: Tensor | None  # [1]: sum of all class weights (V without weights); for label smoothing
    n_classes: int  # of the whole vocabulary

    def __getitem__(self, part: slice) -> "TokenRows":
        return replace(
            self,
            target=self.target[part],
            valid=self.valid[part],
            scale=self.scale[part],
            target_weight=None if self.target_weight is None else self.target_weight[part],
        )

    def scaled_by(self, factor: Tensor) -> "TokenRows":
        # An ignored token stays 0 whatever gradient arrives, NaN included.
        return replace(self, scale=torch.where(self.valid, self.scale * factor, 0.0))


@dataclass(frozen=True)
class RowStatistics:
    """What the loss needs of each row of logits. All [N]; 0 for ignored tokens."""

    lse: Tensor  # log-sum-exp
    target_logit: Tensor
    smooth_sum: Tensor | None  # sum over classes of class weight * logit; only with label smoothing
    target_gradient: Tensor | None  # gradient at the target's logit; only where add_target_rows follows

    def __getitem__(self, part: slice) -> "RowStatistics":
        fields = (self.lse, self.target_logit, self.smooth_sum, self.target_gradient)
        return RowStatistics(*(None if each is None else each[part] for each in fields))  # type: ignore[arg-type]


def token_losses(stats: RowStatistics, rows: TokenRows, options: CrossEntropyOptions) -> Tensor:
    """The scaled loss of every token, [N]."""
    nll = stats.lse - stats.target_logit
    if rows.target_weight is not None:
        nll = nll * rows.target_weight
    loss = nll if not options.label_smoothing else (1.0 - options.label_smoothing) * nll
    if stats.smooth_sum is not None and rows.weight_total is not None:
        smooth = rows.weight_total * stats.lse - stats.smooth_sum
        loss = loss + (options.label_smoothing / rows.n_classes) * smooth
    if options.z_loss:
        loss = loss + options.z_loss * stats.lse.square()
    # Not a product with a 0 scale: an ignored token adds nothing even where its logits are NaN.
    return torch.where(rows.valid, loss * rows.scale, 0.0)


# Values per token ------------------------------------------------------------------------------------


def shift_left(values: Tensor, last: float) -> Tensor:
    """Each position gets the value of the next; the last position gets `last`."""
    shifted = torch.full_like(values, last)
    shifted[..., :-1] = values[..., 1:]
    return shifted


def make_token_rows(
    target: Tensor,
    n_classes: int,
    options: CrossEntropyOptions,
    *,
    dtype: torch.dtype,
    triton: bool,
    first_class: int = 0,
    last_class: int | None = None,
) -> TokenRows:
    """Flattened, shifted and weighted targets, without waiting for the device.

    dtype: fp32 or float64. first_class, last_class: this rank's classes.
    """
    class_weight = None if options.class_weight is None else options.class_weight.to(dtype).contiguous()
    weight_total = None
    if options.label_smoothing:
        if class_weight is None:
            weight_total = target.new_full((1,), n_classes, dtype=dtype)
        else:
            weight_total = class_weight.sum().reshape(1)
    make = _token_rows_triton if triton else _token_rows_torch
    values = make(target, n_classes, first_class, options, class_weight, dtype)
    if class_weight is not None and last_class is not None:
        class_weight = class_weight[first_class:last_class]
    return TokenRows(*values, class_weight, weight_total, n_classes)


def _token_rows_triton(
    target: Tensor,
    n_classes: int,
    first_class: int,
    options: CrossEntropyOptions,
    class_weight: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """In one kernel: the first product waits for this, and twenty small ops take a tenth of its time."""
    # The kernel reads flat arrays; reshape alone may leave strides.
    target_N = target.reshape(-1).contiguous()
    token_weight = options.token_weight
    token_weight_N = None if token_weight is None else token_weight.reshape(-1).contiguous()
    n = target_N.shape[0]
    out_target_N = torch.empty(n, dtype=torch.int64, device=target.device)
    valid_N = torch.empty(n, dtype=torch.bool, device=target.device)
    scale_N = torch.empty(n, dtype=dtype, device=target.device)
    target_weight_N = None if class_weight is None else torch.empty_like(scale_N)
    sequence = target.shape[-1] if options.shift else 1
    if n:
        _KERNELS.launch(
            "prepare_rows",
            (1,),
            *(target_N, token_weight_N, class_weight, out_target_N, valid_N, scale_N, target_weight_N),
            *(n, sequence, options.ignore_index, n_classes, first_class),
            SHIFT=options.shift,
            HAS_TOKEN_WEIGHT=token_weight is not None,
            HAS_CLASS_WEIGHT=class_weight is not None,
            MEAN=options.reduction == "mean",
            BLOCK=4096,
            num_warps=16,
        )
    return out_target_N, valid_N, scale_N, target_weight_N


def _token_rows_torch(
    target: Tensor,
    n_classes: int,
    first_class: int,
    options: CrossEntropyOptions,
    class_weight: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    token_weight = options.token_weight
    if options.shift:
        target = shift_left(target, options.ignore_index)
        token_weight = None if token_weight is None else shift_left(token_weight, 0.0)
    target_N = target.reshape(-1).long()
    valid_N = target_N != options.ignore_index
    wrong_N = valid_N & ((target_N < 0) | (target_N >= n_classes))
    scale_N = valid_N.to(dtype)
    if token_weight is not None:
        # Not a product: a weight of NaN on an ignored token adds nothing.
        scale_N = torch.where(valid_N, token_weight.reshape(-1).to(dtype), 0.0)
    target_weight_N = None if class_weight is None else class_weight[target_N.clamp(0, n_classes - 1)]
    if options.reduction == "mean":
        weights = scale_N if target_weight_N is None else scale_N * target_weight_N
        total = torch.where(wrong_N, 0.0, weights).sum()
        # Nothing valid: every scale is 0 and so are the loss and all gradients.
        scale_N = torch.where(total == 0, 0.0, scale_N / total)
    scale_N = torch.where(wrong_N, torch.nan, scale_N)
    return target_N - first_class if first_class else target_N, valid_N, scale_N, target_weight_N


# Softmax of a tile of logits -------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxPass:
    """What one pass over a tile of logits does.

    find_lse: fills the statistics. merge: they already hold those of other classes; combine. write_gradient:
    overwrites the logits with the gradient of the loss; a pass that merges does not. column: the first class
    of the tile. grad_lse [rows]: the gradient with respect to the returned log-sum-exp.
    """

    column: int
    find_lse: bool
    write_gradient: bool
    merge: bool = False
    grad_lse: Tensor | None = None


def softmax_rows_triton(
    logits_RC: Tensor, rows: TokenRows, stats: RowStatistics, options: CrossEntropyOptions, todo: SoftmaxPass
) -> None:
    n, c = logits_RC.shape
    # Classes per load and warps per row: the best of those measured, from 4,000 to 150,000 classes.
    block = 128
    while block < 8192 and block * 8 < c:
        block *= 2
    class_weight = None if rows.class_weight is None else rows.class_weight[todo.column : todo.column + c]
    _KERNELS.launch(
        "softmax_rows",
        (n,),
        *(logits_RC, logits_RC.stride(0), rows.target, todo.column, rows.valid, rows.scale),
        *(rows.target_weight, class_weight, todo.grad_lse, rows.weight_total),
        *(stats.lse, stats.target_logit, stats.smooth_sum, stats.target_gradient, c),
        *(options.label_smoothing, options.label_smoothing / rows.n_classes),
        *(options.z_loss, options.softcap or 0.0),
        FIND_LSE=todo.find_lse,
        passes=int(todo.find_lse) + 2 * int(todo.write_gradient),  # the gradient overwrites the logits
        MERGE=todo.merge,
        WRITE_GRADIENT=todo.write_gradient,
        KEEP_TARGET=stats.target_gradient is not None,
        SMOOTH=options.label_smoothing != 0.0,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_GRAD_LSE=todo.grad_lse is not None,
        BLOCK=block,
        num_warps=max(1, block // 256),
    )


def softmax_rows_torch(
    logits_RC: Tensor, rows: TokenRows, stats: RowStatistics, options: CrossEntropyOptions, todo: SoftmaxPass
) -> None:
    c, valid, softcap = logits_RC.shape[1], rows.valid, options.softcap
    target = rows.target - todo.column
    in_tile = valid & (target >= 0) & (target < c)
    safe_target = torch.where(in_tile, target, 0).unsqueeze(1)
    class_weight = None if rows.class_weight is None else rows.class_weight[todo.column : todo.column + c]

    # Half precision is widened into a copy. fp32 and float64 are modified in place, unless the logits must
    # stay as they are.
    z = logits_RC.to(rows.scale.dtype, copy=softcap is not None and not todo.write_gradient)
    if softcap is not None:
        z = z.div_(softcap).tanh_().mul_(softcap)
    if todo.find_lse:
        target_logit = torch.where(in_tile, z.gather(1, safe_target).squeeze(1), 0.0)
        stats.target_logit.copy_(stats.target_logit + target_logit if todo.merge else target_logit)
        if stats.smooth_sum is not None:
            smooth = z.sum(1) if class_weight is None else z @ class_weight
            smooth = torch.where(valid, smooth, 0.0)
            stats.smooth_sum.copy_(stats.smooth_sum + smooth if todo.merge else smooth)
        if not todo.write_gradient:
            lse = torch.logsumexp(z, 1)
            lse = torch.logaddexp(stats.lse, lse) if todo.merge else lse
            stats.lse.copy_(torch.where(valid, lse, 0.0))
            return
    softcap_slope = None if softcap is None else 1.0 - (z / softcap).square_()
    if todo.find_lse:
        # One exp: its sum gives the log-sum-exp, and divided by that sum it is the softmax.
        top = z.amax(1).nan_to_num_(neginf=0.0)
        p = z.sub_(top.unsqueeze(1)).exp_()
        total = p.sum(1)
        stats.lse.copy_(torch.where(valid, top + total.log(), 0.0))
    else:
        p = z.sub_(stats.lse.unsqueeze(1)).exp_()
        total = torch.ones_like(stats.lse)

    target_factor = rows.scale * (1.0 - options.label_smoothing)
    if rows.target_weight is not None:
        target_factor = target_factor * rows.target_weight
    softmax_factor = target_factor
    uniform = options.label_smoothing / rows.n_classes
    if rows.weight_total is not None:
        softmax_factor = softmax_factor + rows.scale * (uniform * rows.weight_total)
    if options.z_loss:
        softmax_factor = softmax_factor + rows.scale * (2.0 * options.z_loss * stats.lse)
    if todo.grad_lse is not None:
        softmax_factor = softmax_factor + todo.grad_lse
    grad = p.mul_(torch.where(valid, softmax_factor / total, 0.0).unsqueeze(1))
    grad.scatter_add_(1, safe_target, torch.where(in_tile, -target_factor, 0.0).unsqueeze(1))
    if options.label_smoothing:
        smoothing = (rows.scale * uniform).unsqueeze(1)
        grad.sub_(smoothing if class_weight is None else smoothing * class_weight)
    if softcap_slope is not None:
        grad.mul_(softcap_slope)
    # 0 * inf in an ignored row would be NaN; the kernel writes 0 there, and so does this.
    grad.masked_fill_(~valid.unsqueeze(1), 0.0)
    if grad is not logits_RC:
        logits_RC.copy_(grad)


# The target's part of the weight gradient, Triton only -----------------------------------------------


def clear_targets(gradient_RC: Tensor, rows: TokenRows, column: int) -> None:
    """Set each row's gradient at its target to 0: `add_target_rows` adds it to the weight gradient."""
    (n, c), block = gradient_RC.shape, 256
    arguments = (gradient_RC, gradient_RC.stride(0), rows.target, column, n, c)
    _KERNELS.launch("clear_targets", (-(-n // block),), *arguments, BLOCK=block, passes=1 / max(c, 1))


def add_target_rows(grad_weight_VD: Tensor, x_ND: Tensor, rows: TokenRows, target_gradient_N: Tensor) -> None:
    """grad_weight[v] += target_gradient[n] * x[n] for every token n whose target is v, summed in fp32."""
    n, (v, d) = rows.target.shape[0], grad_weight_VD.shape
    # int32 takes half the passes of int64 to sort. Targets out of range stay so.
    target, order = rows.target.clamp(-1, v).to(torch.int32).sort()
    end = torch.searchsorted(target, target, right=True)
    block = min(1024, 1 << max(4, (d - 1).bit_length()))
    if n:
        _KERNELS.launch(
            "add_target_rows",
            (n, -(-d // block)),
            *(grad_weight_VD, *grad_weight_VD.stride(), x_ND, *x_ND.stride()),
            *(target_gradient_N, target, order, end, rows.valid, v, d),
            BLOCK=block,
            num_warps=4,
        )


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """values *= factor, at no cost where the factor is 1; `values` is contiguous, `factor` one number."""
    block, programs = 4096, 1024  # enough to fill a GPU; each continues with further blocks
    grid = (min(programs, -(-values.numel() // block)),)
    if values.numel():
        _KERNELS.launch("scale_in_place", grid, values, values.numel(), factor, BLOCK=block, num_warps=8)
