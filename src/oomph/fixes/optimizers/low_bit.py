"""Adam and AdamW with 8-bit or bfloat16 state, and with stochastic rounding of bfloat16 parameters.

The update itself is computed in float32, one parameter at a time: on a GPU by one kernel without temporaries,
elsewhere (and without Triton) by torch ops over slices of bounded size.

8-bit state has the format of torchao and bitsandbytes: blocks of 256 numbers with a float32 scale; tensors
of less than 4096 numbers stay float32. A block is divided by its largest magnitude, and each number becomes
the nearest of 256 values between -1 and 1 (0 and 1 for what is never negative), dense near zero: seven
decades, each split evenly, the larger the finer (dynamic tree quantization, arXiv 2110.02861). Unlike there,
of exp_avg_sq the root is stored. The squares span too much: what lies below 3e-7 of a block's largest would
be zero, and the next update, divided by its root, up to 30 times too long.

torchao's own 8-bit Adam is not used: it wants the learning rate as a tensor, which torch's schedulers replace
by a number, and it compiles its step once for every shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import (
    OptimizerFix,
    ReplacingOptimizer,
    hyperparameter,
    kind_of,
    parameters_of,
)
from oomph.fixes.registry import FixContext, Target, check_choice
from oomph.fixes.workload_settings import lacks_bfloat16
from oomph.ops.common import Kernels, why_not_triton
from oomph.workload import Workload

BLOCK = 256  # numbers that share a scale
_ROWS = 4  # blocks that one program of a kernel takes
_SLICE = 1 << 22  # numbers; a multiple of BLOCK
_SMALLEST_QUANTIZED = 4096  # numbers; below, 8 bits save too little
_SMALLEST_SCALE = 1e-12  # of a block of zeros
_DECADES = 7
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_AVERAGES = ("exp_avg", "exp_avg_sq")
kernels = Kernels("oomph.fixes.optimizers.kernels")

State = dict[str, Any]
Group = dict[str, Any]


class Optimizer8Bit(OptimizerFix):
    name = "optimizer_8bit"
    kind = "precision"
    changes = "Adam's two averages are stored in 8 bits, in blocks of 256 with a scale; updates stay float32."
    excludes: ClassVar = {
        "fused_optimizer": "the 8-bit step is already one kernel per parameter",
        "no_foreach": "the 8-bit step already updates one parameter at a time",
    }

    def why_not(self, optimizer: Optimizer, **options: Any) -> str | None:
        return _why_not(optimizer)

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        return LowBitAdam(optimizer, "8bit", stochastic=False, fix=self.name)


class StochasticRounding(OptimizerFix):
    name = "stochastic_rounding"
    kind = "precision"
    changes = (
        "Parameters, gradients and activations are bfloat16; updates are computed in float32 and rounded at "
        "random to one of the two nearest bfloat16 numbers, right on average."
    )
    excludes: ClassVar = {
        "fused_optimizer": "stochastic rounding has a step of its own, already one kernel per parameter",
        "no_foreach": "stochastic rounding has a step of its own, already one parameter at a time",
        "autocast": "the parameters are bfloat16, so there is nothing to cast",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = context.optimizer
        if lacks_bfloat16(context) or optimizer is None or self.why_not(optimizer) is not None:
            return
        if not isinstance(optimizer, LowBitAdam):
            yield Target(("optimizer",), {"state": "bfloat16"})
            yield Target(("optimizer",), {"state": "float32"}, "the optimizer's averages stay float32")
        elif not optimizer.stochastic:
            yield Target(("optimizer",), {}, "the optimizer's state keeps its format")

    def change_workload(self, workload: Workload, *_: Any, state: str = "bfloat16") -> Workload:
        """`state`: the dtype of the averages; 8-bit ones stay 8-bit."""
        check_choice(self.name, "state", state, ("bfloat16", "float32"))
        return replace(self.converting(workload, state=state), dtype=torch.bfloat16, autocast=None)

    def why_not(self, optimizer: Optimizer, **options: Any) -> str | None:
        return None if isinstance(optimizer, LowBitAdam) else _why_not(optimizer)

    def convert(self, optimizer: Optimizer, *, state: str = "bfloat16", **options: Any) -> Optimizer:
        if isinstance(optimizer, LowBitAdam):  # its state keeps its format
            optimizer.stochastic = True
            return optimizer
        return LowBitAdam(optimizer, state, stochastic=True, fix=self.name)


def _why_not(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return f"the optimizer is {kind_of(optimizer)}; valid: Adam, AdamW of torch.optim"
    for flag in ("amsgrad", "differentiable", "capturable"):
        if any(group.get(flag) for group in optimizer.param_groups):
            return f"{kind_of(optimizer)} with {flag}=True is not supported"
    return None


class LowBitAdam(ReplacingOptimizer):
    """`state_format`: "float32", "bfloat16" or "8bit". `stochastic`: round bfloat16 parameters so."""

    updates_are_independent = True

    def __init__(self, original: Optimizer, state_format: str, stochastic: bool, fix: str) -> None:
        self.fix = fix
        super().__init__(original)
        self.state_format, self.stochastic = state_format, stochastic
        self.table: Tensor | None = None  # of 8-bit codes, on the parameters' device
        if any(original.state.values()):
            raise UserError(f"fix {fix!r}: the optimizer already has state; apply the fix before it steps")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.table = None

    def update_parameters(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        if parameter.dtype not in _DTYPES or gradient.layout is not torch.strided:
            raise UserError(
                f"fix {self.fix!r}: a parameter is {parameter.dtype} with a gradient of layout "
                f"{gradient.layout}; valid: float32, bfloat16 or float16, and dense"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            for key in _AVERAGES:
                self._create_state(state, key, parameter)
        state["step"] += 1
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if self.table is None and state["exp_avg"].dtype is torch.uint8:
            self.table = quantization_table(parameter.device)
        if parameter.device.type == "cuda" and why_not_triton(parameter) is None:
            self._launch(parameter, gradient, state, group)
            torch.autograd.graph.increment_version(parameter)  # as every torch op does that writes
        else:
            self._update_in_slices(parameter, gradient, state, group)

    def _create_state(self, state: State, key: str, parameter: Tensor) -> None:
        dtype = torch.bfloat16 if self.state_format == "bfloat16" else torch.float32
        if self.state_format == "8bit" and parameter.numel() >= _SMALLEST_QUANTIZED:
            dtype = torch.uint8
        state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        if dtype is torch.uint8:
            # Zero scales make every number zero until the first step writes codes and scales.
            blocks = -(-parameter.numel() // BLOCK)
            state[f"{key}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def _update_in_slices(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        flat_p, flat_g = flat(parameter), flat(gradient)
        for start in range(0, parameter.numel(), _SLICE):
            part = slice(start, min(start + _SLICE, parameter.numel()))
            averages = [self._read(state, key, part) for key in _AVERAGES]
            stored = flat_p[part]
            p = stored.float()  # the parameter itself where it is float32
            self._compute(p, flat_g[part].float(), averages, state, group)
            for key, average in zip(_AVERAGES, averages, strict=True):
                self._write(state, key, part, average)
            if self.stochastic and stored.dtype is torch.bfloat16:
                round_stochastically(p, stored)
            elif stored.dtype is not torch.float32:
                stored.copy_(p)

    def _read(self, state: State, key: str, part: slice) -> Tensor:
        """A slice of the state as float32, flat: a view where the state is float32."""
        values = flat(state[key])[part]
        if values.dtype is not torch.uint8:
            return values.float()
        assert self.table is not None
        return dequantize(values, _scales(state, key, part), self.table, signed=_is_signed(key))

    def _write(self, state: State, key: str, part: slice, number: Tensor) -> None:
        """Store what `_read` returned, changed in place."""
        values = flat(state[key])[part]
        if values.dtype is torch.uint8:
            assert self.table is not None
            quantize(number, values, _scales(state, key, part), self.table, signed=_is_signed(key))
        elif values.dtype is torch.bfloat16:
            # Rounded to the nearest, an average of many steps would stand still.
            round_stochastically(number, values)

    def _lr(self, group: Group) -> float:
        return hyperparameter(group, "lr", self.fix)

    def _factors(self, state: State, group: Group) -> tuple[float, float, float, float, float]:
        """(beta1, beta2, step size, root of the second bias correction, weight decay)."""
        step, lr = state["step"].item(), self._lr(group)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return beta1, beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, float(group["weight_decay"])

    def _compute(self, p: Tensor, g: Tensor, averages: list[Tensor], state: State, group: Group) -> None:
        """Update `p` and `averages` in place; `g` may be the gradient itself and is not written."""
        beta1, beta2, size, root, decay = self._factors(state, group)
        average, square = averages
        if group.get("maximize"):
            g = -g
        if group["decoupled_weight_decay"]:
            p.mul_(1 - self._lr(group) * decay)
        elif decay:
            g = g.add(p, alpha=decay)
        average.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = square.sqrt().div_(root).add_(float(group["eps"]))
        p.addcdiv_(average, denominator, value=-size)

    def _launch(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """One kernel. The seed comes from torch's CPU generator."""
        beta1, beta2, size, root, decay = self._factors(state, group)
        decoupled = bool(group["decoupled_weight_decay"])
        average, square = state["exp_avg"], state["exp_avg_sq"]
        quantized = average.dtype is torch.uint8
        stochastic = self.stochastic and parameter.dtype is torch.bfloat16
        draws = stochastic or self.state_format == "bfloat16"
        seed = int(torch.randint(0, 2**31 - 1, (), device="cpu").item()) if draws else 0
        kernels.launch(
            "adam", (-(-parameter.numel() // (BLOCK * _ROWS)),),
            flat(parameter), flat(gradient), flat(average), flat(square),
            state.get("exp_avg_scale"), state.get("exp_avg_sq_scale"), self.table if quantized else None,
            1 - beta1, beta2, 1 - beta2, size, root, float(group["eps"]),
            1 - self._lr(group) * decay if decoupled else 1.0, 0.0 if decoupled else decay,
            parameter.numel(), seed,
            MAXIMIZE=bool(group.get("maximize")), QUANTIZED=quantized,
            STOCHASTIC_STATE=average.dtype is torch.bfloat16, STOCHASTIC=stochastic, BLOCK=BLOCK, ROWS=_ROWS,
        )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype; this state has its own.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters_of(self), strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                device = "cpu" if key == "step" else parameter.device
                self.state[parameter][key] = value.to(device, copy=True)


def _is_signed(key: str) -> bool:
    return key != "exp_avg_sq"


def _scales(state: State, key: str, part: slice) -> Tensor:
    scales: Tensor = state[f"{key}_scale"]
    return scales[part.start // BLOCK : -(-part.stop // BLOCK)]


def flat(tensor: Tensor) -> Tensor:
    """A 1D view of the numbers in memory order."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


# ------------------------------------------------------------------------------- rounding and quantization


def round_stochastically(number: Tensor, out: Tensor) -> None:
    """Write float32 numbers to a bfloat16 tensor, each as one of its two neighbours, right on average.

    The chance to round up is the part that bfloat16 cuts off. NaN stays NaN.
    """
    drawn = torch.randint(0, 1 << 16, number.shape, dtype=torch.int32, device=number.device)
    drawn.add_(number.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(number.isnan(), number, drawn.view(torch.float32)))


@cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of an 8-bit code, in rising order."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2).tolist()
        found += [10.0 ** (decade - _DECADES + 1) * middle for middle in middles]
        if signed:
            found += [-(10.0 ** (decade - _DECADES + 1)) * middle for middle in middles]
    return tuple(sorted(found))


def quantization_table(device: torch.device) -> Tensor:
    """[4, 256] float32: values of signed and of unsigned codes, then the midpoints between neighbours."""
    values = [list(code_values(signed)) for signed in (True, False)]
    midpoints = [[*((low + high) / 2 for low, high in pairwise(own)), float("inf")] for own in values]
    return torch.tensor([*values, *midpoints], dtype=torch.float32, device=device)


def dequantize(codes: Tensor, scales: Tensor, table: Tensor, signed: bool) -> Tensor:
    """Flat uint8 codes as float32. Unsigned codes hold roots, which are squared."""
    found = table[0 if signed else 1].index_select(0, codes.int()).mul_(_per_number(scales, codes.numel()))
    return found if signed else found.square_()


def quantize(number: Tensor, codes: Tensor, scales: Tensor, table: Tensor, signed: bool) -> None:
    """Write flat float32 numbers as uint8 codes and block scales; of unsigned ones, the roots.

    A block with a number that is not finite gets a scale that is not finite.
    """
    size = number.numel()
    number = number if signed else number.sqrt()
    padded = number if size % BLOCK == 0 else torch.nn.functional.pad(number, (0, -size % BLOCK))
    torch.amax(padded.view(-1, BLOCK).abs(), 1, out=scales)
    scales.clamp_(min=_SMALLEST_SCALE)
    scaled = number / _per_number(scales, size)
    codes.copy_(torch.bucketize(scaled, table[2 if signed else 3, :-1], out_int32=True))


def _per_number(scales: Tensor, size: int) -> Tensor:
    return scales.view(-1, 1).expand(-1, BLOCK).reshape(-1)[:size]
