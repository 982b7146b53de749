"""Adam's averages in 8 bits instead of 32.

The format is that of torchao and bitsandbytes (blocks of 256 numbers with a scale, tensors of less than 4096
numbers left in float32), but for the second average, of which the root is kept: see optimizers/blocks.py. The
step is our own, one kernel a parameter. torchao's is left to torch.compile, shape by shape: its temporaries
are the compiler's choice and cannot be predicted, and it wants a learning rate that is a tensor, which
schedulers replace by a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from oomph.fixes.optimizers.compact import compact, why_not
from oomph.fixes.optimizers.conversion import optimizer_of, with_converted_optimizer
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


class Optimizer8Bit(Fix):
    name = "optimizer_8bit"
    kind = "precision"
    changes = "Adam's two averages are kept in 8 bits, in blocks of 256 with a scale; updates stay float32."
    excludes: ClassVar = {
        "fused_optimizer": "the 8-bit step is one kernel a parameter already",
        "no_foreach": "the 8-bit step goes parameter by parameter already",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = optimizer_of(context)
        if optimizer is not None and why_not(optimizer, sgd=False) is None:
            yield Target(("optimizer",))

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        convert = partial(compact, fix=self.name, kept="8bit", stochastic=False, sgd=False)
        return with_converted_optimizer(workload, self.name, convert)
