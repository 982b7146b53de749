"""The training loop: steps, and at their times evaluation, samples, metrics and checkpoints."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.torch_internals import deterministic_errors
from oomph.units import counted
from oomph.workload import Workload
from oomph_lab.training.checkpoint import Checkpoints, load, malformed_errors
from oomph_lab.training.checkpoint_state import rng_state, set_rng_state
from oomph_lab.training.config import Stage, TrainConfig, TrainingConfig
from oomph_lab.training.data import STOP_SIGNALS, Data
from oomph_lab.training.evaluation import evaluate, sample_images, sample_text
from oomph_lab.training.failures import (
    NotFinite,
    OutOfMemory,
    describe_not_finite,
    is_out_of_memory,
    memory_in_use,
    save_batches,
)
from oomph_lab.training.metrics import Callbacks, MetricsWriter, StepReport
from oomph_lab.training.ranks import ONE_PROCESS, Ranks
from oomph_lab.training.step import (
    CudaGraphForwardBackward,
    ForwardBackward,
    OptimizerStep,
    Precision,
    StepResult,
    StepResults,
    count_tokens,
    to_device,
    whole_tensor,
    with_own_options,
)

_MOST_SKIPPED = 20  # steps in a row, after which the data are not to blame


@dataclass(frozen=True)
class Outcome:
    """stopped: the name of the signal that stopped the run, None at its end."""

    step: int
    stopped: str | None
    evaluation: dict[str, float]


class Trainer:
    """One run: a model on its device, its optimizer, its data and its folder.

    Call `resume()` first to continue from the newest checkpoint, then `run()`.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        data: Data,
        folder: Path,
        device: torch.device,
        callbacks: Callbacks,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.config, self.data, self.ranks = config, data, ranks
        self.one_batch = replace(workload, accumulate=1)  # a step's batches arrive one by one
        self.folder, self.device, self.callbacks = folder, device, callbacks
        options = config.training
        # Over several ranks it is built on the host, and moved to the device shard by shard.
        self.model = build_model(workload, device if ranks.parallel is None else torch.device("cpu"))
        # Weights that a folder holds are left out of checkpoints; a resumed run must have the same.
        from_folder = getattr(config.model_config, "weights", None) is not None
        self._frozen = frozen_fingerprint(self.model) if from_folder else None
        called = self.model if ranks.parallel is None else ranks.parallel.apply(self.model, device.type)
        assert workload.optimizer is not None
        self.optimizer: Optimizer = workload.optimizer(self.model.parameters())
        autocast = workload.autocast
        assert autocast is None or isinstance(autocast, torch.dtype)
        self.precision = Precision(device, autocast)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer_step = OptimizerStep(self.optimizer, trained, options.clip, self.precision)
        use_graph = options.cuda_graph and device.type == "cuda"
        kind = CudaGraphForwardBackward if use_graph else ForwardBackward
        self.forward_backward = kind(called, workload.loss, self.precision)
        ranks.seed(options.seed)
        self.learning_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.results = StepResults(device)
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=options.keep)
        self.metrics: MetricsWriter  # from `run` on
        self.step = 0
        self._resumed = False
        self._saved_at: int | None = None
        self._skipped = self._skipped_in_a_row = 0
        self._stage: Stage | None = None  # of the last step
        self._not_logged: StepResult | None = None
        self._tokens, self._seconds = 0, 0.0  # since the last report
        self._tokens_per_second = 0.0
        if self.optimizer_step.in_backward and any(stage.accumulate > 1 for stage in config.stages):
            raise UserError("a stage accumulates, and with updates in backward no gradient is left to add to")

    # ------------------------------------------------------------------------------------ the run

    def resume(self) -> int | None:
        """Load the newest checkpoint that verifies; None if there is none."""
        saved = self.checkpoints.latest()
        if saved is None:
            return None
        for why in saved.skipped.values():
            self.callbacks.on_message(f"skipped: {why}")
        # Into the model's own tensors, so that the device needs no second copy.
        state = load(saved, into={"model": self._saved_model()})
        if state.get("frozen") != self._frozen:
            raise UserError(
                f"the frozen weights differ from those of the run in {saved.folder}, which does not store "
                "them; set model.weights to the folder that the run used"
            )
        with malformed_errors(saved):
            own = with_own_options(state["optimizer"], self.optimizer)
            self.optimizer.load_state_dict(self.ranks.sharded_optimizer_state(own, self.optimizer))
            self.precision.scaler.load_state_dict(state["scaler"])
            self.data.train.load_state_dict(state["data"])
            set_rng_state(state["rng"])
            self.ranks.seed(self.config.training.seed + saved.step)
            if state["step"] != saved.step:
                raise ValueError(f"step {state['step']!r} in the folder of step {saved.step}")
        self.step = self._saved_at = saved.step
        self._resumed = True
        return self.step

    def run(self) -> Outcome:
        with self.ranks.main_process_first():
            resumed_at = self.step if self._resumed else None
            self.metrics = MetricsWriter(self.folder, resumed_at, writes=self.ranks.is_main_process)
        try:
            with StopSignals() as signals:
                return self._train(signals)
        except (RuntimeError, MemoryError) as error:  # in an evaluation, between two steps
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(error, None) from error
        finally:
            self.metrics.close()
            self.checkpoints.close()

    def start_measuring(self) -> None:
        """Throughput and peak memory count from here."""
        self._tokens, self._seconds = 0, 0.0
        self.results.restart_clock()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _train(self, signals: StopSignals) -> Outcome:
        options = self.config.training
        if options.eval_at_start and self.step == 0 and self._found_evaluation() is None:
            self._evaluate()
        self.start_measuring()
        while not self._finished() and self.train_step():
            self._report_results()
            if not self._finished():
                if _is_time(self.step, options.eval_every):
                    self._evaluate()
                if _is_time(self.step, options.save_every):
                    self._save(scheduled=True)
            stopped = self.ranks.any_signal(signals.received)
            if stopped:
                break
        else:
            stopped = None  # a later signal has nothing left to stop
        self._report_results(wait=True)
        if self._not_logged is not None and not stopped:  # with epochs the last step was not known to be
            self._log(self._not_logged, always=True)
        found = self._found_evaluation()
        if found is None:
            found = {} if stopped else self._evaluate()
        if options.save:
            self._save()
            self.checkpoints.wait()
            self.callbacks.on_message(f"step {self.step} is saved in {self.checkpoints.folder}")
        if self._skipped:
            self.callbacks.on_message(f"{counted(self._skipped, 'step')} skipped (training.on_nan=skip)")
        return Outcome(self.step, stopped, found)

    def _found_evaluation(self) -> dict[str, float] | None:
        """That of this step, if there is one on disk."""
        return self.ranks.broadcast(self.metrics.find("evaluation", self.step))

    def _finished(self) -> bool:
        steps = self.config.training.steps
        return steps is not None and self.step >= steps

    # ------------------------------------------------------------------------------------ a step

    def train_step(self) -> bool:
        """One optimizer step; False at the end of the data."""
        start = StepStart.now(self.data.train, self.device)
        stage = self.config.curriculum.at_step(self.step)
        batches = self._next_batches(start, stage)
        if not batches:
            return False
        if stage != self._stage:
            self.forward_backward.release()  # graphs of the last stage's shapes
            self._stage = stage
        scale = learning_rate_scale(self.config.training, self.step)
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * scale
        try:
            loss = self._loss_and_gradients(batches)
            update = self.optimizer_step(loss)
            self.optimizer.zero_grad(set_to_none=not self.forward_backward.keeps_gradients)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(error, start) from error
        self.step += 1
        self.results.put(self.step, loss, update, batches)
        return True

    def _next_batches(self, start: StepStart, stage: Stage) -> list[Any]:
        """Fewer at the end of the data. If reading fails, the training so far is saved."""
        try:
            return list(islice(self.data.train, stage.accumulate))
        except Exception:
            self._save_alone(start)
            raise

    def _loss_and_gradients(self, batches: list[Any]) -> Tensor:
        losses = []
        for batch in batches:
            own = to_device(self.ranks.rows(batch), self.device)
            for part, share in self.one_batch.passes(own):
                share = share / len(batches)
                losses.append(Workload.scaled(self.forward_backward(part, share), share))
        return self.ranks.mean(torch.stack(losses).sum())

    # ----------------------------------------------------------------------------------- reports

    def _report_results(self, wait: bool = False) -> None:
        results = self.results.take(wait)
        for result in results:
            self._tokens += sum(map(count_tokens, result.batches))
            self._seconds += result.seconds
            self._log(result)
        for result in results:
            if result.skipped:
                self._handle_not_finite(result)
            else:
                self._skipped_in_a_row = 0

    def _log(self, result: StepResult, always: bool = False) -> None:
        options = self.config.training
        if result.step % options.log_every and result.step not in (1, options.steps) and not always:
            self._not_logged = result
            self.callbacks.on_progress(result.step, result.loss)
            return
        self._not_logged = None
        if self._seconds > 0:  # a report without new steps repeats the last rate
            self._tokens_per_second = self._tokens / self._seconds
            self._tokens, self._seconds = 0, 0.0
        memory, peak = self._memory()
        report = StepReport(
            step=result.step,
            loss=result.loss,
            learning_rate=self.learning_rates[0] * learning_rate_scale(options, result.step - 1),
            grad_norm=result.grad_norm,
            tokens_per_second=self._tokens_per_second,
            memory=memory,
            memory_peak=peak,
        )
        self.metrics.write("train", result.step, report.numbers())
        self.callbacks.on_step(report)

    def _memory(self) -> tuple[int | None, int | None]:
        if self.device.type != "cuda":
            return None, None
        graphs = self.forward_backward
        allocated = torch.cuda.memory_allocated(self.device) + graphs.graph_bytes
        peak = torch.cuda.max_memory_allocated(self.device)
        return allocated, max(peak, graphs.peak_before_capture, allocated)

    def _handle_not_finite(self, result: StepResult) -> None:
        batch = save_batches(self.folder, result) if self.ranks.is_main_process else ""
        what = describe_not_finite(result)
        if self.optimizer_step.in_backward:
            # The weights have been updated: only an earlier checkpoint is left.
            raise NotFinite(
                f"{what}, and its updates were made in backward; {batch}; "
                "resume from the checkpoint before it"
            )
        self._check_weights()
        self._skipped_in_a_row += 1
        self._skipped += 1
        if self.config.training.on_nan == "skip" and self._skipped_in_a_row < _MOST_SKIPPED:
            self.callbacks.on_message(f"{what}; skipped, {batch}")
            return
        for later in self.results.take(wait=True):
            self._log(later)
        self._write_checkpoint()
        self.checkpoints.wait()
        saved = f"the state is saved at step {self.step}" if self.config.training.save else "nothing is saved"
        advice = "lower the learning rate, give training.clip, or skip such steps: training.on_nan=skip"
        if self.config.training.on_nan == "skip":
            advice = f"{_MOST_SKIPPED} in a row: lower the learning rate, or give training.clip"
        raise NotFinite(f"{what}; its update was not made, {batch}, {saved}; {advice}")

    def _check_weights(self) -> None:
        """Gradients that were not finite and not looked at are in the weights after their step."""
        # The largest entry: a norm of squares overflows before the weights do.
        if torch.isfinite(whole_tensor(get_total_norm(self.optimizer_step.trained, math.inf))):
            return
        message = f"the weights of step {self.step} are not finite, and are not saved; "
        saved = self._saved_at
        message += "there is no checkpoint" if saved is None else f"--resume continues at step {saved}"
        if self.optimizer_step.clip is None and not self.optimizer_step.in_backward:
            message += "; training.clip=1.0 skips updates that are not finite"
        raise NotFinite(message)

    # -------------------------------------------------------------------------------- evaluation

    def _evaluate(self) -> dict[str, float]:
        self._report_results(wait=True)  # a step that must not be saved ends the run here
        try:
            with deterministic_errors():
                return self._evaluate_and_sample()
        except UserError:  # such as held-out data that cannot be read: save the training so far
            self._save_alone()
            raise
        finally:
            self.results.restart_clock()

    def _evaluate_and_sample(self) -> dict[str, float]:
        batches = iter(self.data.validation())
        first = next(batches, None)
        if first is None:
            if self.config.data.validation:
                self.callbacks.on_evaluation(self.step, {})
            return {}
        most = self.config.training.eval_batches
        with self.forward_backward.released():
            found = evaluate(self.model, chain([first], batches), most, self.device, self.precision)
            self.metrics.write("evaluation", self.step, found)
            self.callbacks.on_evaluation(self.step, found)
            self._sample(first)
        return found

    def _sample(self, batch: Any) -> None:
        if "images" in batch:
            name = (
                f"step_{self.step:08}{'' if self.ranks.is_main_process else f'_rank_{self.ranks.rank}'}.png"
            )
            file = self.folder / "samples" / name
            sample_images(self.model, batch, file, self.device, self.precision)
            self.callbacks.on_sample(self.step, str(file))
        elif self.data.tokenizer is not None:
            text = sample_text(self.model, self.data.tokenizer, batch, self.device, self.precision)
            self.metrics.write_text(self.step, text)
            self.callbacks.on_sample(self.step, text)

    # ------------------------------------------------------------------------------- checkpoints

    def _saved_model(self) -> dict[str, Any]:
        """All of the model; of one with frozen weights from a folder, what is trained."""
        state = self.model.state_dict()
        if self._frozen is None:
            return state
        trained = {name for name, each in self.model.named_parameters() if each.requires_grad}
        return {name: each for name, each in state.items() if name in trained}

    def state(self, data: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self._saved_model(),
            "frozen": self._frozen,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "data": self.data.train.state_dict() if data is None else data,
            "rng": rng_state(),
        }

    def _save(self, start: StepStart | None = None, scheduled: bool = False) -> None:
        """Save the state now, or as it was at the start of a step that failed.

        Results are reported first, so that a checkpoint has finite weights and the metrics up to it are
        complete. A scheduled save is left out after a skipped step: if all later steps are skipped too, such
        checkpoints would rotate the good ones out."""
        self._report_results(wait=True)
        if self._saved_at != self.step and not (scheduled and self._skipped_in_a_row):
            self._check_weights()
            self._write_checkpoint(start)

    def _save_alone(self, start: StepStart | None = None) -> None:
        """Save after a failure of this rank. With others nothing is saved: that takes all ranks, and the
        others have gone on."""
        if self.ranks.parallel is None:
            self._save(start)
            self.checkpoints.wait()

    def _write_checkpoint(self, start: StepStart | None = None) -> None:
        if not self.config.training.save:
            return
        if start is not None:
            start.restore_generators(self.device)
        state = self.ranks.full_state(self.state(None if start is None else start.data))
        if self.ranks.is_main_process:
            self.checkpoints.save(self.step, state)
        self._saved_at = self.step
        self.results.restart_clock()

    def _out_of_memory(self, error: BaseException, start: StepStart | None) -> OutOfMemory:
        """Save the state as it was before the step, and report who held memory."""
        held = memory_in_use(self.model, self.optimizer, self.device, self.forward_backward.graph_bytes)
        why_not = ""
        if start is not None and self.optimizer_step.in_backward:
            why_not = "updates are made in backward, so some weights are a step ahead"
        elif self.optimizer_step.incomplete:
            why_not = "the update was incomplete, so some weights are a step ahead"
        if why_not:
            why_not += "; resume from the newest checkpoint"
        elif not self.config.training.save:
            why_not = "training.save is false"
        elif self.ranks.parallel is not None:
            why_not = "the other ranks have gone on; resume from the newest checkpoint"
        if why_not:
            return OutOfMemory(str(error), held, None, why_not)
        error.__traceback__ = None  # its frames hold the activations
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self._save_alone(start)
        # A second out-of-memory error must not be handled as one between two steps, which saves what is now.
        except (UserError, RuntimeError, MemoryError) as second:
            return OutOfMemory(str(error), held, None, str(second))
        return OutOfMemory(str(error), held, self.step, "")


def frozen_fingerprint(model: nn.Module) -> str:
    """A hash of names, shapes and some values of what is not trained."""
    digest = sha256()
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    for name, each in model.state_dict().items():
        if name not in trained:
            values = each.detach().flatten()[:: max(1, each.numel() // 64)].tolist()
            digest.update(f"{name} {tuple(each.shape)} {values};".encode())
    return digest.hexdigest()[:16]


def _is_time(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def learning_rate_scale(training: TrainingConfig, step: int) -> float:
    """The learning rate of step 0, 1, ... as a share of the full one.

    A linear warm-up, then constant, or down to `min_learning_rate` at the last step. With epochs the last
    step is not known, and the rate stays."""
    if step < training.warmup:
        return (step + 1) / training.warmup
    if training.schedule == "constant" or training.steps is None or training.steps <= training.warmup:
        return 1.0
    done = min(1.0, (step - training.warmup) / max(1, training.steps - 1 - training.warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if training.schedule == "cosine" else 1 - done
    return training.min_learning_rate + (1 - training.min_learning_rate) * left


@dataclass(frozen=True)
class StepStart:
    """The data position and torch's generators before a step, so that a step which fails half way can save
    the state before it. Python's and numpy's generators are not used in a step."""

    data: dict[str, Any]
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, batches: Any, device: torch.device) -> StepStart:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(batches.state_dict(), torch.get_rng_state(), cuda)

    def restore_generators(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


class StopSignals:
    """Ctrl-C, SIGTERM or a closed terminal: the current step is finished and saved. Ctrl-C after that ends at
    once; other signals may come twice, as a closed terminal's does from the kernel and from the shell.
    received: the first signal's name."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


# -------------------------------------------------------------------------------- building a model


def build_model(workload: Workload, device: torch.device) -> nn.Module:
    """The model on its device. It is built on the GPU, where initializing billions of weights takes seconds,
    or on the host if the GPU is too small for the model and what building it may need."""
    dtype = workload.dtype
    assert dtype is None or isinstance(dtype, torch.dtype)
    where = device if device.type == "cuda" and _has_room(workload, device) else torch.device("cpu")
    with where, _default_dtype(dtype):
        model = workload.make_model(lambda made: made)
    return model.to(device=device, dtype=dtype).train()


def _has_room(workload: Workload, device: torch.device) -> bool:
    """For twice the model: an 8-bit weight is made from a wider one."""
    with torch.device("meta"):
        model = workload.make_model(lambda made: made)
    dtype = workload.dtype
    size = sum(
        each.numel() * (dtype.itemsize if isinstance(dtype, torch.dtype) else each.element_size())
        for each in (*model.parameters(), *model.buffers())
    )
    share = torch.cuda.get_per_process_memory_fraction(device)
    return 2 * size <= share * torch.cuda.get_device_properties(device).total_memory


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Weights are initialized in their own dtype: there is never a float32 copy of all of them."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
