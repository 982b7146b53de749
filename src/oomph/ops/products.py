"""Matrix products into memory that is already there, and sums of them in a wider dtype."""

import torch
from torch import Tensor


def product_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b. `out` may be wider than a and b: then it is summed in its own dtype."""
    if out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif out.device.type == "cuda" and out.dtype == torch.float32:
        # cuBLAS multiplies half-precision numbers and adds them up in fp32 without a copy of either.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
