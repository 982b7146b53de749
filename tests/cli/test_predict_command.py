from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from small_prediction import make_prediction

from oomph.cli.main import run
from oomph.errors import ProgramError, UserError

PROGRAM = "def step(): ...\n"


@pytest.fixture(autouse=True)
def _train(program):
    program(PROGRAM)


def _error(capsys, *arguments: str, status: int = 2) -> str:
    """The one line on stderr of a command that ends with `status`, having printed nothing on stdout."""
    assert run(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err.strip()


@pytest.mark.parametrize(("fits", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_is_the_verdict(fake_predict, capsys, fits, status):
    fake_predict.result = make_prediction(fits)
    assert run(["predict", "train.py:step"]) == status
    assert capsys.readouterr().out.split(":")[0].split(" 3.00")[0] in ("fits", "does not fit", "needs")


def test_gpu_and_max_are_passed_on(fake_predict, capsys):
    run(["predict", "train.py:step", "--gpu", "rtx3090", "--max", "20GiB"])
    (target, options) = fake_predict.calls[0]
    assert target.__name__ == "step"
    assert (options["gpu"], options["max"]) == ("rtx3090", "20GiB")


def test_the_tracer_can_report_progress_and_off_a_terminal_it_is_silent(fake_predict, capsys):
    run(["predict", "train.py:step"])
    report = fake_predict.calls[0][1]["progress"]
    report("step 2 of 3: backward", 0.5)
    report("loading", None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", [0, 1])
def test_json_is_exactly_one_object_whatever_the_program_prints(fake_predict, program, capfd, status):
    program("print('at import')\ndef step(): ...\n")

    def noisy(target):
        print("while traced")
        os.write(1, b"from C\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)

    fake_predict.during = noisy
    fake_predict.result = make_prediction(status == 0)
    assert run(["predict", "train.py:step", "--json"]) == status
    captured = capfd.readouterr()
    assert json.loads(captured.out)["schema"] == 1
    assert captured.out.count("\n") == 1
    for said in ("at import", "while traced", "from C", "from a child"):
        assert said in captured.err


def test_stdout_is_given_back_after_a_failure(fake_predict, capfd):
    def fail(target):
        raise ProgramError("it failed")

    before = sys.stdout
    fake_predict.during = fail
    assert run(["predict", "train.py:step"]) == 3
    assert sys.stdout is before
    os.write(1, b"mine again\n")
    assert capfd.readouterr().out == "mine again\n"


def test_an_unknown_gpu_is_told_before_anything_is_imported(fake_predict, program, capsys):
    program("raise RuntimeError('imported')\n")
    error = _error(capsys, "predict", "train.py:step", "--gpu", "rtx3091")
    assert error.startswith("oomph: ")
    assert "'rtx3091'" in error
    assert "rtx3090" in error
    assert fake_predict.calls == []


def test_an_unknown_unit_is_told_before_anything_is_imported(fake_predict, program, capsys):
    program("raise RuntimeError('imported')\n")
    error = _error(capsys, "predict", "train.py:step", "--max", "24Gigs")
    assert "'24Gigs'" in error
    assert "24GiB" in error


def test_a_bad_target_is_one_line(fake_predict, capsys):
    assert _error(capsys, "predict", "train.py:stp") == "oomph: train.py has no 'stp'; did you mean 'step'?"


def test_a_users_mistake_found_while_tracing_is_one_line(fake_predict, capsys):
    def refuse(target):
        raise UserError("the loss has shape (4,);\nreturn a scalar")

    fake_predict.during = refuse
    assert _error(capsys, "predict", "train.py:step") == "oomph: the loss has shape (4,); return a scalar"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict"], "oomph: Missing argument 'TARGET'; see `oomph predict --help`"),
        (
            ["predict", "a.py:b", "c.d=3"],
            "oomph: target 'a.py:b' is a program, and 'c.d=3' is not a size of its Workload, such as B=4",
        ),
        (["predict", "a.py:b", "--html", "f"], "oomph: No such option: --html"),
        (["predict", "a.py:b", "--gpu"], "oomph: Option '--gpu' requires an argument"),
        (
            ["frobnicate"],
            "oomph: No such command 'frobnicate'; "
            "the commands are predict, fixes, verify, train, systems, gpus",
        ),
        (
            ["predict", "a.py:b", "--snapshot", "no/such/f"],
            "oomph: --snapshot 'no/such/f': the directory 'no/such' does not exist",
        ),
        (["predict", "a.py:b", "--snapshot", "."], "oomph: --snapshot '.' is a directory; give a file"),
    ],
)
def test_usage_errors_are_one_line_that_says_what_was_given(capsys, arguments, message):
    assert _error(capsys, *arguments).startswith(message)


def test_a_program_that_fails_shows_its_own_traceback_then_one_line(fake_predict, program, capsys):
    program("import torch\n\ndef step():\n    return torch.nn.Linear(2, 2)(torch.ones(1, 3))\n")

    def trace(target):
        try:
            target()
        except RuntimeError as error:
            raise ProgramError(f"RuntimeError: {error}") from error

    fake_predict.during = trace
    assert run(["predict", "train.py:step"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Traceback (most recent call last):")
    assert "return torch.nn.Linear(2, 2)(torch.ones(1, 3))" in captured.err
    assert "site-packages/torch/" not in captured.err
    assert "oomph/cli" not in captured.err
    assert captured.err.splitlines()[-1].startswith(
        "oomph: the program failed at train.py:4: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )


def test_a_program_that_fails_at_import_names_its_line(capsys, program):
    program("x = 1\nraise ValueError('bad config')\n")
    assert run(["predict", "train.py:step"]) == 3
    error = capsys.readouterr().err
    assert "raise ValueError('bad config')" in error
    assert "importlib" not in error
    assert error.splitlines()[-1] == "oomph: the program failed at train.py:2: ValueError: bad config"


def test_a_place_already_in_the_message_is_not_repeated(fake_predict, capsys):
    def fail(target):
        raise ProgramError("train.py:1: batch on cpu, model on cuda", "/x/train.py", 1)

    fake_predict.during = fail
    assert _error(capsys, "predict", "train.py:step", status=3) == (
        "oomph: the program failed: train.py:1: batch on cpu, model on cuda"
    )


def test_a_program_that_exits_does_not_pass_for_a_verdict(fake_predict, capsys):
    fake_predict.during = lambda target: sys.exit(0)
    assert run(["predict", "train.py:step"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("it ends the process while it is traced (SystemExit: 0)")


def test_a_bug_of_ours_does_not_pass_for_a_verdict(fake_predict, capsys):
    fake_predict.during = lambda target: {}["missing"]
    assert run(["predict", "train.py:step"]) == 70
    assert capsys.readouterr().err.splitlines()[-1] == "oomph: this is a bug in oomph, not in your program"


def test_an_interrupt_ends_with_the_usual_status(fake_predict, capsys):
    def interrupt(target):
        raise KeyboardInterrupt

    fake_predict.during = interrupt
    assert run(["predict", "train.py:step"]) == 130


def test_a_snapshot_is_written_beside_the_report(fake_predict, capsys, tmp_path):
    assert run(["predict", "train.py:step", "--snapshot", "memory.pickle"]) == 0
    assert (tmp_path / "memory.pickle").stat().st_size > 0
    assert capsys.readouterr().out.startswith("needs 3.00 GiB")


def test_a_snapshot_that_cannot_be_written_is_the_users_mistake(fake_predict, capsys, monkeypatch):
    from oomph.report import snapshot

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "write_snapshot", full)
    assert _error(capsys, "predict", "train.py:step", "--snapshot", "m.pickle") == (
        "oomph: --snapshot 'm.pickle' cannot be written: No space left on device"
    )
