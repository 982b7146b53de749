"""`oomph systems`, and the launch scripts of the reports."""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from oomph import gpus
from oomph.cli.main import run
from oomph_lab.systems import SYSTEMS, find_system
from oomph_lab.systems.reports import REPORTS, FormRun
from oomph_lab.training.config import find_config

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"


def test_all_systems_are_listed_with_both_forms(capsys):
    assert run(["systems"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 100
    assert all(name in out for name in SYSTEMS)
    assert out.count("naive  ") == out.count("model  ") == 5
    assert run(["systems", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [system["name"] for system in found["systems"]] == list(SYSTEMS)
    assert set(found["systems"][0]) == {"name", "report", "title", "naive", "model"}


def test_the_claims_of_one_system_are_a_table(capsys):
    assert run(["systems", "longctx", "--claims"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    for word in ("claim", "derived", "predicted", "measured", "verdict", "why", "37.09 GiB", "in part"):
        assert word in out
    assert run(["systems", "003", "--claims", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["system"]["name"] == "npt"
    columns = {"claim", "claimed", "derived", "predicted", "measured", "verdict", "why"}
    assert set(found["claims"][0]) == columns


def test_a_story_names_the_line_that_fails_and_the_errors_of_programs(capsys, monkeypatch, in_process):
    """On small shapes: the forms of longctx, on a GPU that holds the model and not the naive form."""
    story = find_system("longctx").story
    small = ("preset=tiny", "vocab_size=50000", "seq_len=2048", "gradient_checkpointing=false")
    forms = tuple(
        FormRun(form, "longctx_tiny", (f"form={form}", *small)) for form in ("naive", "rope_on_cpu", "model")
    )
    monkeypatch.setitem(REPORTS, "longctx", replace(story, gpu="2GiB", forms=forms))
    assert run(["systems", "002", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    naive, rope, model = found["forms"]
    assert naive["verdict"] == "does not fit"
    assert "longctx/naive.py:" in naive["failure"]
    assert "logits_BTV = F.linear" in naive["failure"]
    assert naive["needs"] > model["needs"]
    assert rope["verdict"] == "fails"
    assert "device" in rope["failure"]
    assert model["verdict"] == "fits"
    assert model["failure"] == ""
    assert (
        found["commands"]["python verify_chunked_loss.py"]
        == "python -m lab.benchmarks.systems.report_checks longctx"
    )


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_the_configs_and_keys_of_every_story_and_command_are_valid(system):
    from oomph_lab.training.config import CONFIGS, load, overrides_from_words

    for form in system.story.forms:
        load(CONFIGS / f"{form.config}.yaml", form.overrides)
    gpus.find(system.story.gpu)
    for command in system.story.commands.values():
        words = shlex.split(command, comments=True)
        words = words[words.index("oomph") :] if "torchrun" in words else words
        configs = [word for word in words if word.endswith(".yaml")]
        if words[:2] in (["oomph", "train"], ["oomph", "predict"]):
            keys = words[words.index(configs[0]) + 1 :]
            keys = keys[: keys.index("--gpu")] if "--gpu" in keys else keys
            load(configs[0], overrides_from_words(keys))


# ------------------------------------------------------------------------------------------- launch scripts


@pytest.fixture
def launch(tmp_path):
    """Runs a script with a stand-in for `oomph` on the PATH that prints its arguments."""
    command = tmp_path / "oomph"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)

    def run(script, *arguments):
        path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run([SCRIPTS / script, *arguments], env=path, capture_output=True, text=True)
        return done.returncode, done.stdout.split(), done.stderr

    return run


def test_the_scripts_call_oomph_train(launch):
    words = ["configs/hn_xs.yaml", "batch_tokens=2048"]
    assert launch("run_pretrain.sh", *words) == (0, ["train", *words], "")
    for mode in ("small", "optimized", "default"):
        status, (command, config, steps), _ = launch("launch_optimized.sh", mode, "steps=3")
        assert (status, command, steps) == (0, "train", "steps=3")
        assert find_config(config).is_file()


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("run_pretrain.sh", (), "CONFIG.yaml"),
        ("launch_optimized.sh", ("large",), "small|optimized|default [key=value ...]   (given: 'large')"),
    ],
)
def test_a_wrong_call_of_a_script_is_one_line(launch, script, arguments, message):
    status, _, error = launch(script, *arguments)
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
