"""Does a Workload compute the same with its fixes in? Run on the CPU, before and after, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oomph.errors import UserError
from oomph.fixes.applying import Fixes, apply, uses_of
from oomph.fixes.catalogue import find
from oomph.prediction import built
from oomph.records import FixKind
from oomph.units import GiB
from oomph.workload import Workload

_LARGEST = 4 * GiB  # of parameters; gradients and a second model come on top
STEPS = 2
# How far apart an exact fix may be, relative to a tensor's largest entry: float32's rounding, summed.
EXACT = 1e-4
# Gradients that are zero but for rounding (of the keys' bias, say) are compared with the largest of all.
_FLOOR = 1e-4


@dataclass(frozen=True)
class Difference:
    """How far apart a tensor is with the fixes and without, relative to its largest entry without."""

    name: str  # "loss of step 1", "gradient of blocks.0.mlp.fc.weight", "head.weight after 2 steps"
    error: float


@dataclass(frozen=True)
class Verification:
    fixes: tuple[str, ...]
    kind: FixKind  # the least exact of the fixes'
    differences: tuple[Difference, ...]  # largest first
    tolerance: float | None  # None: not judged, since the fixes change the numbers on purpose

    @property
    def holds(self) -> bool:
        """Whether all is finite and, for exact fixes, the same."""
        most = float("inf") if self.tolerance is None else self.tolerance
        return all(each.error <= most and each.error < float("inf") for each in self.differences)


@dataclass(frozen=True)
class _Run:
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def verify(
    fixes: Fixes, workload: Workload, *, sizes: dict[str, int] | None = None, tolerance: float = EXACT
) -> Verification:
    """Loss, every gradient and the parameters after two steps, without the fixes and with them, on the CPU.

    The model is built and run for real: give a small instance. `sizes` replaces some of the Workload's. Exact
    fixes are run in float64 where the Workload is float32, so that rounding hides nothing.
    """
    if sizes:
        workload = replace(workload, sizes={**(workload.sizes or {}), **sizes})
    _check_size(workload)
    uses = uses_of(fixes)
    kinds = [find(use.fix).kind for use in uses]
    kind: FixKind = "training" if "training" in kinds else "precision" if "precision" in kinds else "exact"
    if kind == "exact" and workload.dtype in (None, torch.float32) and workload.autocast is None:
        workload = replace(workload, dtype=torch.float64, batch=_in_float64(workload.batch))
    fixed = apply(uses, workload)
    before, after = _run(workload), _run(fixed)
    found = list(_differences(before, after, comparable=kind != "training"))
    return Verification(
        tuple(use.fix for use in uses),
        kind,
        tuple(sorted(found, key=lambda each: -each.error)),
        tolerance if kind == "exact" else None,
    )


def _check_size(workload: Workload) -> None:
    size = sum(parameter.numel() * parameter.element_size() for parameter in built(workload).parameters())
    if size > _LARGEST:
        raise UserError(
            f"verify runs the model on the CPU, and this one has {size / GiB:.1f} GiB of parameters; "
            "give a target with a small configuration of it"
        )


def _in_float64(make: Callable[..., Any]) -> Callable[..., Any]:
    def batch(*args: Any, **sizes: int) -> Any:
        def wide(leaf: Any) -> Any:
            return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf

        return tree_map(wide, make(*args, **sizes))

    return batch


def _run(workload: Workload) -> _Run:
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = workload.model()
        if workload.dtype is not None:
            model = model.to(workload.dtype)  # type: ignore[arg-type]
        model.train()
        optimizer = workload.optimizer(model.parameters()) if workload.optimizer is not None else None
        torch.manual_seed(1)
        batch = workload.make_batch(device)
        losses, gradients = [], {}
        for step in range(STEPS):
            torch.manual_seed(2 + step)
            with _seen_gradients(model) as seen:
                losses.append(_forward_and_backward(workload, model, batch))
            if step == 0:
                gradients = seen
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return _Run(losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()})


def _forward_and_backward(workload: Workload, model: nn.Module, batch: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for part, factor in workload.passes(batch):
        with contextlib.ExitStack() as stack:
            if workload.autocast is not None:
                stack.enter_context(torch.autocast("cpu", workload.autocast))  # type: ignore[arg-type]
            loss = workload.loss(model, part)
        scaled = loss * factor
        scaled.backward()
        total += scaled.detach().double()
    return total


@contextlib.contextmanager
def _seen_gradients(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The step's gradients by name, once it is over: from .grad, or as they passed where .grad is freed."""
    passed: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:

            def add(grad: Tensor, name: str = name) -> None:
                passed[name] = passed[name] + grad if name in passed else grad.clone()

            handles.append(parameter.register_hook(add))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for name, parameter in model.named_parameters():
        grad = parameter.grad if parameter.grad is not None else passed.get(name)
        if grad is not None:
            found[name] = grad.detach().clone()


def _differences(before: _Run, after: _Run, comparable: bool) -> Iterator[Difference]:
    for step, (loss, new) in enumerate(zip(before.losses, after.losses, strict=True), 1):
        yield Difference(f"loss of step {step}", _apart(loss, new))
    if not comparable:
        return
    for what, old, new_ones in (
        ("gradient of {}", before.gradients, after.gradients),
        ("{} after " + f"{STEPS} steps", before.parameters, after.parameters),
    ):
        floor = _FLOOR * max((_largest(tensor) for tensor in old.values()), default=0.0)
        for name in dict.fromkeys([*old, *new_ones]):
            both = name in old and name in new_ones
            error = _apart(old[name], new_ones[name], floor) if both else float("inf")
            yield Difference(what.format(name), error)


def _apart(old: Tensor, new: Tensor, floor: float = 0.0) -> float:
    if old.shape != new.shape:
        return float("inf")
    off, size = _largest(new.double() - old.double()), max(_largest(old), floor)
    error = off / size if off and size else off
    return error if error == error else float("inf")  # not a number


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0
