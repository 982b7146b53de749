"""`oomph diverge`, for developers: where a prediction differs from the op log of a GPU run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomph import gpus
from oomph.cli.output import ProgressReport, stdout_to_stderr, write_stdout
from oomph.cli.targets import check_target, open_target
from oomph.measurement.divergence import compare, render
from oomph.measurement.oplog import OpRow, describe, read_rows
from oomph.prediction.api import trace
from oomph.prediction.isolation import run_isolated
from oomph.prediction.replay import replay
from oomph.prediction.tracer.recorder import OpLog


def predicted_rows(target: Any, gpu: str) -> list[OpRow]:
    """The predicted op log of `target` on `gpu`, in the format of a measured one."""
    log = OpLog(describe)
    recorder = trace(target, gpus.find(gpu), lambda text, fraction: None, log).recorder
    allocations = [pending.finish() for pending in recorder.allocations]
    allocated = {moment.event: moment.allocated for moment in replay(recorder.events, allocations).timeline}
    after_event, level = [], 0
    for index in range(len(recorder.events)):
        level = allocated.get(index, level)
        after_event.append(level)
    rows = []
    for op, outputs, phase, first, last in log.rows:
        inside = after_event[first:last]
        before = after_event[first - 1] if first else 0
        sizes = [
            allocations[event.id].bytes for event in recorder.events[first:last] if event.action == "alloc"
        ]
        rows.append(
            OpRow(
                op=op,
                outputs=outputs,
                before=before,
                after=inside[-1] if inside else before,
                high=max([before, *inside]),
                phase=phase,
                n_allocs=len(sizes),
                requested=sum(sizes),
                allocs=tuple(sizes),
            )
        )
    return rows


def divergence_text(target: Any, measured: Path, gpu: str, limit: int) -> str:
    """The differences between a measured op log and the prediction of the same steps."""
    return _divergence_text(target, read_rows(measured), gpu, limit)


def _divergence_text(target: Any, rows: list[OpRow], gpu: str, limit: int) -> str:
    steps = {row.phase.split()[1] for row in rows if row.phase.startswith("step")}
    ours = [
        row for row in predicted_rows(target, gpu) if row.phase == "setup" or row.phase.split()[1] in steps
    ]
    return render(compare(rows, ours), limit)


def run_diverge(spec: str, measured: str, gpu: str, limit: int) -> int:
    gpus.find(gpu)
    check_target(spec)
    rows = read_rows(measured)

    def run(progress: ProgressReport) -> str:
        with open_target(spec) as target:
            return _divergence_text(target, rows, gpu, limit)

    with stdout_to_stderr():
        text = run_isolated(run, lambda text, fraction: None)
    write_stdout(text + "\n")
    return 0
