"""The numbers of a run: learning rates, evaluation, metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import Notes, differences, rows_of, state_of, trained
from torch import nn

from oomph.errors import UserError
from oomph.training.loop.evaluation import evaluate
from oomph.training.loop.metrics import Metrics, read_metrics
from oomph.training.loop.precision import Precision
from oomph.training.loop.readings import Readings
from oomph.training.loop.schedule import Schedule

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------ schedule


def shares(kind: str, warmup: int, floor: float, steps: int | None, count: int) -> list[float]:
    schedule = Schedule(kind, warmup, floor, steps)
    return [round(schedule.share(step), 6) for step in range(count)]


def test_a_constant_rate_is_constant_after_its_rise() -> None:
    assert shares("constant", 0, 0.0, 4, 4) == [1, 1, 1, 1]
    assert shares("constant", 4, 0.0, 10, 6) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_a_linear_rate_falls_evenly_to_its_floor_at_the_last_step() -> None:
    assert shares("linear", 0, 0.0, 5, 5) == [1, 0.75, 0.5, 0.25, 0]
    assert shares("linear", 2, 0.2, 7, 7) == [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    assert shares("cosine", 0, 0.0, 5, 5) == [1, round(0.5 + math.sqrt(0.5) / 2, 6), 0.5, 0.146447, 0]
    assert shares("cosine", 1, 0.1, 4, 4) == [1, 1, 0.55, 0.1]


def test_past_the_end_the_rate_stays_at_the_floor() -> None:
    assert shares("linear", 0, 0.1, 3, 5)[2:] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_without_a_known_end_or_with_no_step_after_the_rise_the_rate_stays_full(kind: str) -> None:
    assert shares(kind, 2, 0.0, None, 4) == [0.5, 1, 1, 1]
    assert shares(kind, 3, 0.0, 3, 4) == [round(1 / 3, 6), round(2 / 3, 6), 1, 1]


def test_the_rates_of_a_run_are_those_of_its_schedule(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["training.schedule=linear", "training.min_learning_rate=0.5"])
    schedule = Schedule("linear", 2, 0.5, 6)
    logged = [row["learning_rate"] for row in rows_of(tmp_path / "run")]
    assert logged == [pytest.approx(0.01 * schedule.share(step)) for step in range(6)]


# ---------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("system", ["pythia", "ginr"])
def test_evaluation_does_not_disturb_the_training(tmp_path: Path, system: str) -> None:
    trained(tmp_path / "often", ["training.eval_every=1", "training.eval_at_start=true"], system)
    trained(tmp_path / "never", ["training.eval_every=null"], system)
    assert differences(state_of(tmp_path / "often"), state_of(tmp_path / "never")) == []
    assert rows_of(tmp_path / "often") == rows_of(tmp_path / "never")
    assert [row["step"] for row in rows_of(tmp_path / "often", "evaluation")] == list(range(7))
    assert len(rows_of(tmp_path / "never", "evaluation")) == 1


class Draws(nn.Module):
    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=torch.rand(()))


def test_random_numbers_that_evaluation_draws_are_not_missing_from_the_training() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    evaluate(Draws(), [text_of(1, 8)], 1, CPU, Precision(CPU, None))
    assert torch.equal(torch.rand(2), expected)


class Fixed(nn.Module):
    """Gives back losses that are known, one a call."""

    def __init__(self, losses: list[float], **more: float) -> None:
        super().__init__()
        self.losses, self.more = iter(losses), more
        self.seen_in_training: list[bool] = []

    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        self.seen_in_training.append(self.training)
        return SimpleNamespace(loss=torch.tensor(next(self.losses)), **self.more)


def text_of(*shape: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(*shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_perplexity_is_that_of_the_mean_loss_over_tokens() -> None:
    model = Fixed([2.0, 4.0, 100.0])
    batches = [text_of(3, 8), text_of(1, 8), text_of(1, 8)]
    found = evaluate(model, batches, 2, CPU, Precision(CPU, None))
    assert found["loss"] == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert found["perplexity"] == pytest.approx(math.exp(2.5))
    assert model.seen_in_training == [False, False]
    assert model.training


def test_psnr_is_that_of_the_mean_error() -> None:
    batches = [{"images": torch.zeros(2, 3, 4, 4)} for _ in range(2)]
    found = evaluate(Fixed([0.01, 0.03], psnr=0.0), batches, 9, CPU, Precision(CPU, None))
    assert found["psnr"] == pytest.approx(-10 * math.log10(0.02))
    assert found["loss"] == pytest.approx(0.02)


def test_a_hopeless_loss_has_a_perplexity_that_is_a_number() -> None:
    found = evaluate(Fixed([5000.0]), [text_of(1, 8)], 1, CPU, Precision(CPU, None))
    assert math.isfinite(found["perplexity"])


def test_nothing_held_out_gives_no_figures(tmp_path: Path) -> None:
    notes = Notes()
    outcome = trained(tmp_path / "run", ["data.validation=0", "training.steps=1"], listener=notes)
    assert outcome.evaluation == {}
    assert rows_of(tmp_path / "run", "evaluation") == []


def test_an_npt_tells_its_matching_error_beside_the_students_loss(tmp_path: Path) -> None:
    found = trained(tmp_path / "run", ["training.steps=1"], "npt").evaluation
    assert found["matching"] > 0
    assert found["perplexity"] == pytest.approx(math.exp(found["language_loss"]))


def test_images_are_reconstructed_into_a_picture(tmp_path: Path) -> None:
    from PIL import Image

    notes = Notes()
    trained(tmp_path / "run", ["training.steps=1"], "ginr", listener=notes)
    ((step, file),) = notes.samples
    assert step == 1
    with Image.open(file) as picture:
        assert picture.size == (2 * 8 * 3, 2 * 8 * 3)  # two images, above and below, enlarged


def test_a_sample_is_a_prompt_and_what_the_model_makes_of_it(tmp_path: Path) -> None:
    notes = Notes()
    trained(tmp_path / "run", ["training.steps=1"], listener=notes)
    ((_, sample),) = notes.samples
    assert " | " in sample
    assert rows_of(tmp_path / "run", "sample") == [{"kind": "sample", "step": 1, "text": sample}]


# ------------------------------------------------------------------------------------- metrics


def test_rows_are_written_every_so_many_steps_and_for_the_first_and_the_last(tmp_path: Path) -> None:
    notes = Notes()
    trained(tmp_path / "run", ["training.log_every=4", "training.steps=9"], listener=notes)
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 4, 8, 9]
    assert [report.step for report in notes.reports] == [1, 4, 8, 9]


def test_a_row_has_speed_and_norm_and_no_memory_of_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["training.steps=2"])
    (_, row) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["tokens_per_second"] > 0
    assert row["grad_norm"] > 0
    assert "memory" not in row


def test_rows_after_the_step_resumed_at_are_taken_out_and_a_torn_line_too(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None)
    for step in range(1, 6):
        metrics.write("train", step, {"loss": float(step)})
    metrics.close()
    with metrics.path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [row["step"] for row in read_metrics(metrics.path)] == [1, 2, 3, 4, 5]
    again = Metrics(tmp_path, 3)
    again.write("train", 4, {"loss": 40.0, "grad_norm": None})
    again.close()
    assert [row["loss"] for row in read_metrics(metrics.path)] == [1, 2, 3, 40]
    assert "grad_norm" not in read_metrics(metrics.path)[-1]


def test_a_new_run_begins_with_no_rows(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        metrics = Metrics(tmp_path, None)
        metrics.write("train", 1, {"loss": value})
        metrics.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2.0]


def test_numbers_that_are_not_finite_keep_the_lines_valid_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None)
    metrics.write("train", 1, {"loss": math.nan, "grad_norm": math.inf})
    metrics.close()

    def refuse(word: str) -> float:
        raise AssertionError(word)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["loss"], line["grad_norm"]) == ("nan", "inf")


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path / "run", ["training.steps=3"])
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/learning_rate", "evaluation/perplexity"} <= set(events.Tags()["scalars"])
    written = [row["loss"] for row in rows_of(tmp_path / "run")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(written)


def test_tensorboard_has_every_step_once_where_a_run_began_again_from_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for losses in ((9.0, 8.0, 7.0), (5.0, 4.0)):
        metrics = Metrics(tmp_path, None)
        for step, loss in enumerate(losses, 1):
            metrics.write("train", step, {"loss": loss})
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 5.0), (2, 4.0)]


def test_readings_come_in_order_with_the_norm_only_where_there_is_one() -> None:
    readings = Readings()
    none, doubt = torch.tensor(0.0), torch.tensor(math.nan)
    readings.put(1, torch.tensor(1.0), None, none, ["a"])
    readings.put(2, torch.tensor(math.nan), torch.tensor(3.0), doubt, ["b"])
    first, second = readings.take()
    assert (first.step, first.loss, first.norm, first.sound) == (1, 1.0, None, True)
    assert (second.step, second.norm, second.sound, second.batches) == (2, 3.0, False, ["b"])
    assert readings.take() == []


def test_the_steps_before_an_evaluation_are_told_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where losses come from the device a step later."""
    take = Readings.take
    monkeypatch.setattr(Readings, "take", lambda self, all_of_them=False: take(self) if all_of_them else [])
    trained(tmp_path / "run", ["training.eval_every=4"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [(row["kind"], row["step"]) for row in rows if row["kind"] != "sample"]
    steps = [("train", step) for step in range(1, 7)]
    assert told == [*steps[:4], ("evaluation", 4), *steps[4:], ("evaluation", 6)]


def test_an_evaluation_counts_the_tokens_that_are_predicted_not_the_padding() -> None:
    class Known(nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=input_ids[0, 0].float())

    whole = torch.tensor([[2, 2, 2, 2, 2]])
    padded = torch.tensor([[8, 8, 0, 0, 0]])
    labels = torch.tensor([[8, 8, -100, -100, -100]])
    alone = torch.tensor([[100, -100, -100, -100, -100]])  # a last token, which nothing predicts
    batches = [(whole, whole), (padded, labels), (alone, alone)]
    given = [{"input_ids": ids, "labels": wanted} for ids, wanted in batches]
    found = evaluate(Known(), given, 9, CPU, Precision(CPU, None))
    assert found["loss"] == pytest.approx((4 * 2 + 1 * 8) / 5)


def test_closing_metrics_on_a_full_disk_does_not_hide_what_was_told(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None)
    metrics._file.close()
    metrics._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        metrics.write("train", 1, {"loss": 1.0})
    metrics.close()


def test_a_model_whose_numbers_are_not_finite_has_no_sample_but_a_checkpoint(tmp_path: Path) -> None:
    diverging = [
        "optimizer.learning_rate=1e30",
        "training.clip=null",
        "training.steps=1",
        "training.warmup=0",
    ]
    trained(tmp_path / "run", diverging)
    (sample,) = rows_of(tmp_path / "run", "sample")
    assert sample["text"].endswith("| (nothing: its numbers are not finite)")
    assert state_of(tmp_path / "run")["step"] == 1


def test_images_are_not_given_to_a_model_of_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'photographs' is made of images, and pythia reads text; give text"):
        trained(tmp_path / "run", ["data.source=photographs"])


def test_the_last_step_is_logged_also_where_the_data_end_it(tmp_path: Path) -> None:
    changes = ["training.steps=null", "training.epochs=1", "training.log_every=7", "data.batch_size=16"]
    last = trained(tmp_path / "run", changes).step
    assert last % 7
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, *range(7, last, 7), last]


def test_an_evaluation_that_was_not_finite_is_still_numbers_when_it_is_found_again(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None)
    metrics.write("evaluation", 3, {"loss": math.nan, "perplexity": math.inf, "matching": 0.5})
    found = metrics.found("evaluation", 3)
    metrics.close()
    assert found is not None
    assert math.isnan(found["loss"])
    assert (found["perplexity"], found["matching"]) == (math.inf, 0.5)
    assert metrics.found("evaluation", 4) is None


def test_held_out_data_without_a_text_are_said(tmp_path: Path) -> None:
    documents = tmp_path / "long.jsonl"
    documents.write_text("".join(json.dumps({"text": f"{n} words " * 2000}) + "\n" for n in range(4)))
    notes = Notes()
    changes = [f"data.source={documents}", "data.validation=0.02", "training.steps=1"]
    assert trained(tmp_path / "run", changes, listener=notes).evaluation == {}
    assert notes.evaluations == [(1, {})]


def test_a_batch_of_one_token_does_not_spoil_an_evaluation() -> None:
    class MeanOfNothing(nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=input_ids[:, 1:].double().mean())

    batches = [{"input_ids": row, "labels": row} for row in (torch.tensor([[1, 2, 4]]), torch.tensor([[9]]))]
    assert evaluate(MeanOfNothing(), batches, 5, CPU, Precision(CPU, None))["loss"] == 3.0


def test_a_precision_that_is_slow_on_a_cpu_is_said(tmp_path: Path) -> None:
    notes = Notes()
    for name in ("autocast", "dtype"):
        trained(tmp_path / name, ["training.steps=1", f"training.{name}=bfloat16"], listener=notes)
        assert f"training.{name}=bfloat16: many CPUs only imitate it, far slower" in notes.messages
    notes = Notes()
    trained(tmp_path / "other", ["training.steps=1"], listener=notes)
    assert not any("imitate" in message for message in notes.messages)


def test_a_rise_that_is_longer_than_the_run_is_said(tmp_path: Path) -> None:
    notes = Notes()
    trained(tmp_path / "run", ["training.steps=2", "training.warmup=3"], listener=notes)
    told = "training.warmup=3 is more than training.steps=2: the learning rate never reaches the full one"
    assert told in notes.messages
    notes = Notes()
    trained(tmp_path / "other", ["training.steps=2", "training.warmup=2"], listener=notes)
    assert not any("warmup" in message for message in notes.messages)


def test_a_curriculum_that_is_not_reached_to_its_end_is_told(tmp_path: Path) -> None:
    notes = Notes()
    trained(tmp_path / "run", ["training.steps=4"], "hatchling", listener=notes)
    assert "training.steps=4 ends in stage 2 of the curriculum's 3" in notes.messages
    notes = Notes()
    trained(tmp_path / "whole", ["training.steps=5"], "hatchling", listener=notes)
    assert not any("ends in stage" in message for message in notes.messages)
