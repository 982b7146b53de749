"""How far each contender's gradients are from a float64 computation of the same inputs: one row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from op_rows import Row
from op_runs import Case, Inputs, Machine, clean, first_line, relative_error, step_of
from torch import Tensor

Gradients = Mapping[str, Tensor]


def float64_gradients(
    made: Inputs, names: Sequence[str], forward: Callable[[Inputs], Tensor], grad: str
) -> Gradients:
    """Those of the named inputs, by autograd, with everything that is a floating-point number in float64."""
    wide = {
        name: value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in made.items()
    }
    wanted = {name: wide[name].requires_grad_() for name in names}
    forward(wide).backward(wide[grad])
    return {name: value.grad for name, value in wanted.items() if value.grad is not None}


def gradient_errors(
    case: Case, machine: Machine, names: Sequence[str], forward: Callable[[Inputs], Tensor], grad: str
) -> list[Row]:
    """A row for each contender and gradient, its name in `data` and its error in `dx_error`."""
    torch.manual_seed(0)
    case = replace(case, op=f"{case.op} errors")
    made = case.make(machine.device)
    right = float64_gradients(made, names, forward, grad)
    rows = []
    for contender in case.contenders:
        try:
            step_of(contender, made)()
            for name in names:
                off = relative_error(made[name].grad, right[name])
                rows.append(machine.row(replace(case, data=f"d{name}"), contender, dx_error=off))
        except Exception as error:  # one contender must not stop the others
            rows.append(machine.row(case, contender, error=first_line(error)))
        clean(made)
    del made, right
    clean({})
    return rows
