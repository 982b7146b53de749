from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from oomph import gpus
from oomph.cli.main import run


def test_no_arguments_print_the_help(capsys):
    assert run([]) == 0
    out = capsys.readouterr().out
    assert "Usage: oomph" in out
    assert "predict" in out
    assert "gpus" in out


def test_the_help_of_predict_names_every_option_and_no_later_one(capsys):
    assert run(["predict", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("TARGET", "--gpu", "--max", "--json", "--snapshot"):
        assert option in out
    assert "--html" not in out


def test_the_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("oomph ")


def test_gpus_lists_every_card_in_plain_ascii(capsys):
    assert run(["gpus"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    listed = {line.split()[0] for line in out.splitlines() if line}
    assert {card.name for card in gpus.catalogue()} <= listed
    assert any(line.split()[0] == "rtx3090" and "23.6 GiB" in line for line in out.splitlines() if line)


def test_a_rate_in_fp16_is_marked_as_such(capsys):
    run(["gpus"])
    assert "fp16 65" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("t4 "))


def test_gpus_as_json_is_one_object(capsys):
    assert run(["gpus", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == 1
    card = next(one for one in made["gpus"] if one["name"] == "rtx3090")
    assert (card["title"], card["capability"]) == ("RTX 3090", "8.6")
    assert card["memory"] == gpus.find("rtx3090").memory


def test_a_reader_that_leaves_early_is_no_error():
    script = "from oomph.cli.main import main; import sys; sys.argv[1:] = ['gpus']; main()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (0, b"")


@pytest.mark.parametrize("command", [["gpus"], ["--help"], ["predict", "nothing.py:x"]])
def test_what_needs_no_trace_does_not_wait_for_torch(command):
    script = (
        "import sys; from oomph.cli.main import run; run(sys.argv[1:]); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_narrow_encoding_does_not_cost_the_report(monkeypatch):
    import io

    from oomph.cli.output import write_stdout

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    write_stdout("naïve.py:3\n")
    assert raw.getvalue() == b"na\\xefve.py:3\n"


def test_the_display_appears_only_after_its_patience_and_shows_what_goes_on():
    import io

    from rich.console import Console

    from oomph.cli.output import progress_display

    def shown(patience: float, wait: float) -> str:
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, width=100, color_system=None)
        with progress_display(console, patience) as report:
            report("step 2 of 3: backward", 0.5)
            until = time.monotonic() + wait
            while "step" not in screen.getvalue() and time.monotonic() < until:
                time.sleep(0.05)
        return screen.getvalue()

    assert "step 2 of 3: backward" in shown(0.01, wait=30)
    assert "step" not in shown(60.0, wait=0.3)


def test_off_a_terminal_the_display_stays_silent():
    import io

    from rich.console import Console

    from oomph.cli.output import progress_display

    console = Console(file=io.StringIO())
    with progress_display(console, 0.0) as report:
        report("step 1 of 3: forward", None)
        time.sleep(0.05)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
