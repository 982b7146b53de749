"""The same in plain torch, block by block: the unrounded product never exists as a whole.

Legend: G batch, M rows, K inner, N columns.
"""

import torch
from torch import Tensor

from oomph.ops.matmul.reference import row_statistic
from oomph.units import MiB

_BLOCK_BYTES = 16 * MiB  # of the product in the wide dtype


def matmul_in_blocks(
    a_GMK: Tensor, b_GKN: Tensor, epilogue: str | None, return_product: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(product or None, row statistic or None), as the reference gives them."""
    if epilogue is None:
        return torch.bmm(
            a_GMK, b_GKN
        ), None  # nothing to keep unrounded: the library's product is all there is
    groups, rows, _ = a_GMK.shape
    columns = b_GKN.shape[2]
    wide = torch.promote_types(a_GMK.dtype, torch.float32)
    c = a_GMK.new_empty(groups, rows, columns) if return_product else None
    statistic = a_GMK.new_full((groups, rows), float("-inf"), dtype=wide)
    row_step, column_step = _steps(rows, columns, wide.itemsize)
    for g in range(groups):
        # Columns outside: so each block of b is widened once.
        for n in range(0, columns, column_step):
            b = b_GKN[g, :, n : n + column_step].to(wide)
            for m in range(0, rows, row_step):
                product = a_GMK[g, m : m + row_step].to(wide) @ b
                if c is not None:
                    c[g, m : m + row_step, n : n + column_step].copy_(product)
                part = row_statistic(product, epilogue)
                del product  # before the next block is made
                assert part is not None
                so_far = statistic[g, m : m + row_step]
                if epilogue == "rowmax":
                    torch.maximum(so_far, part, out=so_far)
                else:
                    torch.logaddexp(so_far, part, out=so_far)
    return c, statistic


def statistic_gradients(
    a_GMK: Tensor,
    b_GKN: Tensor,
    statistic_GM: Tensor,
    grad_c_GMN: Tensor | None,
    grad_statistic_GM: Tensor,
    epilogue: str,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a and b. The product is computed again, a block of rows at a time, in the wide dtype."""
    groups, rows, inner = a_GMK.shape
    columns = b_GKN.shape[2]
    wide = statistic_GM.dtype
    grad_a = torch.empty_like(a_GMK) if needs[0] else None
    grad_b = torch.empty_like(b_GKN) if needs[1] else None
    row_step = max(1, _BLOCK_BYTES // max(1, columns * wide.itemsize))
    for g in range(groups):
        b = b_GKN[g].to(wide)
        sum_b = torch.zeros(inner, columns, dtype=wide, device=b.device) if needs[1] else None
        for m in range(0, rows, row_step):
            part = slice(m, m + row_step)
            a = a_GMK[g, part].to(wide)
            grad = _grad_of_block(a @ b, statistic_GM[g, part], grad_statistic_GM[g, part], epilogue)
            if grad_c_GMN is not None:
                grad += grad_c_GMN[g, part]
            if grad_a is not None:
                grad_a[g, part].copy_(grad @ b.t())
            if sum_b is not None:
                sum_b.addmm_(a.t(), grad)
            del grad
        if grad_b is not None and sum_b is not None:
            grad_b[g].copy_(sum_b)
    return grad_a, grad_b


def _grad_of_block(product: Tensor, statistic_M: Tensor, grad_M: Tensor, epilogue: str) -> Tensor:
    """What the statistic sends back to the product; uses the product's memory where it can."""
    if product.shape[1] == 0:
        return product
    if epilogue == "logsumexp":
        softmax = product.sub_(statistic_M.unsqueeze(1)).exp_()
        return softmax.mul_(grad_M.unsqueeze(1))
    largest = product.argmax(dim=1, keepdim=True)
    return product.zero_().scatter_(1, largest, grad_M.unsqueeze(1).to(product.dtype))


def _steps(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Blocks of at most _BLOCK_BYTES, up to 2,048 columns wide."""
    column_step = max(1, min(columns, 2048))
    return max(1, min(rows, _BLOCK_BYTES // (column_step * itemsize))), column_step
