"""The Workload: one training step, described."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from oomph.errors import UserError
from oomph.records import FixUse
from oomph.torch_internals import set_allocator_settings, tree_leaves, tree_map

_FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}


def default_loss(model: Any, batch: Any) -> torch.Tensor:
    """`model(**batch).loss`, as Hugging Face models give it."""
    advice = "give loss=lambda model, batch: ..."
    if not isinstance(batch, Mapping):
        given = "tensor" if isinstance(batch, torch.Tensor) else type(batch).__name__
        raise UserError(f"the default loss is model(**batch).loss, but the batch is a {given}; {advice}")
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise UserError(f"the default loss is model(**batch).loss, but the model returned no loss; {advice}")
    return loss


def default_optimizer(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def check_loss(loss: Any) -> None:
    """Raise where no training step can go backward from it."""
    valid = "the loss function must return a tensor with one element"
    if not isinstance(loss, torch.Tensor):
        raise UserError(f"Workload loss returned {type(loss).__name__}; {valid}")
    if loss.numel() != 1:
        raise UserError(f"Workload loss returned a tensor of shape {list(loss.shape)}; {valid}")
    if not loss.requires_grad:
        raise UserError(
            "Workload loss does not depend on any trainable parameter; "
            "check for torch.no_grad(), .detach() or parameters that are all frozen"
        )


@dataclass(frozen=True)
class Changed:
    """Builds a model, then changes it.

    Two steps, since a prediction changes a copy where the model was there before and is the user's own.
    """

    build: Callable[[], torch.nn.Module]
    change: Callable[[torch.nn.Module], None]

    def __call__(self) -> torch.nn.Module:
        model = self.build()
        self.change(model)
        return model


@dataclass(frozen=True)
class MicroBatches:
    """The batch in parts along its first dimension, one after the other, with the gradients of the whole.

    `share(part, batch)` says what a part's loss counts in the batch's: a number, or a tensor on their device.
    By default it is the part's share of the rows, which is right for a mean over rows of equal weight.
    """

    parts: int
    share: Callable[[Any, Any], float | torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, bool) or not isinstance(self.parts, int) or self.parts < 1:
            raise UserError(f"MicroBatches parts={self.parts!r} is not valid; give a whole number >= 1")
        if self.share is not None and not callable(self.share):
            raise UserError(f"MicroBatches share={self.share!r} is not callable; give a function or None")

    def cut(self, batch: Any) -> Iterator[tuple[Any, float | torch.Tensor]]:
        """The parts, as views, each with its share. What has another first dimension goes whole to each."""
        rows = rows_of(batch)
        if rows < self.parts:
            raise UserError(f"a batch of {rows} rows cannot be cut into {self.parts} parts")
        for number in range(self.parts):
            start, stop = number * rows // self.parts, (number + 1) * rows // self.parts
            part = tree_map(lambda leaf, a=start, b=stop: leaf[a:b] if _has_rows(leaf, rows) else leaf, batch)
            yield part, (stop - start) / rows if self.share is None else self.share(part, batch)


def rows_of(batch: Any) -> int:
    """The first dimension that most of the batch's tensors have."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if tensors:
        return Counter(tensor.shape[0] for tensor in tensors).most_common(1)[0][0]
    raise UserError("the batch holds no tensor with a first dimension, so it cannot be cut into parts")


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


class Parallelism(Protocol):
    """How a model is spread over the ranks of a process group."""

    @property
    def ranks(self) -> int: ...

    def apply(self, model: torch.nn.Module, device: str) -> torch.nn.Module:
        """Change the model and move it to its device; what is returned is to be called."""


@dataclass(frozen=True)
class Workload:
    """One training step: what prediction traces, measurement runs and training repeats.

    `model` and `batch` are functions, so that nothing is allocated. `optimizer=None`: forward and backward
    only. `sizes` names the numbers that oomph may vary; they are passed to `batch` by keyword. `allocator` is
    the value of PYTORCH_CUDA_ALLOC_CONF. `deterministic` selects kernels that give the same bits in every
    run; some need more memory. `fixes` lists what `oomph.apply` has applied. `parallel` spreads the step over
    ranks (oomph.parallel.Parallel); `batch` is then that of one of them.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], torch.Tensor] = default_loss
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] | None = default_optimizer
    dtype: str | torch.dtype | None = None
    autocast: str | torch.dtype | None = None
    accumulate: int = 1
    sizes: Mapping[str, int] | None = None
    micro_batches: MicroBatches | None = None
    allocator: str | None = None
    deterministic: bool = False
    fixes: tuple[FixUse, ...] = ()
    parallel: Parallelism | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, torch.nn.Module):
            raise UserError(
                "Workload model is a model; give a function that builds it: model=lambda: MyModel()"
            )
        for name in ("model", "batch", "loss"):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__  # itself, a batch would be all its numbers
                raise UserError(
                    f"Workload {name} is of type {kind}, not a function; give one, e.g. {name}="
                    + {"model": "lambda: MyModel()", "batch": "lambda device: {...}"}.get(
                        name, "lambda model, batch: ..."
                    )
                )
        if self.optimizer is not None and not callable(self.optimizer):
            raise UserError(
                f"Workload optimizer={self.optimizer!r} is not callable; give a function of the parameters, "
                "e.g. optimizer=lambda params: torch.optim.AdamW(params), or None"
            )
        if not isinstance(self.deterministic, bool):
            raise UserError(f"Workload deterministic={self.deterministic!r} is not valid; give True or False")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise UserError(f"Workload accumulate={self.accumulate!r} is not valid; give a whole number >= 1")
        if self.micro_batches is not None and not isinstance(self.micro_batches, MicroBatches):
            raise UserError(
                f"Workload micro_batches={self.micro_batches!r} is not valid; give MicroBatches(parts)"
            )
        object.__setattr__(self, "dtype", float_dtype(self.dtype, "dtype"))
        object.__setattr__(self, "autocast", float_dtype(self.autocast, "autocast"))
        self._check_sizes(self.sizes or {})

    def make_model(self, copied: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
        """The model, as `copied` makes it of the one that is built, with the changes of `apply` in."""
        build, changes = self.model, []
        while isinstance(build, Changed):
            changes.append(build.change)
            build = build.build
        model = build()
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"Workload model() returned {type(model).__name__}; it must return a torch.nn.Module"
            )
        model = copied(model)
        for change in reversed(changes):
            change(model)
        return model

    def make_batch(self, device: torch.device) -> Any:
        """The batch on `device`, at the Workload's own sizes."""
        return self.batch(device, **(self.sizes or {}))

    def build(self, device: torch.device | str) -> tuple[torch.nn.Module, torch.optim.Optimizer | None]:
        """The model on `device`, in the Workload's dtype and in training mode, and its optimizer."""
        model = self.model()
        if self.dtype is not None:
            model = model.to(self.dtype)  # type: ignore[arg-type]
        called = self.place(model, device)
        model.train()
        return called, self.make_optimizer(model)

    def place(self, model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
        """Move the model to its device, and over the ranks of the process group. Call what is returned."""
        if self.parallel is None:
            return model.to(device)
        return self.parallel.apply(model, torch.device(device).type)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer of the model's parameters; None without one."""
        if self.optimizer is None:
            return None
        made = self.optimizer(model.parameters())
        if not hasattr(made, "step") or not hasattr(made, "zero_grad"):
            kind = type(made).__name__
            raise UserError(
                f"Workload optimizer(params) returned {kind}; it must return a torch.optim.Optimizer"
            )
        return made

    def autocast_context(self, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
        """The autocast region of a forward pass; nothing without autocast."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(device).type, self.autocast)  # type: ignore[arg-type]

    def forward_backward(
        self, model: torch.nn.Module, batch: Any, device: torch.device | str
    ) -> torch.Tensor:
        """All forward and backward passes of a step, for a loop of your own; returns the step's loss."""
        total: Any = 0.0
        for part, factor in self.passes(batch):
            with self.autocast_context(device):
                loss = self.loss(model, part)
            check_loss(loss)
            scaled = self.scaled(loss, factor)
            scaled.backward()
            total = total + scaled.detach()
        return total  # type: ignore[no-any-return]

    def with_sizes(self, sizes: Mapping[str, int]) -> Workload:
        """The same with other values of its sizes."""
        known = self.sizes or {}
        for name in sizes:
            if name not in known:
                has = ", ".join(f"{own}={size}" for own, size in known.items())
                none = 'none; name them, as Workload(batch=lambda device, B: ..., sizes={"B": 8})'
                raise UserError(f"the Workload has no size {name!r}; its sizes are {has or none}")
        return replace(self, sizes={**known, **sizes})

    def passes(self, batch: Any) -> list[tuple[Any, float | torch.Tensor]]:
        """The forward and backward passes of a step: what each is given, and the factor of its loss."""
        parts = [(batch, 1.0)] if self.micro_batches is None else list(self.micro_batches.cut(batch))
        return [(part, share / self.accumulate) for part, share in parts] * self.accumulate

    @staticmethod
    def scaled(loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """What a pass goes backward from. A part that counts nothing may have a mean over nothing."""
        if isinstance(factor, torch.Tensor):
            return torch.where(factor > 0, loss, torch.zeros_like(loss)) * factor
        return loss * factor

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        wrong = {k: v for k, v in sizes.items() if isinstance(v, bool) or not isinstance(v, int) or v < 1}
        if wrong:
            raise UserError(f"Workload sizes={wrong!r} is not valid; each size is a whole number >= 1")
        try:
            signature = inspect.signature(self.batch)
        except ValueError:  # built in: cannot be asked
            return
        try:
            signature.bind(None, **sizes)
        except TypeError as error:
            arguments = ", ".join(["device", *sizes])
            raise UserError(
                f"Workload batch cannot be called with ({arguments}): {error}; "
                f"write batch=lambda {arguments}: ..."
            ) from None


def float_dtype(value: str | torch.dtype | None, argument: str) -> torch.dtype | None:
    """A float dtype given by name or as itself; None stays None."""
    if value is None:
        return None
    dtype = _FLOAT_DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"{argument}={value!r} is not a float dtype; valid: {', '.join(_FLOAT_DTYPES)}")
    return dtype


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


def allocator_of_environment() -> tuple[str, str] | None:
    """The environment variable with which torch starts its allocator, and its value; None: none is set."""
    return next(((name, os.environ[name]) for name in ALLOCATOR_VARIABLES if os.environ.get(name)), None)


def ignored_allocator() -> str:
    """` instead of PYTORCH_CUDA_ALLOC_CONF=...`, where torch reads the other variable, of another value."""
    read, ignored = map(os.environ.get, ALLOCATOR_VARIABLES)
    return f" instead of {ALLOCATOR_VARIABLES[1]}={ignored}" if read and ignored not in (None, read) else ""


def set_allocator(settings: str) -> None:
    """Torch's caching allocator as a Workload's `allocator` says; before the first tensor is on the GPU."""
    try:
        set_allocator_settings(settings)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"torch refuses allocator={settings!r}: {reason}") from error
