"""A forward and a backward pass: as it is, or recorded once as a CUDA graph and replayed.

Small models spend most of a step in starting kernels, one by one, from Python. A recorded pass starts all of
them at once. What it needs: batches of one shape (another shape is recorded anew), gradients that stay where
they are from step to step, and no decision of the host that depends on numbers of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.training.checkpoints import rng_state, set_rng_state
from oomph.training.loop.precision import Precision

_WARM_UPS = 2  # kernels are compiled and libraries load before the recording


@dataclass(frozen=True)
class Passes:
    """loss(model, batch) and its backward pass, times a factor. The loss itself is returned, detached."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    precision: Precision
    keeps_gradients: ClassVar[bool] = False
    replay_bytes: ClassVar[int] = 0
    peak_before: ClassVar[int] = 0

    def forget(self) -> None:
        """Nothing is held between two passes."""

    def in_their_place(self) -> AbstractContextManager[None]:
        """Nothing stands in the way of other work."""
        return nullcontext()

    def __call__(self, batch: Any, factor: float | Tensor, *, cached: bool = True) -> Tensor:
        from oomph.workload import Workload

        with self.precision.autocast(cached):
            loss = self.loss(self.model, batch)
        self.precision.scaled(Workload.scaled(loss, factor)).backward()
        return loss.detach()


class RecordedPasses:
    """The same, replayed. One recording for each shape of batch and factor.

    A factor that is a tensor is another one at every pass: it is copied in, as the batch is. All recordings
    share their memory: they run one after the other, and a loss is copied out before the next.

    replay_bytes: what a replay uses at most of the recordings' memory, which the allocator does not count.
    peak_before: its peak before the last recording, which is measured from zero.
    """

    keeps_gradients = True

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.replay_bytes = self.peak_before = 0
        self._trained = [each for each in passes.model.parameters() if each.requires_grad]
        self._added_to: list[Tensor] = []  # those that have a gradient
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._recorded: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Tensor]] = {}

    def forget(self) -> None:
        """Give back what the recordings hold, before something that needs room beside them or in their place.
        The next pass of each shape is recorded anew."""
        if self._recorded:
            torch.cuda.synchronize()  # a replay may be under way
            self._recorded.clear()
            self._pool, self.replay_bytes = None, 0
            torch.cuda.empty_cache()

    @contextmanager
    def in_their_place(self) -> Iterator[None]:
        """Other work of the model, an evaluation, in the memory of the passes and not beside it.

        On the stream where they are warmed up and recorded: matrix products hold memory on each stream that
        they have been on, and what was freed on one is not used again on another."""
        self.forget()
        with self._on_one_stream():
            yield

    @contextmanager
    def _on_one_stream(self) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def __call__(self, batch: Any, factor: float | Tensor) -> Tensor:
        given = (batch, factor)
        key = _shape(given)
        if key not in self._recorded:
            self._recorded[key] = self._record(given)
            self._added_to = [each for each in self._trained if each.grad is not None]
        if any(each.grad is None for each in self._added_to):
            raise RuntimeError("gradients that recorded passes add to were freed: zero them in place")
        graph, inputs, loss = self._recorded[key]
        for place, leaf in zip(tree_leaves(inputs), tree_leaves(given), strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        graph.replay()
        return loss.clone()

    def _record(self, given: tuple[Any, float | Tensor]) -> tuple[torch.cuda.CUDAGraph, Any, Tensor]:
        inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given)
        before = [_kept(each.grad) for each in self._trained]
        state = rng_state()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self._on_one_stream():
            for _ in range(_WARM_UPS):
                self.passes(*inputs, cached=False)
        for each, old in zip(self._trained, before, strict=True):
            # A parameter without a share in the loss has no gradient, recorded or not.
            if each.grad is not None:
                each.grad.zero_() if old is None else each.grad.copy_(old)
        graph = torch.cuda.CUDAGraph()
        self.peak_before = max(self.peak_before, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        # The thread that pins batches goes on meanwhile: what it asks of the driver is not part of the pass.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with recording:
            loss = self.passes(*inputs, cached=False)
        self.replay_bytes = max(self.replay_bytes, torch.cuda.max_memory_allocated() - allocated)
        set_rng_state(state)  # as if the first replay were the first pass
        return graph, inputs, loss


def _kept(gradient: Tensor | None) -> Tensor | None:
    """What warming up would add to. Of zeros, as between two steps, nothing need be kept."""
    return gradient.clone() if gradient is not None and bool(gradient.any()) else None


def _shape(given: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(given)
    )
