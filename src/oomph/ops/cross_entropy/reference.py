"""The options of linear_cross_entropy and its specification: all logits, float64, differentiable torch.

N tokens, D hidden size, V classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CrossEntropyOptions:
    """The keyword arguments of linear_cross_entropy, except `bias`; its docstring explains each."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    shift: bool = False
    return_lse: bool = False
    accumulate_into_grad: bool = False
    check: bool = False
    memory_budget: str | int | None = None
    impl: str = "auto"


def linear_cross_entropy_reference(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    bias: Tensor | None,  # [V]
    options: CrossEntropyOptions,
) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp), both float64 whatever the inputs' dtype.

    With `shift`, results per token have one position less than target.
    """
    token_weight = options.token_weight
    if options.shift:
        x, target = x[..., :-1, :], target[..., 1:]
        token_weight = None if token_weight is None else token_weight[..., 1:]
    logits = x.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    n_classes = weight.shape[0]
    lse = torch.logsumexp(logits, dim=-1)
    negative_log_p = lse.unsqueeze(-1) - logits

    valid = target != options.ignore_index
    in_range = (target >= 0) & (target < n_classes)
    safe_target = torch.where(valid & in_range, target, 0).long()
    class_weight = torch.ones(n_classes, dtype=torch.float64, device=x.device)
    if options.class_weight is not None:
        class_weight = options.class_weight.double()
    target_weight = class_weight[safe_target]

    nll = negative_log_p.gather(-1, safe_target.unsqueeze(-1)).squeeze(-1)
    loss = (1 - options.label_smoothing) * target_weight * nll
    if options.label_smoothing:
        loss = loss + options.label_smoothing / n_classes * (negative_log_p * class_weight).sum(-1)
    loss = loss + options.z_loss * lse**2
    token_weight = torch.ones_like(loss) if token_weight is None else token_weight.double()
    loss = torch.where(valid, loss * token_weight, 0.0)
    loss = torch.where(valid & ~in_range, torch.nan, loss)
    lse = torch.where(valid, lse, 0.0)

    if options.reduction == "none":
        return loss, lse
    if options.reduction == "sum":
        return loss.sum(), lse
    total = torch.where(valid, token_weight * target_weight, 0.0).sum()
    # Nothing to average: 0, with zero gradients. Not a where() of both: 0 / 0 would make the gradients NaN.
    return loss.sum() / torch.where(total == 0, 1.0, total) * (total != 0), lse
