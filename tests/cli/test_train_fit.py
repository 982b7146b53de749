"""`oomph train` before step 1: what does not fit is refused, with what would."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from small_prediction import make_prediction

from oomph.cli import train_fit
from oomph.cli.main import run
from oomph.records import FixUse
from oomph.training.config import load_dict


def test_what_does_not_fit_is_refused_with_what_would(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def during(target: Any) -> None:
        fits = any(use.fix == "activation_checkpointing" for use in target.fixes)
        fake_predict.result = make_prediction(fits)

    fake_predict.during = during
    assert run(["train", "small.yaml", "training.memory_limit=1GiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "oomph: small does not fit: a step needs 2.00 GiB, and training.memory_limit is 1GiB" in err
    assert "What fits: 'fixes=[" in err
    assert "activation_checkpointing]' (2.00 GiB)" in err
    assert "--force" in err
    assert given == []
    assert not Path("runs").exists()


@pytest.mark.parametrize("enough", ["nothing", "activation_checkpointing"])
def test_cuda_graphs_are_given_up_first_and_then_with_fixes(
    config: Path, pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str], enough: str
) -> None:
    def during(target: Any) -> None:
        captured = getattr(target.optimizer, "gradients_must_stay", False)
        has = enough == "nothing" or any(use.fix == enough for use in target.fixes)
        fake_predict.result = make_prediction(not captured and has)

    fake_predict.during = during
    assert run(["train", "small.yaml", "training.memory_limit=1GiB", "training.cuda_graph=true"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    before = "What fits: " if enough == "nothing" else "activation_checkpointing]' "
    assert f"{before}training.cuda_graph=false (" in err
    assert ("fixes=[" in err) == (enough != "nothing")


def test_smaller_batches_are_tried_when_fixes_are_not_enough(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_predict.during = lambda target: setattr(
        fake_predict, "result", make_prediction(target.sizes["B"] == 1)
    )
    assert run(["train", "small.yaml", "training.memory_limit=1GiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "data.batch_size=1 training.accumulate=2" in err


def test_force_goes_on_and_shows_what_was_predicted(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_predict.result = make_prediction(False)
    assert run(["train", "small.yaml", "--force"]) == 0
    assert len(given) == 1
    assert "predicted peak: 2.00 GiB allocated, 30.0 GiB of the GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "uses",
    [
        (
            FixUse("fused_linear_cross_entropy"),
            FixUse("activation_checkpointing", {"keep": "products", "blocks": ["layers.*.mlp"]}),
        ),
        (
            FixUse("activation_offloading", {"ahead": False}),
            FixUse("allocator", {"expandable_segments": True}),
        ),
    ],
)
def test_fixes_that_are_proposed_can_be_copied_to_a_shell(uses: tuple[FixUse, ...]) -> None:
    (word,) = shlex.split(train_fit._override(uses))
    found = load_dict({"system": "longctx", "model": {"preset": "tiny", "vocab_size": 300}}, "x", [word])
    assert found.fixes == uses
