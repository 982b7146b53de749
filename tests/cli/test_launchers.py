"""The reports' own launchers: thin scripts over `oomph train`."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def launched(tmp_path):
    """What a launcher starts, written down by a stand-in for the command."""
    command = tmp_path / "oomph"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    command.chmod(0o755)

    def run(script, *arguments):
        path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            [SCRIPTS / script, *arguments], env=path, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.split(), done.stderr

    return run


def test_pretraining_is_oomph_train_with_the_config_and_its_overrides(launched):
    assert launched("run_pretrain.sh", "configs/hn_xs.yaml", "batch_tokens=2048") == (
        0,
        ["train", "configs/hn_xs.yaml", "batch_tokens=2048"],
        "",
    )


@pytest.mark.parametrize("mode", ["small", "optimized", "default"])
def test_a_mode_is_one_of_npts_configs(launched, mode):
    status, (command, config, steps), _ = launched("launch_optimized.sh", mode, "steps=3")
    assert (status, command, steps) == (0, "train", "steps=3")
    assert Path(config).is_file()


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("run_pretrain.sh", (), "CONFIG.yaml"),
        ("launch_optimized.sh", ("large",), r"small|optimized|default [key=value ...]   (given: 'large')"),
    ],
)
def test_a_wrong_call_is_told_in_one_line(launched, script, arguments, told):
    status, _, error = launched(script, *arguments)
    assert status == 2
    assert told in error
    assert error.count("\n") == 1
