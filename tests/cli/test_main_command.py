"""The command itself: help, version, `oomph gpus`, streams and progress."""

import io
import json
import os
import subprocess
import sys
import time

from rich.console import Console

from oomph import gpus
from oomph.cli.common import progress_display, write_stdout
from oomph.cli.main import run


def test_no_arguments_print_the_commands_that_come_first(capsys):
    assert run([]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("predict", "fit", "run", "explain") if f"  oomph {name} " not in out] == []
    assert "oomph verify" not in out


def test_the_help_names_all_commands(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: oomph" in out
    assert "predict" in out
    assert "gpus" in out
    assert "cases" not in out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("oomph ")


def test_the_help_of_predict_names_every_option(capsys):
    assert run(["predict", "--help"]) == 0
    out = capsys.readouterr().out
    words = ("TARGET", "--gpu", "--max", "--json", "--html", "--snapshot", "1 does not fit or too close")
    assert [word for word in words if word not in out] == []


def test_gpus_lists_every_gpu_in_plain_ascii(capsys):
    assert run(["gpus"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert {card.name for card in gpus.catalogue()} <= lines.keys()
    assert "fp16 65" in lines["t4"]
    assert "23.6 GiB" in lines["rtx3090"]


def test_gpus_as_json_is_one_object(capsys):
    assert run(["gpus", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == 1
    card = next(one for one in made["gpus"] if one["name"] == "rtx3090")
    assert (card["title"], card["capability"]) == ("RTX 3090", "8.6")
    assert card["memory"] == gpus.find("rtx3090").memory


def test_commands_that_need_no_trace_do_not_import_torch():
    script = (
        "import sys; from oomph.cli.main import run\n"
        "for command in ('gpus', '--help', 'predict nothing.py:x', 'predict nothing.yaml a=1',\n"
        f"        'predict {__file__}:x --fix unknown', 'measure {__file__}:x --fix unknown:parts=4'):\n"
        "    run(command.split())\n"
        "    assert 'torch' not in sys.modules, command"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_narrow_encoding_does_not_cost_the_report(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    write_stdout("naïve.py:3\n")
    assert raw.getvalue() == b"na\\xefve.py:3\n"


def test_the_progress_bar_appears_after_its_delay():
    def shown(delay, wait):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=100, color_system=None)
        with progress_display(console, delay) as report:
            report("step 2 of 3: backward", 0.5)
            until = time.monotonic() + wait
            while "step" not in screen.getvalue() and time.monotonic() < until:
                time.sleep(0.05)
        return screen.getvalue()

    assert "step 2 of 3: backward" in shown(0.01, wait=30)
    assert "step" not in shown(1e6, wait=0.3)


def test_ctrl_c_while_torch_is_loaded_is_quiet(tmp_path):
    """Native modules take the KeyboardInterrupt of a module that they import for a missing one, or abort."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(99): pass\n"
        "except BaseException as error:\n    raise ImportError('torch') from error\n"
    )
    (tmp_path / "train.py").write_text("1 / 0")
    path = os.pathsep.join((str(tmp_path), *sys.path))
    command = [sys.executable, "-m", "oomph", "predict", str(tmp_path / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "oomph: interrupted"
    assert "Traceback" not in done.stderr


def test_progress_shows_while_torch_is_loaded(tmp_path):
    (tmp_path / "train.py").write_text("1 / 0")
    script = (
        "import os, sys, time; from oomph.cli.main import run\n"
        "class SlowDisk:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            time.sleep(3)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, SlowDisk())\n"
        f"run(['predict', {str(tmp_path / 'train.py')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.startswith("oomph: loading torch\n"), done.stderr
