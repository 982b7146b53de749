"""`oomph train`: from the command line to a trained model, and every ending as an exit status."""

import torch
from safetensors.torch import load_file

from oomph.cli.main import run
from oomph_lab.training import run as training_run
from oomph_lab.training.checkpoint import find, load
from oomph_lab.training.config import load as load_config
from oomph_lab.training.metrics import read_metrics


def test_a_small_config_trains_end_to_end(config, capsys):
    assert run(["train", "small.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    for step in range(1, 5):
        assert f"step {step}/4  loss " in err
    assert " tok/s  lr 3.00e-04" in err
    assert "evaluation at step 2: loss " in err
    assert "evaluation at step 4: loss " in err
    assert "step 4 is saved in runs/small/checkpoints" in err
    assert find("runs/small/checkpoints").step == 4
    rows = read_metrics("runs/small/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_machine_without_a_gpu_says_so_first(config, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(["train", "small.yaml", "training.device=null", "training.steps=1"]) == 0
    assert capsys.readouterr().err.startswith("no GPU is available: training on the CPU\n")


def test_the_reports_own_flags_have_their_place(config, given, monkeypatch):
    asked = []

    def device_of(config):
        asked.append(config.training.device)
        return torch.device("cpu")

    monkeypatch.setattr(training_run, "device_of", device_of)
    flags = "--dataset wikitext-2 --vocab_size 10000 --batch_size 32 --seq_len 128 --epochs 10 --sparse"
    tail = "training.steps=null tokenizer=words --device cuda"
    own = ["--force", "--export", "w.safetensors"]  # flags of the command may stand between
    assert run(["train", "small.yaml", *flags.split(), *own, *tail.split()]) == 0
    (found,) = given
    assert found.data.source == "wikitext-2"
    assert (found.data.vocab_size, found.model_config.vocab_size) == (10000, 10000)
    assert (found.data.batch_size, found.data.seq_len, found.training.epochs) == (32, 128, 10)
    assert found.model_config.sparse == "local"
    assert asked == ["cuda"]


# ---------------------------------------------------------------------------------------- fixes


def test_recorded_fixes_are_applied_and_are_part_of_the_run(config, tmp_path):
    (tmp_path / "fixes.json").write_text('[{"fix": "optimizer_8bit"}]')
    assert run(["train", "small.yaml", "fixes=[fused_optimizer]", "--fixes", "fixes.json"]) == 0
    state = load(find("runs/small/checkpoints"))
    assert state["optimizer"]["state"][0]["exp_avg"].dtype == torch.uint8
    assert run(["train", "small.yaml", "--resume"]) == 2
    assert run(["train", "small.yaml", "--resume", "--fixes", "fixes.json"]) == 0


# ---------------------------------------------------------------------------------------- export


def test_exported_weights_are_those_of_the_last_step(config):
    assert run(["train", "small.yaml", "--export", "weights.safetensors"]) == 0
    weights = load_file("weights.safetensors")
    model = load_config("small.yaml").model_config.build()
    missing = model.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == []
    saved = load(find("runs/small/checkpoints"))["model"]
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    assert len(weights) > 5


def test_a_run_is_resumed_until_nothing_is_left(config, capsys):
    assert run(["train", "small.yaml", "steps=2"]) == 0
    assert run(["train", "small.yaml", "--resume"]) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert run(["train", "small.yaml", "--resume"]) == 0
    assert "the run is complete at step 4" in capsys.readouterr().err
