"""Run a Workload on the CPU with and without fixes, and compare loss, gradients and parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ProgramError, UserError, blame
from oomph.fixes.application import apply
from oomph.fixes.registry import Fixes, find, uses_of
from oomph.fixes.training_changes import ChangedBatch
from oomph.prediction import fake_model
from oomph.prediction.isolation import run_isolated
from oomph.records import Difference, FixKind, Progress, Verification
from oomph.units import GiB
from oomph.workload import Workload

_LARGEST = 4 * GiB  # of parameters; gradients and a second model need as much again
STEPS = 2
# The largest difference of an exact fix, relative to a tensor's largest entry: accumulated float32 rounding.
EXACT = 1e-4
# Gradients that are zero up to rounding (of a key's bias, say) are compared with the largest of all.
_FLOOR = 1e-4


@dataclass(frozen=True)
class Run:
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def verify(
    fixes: Fixes,
    workload: Workload,
    *,
    sizes: dict[str, int] | None = None,
    tolerance: float = EXACT,
    progress: Progress | None = None,
) -> Verification:
    """Compare losses, every gradient, and parameters and buffers after two steps, without and with the fixes.

    The model is built and runs on the CPU: give a small instance. `sizes` replaces some of the Workload's
    sizes. Exact fixes run in float64 without autocast, so that rounding hides nothing; in their own dtype
    where its model does not run in float64.
    """
    return run_isolated(
        lambda report: _verify(fixes, workload, sizes, tolerance, report),
        progress or (lambda text, fraction: None),
    )


def _verify(
    fixes: Fixes, workload: Workload, sizes: dict[str, int] | None, tolerance: float, progress: Progress
) -> Verification:
    if sizes:
        workload = replace(workload, sizes={**(workload.sizes or {}), **sizes})
    _check_size(workload)
    uses = uses_of(fixes)
    kinds = [find(use.fix).kind for use in uses]
    if "compile" in kinds:
        raise UserError(
            "fix 'compile' cannot be verified on the CPU, where torch.compile generates other code"
        )
    kind: FixKind = "training" if "training" in kinds else "precision" if "precision" in kinds else "exact"
    smaller = _smaller(workload)

    def report(with_fixes: bool, step: int) -> None:
        which = "with the fixes" if with_fixes else "without fixes"
        done = (step + STEPS * with_fixes) / (2 * STEPS)
        progress(f"on the CPU {which}: step {step + 1} of {STEPS}{smaller}", done)

    failure: BaseException | None = None
    for candidate in (widened(workload), workload) if kind == "exact" else (workload,):
        try:
            before = run(candidate, before_step=partial(report, False))
            break
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # in float64, such as a model that makes tensors of another dtype
            failure = error
    else:  # without a fix: not ours
        assert failure is not None
        raise blame(failure) or ProgramError.of(failure) from failure
    if kind == "exact" and candidate is workload and _rounds_to_16_bits(workload):
        raise UserError(
            "the model does not run in float64, and rounding to 16 bits hides what verify looks for; "
            "give a Workload in float32"
        )
    workload = candidate
    if not all(loss.isfinite() for loss in before.losses):
        raise UserError(
            "the workload's own loss is not finite, without any fix, so there is nothing to compare with"
        )
    after = run(apply(uses, workload), before_step=partial(report, True))
    found = differences(before, after, comparable=kind != "training")
    names = tuple(use.fix for use in uses)
    verification = Verification(names, kind, found, tolerance if kind == "exact" else None)
    if not verification.holds and any(map(_drops, fake_model(workload).modules())):
        note = "the model has dropout, and fixes may draw other masks: compare a Workload without dropout"
        return replace(verification, notes=(note,))
    return verification


def _drops(module: nn.Module) -> bool:
    return "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0


def widened(workload: Workload) -> Workload:
    """The workload in float64, without autocast."""
    batch = ChangedBatch(workload.batch, _in_float64)
    return replace(workload, dtype=torch.float64, autocast=None, batch=batch)


def _rounds_to_16_bits(workload: Workload) -> bool:
    return workload.autocast is not None or workload.dtype in (torch.bfloat16, torch.float16)


def _check_size(workload: Workload) -> None:
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in fake_model(workload).parameters()
    )
    if size > _LARGEST:
        raise UserError(
            f"verify runs the model on the CPU, and this one has {size / GiB:.1f} GiB of parameters; "
            "give a target with a small configuration of it"
        )


def _in_float64(leaf: Tensor, batch: Any, name: str | None) -> Tensor:
    return leaf.double() if leaf.is_floating_point() else leaf


def _smaller(workload: Workload) -> str:
    """How to run less, with sizes that the Workload has."""
    sizes = {name: 2 if name == "B" else size // 4 for name, size in (workload.sizes or {}).items()}
    smaller = [f"{name}={size}" for name, size in sizes.items() if 0 < size < workload.sizes[name]]  # type: ignore[index]
    return f" (smaller: --sizes {','.join(smaller)})" if smaller else ""


def run(
    workload: Workload, steps: int = STEPS, before_step: Callable[[int], None] = lambda step: None
) -> Run:
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = workload.make_model(copy.deepcopy)  # the factory may return the user's own model
        if workload.dtype is not None:
            model = model.to(workload.dtype)  # type: ignore[arg-type]
        model.train()
        optimizer = workload.make_optimizer(model)
        torch.manual_seed(1)
        batch = workload.make_batch(device)
        losses, gradients = [], {}
        for step in range(steps):
            before_step(step)
            torch.manual_seed(2 + step)
            freed = getattr(optimizer, "updates_in_backward", False)
            with _collect_gradients(model, freed) as seen:
                losses.append(workload.forward_backward(model, batch, device).double())
            if step == 0:
                gradients = seen
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    parameters, buffers = (
        {name: tensor.detach().clone() for name, tensor in named}
        for named in (model.named_parameters(), model.named_buffers(remove_duplicate=False))
    )
    return Run(losses, gradients, parameters, buffers)


@contextlib.contextmanager
def _collect_gradients(model: nn.Module, freed: bool) -> Iterator[dict[str, Tensor]]:
    """A step's gradients by name: from .grad, or by hooks where an optimizer frees .grad in backward.

    Hooks are used only then, because fixes leave parameters with hooks alone.
    """
    passed: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and freed:

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


def differences(before: Run, after: Run, comparable: bool) -> tuple[Difference, ...]:
    """Largest first. `comparable`: compare gradients and parameters, too."""
    return tuple(sorted(_differences(before, after, comparable), key=lambda each: -each.error))


def _differences(before: Run, after: Run, comparable: bool) -> Iterator[Difference]:
    for step, (loss, new) in enumerate(zip(before.losses, after.losses, strict=True), 1):
        yield Difference(f"loss of step {step}", _relative_difference(loss, new))
    if not comparable:
        return
    for what, old, new_ones in (
        ("gradient of {}", before.gradients, after.gradients),
        ("{} after " + f"{STEPS} steps", before.parameters, after.parameters),
        ("buffer {} after " + f"{STEPS} steps", before.buffers, after.buffers),
    ):
        floor = _FLOOR * max((_largest(tensor) for tensor in old.values()), default=0.0)
        for name in dict.fromkeys([*old, *new_ones]):
            both = name in old and name in new_ones
            if not both and old is before.buffers:  # a fix may make one superfluous
                continue
            error = _relative_difference(old[name], new_ones[name], floor) if both else float("inf")
            yield Difference(what.format(name), error)


def _relative_difference(old: Tensor, new: Tensor, floor: float = 0.0) -> float:
    if old.shape != new.shape:
        return float("inf")
    if torch.equal(old, new):  # also where entries are infinite, as in masks
        return 0.0
    off, size = _largest(new.double() - old.double()), max(_largest(old), floor)
    error = off / size if off and size else off
    return error if error == error else float("inf")  # not a number


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0
