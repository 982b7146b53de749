"""Which implementation of linear_cross_entropy runs, and in what blocks."""

import functools
from typing import Any

import torch

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import Choice
from oomph.ops.cross_entropy.arguments import Arguments, check_arguments
from oomph.ops.cross_entropy.sharded import shard_of
from oomph.ops.cross_entropy.tiling import DEFAULT_BUDGET, Sizes, Tiling, choose_tiling
from oomph.ops.launch import why_not_triton
from oomph.units import MiB, format_bytes

# Up to this many bytes of fp32 logits the plain product is chosen: it starts fewer kernels, and the four
# copies of the logits it holds are 64 MiB at most. Report 002 changed over at 10 GB: there they are 40 GB.
PLAIN_LOGITS = 16 * MiB
_PLAIN_COPIES = 4


def explain_choice(*arguments: Any, **options: Any) -> Choice:
    call = Arguments(*arguments, **options)
    check_arguments(call)
    return choose(call)


@functools.lru_cache(maxsize=256)  # small models wait for the host, and ask the same at every step
def _tiling(sizes: Sizes, budget: int) -> tuple[Tiling, str]:
    tiling = choose_tiling(sizes, budget)
    return tiling, tiling.describe(sizes.n_tokens, sizes.n_classes, sizes.bytes_per_logit)


def choose(a: Arguments) -> Choice:
    dtype = a.compute_dtype
    wide = max(4, dtype.itemsize)
    n_tokens = a.target.numel() if a.num_valid is None else min(a.num_valid, a.target.numel())
    n_classes, hidden = a.weight.shape
    shard = shard_of(a.weight)
    if shard is not None:
        n_classes = shard.largest
        if a.impl in ("plain", "reference"):
            raise ArgumentError(
                f"impl={a.impl!r} takes no vocabulary-sharded weight; choose from 'auto', 'chunked', 'triton'"
            )
    no_kernels = why_not_triton(a.x) or ("float64 is computed in float64" if dtype == torch.float64 else None)
    if a.impl == "triton" and no_kernels:
        raise ArgumentError(f"impl='triton' cannot run: {no_kernels}; choose 'auto' or 'chunked'")

    kernels = a.impl == "triton" or (a.impl == "auto" and no_kernels is None and a.x.device.type == "cuda")
    per_logit = dtype.itemsize
    if not kernels:
        # Plain torch: a widened copy of half-precision logits, one in log-sum-exp, and the slope of the cap.
        per_logit += wide * (1 + (dtype.itemsize < wide) + (a.softcap is not None))
    budget = common.parse_memory_budget(a.memory_budget)
    sizes = Sizes(n_tokens, hidden, n_classes, per_logit, wide, a.x.device.type)
    tiling, blocks = _tiling(sizes, budget or DEFAULT_BUDGET)
    settings = {"rows": tiling.rows, "columns": tiling.columns, "kernels": no_kernels is None}
    if a.impl != "auto":
        return Choice(a.impl, f"asked for; {blocks}", settings)

    logits = n_tokens * n_classes * wide
    limit = PLAIN_LOGITS if budget is None else min(PLAIN_LOGITS, budget // _PLAIN_COPIES)
    if logits <= limit and not a.accumulate_into_grad and shard is None:
        reason = f"the logits are {format_bytes(logits)} in fp32, at most {format_bytes(limit)}"
        return Choice("plain", reason, settings)
    size = f"the logits would be {format_bytes(logits)} in fp32; {blocks}"
    if kernels:
        return Choice("triton", size, settings)
    return Choice("chunked", f"{size}; no kernels: {no_kernels or 'the interpreter is for tests'}", settings)
