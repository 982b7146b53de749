"""The specification of linear_cross_entropy: every logit held, every step differentiable torch.

N tokens, D hidden size, V classes. Computed in float64, whatever the inputs' dtype.
"""

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
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
) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp), both float64."""
    if shift:
        x, target = x[..., :-1, :], target[..., 1:]
        token_weight = None if token_weight is None else token_weight[..., 1:]
    logits = x.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    n_classes = weight.shape[0]
    lse = torch.logsumexp(logits, dim=-1)
    negative_log_p = lse.unsqueeze(-1) - logits

    kept = target != ignore_index
    in_range = (target >= 0) & (target < n_classes)
    safe_target = torch.where(kept & in_range, target, 0)
    of_class = torch.ones(n_classes, dtype=torch.float64, device=x.device)
    if class_weight is not None:
        of_class = class_weight.double()
    of_target = of_class[safe_target]

    nll = negative_log_p.gather(-1, safe_target.unsqueeze(-1)).squeeze(-1)
    smooth = (negative_log_p * of_class).sum(-1)
    per_token = (1 - label_smoothing) * of_target * nll
    if label_smoothing:
        per_token = per_token + label_smoothing / n_classes * smooth
    per_token = per_token + z_loss * lse**2
    of_token = torch.ones_like(per_token) if token_weight is None else token_weight.double()
    per_token = torch.where(kept, per_token * of_token, 0.0)
    per_token = torch.where(kept & ~in_range, torch.nan, per_token)
    lse = torch.where(kept, lse, 0.0)

    if reduction == "none":
        return per_token, lse
    if reduction == "sum":
        return per_token.sum(), lse
    total = torch.where(kept, of_token * of_target, 0.0).sum()
    # Nothing to average: 0, with zero gradients, rather than 0 / 0.
    return torch.where(total == 0, per_token.sum() * 0.0, per_token.sum() / total), lse
