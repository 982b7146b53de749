"""The product and its row statistics as they are defined."""

import torch
from torch import Tensor


def matmul_reference(a: Tensor, b: Tensor, epilogue: str | None) -> tuple[Tensor, Tensor | None]:
    """a [..., M, K] @ b [..., K, N] in float32 (float64 for float64), rounded once; the statistic [..., M].

    The statistic is of the unrounded product and stays in its dtype. Over no columns it is -inf.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    product = a.to(wide) @ b.to(wide)
    return product.to(a.dtype), row_statistic(product, epilogue)


def row_statistic(product: Tensor, epilogue: str | None) -> Tensor | None:
    if epilogue is None:
        return None
    if product.shape[-1] == 0:
        return product.new_full(product.shape[:-1], float("-inf"))
    return product.max(dim=-1).values if epilogue == "rowmax" else product.logsumexp(dim=-1)
