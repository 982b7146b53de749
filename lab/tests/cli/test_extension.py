"""What the lab adds to oomph's command line: by entry points, by `python -m oomph_lab`; and without it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from oomph.cli import extensions
from oomph.cli.main import run
from oomph_lab.cli import COMMANDS, TARGETS, targets
from oomph_lab.training.config import CONFIGS

LAB = Path(__file__).resolve().parents[2]


def test_the_entry_points_are_those_that_are_registered():
    points = tomllib.loads((LAB / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {extensions.COMMANDS: COMMANDS, extensions.TARGETS: TARGETS}
    assert all(callable(extensions.load(group, name)) for group, names in points.items() for name in names)


def test_as_a_module_it_has_all_commands():
    code = (
        "import runpy, sys\n"
        "from importlib import metadata\n"
        "metadata.entry_points = lambda **_: ()\n"  # as where nothing is installed
        "runpy.run_module('oomph_lab', run_name='__main__')"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, "systems"], env=path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "longctx" in done.stdout


def test_a_module_that_is_missing_is_one_line():
    code = "import runpy, sys\nsys.modules['yaml'] = None\nrunpy.run_module('oomph_lab', run_name='__main__')"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "train", "pythia_tiny"]
    done = subprocess.run(command, env=path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "oomph: the module 'yaml', which this command needs, is not installed\n"


@pytest.mark.parametrize("command", ["train pythia_tiny", "systems", "predict x.yaml", "verify x.yml fsdp2"])
def test_without_the_lab_it_is_one_line(command):
    code = (
        "import sys\n"
        "from importlib import metadata\n"
        "metadata.entry_points = lambda **_: ()\n"
        "from oomph.cli.main import run\n"
        "status = run(sys.argv[1:])\n"
        "loaded = {'torch', 'yaml', 'oomph_lab'} & set(sys.modules)\n"
        "sys.exit(f'{loaded} imported' if loaded else status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("oomph: ")
    assert done.stderr.endswith("pip install oomph-lab\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("in_process")
def test_a_config_is_loaded_once(fake_predict, monkeypatch, capsys):
    loaded, load = [], targets.load
    monkeypatch.setattr(targets, "load", lambda *given: loaded.append(given) or load(*given))
    words = ["training.memory_limit=3GiB", "--max", "2GiB", "--ranks", "2", "--json"]
    assert run(["predict", "longctx_tiny.yaml", *words]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["max"] == "2GiB"
    assert len(loaded) == 1


def test_a_config_has_a_name(tmp_path, monkeypatch, capsys):
    """A file of that name comes first."""
    monkeypatch.chdir(tmp_path)
    own = CONFIGS / "pythia_tiny.yaml"
    for name in ("pythia_tiny", "pythia_tiny.yaml", "configs/pythia_tiny.yaml"):
        assert targets.find_config(name) == own
    Path("pythia_tiny.yaml").write_text("system: pythia")
    assert targets.find_config("pythia_tiny.yaml") == Path("pythia_tiny.yaml")
    assert run(["predict", "elsewhere/pythia_tiny.yaml"]) == 2
    assert "did you mean 'configs/pythia_tiny.yaml'?" in capsys.readouterr().err
