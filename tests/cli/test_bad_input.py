"""Mistakes: for each, a command line, the exit status and a part of the one line that the user gets.

All run in this process and in one folder, which has the files that the fixture `folder` writes.
"""

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from oomph.cli.main import run

USER, PROGRAM, INTERRUPTED = 2, 3, 130


class Case(NamedTuple):
    command: str  # as in a shell
    line: str  # a part of the error
    status: int
    files: dict[str, str | bytes]  # written before


CASES = []
# Programs that end or disturb the process they run in.
NEEDS_A_PROCESS = re.compile("leaves|aborts|crashes|interrupts|asks|exits|fatal|x.py( |$)|starts_program")


def cases(command, *rows, status=USER):
    """Rows of (more words, line), or (more words, line, what the file `x` with that suffix holds)."""
    for words, line, *content in rows:
        typed = f"{command} {words}"
        file = found[0] if (found := re.search(r"\bx\.[a-z]+", typed)) else "x.py"
        CASES.append(Case(typed, line, status, dict.fromkeys([file][: len(content)], *content)))


LONG, DIGITS, DEEP = "n" * 300, "9" * 5000, "[" * 3000

# ------------------------------------------------------------------------------------ the command line

cases(
    "",
    (
        "frobnicate",
        "No such command 'frobnicate'; the commands are predict, diagnose, fixes, fit, measure, compare, ",
    ),
    ("--verison", "No such option: --verison"),
    ("predict", "predict needs a TARGET, or -m MODULE"),
    ("fit p.py:ok --gpu 8GiB --torchrun", "--steps and --torchrun are for scripts"),
    ("run --fix activation_checkpointing", "run needs a SCRIPT, or -m MODULE"),
    ("verify", "Missing argument 'TARGET'"),
    ("gpus h100", "unexpected extra argument(s) (h100)"),
    ("predict p.py:ok --gpu", "Option '--gpu' requires an argument"),
    ("fit p.py:ok --gpu rtx3090 --gpu=a100", "--gpu was given 2 times; give it once"),
    ("predict p.py:ok --html no/f.html", "--html 'no/f.html': the directory 'no' does not exist"),
    ("predict p.py:ok --json=yes", "Option '--json' does not take a value"),
    ("fixes --only micro_batches", "--only tries fixes on a target"),
    ("fixes --gpu rtx4090", "--gpu is for the step of a target"),
    ("fixes p.py:ok --allow speed", "--allow 'speed' is not a kind of fix; valid: exact, precision"),
    ("fixes p.py:ok --only activation_checkpoint", "did you mean 'activation_checkpointing'"),
    ("fixes p.py:nothing --only gradient_checkpointing", "here that is 'activation_checkpointing'"),
    ("predict p.py:ok --sizes T", "--sizes 'T' is not valid; give NAME=NUMBER"),
    ("predict p.py --sizes Q=3", "give whole numbers for B, T, H, W"),
    ("predict p.py --stpes 4 -- --lr 3", "No such option: --stpes; the nearest is --steps"),
    ("fit p.py --gpu 8GiB --out f.json -- --lr 3", "No such option: --out. Options of the script come"),
    ("predict p.py:ok --stpes 4", "No such option: --stpes; the nearest is --steps"),
    (
        "predict p.py --batch 4",
        "--batch is for a model's name, as Qwen/Qwen3-8B --method lora; options of the script come after --",
    ),
    ("predict p.py B=4 --gpu 8GiB", "'B=4' would be an argument of the script; these come after --"),
    ("predict --json -m p --sizes B=4 lr=1 -- --b", "'lr=1' would be an argument of the script"),
    ("run --fix activation_checkpointing uses_gpu.py", "uses_gpu.py:2 uses CUDA, and there is no GPU here"),
    ("run --fix activation_checkpointing bf16.py", "uses CUDA, and there is no GPU here; `oomph predict"),
    (
        "run uses_gpu.py --plan plan.json",
        "--plan after uses_gpu.py is an option of the script; give --plan before",
    ),
    ("fixes p.py --only shorter_sequence", "fix 'shorter_sequence' changes the step, not the model"),
    ("verify p.py micro_batches", "target 'p.py' is a whole script"),
    ("verify p.py:ok", "verify needs a fix: oomph verify TARGET FIX"),
    ("verify p.py:ok micro_batches --sizes C=2", "cannot be called with (device, B, C)"),
    ("predict p.py:ok --snapshot .", "--snapshot '.' is a directory; give a file"),
    ("predict p.py:ok --snapshot loop.py", "'loop.py' cannot be written: Too many levels of symbolic"),
)
cases(
    "predict p.py:ok --gpu",
    ("rtx3091", "unknown GPU 'rtx3091'; nearest: rtx3090"),
    ("a100", "ambiguous"),
    ("24", "GPU '24' has no unit; for a card of that size: 24GiB"),
    ("0", "GPU '0' has no unit; `oomph gpus` lists every name"),
    ("24G", "size '24G' is ambiguous; write 24GiB (powers of 1024) or 24GB"),
    ("'\x1b[31mh100'", r"unknown GPU '\x1b[31mh100'"),
)
cases(
    "predict p.py:ok --max",
    ("24", "size '24' has no unit"),
    ("ten", "size 'ten' is not valid; a size is a number with a unit"),
)

# --------------------------------------------------------------------------------------------- targets

cases(
    "predict",
    ("train", "target 'train' has no colon; give a script, as train.py"),
    ("train.ipynb", "file 'train.ipynb' does not exist"),
    ("pp", "target 'pp' has no colon (did you mean 'p.py'?)"),
    ("p.py --steps 0", "--steps 0 is not valid; give a positive number"),
    ("p.py:ok --steps 4", "--steps and --torchrun are for scripts"),
    ("-m not_a_module", "module 'not_a_module' was not found"),
    ("x.py", "x.py put nothing on the GPU; build its model", "print('trains nothing')"),
    ("x.py", "put nothing on the GPU before it ended itself at x.py:2; build", "import sys\nsys.exit(0)"),
    (
        "x.py",
        "predict what it defines, `oomph predict x.py:train`, or",
        "def train(lr=1): pass\ndef loss(x): pass",
    ),
    (":ok", "target ':ok' is not valid"),
    ("p.py:", "target 'p.py:' is not valid"),
    ("pp.py:ok", "file 'pp.py' does not exist (did you mean 'p.py'?)"),
    ("./folder:x", "file './folder' is a directory"),
    ("./text.txt:x", "file './text.txt' is not a Python file"),
    ("loop.py:x", "file 'loop.py' is a symbolic link to nothing"),
    (f"{LONG}.py:x", "File name too long"),
    ("nopkg.a.b:x", "module 'nopkg.a.b' was not found (there is no 'nopkg')"),
    ("a-b:x", "module 'a-b' is not a valid module name"),
    ("p.py:okay", "p.py has no 'okay'; did you mean 'ok'"),
    ("p.py:zzz", "p.py has no 'zzz'; it defines"),
    ("uses_gpu.py:model", "uses_gpu.py:2 uses the GPU while uses_gpu.py is imported, as a script does"),
    (
        "x.py:zzz",
        "x.py has no 'zzz'; it defines nothing that could be a target; `oomph predict x.py` predicts",
        "",
    ),
    ("p.py:a_dict", "is a dict; give a Workload, or a function of no arguments"),
    ("p.py:AClass", "is the class AClass"),
    ("p.py:a_model", "is a model (Linear)"),
    ("p.py:batch", "is a function that needs arguments (device)"),
    ("p.py:ok C=3", "the Workload has no size 'C'; its sizes are B=4"),
    ("p.py:unsized B=3", "its sizes are none; name them, as Workload("),
    ("p.py:returns_step B=3", "fixes and sizes need a Workload"),
    ("p.py:ok B=x", "'B=x' is not a size of its Workload; give NAME=NUMBER"),
    ("p.py:ok data.batch_size=4", "'data.batch_size=4' is not a size"),
    (
        "p.py:returns_tuple",
        "returned a tuple of a model (Linear), a function, and no training step was traced",
    ),
    ("p.py:returns_model", "returned a model (Linear), and no training step was traced"),
    ("p.py:generates", "returned a generator, and no training step was traced"),
    ("p.py:step_with_arguments", "which needs arguments (batch)"),
    ("p.py:on_the_host", "the program put nothing on the GPU"),
    ("p.py:predicts_itself", "predict was called by a program that is itself being predicted"),
    ("p.py:loss_none", "Workload loss returned NoneType; the loss function must return a tensor"),
    ("p.py:loss_vector", "Workload loss returned a tensor of shape [4, 8]"),
    ("p.py:loss_detached", "Workload loss does not depend on any trainable parameter"),
    ("p.py:optimizer_none", "Workload optimizer(params) returned NoneType; it must return a torch.optim"),
    ("p.py:model_none", "Workload model() returned NoneType; it must return a torch.nn.Module"),
    ("p.py:batch_on_host", "Workload batch(device) returned a tensor on cpu"),
    ("p.py:tensor_for_default_loss", "the default loss is model(**batch).loss, but the batch is a tensor"),
    ("x.py:w", "x.py:2: Workload model is of type int", "from oomph import Workload\nw = Workload(3, print)"),
    ("x.py:w", "Workload model is a model; give a function", "from p import *\nw = Workload(model(), batch)"),
    (
        "x.py:w",
        "Workload batch cannot be called with (device)",
        "from p import *\nw = Workload(model, model)",
    ),
    ("x.py:w", "sizes={'B': 0} is not valid", "from p import *\nw = Workload(model, batch, sizes={'B': 0})"),
    ("x.py:w", "accumulate=0 is not valid", "from p import *\nw = Workload(model, batch, accumulate=0)"),
    ("x.py:w", "dtype='int8' is not a float", "from p import *\nw = Workload(model, batch, dtype='int8')"),
    ("x.py:w", "optimizer='adam' is not", "from p import *\nw = Workload(model, batch, optimizer='adam')"),
    ("p.py:bad_allocator", "expandable_segments:maybe"),
)

# ------------------------------------------------------------------------------- programs that fail

cases(
    "predict",
    ("x.py:w", "x.py:1: SyntaxError: '(' was never closed", "w = ("),
    ("x.py:w", "SyntaxError", b"w = '\xff'"),
    ("x.py:w", "x.py:1: ModuleNotFoundError: No module named 'not_there'", "import not_there"),
    ("x.py:w", "x.py ends the process while it is imported (SystemExit: 0)", "import sys\nsys.exit(0)"),
    ("x.py:w", "x.py:1: EOFError", "w = input('size? ')"),
    ("x.py:w", "x.py:1: RecursionError", "exec('f = lambda: f()'); f()"),
    ("x.py", "x.py:1: ZeroDivisionError: division by zero", "1 / 0"),
    ("x.py", "x.py ended with status 5", "import sys\nsys.exit(5)"),
    ("p.py:loss_raises", "the program failed at p.py:20: ValueError: my own"),
    ("p.py:loss_exits", "the program ends the process (SystemExit: 0)"),
    ("p.py:loss_leaves", "the program ended the process (os._exit, status 0)"),
    ("p.py:loss_aborts", "the program crashed the process (SIGABRT)"),
    ("p.py:loss_crashes", "the program crashed the process (SIGSEGV)"),
    ("p.py:loss_fatal", "p.py:20: Fatal: not an Exception"),
    ("p.py:loss_unprintable", "Unprintable: (its text cannot be shown"),
    ("p.py:loss_json", "p.py:33: JSONDecodeError"),
    ("p.py:loss_escapes", r"ValueError: \x1b[31mred"),
    ("p.py:second_gpu", "invalid device ordinal"),
    ("p.py:starts_program", "a predicted program cannot start other programs"),
    ("p.py:asks", "EOFError"),
    ("p.py:needs_arguments", "(SystemExit: 2); arguments of a script come after --: `oomph"),
    ("p.py:backward_twice", "Trying to backward through the graph a second time"),
    ("p.py:wrong_op_argument", "the program failed at p.py:68: ArgumentError: "),
    status=PROGRAM,
)
cases(
    "predict",
    (
        "x.py",
        "x.py ended with status 2; arguments of a script come after --",
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()",
    ),
    (
        "x.py",
        "x.py ended without a training step: it made an optimizer, but it ran no backward pass",
        "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\ntorch.optim.SGD(model.parameters())",
    ),
    status=PROGRAM,
)
cases("predict", ("p.py:loss_interrupts", "interrupted"), status=INTERRUPTED)

for command, more in (("verify", "micro_batches"), ("fixes", "")):
    cases(
        command,
        (f"p.py:loss_exits {more}", "the program ends the process (SystemExit: 0)"),
        (f"x.py:w {more}", "x.py:1: ZeroDivisionError", "1 / 0"),
        status=PROGRAM,
    )
    cases(command, (f"p.py:loss_interrupts {more}", "interrupted"), status=INTERRUPTED)
cases(
    "verify",
    ("p.py:loss_raises micro_batches", "ValueError: my own"),
    ("p.py:loss_leaves micro_batches", "the program ended the process (os._exit, status 0)"),
    status=PROGRAM,
)
cases(
    "verify",
    ("p.py:loss_none micro_batches", "Workload loss returned NoneType"),
    ("p.py:loss_host_memory micro_batches", "the host's memory is not enough; give smaller sizes"),
    ("p.py:loss_nan micro_batches", "the workload's own loss is not finite"),
    ("p.py:returns_step micro_batches", "fixes and sizes need a Workload"),
    ("p.py:huge_model micro_batches", "verify runs the model on the CPU"),
    ("p.py:ok micro_batches:parts=9", "a batch of 4 rows cannot be cut into 9 parts"),
)
cases(
    "fixes",
    ("p.py:returns_step --torchrun", "--steps and --torchrun are for scripts"),
    (
        "x.py:step",
        "the function made no optimizer of torch.optim, by which its model is found; make one in it, or",
        "import torch\ndef step():\n    torch.ones(8, device='cuda', requires_grad=True).sum().backward()",
    ),
)

# ----------------------------------------------------------------------------------------------- fixes

cases(
    "verify p.py:ok",
    ("liger", "there is no fix 'liger'; here that is 'fused_linear_cross_entropy'"),
    ("flash_attention", "here that is 'fused_attention' for attention in your own code, or 'attn_impl"),
    ("activation-checkpointing", "did you mean 'activation_checkpointing'?"),
    ("''", "there is no fix ''; the fixes are smaller_vocabulary, "),
    ("micro_batches:parts", "'parts' is not option=value"),
    ("activation_checkpointing:blocks=a,b", "a list in brackets: option=[a,b]"),
    ("micro_batches:parts=two", "parts='two' is not valid; give a whole number >= 2"),
    ("micro_batches:pieces=2", "fix 'micro_batches' has no option 'pieces'; its options are parts"),
    (f"micro_batches:parts={DIGITS}", "is not valid; give a whole number >= 2"),
    (f"micro_batches:parts={DEEP}", "is not valid"),
    ("micro_batches micro_batches:parts=3", "fix 'micro_batches' is already applied"),
    ("fused_optimizer no_foreach", "cannot be combined"),
    ("x.json", "file 'x.json' is not JSON", "{"),
    ("x.json", "file 'x.json' is not JSON", DEEP),
    ("x.json", "holds an empty list; give at least one fix", "[]"),
    ("x.json", "is not a list of fixes such as", "[1]"),
    ("x.json", "is not a list of fixes such as", '{"fixes": "micro_batches"}'),
    ("x.json", "there is no fix 'x.json'", '["x.json"]'),
    ("x.json", "a fix is given as {'fix': 3}", '[{"fix": 3}]'),
    ("x.json", "options='parts=2' is not a mapping", '[{"fix": "micro_batches", "options": "parts=2"}]'),
    ("x.json", "parts=nan is not valid", '[{"fix": "micro_batches", "options": {"parts": NaN}}]'),
)
cases(
    "fit p.py:ok",
    ("", "a card or a budget"),
    ("--gpu h200 --largest depth", "batch, sequence"),
    ("--budget lots", "lots"),
    ("--gpu h200 --allow anything", "anything"),
)
cases(
    "predict p.py:ok --fix",
    ("FSDP", "there is no fix 'FSDP'; here that is 'fsdp2'"),
    ("fused_attention", "fix 'fused_attention': the model has no code of its own"),
)

# ------------------------------------------------------------------------------------------ the folder

SOURCE = """\
import argparse, ctypes, json, os, signal, subprocess, sys
import torch
from torch import nn
from oomph import Workload

def model(): return nn.Linear(8, 8)
def batch(device, B=4): return torch.randn(B, 8, device=device)
def loss(model, batch): return model(batch).square().mean()
ok = Workload(model, batch, loss, sizes={"B": 4})
unsized = Workload(model, lambda device: batch(device), loss)
tensor_for_default_loss = Workload(model, batch)
bad_allocator = Workload(model, batch, loss, allocator="expandable_segments:maybe")
huge_model = Workload(lambda: nn.Linear(40000, 40000), batch, loss)
a_dict, a_model = {}, model()
class AClass: ...
class Fatal(BaseException): ...
class Unprintable(Exception):
    def __str__(self): raise ValueError

def fail(error): raise error
def failing(name, action):
    part = name.partition("_")[0]
    globals()[name] = Workload(**{"model": model, "batch": batch, "loss": loss, part: action})

for name, error in {
    "raises": ValueError("my own"), "exits": SystemExit(0),
    "fatal": Fatal("not an Exception"), "unprintable": Unprintable(),
    "interrupts": KeyboardInterrupt(),
    "escapes": ValueError("\\x1b[31mred"),
}.items():
    for part in ("loss", "model", "batch", "optimizer"):
        failing(f"{part}_{name}", lambda *_, error=error: fail(error))
failing("loss_json", lambda model, batch: json.loads("{"))
failing("loss_leaves", lambda model, batch: os._exit(0))
failing("loss_aborts", lambda model, batch: os.abort())
failing("loss_crashes", lambda model, batch: os.kill(os.getpid(), signal.SIGSEGV))
failing("loss_none", lambda model, batch: None)
failing("loss_vector", lambda model, batch: model(batch))
failing("loss_detached", lambda model, batch: loss(model, batch).detach())
failing("loss_nan", lambda model, batch: loss(model, batch) * float("nan"))
failing("loss_host_memory", lambda model, batch: loss(model, batch) + torch.empty(10**15).sum())
failing("model_none", lambda: None)
failing("batch_on_host", lambda device: torch.randn(4, 8))
failing("optimizer_none", lambda params: None)

def returns_step(): return lambda: None
def returns_model(): return model().cuda()
def returns_tuple(): return model().cuda(), lambda: None
def generates(): yield torch.ones(1, device="cuda")
def step_with_arguments(): return lambda batch: None
def on_the_host(): model()(torch.ones(1, 8)).sum().backward()
def predicts_itself():
    import oomph
    oomph.predict(ok)
def second_gpu(): torch.ones(1, device="cuda:1")
def starts_program(): subprocess.run(["true"])
def asks(): input("size? ")
def needs_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.parse_args()
def backward_twice():
    value = model().cuda()(torch.ones(1, 8, device="cuda")).exp().sum()
    value.backward()
    value.backward()
def wrong_op_argument():
    import oomph.ops
    oomph.ops.linear_cross_entropy(*torch.ones(3, 2, 8, device="cuda"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("bad_input"), Path.cwd()
    os.chdir(folder)
    files = {
        "p.py": SOURCE,
        "uses_gpu.py": "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n",
        "bf16.py": "import transformers\ntransformers.TrainingArguments('out', bf16=True)\n",
        "text.txt": "no program",
    }
    (folder / "folder").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "loop.py").symlink_to("loop.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO())
        patch.setattr("sys.dont_write_bytecode", True)  # every x.py is another one
        yield folder
    os.chdir(before)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.command[:60]} {case.line[:30]}" for case in CASES])
def test_it_is_one_line_with_its_status(case, folder, capfd, request):
    if not NEEDS_A_PROCESS.search(case.command):
        request.getfixturevalue("in_process")  # takes a third of the time
    for name, content in case.files.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        status = run(shlex.split(case.command))
    finally:
        for name in case.files:
            Path(name).unlink()
        sys.modules.pop("x", None)
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("oomph: ")]
    assert status == case.status, err
    assert 1 <= len(errors) <= (2 if status == PROGRAM else 1), err  # with a line of advice
    assert case.line in errors[0]
    assert errors[0].isprintable()
    assert out == ""
    assert "Traceback" not in err or status == PROGRAM
    assert f"{os.sep}oomph{os.sep}cli" not in err


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        ("gpus --json >/dev/full", USER, "oomph: stdout cannot be written: No space left on device"),
        ("--help >/dev/full", USER, "oomph: No space left on device"),
        ("gpus >&-", 0, ""),
        ("nothing 2>&-", USER, ""),
        ("--help | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("gpus | true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_streams_that_cannot_be_written(command, status, line, tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m oomph {command}"], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (status, line)


def test_a_current_directory_that_is_gone(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in ("predict p.py:ok", "predict p:ok"):
        assert run(command.split()) == USER, command
        assert capsys.readouterr().err.count("oomph: ") == 1


def test_a_program_sees_arguments_of_its_own_and_may_change_the_directory(folder, capfd):
    Path("moves.py").write_text(
        "from p import *\ndef w():\n    assert sys.argv == ['moves.py']\n    os.chdir('/')\n    return ok\n"
    )
    assert run("predict moves.py:w --json --snapshot here.pickle".split()) == 0
    assert Path("here.pickle").stat().st_size > 0
    capfd.readouterr()
