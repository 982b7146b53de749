"""The numbers of a run: learning rates, throughput, evaluation, metrics on disk."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from small_runs import Recorder, differences, rows_of, state_of, trained, uninterrupted
from torch import nn

from oomph_lab.training.config import TrainingConfig
from oomph_lab.training.evaluation import evaluate
from oomph_lab.training.metrics import MetricsWriter, read_metrics
from oomph_lab.training.step import Precision, StepResults
from oomph_lab.training.trainer import learning_rate_scale

CPU = torch.device("cpu")
PLAIN = Precision(CPU, None)


# ------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize(
    ("schedule", "warmup", "least", "steps", "scales"),
    [
        ("constant", 4, 0.0, 10, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 2, 0.2, 7, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("linear", 0, 0.1, 3, [1, 0.55, 0.1, 0.1, 0.1]),  # past the end
        ("cosine", 0, 0.0, 5, [1, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.146447, 0]),
        ("cosine", 1, 0.1, 4, [1, 1, 0.55, 0.1]),
        ("cosine", 2, 0.0, None, [0.5, 1, 1, 1]),  # epochs: the end is not known
        ("linear", 3, 0.0, 3, [1 / 3, 2 / 3, 1, 1]),  # no step after the warm-up
    ],
)
def test_learning_rate_schedules(schedule, warmup, least, steps, scales):
    training = TrainingConfig(schedule=schedule, warmup=warmup, min_learning_rate=least, steps=steps)
    found = [learning_rate_scale(training, step) for step in range(len(scales))]
    assert found == pytest.approx(scales, abs=1e-6)


# ---------------------------------------------------------------------------------------- throughput


def test_evaluations_and_saves_do_not_count_as_time_of_steps(tmp_path, monkeypatch):
    clock = [0.0]

    def slow(*_, **__):
        clock[0] += 100
        return {}

    monkeypatch.setattr("oomph_lab.training.step.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("oomph_lab.training.trainer.evaluate", slow)
    put = StepResults.put

    def timed(self, *given):
        clock[0] += 2
        put(self, *given)

    monkeypatch.setattr(StepResults, "put", timed)
    events = Recorder()
    trained(tmp_path / "run", ["training.eval_every=2", "training.save_every=3"], callbacks=events)
    assert {report.tokens_per_second for report in events.reports} == {16.0}  # 2 x 16 tokens in 2 s


# ---------------------------------------------------------------------------------------- evaluation


def test_evaluation_does_not_disturb_the_training(tmp_path):
    trained(tmp_path / "often", ["training.eval_every=1", "training.eval_at_start=true"])
    once = uninterrupted()
    assert differences(state_of(tmp_path / "often"), state_of(once)) == []
    assert rows_of(tmp_path / "often") == rows_of(once)
    assert [row["step"] for row in rows_of(tmp_path / "often", "evaluation")] == list(range(7))
    assert len(rows_of(once, "evaluation")) == 1


class FixedLosses(nn.Module):
    """Returns known losses, one per call."""

    def __init__(self, losses, **more):
        super().__init__()
        self.losses, self.more = iter(losses), more

    def forward(self, **batch):
        return SimpleNamespace(loss=torch.tensor(next(self.losses)), **self.more)


def text_batch(*shape):
    ids = torch.zeros(*shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_perplexity_is_that_of_the_mean_loss_over_tokens():
    losses = FixedLosses([2.0, 4.0, 100.0])
    found = evaluate(losses, [text_batch(3, 8), text_batch(1, 8), text_batch(1, 8)], 2, CPU, PLAIN)
    assert found["loss"] == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert found["perplexity"] == pytest.approx(math.exp(2.5))
    images = {"images": torch.zeros(2, 3, 4, 4)}
    found = evaluate(FixedLosses([0.01, 0.03], psnr=0.0), [images, images], 9, CPU, PLAIN)
    assert found == pytest.approx({"loss": 0.02, "psnr": -10 * math.log10(0.02)})
    huge = evaluate(FixedLosses([5000.0]), [text_batch(1, 8)], 1, CPU, PLAIN)
    assert math.isfinite(huge["perplexity"])


def test_an_evaluation_counts_predicted_tokens_not_padding():
    class FirstToken(nn.Module):
        def forward(self, input_ids, labels):
            return SimpleNamespace(loss=input_ids[0, 0].float())

    whole = torch.tensor([[2, 2, 2, 2, 2]])
    padded = torch.tensor([[8, 8, 0, 0, 0]])
    labels = torch.tensor([[8, 8, -100, -100, -100]])
    alone = torch.tensor([[100, -100, -100, -100, -100]])  # a last token, which nothing predicts
    single = torch.tensor([[9]])
    batches = [(whole, whole), (padded, labels), (alone, alone), (single, single)]
    given = [{"input_ids": ids, "labels": wanted} for ids, wanted in batches]
    found = evaluate(FirstToken(), given, 9, CPU, PLAIN)
    assert found["loss"] == pytest.approx((4 * 2 + 1 * 8) / 5)


def test_nothing_held_out_gives_no_metrics(tmp_path):
    events = Recorder()
    changes = ["data.validation=0", "training.steps=1"]
    assert trained(tmp_path / "run", changes, callbacks=events).evaluation == {}
    assert rows_of(tmp_path / "run", "evaluation") == []
    documents = tmp_path / "long.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{n} words " * 2000}) + "\n" for n in range(4)))
    changes = [f"data.source={documents}", "data.validation=0.02", "training.steps=1"]
    assert trained(tmp_path / "empty", changes, callbacks=events).evaluation == {}
    assert events.evaluations == [(1, {})]


def test_samples_are_an_image_or_a_prompt_and_its_continuation(tmp_path):
    from PIL import Image

    events = Recorder()
    trained(tmp_path / "images", ["training.steps=1"], "ginr", callbacks=events)
    diverging = ["optimizer.learning_rate=1e30", "training.clip=null", "training.steps=1"]
    trained(tmp_path / "diverged", [*diverging, "training.warmup=0"], callbacks=events)
    (step, file), (_, text) = events.samples
    assert text.endswith("| (nothing: the logits are not finite)")
    assert state_of(tmp_path / "diverged")["step"] == 1
    assert step == 1
    with Image.open(file) as image:
        assert image.size == (2 * 8 * 3, 2 * 8 * 3)  # two images, above and below, enlarged
    (row,) = rows_of(uninterrupted(), "sample")
    assert " | " in row["text"]


# ------------------------------------------------------------------------------------------- metrics


def test_rows_are_written_every_few_steps_and_for_the_first_and_the_last(tmp_path):
    events = Recorder()
    trained(tmp_path / "run", ["training.log_every=4", "training.steps=9"], callbacks=events)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 4, 8, 9]
    assert [report.step for report in events.reports] == [1, 4, 8, 9]
    changes = ["training.steps=null", "training.epochs=1", "training.log_every=8", "data.batch_size=16"]
    last = trained(tmp_path / "epoch", changes).step
    assert last % 8
    assert [row["step"] for row in rows_of(tmp_path / "epoch")] == [1, *range(8, last, 8), last]


def test_rows_after_the_step_resumed_at_are_removed_and_a_torn_line_too(tmp_path):
    metrics = MetricsWriter(tmp_path, None)
    for step in range(1, 6):
        metrics.write("train", step, {"loss": float(step)})
    metrics.close()
    with metrics.path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [row["step"] for row in read_metrics(metrics.path)] == [1, 2, 3, 4, 5]
    again = MetricsWriter(tmp_path, 3)
    again.write("train", 4, {"loss": 40.0, "grad_norm": None})
    again.close()
    assert [row["loss"] for row in read_metrics(metrics.path)] == [1, 2, 3, 40]
    assert "grad_norm" not in read_metrics(metrics.path)[-1]
    MetricsWriter(tmp_path, None).close()  # a new run
    assert read_metrics(metrics.path) == []


def test_numbers_that_are_not_finite_are_valid_json_and_numbers_again(tmp_path):
    metrics = MetricsWriter(tmp_path, None)
    metrics.write("evaluation", 3, {"loss": math.nan, "perplexity": math.inf, "matching": 0.5})

    def refuse(word):
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["loss"], line["perplexity"]) == ("nan", "inf")
    found = metrics.find("evaluation", 3)
    metrics.close()
    assert math.isnan(found["loss"])
    assert (found["perplexity"], found["matching"]) == (math.inf, 0.5)
    assert metrics.find("evaluation", 4) is None


def test_the_rows_of_a_run_and_tensorboard_have_the_same_numbers_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = read_metrics(uninterrupted() / "metrics.jsonl")[-1]
    assert row["tokens_per_second"] > 0
    assert row["grad_norm"] > 0
    assert "memory" not in row
    logged = [row["learning_rate"] for row in rows_of(uninterrupted())]
    training = TrainingConfig(schedule="cosine", warmup=2, steps=6)
    assert logged == [pytest.approx(0.01 * learning_rate_scale(training, step)) for step in range(6)]
    events = EventAccumulator(str(uninterrupted() / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/learning_rate", "evaluation/perplexity"} <= set(events.Tags()["scalars"])
    written = [row["loss"] for row in rows_of(uninterrupted())]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(written)
    for losses in ((9.0, 8.0, 7.0), (5.0, 4.0)):  # killed before its first checkpoint, and started again
        metrics = MetricsWriter(tmp_path, None)
        for step, loss in enumerate(losses, 1):
            metrics.write("train", step, {"loss": loss})
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 5.0), (2, 4.0)]


# ------------------------------------------------------------------------------------------ warnings


def test_what_is_valid_but_perhaps_not_intended_is_said(tmp_path):
    def messages(system, *overrides):
        events = Recorder()
        trained(tmp_path / system, overrides, system, callbacks=events)
        return "\n".join(events.messages)

    said = messages("pythia", "training.steps=1", "training.autocast=bfloat16")
    assert "training.autocast=bfloat16: many CPUs emulate it" in said
    assert "training.warmup=2 is more than training.steps=1" in said
    said = messages("hatchling", "training.steps=4")
    assert "training.steps=4 ends in stage 2 of the curriculum's 3" in said
    assert "emulate" not in said
    assert "warmup" not in said
