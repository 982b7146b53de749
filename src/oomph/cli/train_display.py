"""A run for people: a bar with loss, speed and memory on a terminal; plain lines anywhere else."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from oomph.training.workloads import PASSES_PREDICTED
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.gpus import GPU
    from oomph.records import Prediction
    from oomph.training.config import TrainConfig
    from oomph.training.loop.listener import StepReport


class TrainDisplay:
    """A Listener. Everything goes to stderr; what lasts is in the run's folder."""

    def __init__(
        self, console: Console, config: TrainConfig, prediction: Prediction | None, card: GPU | None
    ) -> None:
        self.console, self.config, self.prediction, self.card = console, config, prediction, card
        self._unit = "img" if config.system == "ginr" else "tok"
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> TrainDisplay:
        if self.prediction is not None:
            self.said(
                f"predicted peak {format_bytes(self.prediction.peak.allocated)} allocated, "
                f"{format_bytes(self.prediction.peak.device)} of the GPU"
            )
        if self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.fields[name]}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=4,
            )
            steps = self.config.training.steps
            self._task = self._bar.add_task("starting", total=steps, name=self.config.name)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):  # the terminal may be gone
                self._bar.stop()

    def stepped(self, report: StepReport) -> None:
        text = f"loss {report.loss:.4f}  {_rate(report.tokens_per_second)} {self._unit}/s"
        share = share_of_peak(self.config, self.prediction, self.card, report.tokens_per_second)
        if share is not None:
            text += f"  MFU {100 * share:.0f} %"
        if report.allocated is not None and report.peak is not None:
            text += f"  memory {format_bytes(report.allocated)} now, {format_bytes(report.peak)} peak"
            if self.prediction is not None:
                text += f", {format_bytes(self.prediction.peak.allocated)} predicted"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=text)
        else:
            of = f"/{self.config.training.steps}" if self.config.training.steps else ""
            self.said(f"step {report.step}{of}  {text}  lr {report.learning_rate:.2e}")

    def advanced(self, step: int, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def evaluated(self, step: int, found: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in found.items())
        self.said(
            f"evaluation at step {step}: {shown}"
            if shown
            else "no data held out to evaluate on; give more, or a larger data.validation"
        )

    def sampled(self, step: int, sample: str) -> None:
        told = f"sample at step {step}: "
        self.said(told + in_brief(" ".join(sample.split()), 2 * self.console.width - len(told)))

    def said(self, message: str) -> None:
        # A terminal that is gone must not end the training: what lasts is in the folder.
        with suppress(OSError):
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)


def in_brief(sample: str, room: int) -> str:
    """The end of the prompt and the beginning of what the model made of it; all of both is in the metrics. A
    sample without a bar between them is a file's name, and stays whole."""
    prompt, bar, made = sample.partition(" | ")
    if not bar or len(sample) <= room:
        return sample
    if len(prompt) > room // 3:
        prompt = "..." + prompt[3 - room // 3 :]
    told = prompt + bar + made
    return told if len(told) <= room else f"{told[: room - 3]}..."


def share_of_peak(
    config: TrainConfig, prediction: Prediction | None, card: GPU | None, tokens_per_second: float
) -> float | None:
    """MFU: the share of the GPU's nominal rate that the model's own arithmetic makes: forward, and twice that
    for backward. What is computed a second time does not count."""
    rate = None if card is None else card.bf16_tflops
    if prediction is None or prediction.work is None or not rate:
        return None
    stage = config.largest_stage
    tokens = stage.tokens * min(stage.accumulate, PASSES_PREDICTED)  # the prediction's step
    flops = 3 * prediction.work.forward.flops / tokens * tokens_per_second
    return flops / (rate * 1e12)


def _rate(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.1f}"
