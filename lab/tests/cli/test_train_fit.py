"""`oomph train` before step 1: what does not fit is refused, with what would."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_prediction import make_prediction

from oomph.cli.main import run
from oomph.fixes import uses_of
from oomph.records import FixUse, PredictedFixes
from oomph_lab.cli.train import _override
from oomph_lab.training.config import load, load_dict

KEEP = uses_of(["activation_checkpointing:keep=matmuls"])


@pytest.mark.parametrize("fits", [True, False])
def test_what_does_not_fit_is_refused_with_fixes_that_make_it_fit(
    config, given, pretended_gpu, fake_predict, monkeypatch, capsys, fits
):
    def fit(workload, **options):
        assert not getattr(workload.optimizer, "gradients_must_stay", False)  # as a captured step's must
        assert options["max"] == "1GiB"
        after = PredictedFixes(tuple(KEEP), make_prediction().peak, fits, 1.0, 1.25)
        return SimpleNamespace(fits=fits, fixes=after.fixes, after=after)

    fake_predict.result = make_prediction(False)
    monkeypatch.setattr("oomph.planning.fit", fit)
    words = ["training.memory_limit=1GiB", "training.cuda_graph=true"]
    assert run(["train", "small.yaml", *words]) == 1
    assert given == []
    assert not Path("runs").exists()
    err = " ".join(capsys.readouterr().err.split())
    assert "oomph: small does not fit: a step needs 2.00 GiB, and training.memory_limit is 1GiB" in err
    assert "--force" in err
    if fits:
        found = re.search(r"What fits: (.*fixes=.* training.cuda_graph=false) \(2.00 GiB, time x1.25\)", err)
        assert load("small.yaml", shlex.split(found[1])).fixes == tuple(KEEP)
    else:
        assert "No set of exact fixes is enough; see `oomph fit small.yaml training.memory_limit=1GiB" in err


def test_force_goes_on_and_shows_what_was_predicted(config, given, pretended_gpu, fake_predict, capsys):
    fake_predict.result = make_prediction(False)
    assert run(["train", "small.yaml", "--force"]) == 0
    assert len(given) == 1
    assert "predicted peak: 2.00 GiB allocated, 30.0 GiB of the GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "uses",
    [
        (
            FixUse("fused_linear_cross_entropy"),
            FixUse("activation_checkpointing", {"keep": "matmuls", "blocks": ["layers.*.mlp"]}),
        ),
        (
            FixUse("activation_offloading", {"ahead": False}),
            FixUse("allocator", {"expandable_segments": True}),
        ),
    ],
)
def test_fixes_that_are_proposed_can_be_copied_to_a_shell(uses):
    (word,) = shlex.split(_override(uses))
    found = load_dict({"system": "longctx", "model": {"preset": "tiny", "vocab_size": 300}}, "x", [word])
    assert found.fixes == uses
