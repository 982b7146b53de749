"""The step of a config: as a Workload, which is predicted, measured and trained; and its parts in training.

Mixed precision, forward and backward (also as a CUDA graph), the update, and losses that are read without
waiting for the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes import apply
from oomph.parallel import Parallel
from oomph.torch_internals import tree_leaves, tree_map
from oomph.workload import Workload
from oomph_lab.systems import SYSTEMS
from oomph_lab.training.checkpoint_state import rng_state, set_rng_state
from oomph_lab.training.config import OptimizerConfig, Stage, TrainConfig

# ------------------------------------------------------------------------------------- the step as a Workload

PASSES_PREDICTED = 2  # later passes of a step allocate nothing new


def predicted_workload(config: TrainConfig) -> Workload:
    """The step that a prediction traces."""
    step = workload(config, most_passes=PASSES_PREDICTED)
    if config.training.cuda_graph and step.optimizer is not None:
        step = replace(step, optimizer=KeepsGradients(step.optimizer))
    return step


def on_ranks(step: Workload, parallel: Parallel) -> Workload:
    """One rank's part of a config's step: data.batch_size is the batch of all ranks."""
    assert step.sizes is not None
    return replace(step.with_sizes({"B": step.sizes["B"] // parallel.replicas}), parallel=parallel)


def workload(config: TrainConfig, *, stage: Stage | None = None, most_passes: int | None = None) -> Workload:
    """One step at the config's largest shape (or a stage's), on random data, with its fixes applied.

    most_passes: the most batches per step.
    """
    stage = stage or config.largest_stage
    passes = stage.accumulate if most_passes is None else min(stage.accumulate, most_passes)
    model, batch_size, seq_len = config.model_config, stage.batch_size, stage.seq_len
    if seq_len is None:
        batch = partial(_random_images, model.channels, model.image_size)
        sizes = {"B": batch_size}
    else:
        batch = partial(_random_text, config.data.vocab_size or 1)
        sizes = {"B": batch_size, "T": seq_len}
    plain = Workload(
        model=partial(SYSTEMS[config.system].build, model, config.form, seq_len),
        batch=batch,
        optimizer=AdamW(config.optimizer),
        dtype=config.training.dtype,
        autocast=config.training.autocast,
        accumulate=passes,
        sizes=sizes,
        deterministic=config.training.deterministic,
    )
    return apply(config.fixes, plain)


@dataclass(frozen=True)
class AdamW:
    """AdamW over the parameters that are trained: npt's base is frozen."""

    options: OptimizerConfig

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        o = self.options
        trained = [param for param in params if param.requires_grad]
        # Fused, it needs no temporaries, and skips a step with infinite gradients without the host looking.
        # Fixes look for what they could change on meta, which stands for a GPU.
        devices = {param.device.type for param in trained}
        fused = devices in ({"cuda"}, {"meta"}) and all(param.is_floating_point() for param in trained)
        return torch.optim.AdamW(
            trained,
            lr=o.learning_rate,
            betas=o.betas,
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=fused or None,
        )


@dataclass(frozen=True)
class KeepsGradients:
    """An optimizer that zeroes gradients in place: a captured CUDA graph adds to them there."""

    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    gradients_must_stay: ClassVar[bool] = True  # so that set_to_none is not proposed

    def __call__(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        optimizer = self.make(params)
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        return optimizer


def _random_text(vocab_size: int, device: torch.device, B: int, T: int) -> dict[str, Tensor]:
    ids = torch.randint(vocab_size, (B, T), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def _random_images(channels: int, size: int, device: torch.device, B: int) -> dict[str, Tensor]:
    return {"images": torch.rand(B, channels, size, size, device=device)}


# ------------------------------------------------------------------------------------------------ in training

_WARM_UPS = 2  # before a capture: kernels are compiled and libraries load
_STEPS_IN_FLIGHT = 2  # before the host waits for the oldest


class Precision:
    """Autocast and, for float16, loss scaling."""

    def __init__(self, device: torch.device, autocast: torch.dtype | None) -> None:
        self.device, self.dtype = device, autocast
        self.scaler = torch.amp.GradScaler(device.type, enabled=autocast == torch.float16)

    def autocast(self, cache_weights: bool = True) -> AbstractContextManager[Any]:
        """cache_weights: keep cast weights during the pass. Not during a capture: a replay must cast the
        weights of its own time."""
        enabled = self.dtype is not None
        return torch.autocast(
            self.device.type,
            self.dtype or torch.bfloat16,
            enabled=enabled,
            cache_enabled=cache_weights and enabled,
        )


class ForwardBackward:
    """`loss(model, batch)` times a factor, and its backward pass. Returns the loss itself, detached.

    graph_bytes, peak_before_capture: see CudaGraphForwardBackward.
    """

    keeps_gradients = False
    graph_bytes = 0
    peak_before_capture = 0

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], precision: Precision) -> None:
        self.model, self.loss, self.precision = model, loss, precision

    def __call__(self, batch: Any, factor: float | Tensor) -> Tensor:
        return self.run(batch, factor)

    def run(self, batch: Any, factor: float | Tensor, cache_weights: bool = True) -> Tensor:
        with self.precision.autocast(cache_weights):
            loss = self.loss(self.model, batch)
        self.precision.scaler.scale(Workload.scaled(loss, factor)).backward()
        return loss.detach()

    def release(self) -> None:
        """Free captured CUDA graphs."""

    def released(self) -> AbstractContextManager[None]:
        """For other work of the model, such as an evaluation."""
        return nullcontext()


class CudaGraphForwardBackward(ForwardBackward):
    """The same, captured once for each shape of batch and factor and replayed.

    Small models spend most of a step launching kernels; a graph launches them at once. It needs gradients
    that stay where they are between steps and no host decision that depends on GPU values. A factor that is a
    tensor is copied in, as the batch is. All graphs share one memory pool: they run one after another, and
    each loss is copied out before the next.

    graph_bytes: the most that a replay uses of the pool, which the allocator's statistics do not count.
    peak_before_capture: the allocator's peak before the last capture, which resets it.
    """

    keeps_gradients = True

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], precision: Precision) -> None:
        super().__init__(model, loss, precision)
        self.graph_bytes = self.peak_before_capture = 0
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._with_gradient: list[Tensor] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._captured: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Tensor]] = {}

    def __call__(self, batch: Any, factor: float | Tensor) -> Tensor:
        given = (batch, factor)
        key = _shapes(given)
        if key not in self._captured:
            self._captured[key] = self._capture(given)
            self._with_gradient = [each for each in self._trained if each.grad is not None]
        if any(each.grad is None for each in self._with_gradient):
            raise RuntimeError("gradients that a captured CUDA graph adds to were freed: zero them in place")
        graph, inputs, loss = self._captured[key]
        for static, leaf in zip(tree_leaves(inputs), tree_leaves(given), strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf, non_blocking=True)
        graph.replay()
        return loss.clone()

    def release(self) -> None:
        """Free the graphs, before something that needs their memory. The next pass captures again."""
        if self._captured:
            torch.cuda.synchronize()  # a replay may be running
            self._captured.clear()
            self._pool, self.graph_bytes = None, 0
            torch.cuda.empty_cache()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Other work in the memory of the graphs and not beside it.

        On the stream of warm-up and capture: cuBLAS holds a workspace on each stream that it was used on, and
        memory freed on one stream is not used again on another."""
        self.release()
        with self._on_capture_stream():
            yield

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def _capture(self, given: tuple[Any, float | Tensor]) -> tuple[torch.cuda.CUDAGraph, Any, Tensor]:
        inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given)
        # What the warm-up adds to. Zeros, as between two steps, need no copy.
        before = [
            each.grad.clone() if each.grad is not None and bool(each.grad.any()) else None
            for each in self._trained
        ]
        state = rng_state()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self._on_capture_stream():
            for _ in range(_WARM_UPS):
                self.run(inputs[0], inputs[1], cache_weights=False)
        for each, old in zip(self._trained, before, strict=True):
            # A parameter that the loss does not depend on has no gradient.
            if each.grad is not None:
                each.grad.zero_() if old is None else each.grad.copy_(old)
        graph = torch.cuda.CUDAGraph()
        self.peak_before_capture = max(self.peak_before_capture, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        # thread_local: the thread that pins batches calls the driver meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with capture:
            loss = self.run(inputs[0], inputs[1], cache_weights=False)
        self.graph_bytes = max(self.graph_bytes, torch.cuda.max_memory_allocated() - allocated)
        set_rng_state(state)  # as if the first replay were the first pass
        return graph, inputs, loss


def _shapes(given: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(given)
    )


# ------------------------------------------------------------------------------------- the update


@dataclass(frozen=True)
class Update:
    """grad_norm: of all gradients, before clipping; None without clipping. found_inf: on the device, 1 where
    the loss or the norm is not finite, so that the weights were not updated; else 0."""

    grad_norm: Tensor | None
    found_inf: Tensor


class OptimizerStep:
    """Clips gradients and steps, except from a loss or a norm that is not finite.

    A fused optimizer reads `found_inf` on the device, so the host does not wait. For others the host looks
    first. An optimizer that updates in backward has stepped already: `found_inf` then only reports it.
    """

    def __init__(
        self, optimizer: Optimizer, trained: Sequence[Tensor], clip: float | None, precision: Precision
    ) -> None:
        self.optimizer, self.trained, self.clip, self.scaler = (
            optimizer,
            list(trained),
            clip,
            precision.scaler,
        )
        self.in_backward = bool(getattr(optimizer, "updates_in_backward", False))
        self.incomplete = False  # during a step, and after one that failed half way
        scales = self.scaler.is_enabled()
        if self.in_backward and (clip is not None or scales):
            what = "training.clip" if clip is not None else "training.autocast=float16, which scales them"
            raise UserError(f"updates are made in backward, so no gradients are left for {what}")
        # Not where parameters are sharded: found_inf is a plain tensor.
        sharded = any(hasattr(each, "full_tensor") for each in self.trained)
        supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._reads_found_inf = supports and not scales and not sharded

    def __call__(self, loss: Tensor) -> Update:
        not_finite = loss - loss  # 0 or nan; one kernel, where isfinite launches four
        if self.in_backward:
            self.optimizer.step()
            return Update(None, _as_found_inf(not_finite))
        self.scaler.unscale_(self.optimizer)
        norm = None
        if self.clip is not None:
            norm = whole_tensor(torch.nn.utils.clip_grad_norm_(self.trained, self.clip))
            if not self.scaler.is_enabled():  # it skips such a step and lowers its scale
                not_finite = not_finite + (norm - norm)
        found_inf = _as_found_inf(not_finite)
        self.incomplete = True
        if self._reads_found_inf:
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        else:
            if found_inf == 0:
                self.scaler.step(self.optimizer)
            self.scaler.update()  # also after a skipped step, or the scaler refuses the next
        self.incomplete = False
        return Update(norm, found_inf)


def whole_tensor(tensor: Any) -> Tensor:
    """A norm of sharded tensors as a plain one."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _as_found_inf(not_finite: Tensor) -> Tensor:
    return torch.nan_to_num(not_finite.float(), nan=1.0)


def with_own_options(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved AdamW state with this optimizer's options, which the config gives, and its choice of kernels: a
    run may change its device. Raises if the state is not one of these parameters."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            if saved[name].shape != parameters[number].shape:
                raise ValueError(f"{name} of parameter {number} has the shape {list(saved[name].shape)}")
    return {"state": state["state"], "param_groups": groups}


# ---------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class StepResult:
    """step: 1 is the first. skipped: the update was not made, or, in backward, should not have been.
    seconds: from the end of the step before it to its own end, on the device. batches: on the host."""

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool
    seconds: float
    batches: Any


class StepResults:
    """Losses on their way to the host. They are copied behind each step's work; `take` returns those that
    have arrived and waits only for a step that is more than two behind.

    Steps are timed by CUDA events, since a late read says nothing about when a step ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[int, Tensor, Any, Any]] = deque()
        self._last_end: Any = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step's seconds count from now."""
        self._last_end = self._now()

    def put(self, step: int, loss: Tensor, update: Update, batches: Any) -> None:
        parts = [loss, update.found_inf, *([] if update.grad_norm is None else [update.grad_norm])]
        numbers = torch.stack([part.detach().to(torch.float32).reshape(()) for part in parts])
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
        self._pending.append((step, numbers, self._now(), batches))

    def take(self, wait: bool = False) -> list[StepResult]:
        """Results that have arrived, oldest first; with `wait`, all."""
        found = []
        while self._pending:
            step, numbers, end, batches = self._pending[0]
            if self._cuda and not end.query():
                if not wait and len(self._pending) <= _STEPS_IN_FLIGHT:
                    break
                end.synchronize()
            self._pending.popleft()
            loss, found_inf, *norm = numbers.tolist()
            seconds = self._last_end.elapsed_time(end) / 1000 if self._cuda else end - self._last_end
            self._last_end = end
            found.append(StepResult(step, loss, norm[0] if norm else None, found_inf != 0, seconds, batches))
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On a GPU the copy runs while the host continues."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def count_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of text, or images."""
    ids = batch.get("input_ids")
    return int(ids.numel()) if ids is not None else len(batch["images"])
