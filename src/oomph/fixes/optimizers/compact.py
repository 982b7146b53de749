"""Adam, AdamW and SGD that compute in float32, whatever their parameters and their state are kept in.

One parameter at a time: on a GPU by one kernel that needs no memory of its own, elsewhere (and without
Triton) by plain torch over slices of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers import blocks
from oomph.fixes.optimizers.conversion import kind_of, number_in, takes_over_hooks, takes_the_place_of
from oomph.fixes.optimizers.formats import FORMATS, State, flat, round_stochastically
from oomph.ops.launch import Kernels, why_not_triton

_SLICE = 1 << 22  # numbers; whole blocks of 256
_ROWS = 4  # blocks of 256 numbers that one program of a kernel takes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
kernels = Kernels("oomph.fixes.optimizers.triton")


class Compact(Optimizer):
    """`kept`: how state is kept, a name of FORMATS. `stochastic`: how bfloat16 parameters are rounded."""

    steps_each_parameter_alone = True
    moments: ClassVar[tuple[str, ...]]

    def __init__(self, made: Optimizer, kept: str, stochastic: bool, fix: str) -> None:
        self.fix = fix
        super().__init__(made.param_groups, made.defaults)
        takes_the_place_of(made)
        takes_over_hooks(self, made)
        self.kept, self.stochastic = kept, stochastic
        self.table: Tensor | None = None  # of 8-bit codes, where the parameters are
        for parameter in made.state:
            if made.state[parameter]:
                raise UserError(f"fix {fix!r}: the optimizer has state already; apply the fix before")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.table = None

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if parameter.dtype not in _DTYPES or gradient.layout is not torch.strided:
            raise UserError(
                f"fix {self.fix!r}: a parameter is {parameter.dtype} with a gradient of layout "
                f"{gradient.layout}; valid: float32, bfloat16 or float16, and dense"
            )
        state, moments = self.state[parameter], self.moments_of(group)
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            for key in moments:
                FORMATS[self.kept].make(state, key, parameter)
        state["step"] += 1
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if self.table is None and any(state[key].dtype is torch.uint8 for key in moments):
            self.table = blocks.table(parameter.device)
        if parameter.device.type == "cuda" and why_not_triton(parameter) is None:
            self._launch(parameter, gradient, state, group)
            torch.autograd.graph.increment_version(parameter)  # as every op of torch does that writes
        else:
            self._slice_by_slice(parameter, gradient, state, group)

    def _slice_by_slice(
        self, parameter: Tensor, gradient: Tensor, state: State, group: dict[str, Any]
    ) -> None:
        kept, every_p, every_g = FORMATS[self.kept], flat(parameter), flat(gradient)
        for start, stop in _slices(parameter.numel()):
            moments = [kept.read(state, key, start, stop, self.table) for key in self.moments_of(group)]
            part = every_p[start:stop]
            p = part.float()  # the parameter itself where it is float32
            self._compute(p, every_g[start:stop].float(), moments, state, group)
            for key, moment in zip(self.moments_of(group), moments, strict=True):
                kept.write(state, key, start, stop, moment, self.table)
            if self.stochastic and part.dtype is torch.bfloat16:
                round_stochastically(p, part)
            elif part.dtype is not torch.float32:
                part.copy_(p)

    def _compute(
        self, p: Tensor, g: Tensor, moments: list[Tensor], state: State, group: dict[str, Any]
    ) -> None:
        """One slice's update, in place in `p` and `moments`; `g` may be the gradient itself."""
        raise NotImplementedError

    def _launch(self, parameter: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _number(self, group: dict[str, Any], key: str) -> float:
        return number_in(group, key, self.fix)

    def _start(self, name: str, parameter: Tensor, *arguments: Any, **constants: Any) -> None:
        """The kernel over all of a parameter. A seed comes from torch's own generator on the host."""
        size = parameter.numel()
        stochastic = self.stochastic and parameter.dtype is torch.bfloat16
        draws = stochastic or self.kept == "bfloat16"
        seed = int(torch.randint(0, 2**31 - 1, (), device="cpu").item()) if draws else 0
        grid = (-(-size // (blocks.BLOCK * _ROWS)),)
        kernels.launch(
            name, grid, flat(parameter), *arguments, size, seed,
            STOCHASTIC=stochastic, BLOCK=blocks.BLOCK, ROWS=_ROWS, **constants,
        )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch makes state of the parameter's dtype; ours has its own.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                where = "cpu" if key == "step" else parameter.device
                self.state[parameter][key] = value.to(where, copy=True)


class CompactAdam(Compact):
    moments = ("exp_avg", "exp_avg_sq")

    def _factors(self, state: State, group: dict[str, Any]) -> tuple[float, float, float, float, float]:
        """(beta1, beta2, step size, root of the second correction, weight decay)."""
        step, lr = state["step"].item(), self._number(group, "lr")
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return beta1, beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, float(group["weight_decay"])

    def _compute(
        self, p: Tensor, g: Tensor, moments: list[Tensor], state: State, group: dict[str, Any]
    ) -> None:
        beta1, beta2, size, root, decay = self._factors(state, group)
        average, square = moments
        if group.get("maximize"):
            g = -g
        if _decays_apart(group):
            p.mul_(1 - self._number(group, "lr") * decay)
        elif decay:
            g = g.add(p, alpha=decay)
        average.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = square.sqrt().div_(root).add_(float(group["eps"]))
        p.addcdiv_(average, denominator, value=-size)

    def _launch(self, parameter: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        beta1, beta2, size, root, decay = self._factors(state, group)
        apart = _decays_apart(group)
        average, square = state["exp_avg"], state["exp_avg_sq"]
        coded = average.dtype is torch.uint8
        self._start(
            "adam", parameter, flat(gradient), flat(average), flat(square),
            state.get("exp_avg_scale"), state.get("exp_avg_sq_scale"), self.table if coded else None,
            1 - beta1, beta2, 1 - beta2, size, root, float(group["eps"]),
            1 - self._number(group, "lr") * decay if apart else 1.0, 0.0 if apart else decay,
            MAXIMIZE=bool(group.get("maximize")), CODED=coded,
            DRAWN_STATE=average.dtype is torch.bfloat16,
        )  # fmt: skip


class CompactSGD(Compact):
    moments = ("momentum_buffer",)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments if group["momentum"] else ()

    def _compute(
        self, p: Tensor, g: Tensor, moments: list[Tensor], state: State, group: dict[str, Any]
    ) -> None:
        if group["maximize"]:
            g = -g
        if group["weight_decay"]:
            g = g.add(p, alpha=float(group["weight_decay"]))
        for buffer in moments:
            # The first gradient is taken whole, as torch does.
            first = state["step"].item() == 1
            buffer.mul_(float(group["momentum"])).add_(g, alpha=1 if first else 1 - float(group["dampening"]))
            g = g.add(buffer, alpha=float(group["momentum"])) if group["nesterov"] else buffer
        p.add_(g, alpha=-self._number(group, "lr"))

    def _launch(self, parameter: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> None:
        buffer = state.get("momentum_buffer")
        first = state["step"].item() == 1
        self._start(
            "sgd", parameter, flat(gradient), None if buffer is None else flat(buffer),
            self._number(group, "lr"), float(group["momentum"]),
            1.0 if first else 1 - float(group["dampening"]), float(group["weight_decay"]),
            MAXIMIZE=bool(group["maximize"]), MOMENTUM=buffer is not None,
            NESTEROV=bool(group["nesterov"]),
            DRAWN_STATE=buffer is not None and buffer.dtype is torch.bfloat16,
        )  # fmt: skip


def compact(optimizer: Optimizer, *, fix: str, kept: str, stochastic: bool, sgd: bool) -> Optimizer:
    """The same optimizer, kept so. One that another fix has made compact keeps how its state is kept."""
    if isinstance(optimizer, Compact):
        optimizer.stochastic = optimizer.stochastic or stochastic
        return optimizer
    why = why_not(optimizer, sgd)
    if why is not None:
        raise UserError(f"fix {fix!r}: {why}")
    kind = CompactSGD if type(optimizer) is torch.optim.SGD else CompactAdam
    return kind(optimizer, kept, stochastic, fix)


def why_not(optimizer: Optimizer, sgd: bool) -> str | None:
    """Why it cannot be made compact, in a few words; None where it can."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, *((torch.optim.SGD,) if sgd else ()))
    if type(optimizer) not in kinds:
        valid = ", ".join(kind.__name__ for kind in kinds)
        return f"the optimizer is {kind_of(optimizer)}; valid: {valid} of torch.optim"
    for flag in ("amsgrad", "differentiable", "capturable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            return f"{kind_of(optimizer)} with {flag}=True is not supported"
    return None


def _decays_apart(group: dict[str, Any]) -> bool:
    """AdamW's weight decay, which does not go through the averages."""
    return bool(group["decoupled_weight_decay"])


def _slices(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, _SLICE):
        yield start, min(start + _SLICE, size)
