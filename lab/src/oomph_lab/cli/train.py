"""`oomph train`: predict, refuse what does not fit, then train and show progress."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oomph import gpus
from oomph.cli.common import TAKES_KEYS, progress_display
from oomph.errors import ExitStatus, UserError
from oomph.report.fixes import fix_word
from oomph.report.terminal import short_path
from oomph.units import format_bytes
from oomph_lab.training.metrics import Callbacks, StepReport

if TYPE_CHECKING:
    import torch

    from oomph.parallel import Parallel
    from oomph.records import FixUse, Prediction, Progress
    from oomph_lab.training.config import TrainConfig
    from oomph_lab.training.ranks import Ranks

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"allow_extra_args": True, **TAKES_KEYS})
def run_train(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A config: a .yaml file, or a name of oomph-lab's.")
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in the run's folder.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Train even if the prediction does not fit.")
    ] = False,
    fixes: Annotated[
        str | None,
        typer.Option(
            "--fixes",
            "--plan",
            metavar="FILE.json",
            help="Fixes or a plan from a file, instead of the config's.",
        ),
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the final weights as safetensors.")
    ] = None,
) -> int:
    """Train a config. key=value or --key value override the file."""
    from oomph_lab.training.config import load, overrides_from_words
    from oomph_lab.training.ranks import ONE_PROCESS, join_ranks, parallel_of, restarted, world_size
    from oomph_lab.training.run import check_folder, device_of, folder_of, is_run

    typed, size = [config, *context.args], world_size()
    first = size == 1 or os.environ.get("RANK", "0") == "0"
    console = Console(stderr=True, quiet=not first)
    loaded = device = prediction = gpu = error = None
    try:
        loaded = load(config, (*overrides_from_words(context.args), *_fixes_of_file(fixes)))
        parallel = parallel_of(loaded, size) if size > 1 else None
        resume = resume or (restarted() and is_run(folder_of(loaded)))
        if first:
            check_folder(loaded, folder_of(loaded), resume)
        device = device_of(loaded)
        if device.type == "cuda":
            gpu = gpu_of(device)
            if first:
                with progress_display(console) as report:
                    prediction = _predict(loaded, gpu, parallel, report)
                    if prediction.verdict == "does not fit" and not force:
                        raise DoesNotFit(_refusal(loaded, prediction, gpu, shlex.join(typed), report))
    except UserError as own:
        if size == 1:
            raise
        error = own  # the first rank reports those of all
    again = ["oomph", "train", *typed, "--resume"]
    again += [] if fixes is None else ["--fixes", fixes]
    again += [] if export is None else ["--export", export]
    again += ["--force"] if force else []
    with nullcontext(ONE_PROCESS) if size == 1 else join_ranks(loaded, device, error) as ranks:
        assert loaded is not None
        display = TrainDisplay(console, loaded, prediction, gpu)
        return _train(loaded, resume, export, display, ranks, again)


class DoesNotFit(UserError):
    exit_status = ExitStatus.DOES_NOT_FIT


def _train(
    config: TrainConfig,
    resume: bool,
    export: str | None,
    display: TrainDisplay,
    ranks: Ranks,
    again: Sequence[str],
) -> int:
    """`again`: the words of a command that continues the run."""
    from oomph_lab.training.failures import OutOfMemory
    from oomph_lab.training.run import train

    with display:
        try:
            outcome = train(config, resume=resume, callbacks=display, export_to=export, ranks=ranks)
        except KeyboardInterrupt:  # the second one; the first lets the step finish
            display.on_message("stopped at once; earlier checkpoints are unchanged")
            return ExitStatus.INTERRUPTED
        except OutOfMemory as error:
            raise UserError(f"{error}; {_what_to_change(again[2], display.prediction)}") from error
    if outcome.stopped is not None:
        then = f"continue with: {shlex.join(again)}"
        if not config.training.save:
            then = "nothing is saved, as training.save=false says"
        display.on_message(f"stopped by {outcome.stopped} after step {outcome.step}; {then}")
        return ExitStatus.INTERRUPTED
    return 0


def gpu_of(device: torch.device) -> gpus.GPU:
    """The GPU itself, with the catalogue's figures for its kind."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return gpus.for_device(found.name, found.total_memory, (found.major, found.minor))


def _predict(config: TrainConfig, gpu: gpus.GPU, parallel: Parallel | None, report: Progress) -> Prediction:
    """The step at the config's largest shape, on this GPU and within training.memory_limit."""
    from oomph.prediction import predict
    from oomph_lab.training.step import on_ranks, predicted_workload

    step = predicted_workload(config)
    step = step if parallel is None else on_ranks(step, parallel)
    return predict(step, gpu=gpu, max=config.training.memory_limit, progress=report)


def _refusal(config: TrainConfig, prediction: Prediction, gpu: gpus.GPU, given: str, report: Progress) -> str:
    """What the step needs, what there is, and the cheapest exact fixes with which it fits."""
    from oomph.planning import fit
    from oomph_lab.training.step import predicted_workload

    limit = config.training.memory_limit
    has = (
        f"{gpu.title} has {format_bytes(gpu.memory)}"
        if limit is None
        else f"training.memory_limit is {limit}"
    )
    needs = format_bytes(prediction.peak.reserved)
    problem = f"{config.name} does not fit: a step needs {needs}, and {has}"
    # Recomputation and offloading cannot be captured.
    eager = replace(config, training=config.training.model_copy(update={"cuda_graph": False}))
    plan = fit(predicted_workload(eager), gpu=gpu, max=limit, progress=report)
    if not plan.fits:
        return f"{problem}. No set of exact fixes is enough; see `oomph fit {given}`. --force runs it anyway"
    words = [_override((*config.fixes, *plan.fixes))] if plan.fixes else []
    words += ["training.cuda_graph=false"] if config.training.cuda_graph else []
    fits = f"{' '.join(words)} ({format_bytes(plan.after.peak.reserved)}, time x{plan.after.slowdown:.2f})"
    return f"{problem}. What fits: {fits}. Add that to the command, or --force to run it anyway"


def _override(fixes: Sequence[FixUse]) -> str:
    """Quoted for a shell; a fix with options also has quotes of its own."""
    words = [json.dumps(fix_word(use)) if use.options else use.fix for use in fixes]
    return shlex.quote(f"fixes=[{', '.join(words)}]")


def _fixes_of_file(file: str | None) -> tuple[str, ...]:
    """The fixes of a file as an override: they replace the config's, and are checked with the rest of it."""
    from oomph.fixes import uses_of

    if file is None:
        return ()
    if not file.endswith(".json"):
        raise UserError(f"--fixes {file!r} is not a .json file; single fixes are given as fixes=[name, ...]")
    uses = [{"fix": use.fix, "options": dict(use.options)} for use in uses_of([file])]
    return (f"fixes={json.dumps(uses)}",)


def _what_to_change(config: str, prediction: Prediction | None) -> str:
    advice = f"see `oomph fixes {config}` for what would lower the peak, and what each change costs"
    if prediction is None:
        return advice
    lines = [
        f"{short_path(site.file)}:{site.line} {format_bytes(size)}" for site, size in prediction.by_line()[:3]
    ]
    peak = format_bytes(prediction.peak.allocated)
    return f"predicted: {peak}, most of it from {', '.join(lines)}; {advice}"


class TrainDisplay(Callbacks):
    """A progress bar on a terminal, lines elsewhere; both on stderr."""

    def __init__(
        self, console: Console, config: TrainConfig, prediction: Prediction | None, gpu: gpus.GPU | None
    ) -> None:
        self.console, self.config, self.prediction, self.gpu = console, config, prediction, gpu
        self._unit = "img" if config.system == "ginr" else "tok"
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> TrainDisplay:
        if self.prediction is not None:
            self.on_message(
                f"predicted peak: {format_bytes(self.prediction.peak.allocated)} allocated, "
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
            with suppress(OSError):  # the terminal may be closed
                self._bar.stop()

    def on_step(self, report: StepReport) -> None:
        text = f"loss {report.loss:.4f}  {_rate(report.tokens_per_second)} {self._unit}/s"
        mfu = model_flops_utilization(self.config, self.prediction, self.gpu, report.tokens_per_second)
        if mfu is not None:
            text += f"  MFU {100 * mfu:.0f} %"
        if report.memory is not None and report.memory_peak is not None:
            text += f"  memory {format_bytes(report.memory)} now, {format_bytes(report.memory_peak)} peak"
            if self.prediction is not None:
                text += f", {format_bytes(self.prediction.peak.allocated)} predicted"
        if self._bar is not None:
            self._bar.update(self._task, completed=report.step, description=text)
        else:
            of = f"/{self.config.training.steps}" if self.config.training.steps else ""
            self.on_message(f"step {report.step}{of}  {text}  lr {report.learning_rate:.2e}")

    def on_progress(self, step: int, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.on_message(
            f"evaluation at step {step}: {shown}"
            if shown
            else "no data held out to evaluate on; give more, or a larger data.validation"
        )

    def on_sample(self, step: int, sample: str) -> None:
        start = f"sample at step {step}: "
        self.on_message(start + shorten(" ".join(sample.split()), 2 * self.console.width - len(start)))

    def on_message(self, message: str) -> None:
        # A closed terminal must not end the training: the run's folder has everything.
        with suppress(OSError):
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)


def shorten(sample: str, width: int) -> str:
    """The end of the prompt and the start of the generated text; the metrics have both in full. A sample
    without a bar between them is a file name, and stays whole."""
    prompt, bar, generated = sample.partition(" | ")
    if not bar or len(sample) <= width:
        return sample
    if len(prompt) > width // 3:
        prompt = "..." + prompt[3 - width // 3 :]
    text = prompt + bar + generated
    return text if len(text) <= width else f"{text[: width - 3]}..."


def model_flops_utilization(
    config: TrainConfig, prediction: Prediction | None, gpu: gpus.GPU | None, tokens_per_second: float
) -> float | None:
    """MFU: the share of the GPU's nominal FLOPS that forward, and twice that for backward, take. Recomputed
    work does not count."""
    from oomph_lab.training.step import PASSES_PREDICTED

    peak = None if gpu is None else gpu.bf16_tflops
    if prediction is None or prediction.work is None or not peak:
        return None
    stage = config.largest_stage
    tokens = stage.tokens * min(stage.accumulate, PASSES_PREDICTED)  # of the predicted step
    flops = 3 * prediction.work.forward.flops / tokens * tokens_per_second
    return flops / (peak * 1e12)


def _rate(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.1f}"
