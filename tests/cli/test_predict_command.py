"""`oomph predict`: options, output and exit status, with a stand-in for the tracer and with the real one."""

import io
import json
import os
import pickle
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import pytest
from rich.console import Console
from small_prediction import GiB, make_prediction
from torch.utils._triton import has_triton

from oomph.cli.common import progress_display
from oomph.cli.main import run
from oomph.units import format_bytes

PROGRAM = "def step(): ...\n"


@pytest.fixture(autouse=True)
def _train(program):
    program(PROGRAM)


@pytest.mark.parametrize(("fits", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_is_the_verdict(fake_predict, capsys, fits, status):
    fake_predict.result = make_prediction(fits)
    assert run(["predict", "train.py:step"]) == status
    assert capsys.readouterr().out.startswith(("fits", "does not fit", "needs"))
    if fits is False:
        fake_predict.result = replace(fake_predict.result, verdict="too close to call", margin=GiB)
        assert run(["predict", "train.py:step", "--json"]) == 1
        made = json.loads(capsys.readouterr().out)
        assert (made["fits"], made["verdict"], made["margin"]) == (False, "too close to call", GiB)


def test_a_machine_with_a_gpu_predicts_without_using_it(monkeypatch, program, capsys, request):
    """Here, torch raises as soon as CUDA is started."""
    has_triton.cache_clear()
    request.addfinalizer(has_triton.cache_clear)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    program("import torch\ndef step(): torch.ones(9, device='cuda', requires_grad=True).sum().backward()\n")
    assert run(["predict", "train.py:step", "--json"]) == 0, capsys.readouterr().err


def test_gpu_and_max_are_passed_on(fake_predict, capsys):
    run(["predict", "train.py:step", "--gpu", "rtx3090", "--max", "20GiB", "--json"])
    traced = fake_predict.arguments(capsys.readouterr().out)
    assert (traced["name"], traced["gpu"], traced["max"]) == ("step", "rtx3090", "20GiB")


@pytest.mark.parametrize("status", [0, 1])
def test_json_is_exactly_one_object_whatever_the_program_prints(fake_predict, program, capfd, status):
    program("print('at import')\ndef step(): ...\n")

    def noisy(target):
        print("while traced")
        os.write(1, b"from C\n")
        if (child := os.fork()) == 0:
            os.write(1, b"from a child\n")
            os._exit(0)
        os.waitpid(child, 0)

    fake_predict.during = noisy
    fake_predict.result = make_prediction(status == 0)
    assert run(["predict", "train.py:step", "--json"]) == status
    captured = capfd.readouterr()
    assert json.loads(captured.out)["schema"] == 1
    assert captured.out.count("\n") == 1
    for said in ("at import", "while traced", "from C", "from a child"):
        assert said in captured.err


def test_an_error_class_of_the_program_does_not_pass_for_a_bug(program, capsys):
    program("import oomph.errors\nclass Mine(oomph.errors.UserError): ...\n", "errors_of_test.py")
    program("import errors_of_test\ndef step():\n    raise errors_of_test.Mine('my own')\n")
    assert run(["predict", "train.py:step"]) == 2
    assert capsys.readouterr() == ("", "oomph: my own\n")


def test_a_program_that_reads_from_the_terminal_ends(program, on_terminal):
    """A terminal stops a background process that reads from it; the command would wait for good."""
    program("def step():\n    input('size? ')\n")
    process, terminal = on_terminal(["predict", "train.py:step"])
    shown = b""
    with suppress(OSError):  # where the process has ended
        while True:
            shown += os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 3
    assert b"the program failed at train.py:2: EOFError" in shown


class SlowTerminal(io.StringIO):
    def write(self, text):
        time.sleep(0.02)
        return super().write(text)


def test_a_child_may_print_while_the_progress_bar_is_drawn():
    """Locks of the bar that its thread holds stay locked in a fork."""
    console = Console(file=SlowTerminal(), force_terminal=True)
    with progress_display(console, delay=0), warnings.catch_warnings(action="ignore"):
        for _ in range(6):
            time.sleep(0.1)
            if (child := os.fork()) == 0:
                signal.alarm(10)
                console.print("from the program")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0


def test_a_program_that_fails_shows_its_own_traceback_then_one_line(program, capsys):
    program("import torch\n\ndef step():\n    return torch.nn.Linear(2, 2)(torch.ones(1, 3))\n")
    assert run(["predict", "train.py:step"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Traceback (most recent call last):")
    assert "return torch.nn.Linear(2, 2)(torch.ones(1, 3))" in captured.err
    assert "site-packages/torch/" not in captured.err
    assert "oomph/cli" not in captured.err
    raised, last = captured.err.splitlines()[-2:]
    assert raised.startswith("RuntimeError: ")
    assert last == f"oomph: the program failed at train.py:4: {raised}"


def test_a_bug_of_ours_does_not_pass_for_a_verdict(fake_predict, capsys):
    fake_predict.during = lambda target: format_bytes("a bug")
    assert run(["predict", "train.py:step"]) == 70
    assert capsys.readouterr().err.splitlines()[-1] == "oomph: this is a bug in oomph, not in your program"


# ------------------------------------------------------------------------------------------- end to end

WORKLOADS = """
import torch
from oomph.workload import Workload

print("a program may print")

def loss(model, batch):
    return model(batch).square().mean()

workload = Workload(
    model=lambda: torch.nn.Linear(1024, 4096, bias=False),
    batch=lambda device: torch.ones(2048, 1024, device=device),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params),
)
"""


def test_the_table_of_stages_is_of_the_usual_prediction(program, capfd):
    """The optimizer's state and the second part of the batch are not there in a first pass alone."""
    layers = "lambda: torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))"
    changed = WORKLOADS.replace("lambda: torch.nn.Linear(1024, 4096, bias=False)", layers)
    program(changed.replace("optim.SGD", "optim.AdamW").replace("loss=loss", "loss=loss, accumulate=2"))
    command = ["predict", "train.py:workload", "--max", "130MiB"]
    made = []
    for more in ([], ["--stages"]):
        assert run([*command, *more, "--json"]) == 1
        made.append(json.loads(capfd.readouterr().out))
    assert made[0]["peak"] == made[1]["peak"]
    assert made[1]["forward_stages"][2]["stage"] == "after first layer"
    assert run([*command, "--stages", "--html", "page.html"]) == 1
    assert capfd.readouterr().out.startswith("Allocated memory over the first step\n  parameters ")
    assert os.path.exists("page.html")


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:21"])
def test_the_snapshot_is_of_the_allocator_of_the_prediction(program, capfd, settings):
    program(WORKLOADS.replace("workload = Workload(", f"workload = Workload(allocator={settings!r},"))
    assert run(["predict", "train.py:workload", "--json", "--snapshot", "run.pickle"]) == 0
    timeline = json.loads(capfd.readouterr().out)["timeline"]
    with open("run.pickle", "rb") as file:
        found = pickle.load(file)
    sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    (trace,) = found["device_traces"]
    reserved = list(accumulate(sign.get(entry["action"], 0) * entry["size"] for entry in trace))
    assert max(reserved) == max(moment["reserved"] for moment in timeline)
    assert reserved[-1] == sum(segment["total_size"] for segment in found["segments"])
    assert found["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings


def test_a_small_step_fits_a_large_gpu(program, capfd):
    program(WORKLOADS)
    status = run(["predict", "train.py:workload", "--gpu", "h200", "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    made = json.loads(out)
    assert made["fits"] is True
    assert sum(one["bytes"] for one in made["at_peak"]) == made["peak"]["allocated"]
    # The output of the layer alone is 2048 x 4096 floats.
    assert made["peak"]["allocated"] >= 2048 * 4096 * 4
    assert made["lines"][0]["file"].endswith("train.py")
    assert "a program may print" in err


@pytest.mark.parametrize("command", ["predict", "diagnose", "fit"])
def test_quiet_prints_the_verdict_alone(program, capfd, command):
    program(
        """
import torch
print("from the program")
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(9):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""
    )
    assert run([command, "train.py", "--gpu", "rtx3090", "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("fits ")
    assert len(out.splitlines()) == (2 if command == "diagnose" else 1)
    assert err == ""
