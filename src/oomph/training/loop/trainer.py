"""The loop: batches in, steps made, and at its times evaluation, samples, metrics and checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.deterministic import deterministic_errors
from oomph.errors import UserError
from oomph.training.checkpoints import Checkpoints, rng_state, set_rng_state
from oomph.training.config import Stage, TrainConfig
from oomph.training.data import Data
from oomph.training.loop.batches import at_most, counted_tokens, moved, stage_at
from oomph.training.loop.before import Before
from oomph.training.loop.building import built
from oomph.training.loop.evaluation import evaluate
from oomph.training.loop.failures import (
    NotFinite,
    OutOfMemory,
    not_finite_text,
    ran_out_of_memory,
    save_batches,
)
from oomph.training.loop.listener import Listener, StepReport
from oomph.training.loop.memory import alive, memory_now
from oomph.training.loop.metrics import Metrics
from oomph.training.loop.pace import Pace
from oomph.training.loop.passes import Passes, RecordedPasses
from oomph.training.loop.precision import Precision
from oomph.training.loop.readings import Reading, Readings
from oomph.training.loop.samples import sample_images, sample_text
from oomph.training.loop.schedule import Schedule
from oomph.training.loop.stopping import Stopping
from oomph.training.loop.updates import Updates, with_own_kernels
from oomph.training.run_folder import CHECKPOINTS
from oomph.units import counted
from oomph.workload import Workload

_MOST_SKIPPED = 20  # in a row: by then it is not the data


@dataclass(frozen=True)
class Outcome:
    """stopped: None at the end of the training, else what stopped it (a signal's name)."""

    step: int
    stopped: str | None
    evaluation: dict[str, float]


class Trainer:
    """One run of a config: a model on its device, its optimizer, its data and its folder.

    `resume()` first, to go on where the folder's newest checkpoint is; then `run()`.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        data: Data,
        folder: Path,
        device: torch.device,
        listener: Listener,
    ) -> None:
        self.config, self.data = config, data
        self.batch_alone = replace(workload, accumulate=1)  # a step's batches come one by one
        self.folder, self.device, self.listener = folder, device, listener
        options = config.training
        self.model = built(workload, device)
        assert workload.optimizer is not None
        self.optimizer: Optimizer = workload.optimizer(self.model.parameters())
        autocast = workload.autocast
        assert autocast is None or isinstance(autocast, torch.dtype)
        self.precision = Precision(device, autocast)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.updates = Updates(self.optimizer, trained, options.clip, self.precision)
        passes = Passes(self.model, workload.loss, self.precision)
        self.pass_: Passes | RecordedPasses = passes
        if options.cuda_graph and device.type == "cuda":
            self.pass_ = RecordedPasses(passes)
        self.schedule = Schedule.of(options, options.steps)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.readings = Readings()
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, keep=options.keep)
        self.metrics: Metrics | None = None  # while it runs
        self.step = 0
        self._resumed = False
        self._saved_at: int | None = None
        self._skipped = self._left_out = 0  # steps in a row, and in all
        self._stage: Stage | None = None  # of the last step
        self._not_logged: Reading | None = None
        self._pace = Pace()
        if self.updates.in_backward and any(stage.accumulate > 1 for stage in config.stages):
            raise UserError("a stage accumulates, and with updates in backward no gradient is left to add to")

    # ------------------------------------------------------------------------------- a run

    def resume(self) -> int | None:
        """Go on with the newest sound checkpoint; None where there is none."""
        saved = self.checkpoints.latest()
        if saved is None:
            return None
        for warning in saved.warnings:
            self.listener.said(f"passed over: {warning}")
        # In place where tensors exist, so that a checkpoint needs no second copy on the device.
        state = self.checkpoints.load(saved, into={"model": self.model.state_dict()})
        self.optimizer.load_state_dict(with_own_kernels(state["optimizer"], self.optimizer))
        self.precision.load_state_dict(state["scaler"])
        self.data.train.load_state_dict(state["data"])
        set_rng_state(state["rng"])
        self.step = int(state["step"])
        self._resumed = True
        self._saved_at = self.step
        return self.step

    def run(self) -> Outcome:
        try:
            self.metrics = Metrics(self.folder, self.step if self._resumed else None)
            with Stopping() as stopping:
                return self._steps(stopping)
        except torch.OutOfMemoryError as error:  # in evaluation: between two steps
            raise self._out_of_memory(error, None) from error
        except OSError as problem:
            raise UserError(
                f"the run stopped after step {self.step}: {problem}; go on with --resume once that is mended"
            ) from problem
        finally:
            if self.metrics is not None:
                self.metrics.close()
            self.checkpoints.close()

    def begin(self) -> None:
        """What is counted from now on is of the steps, not of what came before them."""
        self._pace = Pace()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _steps(self, stopping: Stopping) -> Outcome:
        options = self.config.training
        assert self.metrics is not None
        if options.eval_at_start and self.step == 0 and self.metrics.found("evaluation", 0) is None:
            self._evaluate()
        self.begin()
        while not self._finished():
            made = self._one_step()
            if not made:  # the data's epochs are over
                break
            self._read()
            at_end = self._finished()
            if _is_time(self.step, options.eval_every) and not at_end:
                self._evaluate()
            if _is_time(self.step, options.save_every) and not at_end:
                self._save(on_time=True)
            if stopping.asked:
                break
        stopped = stopping.asked  # a signal from here on has nothing left to stop
        self._read(all_of_them=True)
        if self._not_logged is not None and not stopped:  # the last: with epochs it was not known to be
            self._log(self._not_logged, always=True)
        found = self.metrics.found("evaluation", self.step)
        if found is None:
            found = {} if stopped else self._evaluate()
        if options.save:
            self._save()
            self.checkpoints.wait()
            self.listener.said(f"step {self.step} is saved in {self.checkpoints.folder}")
        if self._left_out:
            self.listener.said(f"{counted(self._left_out, 'step')} left out, as training.on_nan=skip says")
        return Outcome(self.step, stopped, found)

    def _finished(self) -> bool:
        steps = self.config.training.steps
        return steps is not None and self.step >= steps

    # ------------------------------------------------------------------------------ a step

    def _one_step(self) -> bool:
        before = Before.of(self.data.train, self.device)
        stage = stage_at(self.config.stages, self.step)
        batches = self._batches(before, stage)
        if not batches:
            return False
        if stage != self._stage:
            self.pass_.forget()  # the shapes of a stage that is over
            self._stage = stage
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule.share(self.step)
        try:
            loss = self._passes(batches)
            update = self.updates.step(loss)
            self.optimizer.zero_grad(set_to_none=not self.pass_.keeps_gradients)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            raise self._out_of_memory(error, before) from error
        self.step += 1
        self.readings.put(self.step, loss, update.norm, update.doubt, batches)
        return True

    def _batches(self, before: Before, stage: Stage) -> list[Any]:
        """Those of a step; none at the end of the data. What was trained so far outlives data that fail."""
        try:
            return list(at_most(self.data.train, stage.accumulate))
        except Exception:
            self._save(before)
            self.checkpoints.wait()
            raise

    def _passes(self, batches: list[Any]) -> Tensor:
        losses = []
        for batch in batches:
            parts = self.batch_alone.passes(moved(batch, self.device))
            shares = [(part, share / len(batches)) for part, share in parts]
            losses += [Workload.scaled(self.pass_(part, share), share) for part, share in shares]
        return torch.stack(losses).sum()

    # -------------------------------------------------------------------- what comes of it

    def _read(self, all_of_them: bool = False) -> None:
        readings = self.readings.take(all_of_them)
        for reading in readings:  # before the first report: those that arrive together share their time
            self._pace.count(sum(map(counted_tokens, reading.batches)))
        for reading in readings:
            self._log(reading)
        for reading in readings:
            if reading.sound:
                self._skipped = 0
            else:
                self._not_finite(reading)

    def _log(self, reading: Reading, always: bool = False) -> None:
        options = self.config.training
        if reading.step % options.log_every and reading.step not in (1, options.steps) and not always:
            self._not_logged = reading
            self.listener.advanced(reading.step, reading.loss)
            return
        self._not_logged = None
        report = self._report(reading)
        assert self.metrics is not None
        self.metrics.write("train", reading.step, report.numbers())
        self.listener.stepped(report)

    def _report(self, reading: Reading) -> StepReport:
        memory = memory_now(self.device, self.pass_.replay_bytes, self.pass_.peak_before)
        return StepReport(
            step=reading.step,
            loss=reading.loss,
            learning_rate=self.rates[0] * self.schedule.share(reading.step - 1),
            norm=reading.norm,
            tokens_per_second=self._pace.lap(),
            allocated=None if memory is None else memory.allocated,
            peak=None if memory is None else memory.peak,
        )

    def _not_finite(self, reading: Reading) -> None:
        batch = save_batches(self.folder, reading)
        told = not_finite_text(reading)
        if self.updates.in_backward:
            # Its updates are in the weights already: what is saved before it is what is left.
            raise NotFinite(
                f"{told}, and its updates were made in backward; {batch}; "
                "resume from the checkpoint before it"
            )
        self._check_weights()
        self._skipped += 1
        self._left_out += 1
        if self.config.training.on_nan == "skip" and self._skipped < _MOST_SKIPPED:
            self.listener.said(f"{told}; skipped, {batch}")
            return
        for later in self.readings.take(all_of_them=True):
            self._log(later)
        self._write()
        self.checkpoints.wait()
        kept = f"the state is saved at step {self.step}" if self.config.training.save else "nothing is saved"
        advice = "lower the learning rate, give training.clip, or leave such steps out: training.on_nan=skip"
        if self.config.training.on_nan == "skip":
            advice = f"{_MOST_SKIPPED} in a row: lower the learning rate, or give training.clip"
        raise NotFinite(f"{told}; its update was not made, {batch}, {kept}; {advice}")

    def _check_weights(self) -> None:
        """Gradients that were not finite, and not looked at, are in the weights after their step."""
        # The largest entry: a norm of squares would be infinite before the weights are.
        if torch.isfinite(torch.nn.utils.get_total_norm(self.updates.trained, math.inf)):
            return
        saved = self._saved_at
        told = f"the weights of step {self.step} are not finite, and are not saved; "
        told += "none were saved before" if saved is None else f"--resume goes on at step {saved}"
        if self.updates.clip is None and not self.updates.in_backward:
            told += "; training.clip=1.0 leaves out updates that are not finite"
        raise NotFinite(told)

    def _evaluate(self) -> dict[str, float]:
        self._read(all_of_them=True)  # told before it; and one that must not be saved ends the run here
        try:
            with deterministic_errors():
                return self._evaluated()
        except UserError:  # such as held-out data that cannot be read: what was trained so far outlives them
            self._save()
            self.checkpoints.wait()
            raise

    def _evaluated(self) -> dict[str, float]:
        options = self.config.training
        began = time.perf_counter()
        batches = iter(self.data.validation())
        first = next(batches, None)
        if first is None:
            if self.config.data.validation:
                self.listener.evaluated(self.step, {})
            return {}
        held_out = (batch for batches_ in ((first,), batches) for batch in batches_)
        with self.pass_.in_their_place():
            found = evaluate(self.model, held_out, options.eval_batches, self.device, self.precision)
            assert self.metrics is not None
            self.metrics.write("evaluation", self.step, found)
            self.listener.evaluated(self.step, found)
            self._sample(first)
        self._pace.leave_out(time.perf_counter() - began)
        return found

    def _sample(self, batch: Any) -> None:
        if "images" in batch:
            file = self.folder / "samples" / f"step_{self.step:08}.png"
            sample_images(self.model, batch, file, self.device, self.precision)
            self.listener.sampled(self.step, str(file))
        elif self.data.tokenizer is not None:
            text = sample_text(self.model, self.data.tokenizer, batch, self.device, self.precision)
            assert self.metrics is not None
            self.metrics.text(self.step, text)
            self.listener.sampled(self.step, text)

    # -------------------------------------------------------------------------- its state

    def state(self, data: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.state_dict(),
            "data": self.data.train.state_dict() if data is None else data,
            "rng": rng_state(),
        }

    def _save(self, before: Before | None = None, on_time: bool = False) -> None:
        """The state now, or as it was before the step that could not be made. Not `on_time` after a step that
        was left out: were all of them from here on, such checkpoints would push out the good ones.

        What is known of the steps so far is written and judged first: a checkpoint has sound weights, and the
        metrics up to it are complete."""
        self._read(all_of_them=True)
        if self._saved_at != self.step and not (on_time and self._skipped):
            self._check_weights()
            self._write(before)

    def _write(self, before: Before | None = None) -> None:
        if not self.config.training.save:
            return
        began = time.perf_counter()
        if before is not None:
            before.draw_again(self.device)
        self.checkpoints.save(self.step, self.state(None if before is None else before.data))
        self._saved_at = self.step
        self._pace.leave_out(time.perf_counter() - began)

    def _out_of_memory(self, error: BaseException, before: Before | None) -> OutOfMemory:
        """The state as it was before the step, saved, and what was alive when it failed."""
        held = alive(self.model, self.optimizer, self.device, self.pass_.replay_bytes)
        again = "resume from the newest checkpoint"
        why_not = ""
        if before is not None and self.updates.in_backward:
            why_not = f"its updates are made in backward, so some weights are a step ahead; {again}"
        elif self.updates.under_way:
            why_not = f"the update was under way, so some weights are a step ahead; {again}"
        elif not self.config.training.save:
            why_not = "training.save is false"
        if why_not:
            return OutOfMemory(str(error), held, None, why_not)
        error.__traceback__ = None  # its frames hold the activations
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._save(before)
            self.checkpoints.wait()
        # Out of memory once more: not to be taken for a failure between two steps, which saves what is now.
        except (UserError, torch.OutOfMemoryError) as problem:
            return OutOfMemory(str(error), held, None, str(problem))
        return OutOfMemory(str(error), held, self.step, "")


def _is_time(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
