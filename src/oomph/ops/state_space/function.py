"""The one autograd function. Kept for backward: the inputs, and the states at the chunks' entries.

Nothing of size [B, L, d] is kept that is not an input: with a gate z, y before the gate is made again from
the states, which backward needs in any case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_autocast, refuse_second_derivatives
from oomph.ops.state_space.problem import Gradients, Inputs, Options, Wanted


@dataclass(frozen=True)
class Passes:
    """How one implementation runs forward and backward."""

    forward: Callable[[Inputs, Options], tuple[Tensor, Tensor | None, Tensor | None]]
    backward: Callable[[Inputs, Options, Tensor, Tensor, Tensor | None, Wanted], Gradients]


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, passes: Passes, options: Options, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        with no_autocast(inputs.x_RBLd):
            y_BLd, final, kept = passes.forward(inputs, options)
        ctx.passes, ctx.options = passes, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, kept)
        return y_BLd, final

    @staticmethod
    def backward(ctx: Any, g_BLd: Tensor | None, g_final: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        refuse_second_derivatives("selective_scan")
        *tensors, kept = ctx.saved_tensors
        inputs = Inputs(*tensors)
        if g_BLd is None:  # only the final state was used
            g_BLd = inputs.x_RBLd.new_zeros(inputs.x_RBLd.shape[1:])
        with no_autocast(g_BLd):
            wanted = Wanted(*ctx.needs_input_grad[2:])
            made = ctx.passes.backward(inputs, ctx.options, kept, g_BLd, g_final, wanted)
        return (None, None, *made)
