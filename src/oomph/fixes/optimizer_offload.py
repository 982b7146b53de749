"""The optimizer's state, and its step, on the host."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.compact import Compact
from oomph.fixes.optimizers.conversion import kind_of, optimizer_of, with_converted_optimizer
from oomph.fixes.optimizers.in_backward import check_steps_apart
from oomph.fixes.optimizers.on_host import OnHost
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.units import MiB, parse_bytes
from oomph.workload import Workload


class OptimizerCPUOffload(Fix):
    name = "optimizer_cpu_offload"
    kind = "exact"
    changes = (
        "The optimizer's state stays in host memory: gradients go there, and updated parameters come back."
    )
    excludes: ClassVar = {
        "optimizer_8bit": "state on the host needs no 8 bits",
        "stochastic_rounding": "its step is a kernel of the GPU",
        "optimizer_in_backward": "backward would wait for the host at every parameter",
        "fused_optimizer": "the step runs on the host, fused where torch has that",
        "no_foreach": "the step runs on the host, parameter by parameter",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = optimizer_of(context)
        if optimizer is not None and _why_not(optimizer, self.name, independent=False) is None:
            yield Target(
                ("optimizer",), {}, "the GPU waits for the step on the host, whose speed is only estimated"
            )

    def change_workload(
        self, workload: Workload, *_: Any, staging: str | int = 64 * MiB, independent: bool = False
    ) -> Workload:
        """`staging`: pinned memory that gradients are copied into, twice this, or twice the largest gradient
        if that is more. `independent`: the user's word that an optimizer which is not torch's own steps each
        parameter by itself."""
        if not isinstance(independent, bool):
            raise UserError(
                f"fix {self.name!r}: independent={independent!r} is not valid; valid: true, false"
            )
        size = parse_bytes(staging)
        if size < 1:
            raise UserError(f"fix {self.name!r}: staging={staging!r} is not valid; give a size such as 64MiB")
        convert = partial(_on_host, fix=self.name, staging=size, independent=independent)
        return with_converted_optimizer(workload, self.name, convert)


def _on_host(optimizer: Optimizer, *, fix: str, staging: int, independent: bool) -> Optimizer:
    why = _why_not(optimizer, fix, independent)
    if why is not None:
        raise UserError(why)
    return OnHost(optimizer, staging, fix)


def _why_not(optimizer: Optimizer, fix: str, independent: bool) -> str | None:
    if isinstance(optimizer, OnHost | Compact):
        return f"fix {fix!r}: {kind_of(optimizer)} is another fix's, whose step is not the host's"
    try:
        check_steps_apart(optimizer, fix, independent)
    except UserError as error:
        return str(error)
    return None
