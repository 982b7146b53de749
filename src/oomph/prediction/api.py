"""oomph.predict."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from oomph.errors import UserError
from oomph.gpus import GPU
from oomph.prediction.child import Request, run
from oomph.prediction.compat import registry
from oomph.prediction.isolation import cuda_has_started, run_in_new_interpreter, show_progress
from oomph.prediction.program import Script
from oomph.prediction.result import card_of, nccl_buffers
from oomph.prediction.retry import predict_isolated
from oomph.prediction.tracer.batch_sizes import Sizes
from oomph.records import Prediction, Progress
from oomph.units import check_batch_sizes, parse_bytes
from oomph.workload import Workload


def predict(
    target: Workload | Script | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    max: str | int | None = None,
    sizes: Sizes | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
    search: bool = True,
) -> Prediction:
    """The memory of a training step on `gpu`, without one.

    `target` is a Workload, or a function of no arguments, which is called once; if it returns a Workload,
    that is predicted; if it returns a callable, that is the step and is called three times. A Script is run
    as it is until its optimizers have stepped three times; a Trainer of transformers makes three steps.
    `gpu` is a name of the catalogue or a size ("24GiB"); `max` limits the allocator further.
    `sizes` replaces sizes of a Workload. The batches of other programs get the sizes B, T, H or W that it
    gives, as {"T": 4096}, or in place of a size, as {"512": 4096}, or those of the longest sample of their
    data sets ("longest").
    The program runs in a child process and changes no file; `allow` may name "subprocesses", to let it start
    other programs, and "network".
    `progress` receives a text and, where it is known, the fraction that is done.
    `search=False` leaves out the free memory that torch.backends.cudnn.benchmark takes for a moment.
    """
    target = registry.as_program(target)
    card = card_of(gpu)
    limit = None if max is None else parse_bytes(max)
    if gpu is not None:
        limit = card.limit(max, nccl=nccl_buffers(target))
    if isinstance(target, Script) and cuda_has_started():
        with show_progress(progress) as report:
            return run_in_new_interpreter(
                predict, report, target, gpu=gpu, max=max, sizes=sizes, allow=allow, search=search
            )
    if sizes is not None and isinstance(target, Workload):
        target, sizes = with_sizes(target, sizes), None
    elif sizes is not None:
        check_batch_sizes(sizes)
    request = Request(target, card, gpu is not None, limit, sizes, search)
    with show_progress(progress) as report:
        return predict_isolated(functools.partial(run, request), report, allow)


def with_sizes(workload: Workload, sizes: Sizes) -> Workload:
    if sizes == "longest":
        raise UserError('sizes="longest" is for scripts and functions; a Workload names its sizes')
    return workload.with_sizes(sizes)
