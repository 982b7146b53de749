"""TARGET: files, modules and configs, with their overrides; and what is wrong with one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from oomph.cli.main import run
from oomph.cli.targets import open_target
from oomph.errors import ProgramError, UserError
from oomph.workload import Workload

WORKLOAD = """
from oomph.workload import Workload
workload = Workload(model=lambda: None, batch=lambda device: {})
"""


def _refusal(target: str) -> str:
    with pytest.raises(UserError) as caught, open_target(target):
        pass
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_workload_in_a_file_is_found(program):
    program(WORKLOAD)
    with open_target("train.py:workload") as found:
        assert isinstance(found, Workload)


def test_a_function_is_handed_over_without_being_called(program):
    program("def make(size=3, *rest, **options):\n    raise RuntimeError('called')\n")
    with open_target("train.py:make") as found:
        assert found.__name__ == "make"


def test_a_module_below_the_current_directory_is_found(program, tmp_path):
    (tmp_path / "pkg_of_test").mkdir()
    program("def make(): ...\n", "pkg_of_test/steps.py")
    with open_target("pkg_of_test.steps:make") as found:
        assert found.__module__ == "pkg_of_test.steps"


def test_the_folder_of_the_file_comes_first_on_the_path_while_in_use_and_is_removed_after(program, tmp_path):
    (tmp_path / "deep").mkdir()
    program("def make():\n    import neighbour_of_test\n    return neighbour_of_test.x\n", "deep/train.py")
    program("x = 5\n", "deep/neighbour_of_test.py")
    before = list(sys.path)
    with open_target("deep/train.py:make") as found:
        assert sys.path[0] == str(tmp_path / "deep")
        assert found() == 5
    assert sys.path == before
    assert "train" not in sys.modules


def test_a_file_named_like_a_module_in_use_does_not_replace_it(program):
    import json

    program("def make(): ...\n", "json.py")
    with open_target("json.py:make") as found:
        assert found.__name__ == "make"
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json


def test_the_file_is_imported_rather_than_run_as_a_script(program):
    program("def make(): ...\nif __name__ == '__main__':\n    raise SystemExit(9)\n")
    with open_target("train.py:make"):
        pass


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train", "'train' has no colon; give file.py:name or package.module:name"),
        ("train.py", "'train.py' is a whole script"),
        (":name", "':name' is not valid; give file.py:name"),
        ("train.py:a b", "'train.py:a b' is not valid"),
        ("train.py:3", "'train.py:3' is not valid"),
        ("trian.py:workload", "file 'trian.py' does not exist (did you mean 'train.py'?); give file.py:name"),
        ("./folder.py:x", "file './folder.py' is a directory"),
        ("./a.txt:x", "file './a.txt' is not a Python file"),
        ("nothing_of_test:x", "module 'nothing_of_test' was not found; give"),
        ("json.nothing:x", "module 'json.nothing' was not found; give"),
        ("nopkg_.a.b:x", "module 'nopkg_.a.b' was not found (there is no 'nopkg_'); give"),
        ("a-b:x", "module 'a-b' is not a valid module name; give"),
        ("train.py:worklod", "train.py has no 'worklod'; did you mean 'workload'?"),
        ("train.py:zzz", "train.py has no 'zzz'; it defines workload, make"),
        ("empty.py:zzz", "empty.py has no 'zzz'; it defines nothing that could be a target"),
    ],
)
def test_a_target_that_is_not_there_is_one_line_with_what_is_valid(program, tmp_path, target, message):
    program(WORKLOAD + "import os\nclass Model: ...\ndef make(): ...\n")
    program("", "empty.py")
    program("hello", "a.txt")
    (tmp_path / "folder.py").mkdir()
    assert message in _refusal(target)


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("x = {}", "a value of type dict"),
        ("class x: ...", "the class x"),
        ("import torch\nx = torch.nn.Linear(1, 1)", "a model (Linear)"),
        ("def x(batch, *, size): ...", "a function that needs arguments (batch, size)"),
    ],
)
def test_an_object_of_the_wrong_kind_is_named_for_what_it_is(program, source, given):
    program(source + "\n")
    assert _refusal("train.py:x") == (
        f"target 'train.py:x' is {given}; give a Workload, or a function of no arguments that returns one"
    )


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("\n1 / 0\n", "ZeroDivisionError: division by zero", 2),
        ("import missing_of_test\n", "ModuleNotFoundError: No module named 'missing_of_test'", 1),
        ("x = (\n", "SyntaxError: '(' was never closed", 1),
    ],
)
@pytest.mark.parametrize("target", ["broken_of_test.py:x", "broken_of_test:x"])
def test_an_error_inside_the_import_is_the_programs_own(program, target, source, message, line):
    file = program(source, "broken_of_test.py")
    with pytest.raises(ProgramError) as caught, open_target(target):
        pass
    assert (str(caught.value), caught.value.file, caught.value.line) == (message, str(file), line)
    assert caught.value.__cause__ is not None
    assert "broken_of_test" not in sys.modules


def test_an_exit_during_the_import_is_the_programs_own(program):
    program("import sys\nsys.exit(0)\n")
    with pytest.raises(ProgramError) as caught, open_target("train.py:x"):
        pass
    assert str(caught.value) == "train.py ends the process while it is imported (SystemExit: 0)"
    assert caught.value.line == 2


def test_a_config_that_is_loaded_by_the_program_keeps_its_problems(program, capsys):
    program("import oomph.training.config as c\n\nc.load_dict({'system': 'pythia', 'epoch': 3}, 'mine')\n")
    (line,) = _error(capsys, "predict", "train.py:x")
    assert line.startswith("oomph: train.py:3: mine: epoch is not a key; did you mean 'training.epochs'?")


def test_a_workload_that_refuses_its_arguments_says_where_it_is_made(program):
    program("\nfrom oomph.workload import Workload\nw = Workload(model=3, batch=lambda device: {})\n")
    assert _refusal("train.py:w").startswith("train.py:3: Workload model is of type int, not a function;")


def test_a_file_that_chooses_its_device_when_imported_chooses_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "chooses.py"
    file.write_text(
        "import torch\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "def train():\n    return lambda: torch.empty(1024, device=device)\n"
    )
    with open_target(f"{file}:train") as target:
        assert target.__globals__["device"] == "cuda"  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- configs

TINY = str(Path(__file__).parents[2] / "configs" / "longctx_tiny.yaml")


def _error(capsys, *arguments: str) -> list[str]:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_config_is_a_workload_with_its_overrides_in():
    with open_target(TINY, ["batch_size=3", "model.attention=nsa"]) as found:
        assert isinstance(found, Workload)
        assert found.sizes == {"B": 3, "T": 128}
        assert found.model.config.attention == "nsa"  # type: ignore[attr-defined]


def test_no_more_batches_of_a_step_are_traced_than_its_memory_needs():
    with open_target(TINY, ["accumulation=16"]) as found:
        assert isinstance(found, Workload)
        assert found.accumulate == 2


def test_predict_takes_a_config_and_overrides(fake_predict, capsys):
    words = ["seq_len=32", "--gpu", "rtx3090", "fixes=activation_checkpointing", "--json"]
    assert run(["predict", TINY, *words]) == 0
    traced = fake_predict.arguments(capsys.readouterr().out)
    assert traced["sizes"]["T"] == 32
    assert traced["fixes"] == ["activation_checkpointing"]
    assert traced["gpu"] == "rtx3090"


def test_a_configs_own_limit_is_that_of_its_prediction(fake_predict, capsys):
    """The smaller of the two, as the run would have it."""
    for more, limit in (([], "3GiB"), (["--max", "2GiB"], "2GiB"), (["--max", "4GiB"], "3GiB")):
        assert run(["predict", TINY, "training.memory_limit=3GiB", "--json", *more]) == 0
        assert fake_predict.arguments(capsys.readouterr().out)["max"] == limit


def test_predict_takes_the_flags_that_train_takes(fake_predict, capsys):
    words = ["--seq_len", "32", "--batch-size=3", "--gpu", "rtx3090", "--json", "--shuffle"]
    assert run(["predict", TINY, *words]) == 0
    traced = fake_predict.arguments(capsys.readouterr().out)
    assert traced["sizes"] == {"B": 3, "T": 32}
    assert traced["gpu"] == "rtx3090"
    assert _error(capsys, "predict", TINY, "--gup", "rtx3090")[0].endswith(
        "gup is not a key; the sections are model, data, optimizer, training, output; "
        "besides them there are system, form, fixes (the nearest option to --gup is --gpu)"
    )


def test_fixes_on_the_command_line_come_on_top(fake_predict, capsys):
    words = ["--fix", "fused_linear_cross_entropy", "fixes=activation_checkpointing"]
    assert run(["predict", TINY, *words]) == 2
    assert "has to be applied before 'activation_checkpointing'" in capsys.readouterr().err
    words = ["--fix", "activation_checkpointing", "fixes=fused_linear_cross_entropy"]
    assert run(["predict", TINY, *words, "--json"]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["fixes"] == [
        "fused_linear_cross_entropy",
        "activation_checkpointing",
    ]


def test_fixes_and_verify_take_a_config_and_overrides(capsys):
    small = ["seq_len=16", "batch_size=2"]
    assert (
        run(["fixes", TINY, *small, "--only", "activation_checkpointing", "--gpu", "rtx3090", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert run(["verify", TINY, "activation_checkpointing:keep=products", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    assert _error(capsys, "verify", TINY, *small) == [
        "oomph: verify needs a fix: oomph verify TARGET FIX ...; `oomph fixes` lists them"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config 'x.yaml' does not exist; give a .yaml file, e.g. in configs/"),
        ("", "config 'x.yaml' is empty; it needs at least: system: pythia"),
        ("[1]", "config 'x.yaml' holds a list; it should be a mapping, like `system: pythia`"),
        ("a: 1\nb: [", "config 'x.yaml', line 2 is not valid YAML: expected the node content"),
        ("system: mamba", "x.yaml: system = 'mamba' is not valid; Choose from hatchling, pythia, longctx"),
        ("system: pythia\nepoch: 3", "x.yaml: epoch is not a key; did you mean 'training.epochs'?"),
    ],
)
def test_a_wrong_config_is_one_line(program, capsys, text, message):
    program("")
    if text is not None:
        program(text, "x.yaml")
    (line,) = _error(capsys, "predict", "x.yaml")
    assert line.startswith(f"oomph: {message}")


def test_several_problems_are_a_line_each(program, capsys):
    program("system: pythia\nmodel: {hiden_size: 3}\ntraining: {steps: many}\n", "x.yaml")
    assert _error(capsys, "predict", "x.yaml", "clip=0") == [
        "oomph: x.yaml has 3 problems:",
        "  model.hiden_size is not a key; did you mean 'model.hidden_size'?",
        "  training.steps = 'many' is not valid; it should be a valid integer",
        "  clip (which is training.clip) = 0 is not valid; it should be greater than 0",
    ]


def test_a_word_that_is_no_override_is_one_line(capsys):
    assert _error(capsys, "predict", TINY, "nsa") == [
        "oomph: 'nsa' is not an override; give key=value, --key value, or --flag"
    ]


@pytest.mark.parametrize("command", ["predict", "fixes", "verify"])
def test_a_program_takes_no_overrides(program, capsys, command):
    program("def step(): ...\n")
    words = ["activation_checkpointing"] if command == "verify" else []
    (line,) = _error(capsys, command, "train.py:step", *words, "a.b=1")
    assert line == (
        "oomph: target 'train.py:step' is a program, and 'a.b=1' is not a size of its Workload, such as B=4: "
        "change the program, or give a .yaml file, whose keys can be overridden"
    )


SIZED = """
import torch, oomph
def batch(device, B, T): return torch.zeros(B, T, device=device)
w = oomph.Workload(lambda: torch.nn.Linear(1, 1), batch, lambda m, b: m(b).sum(), sizes={"B": 8, "T": 64})
def made(): return w
unsized = oomph.Workload(lambda: torch.nn.Linear(1, 1), lambda device: None, lambda m, b: m(b).sum())
def step(): return lambda: None
"""


@pytest.mark.parametrize("name", ["w", "made"])
def test_sizes_of_a_workload_can_be_given(program, fake_predict, capsys, name):
    program(SIZED)
    assert run(["predict", f"train.py:{name}", "B=3", "--json"]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["sizes"] == {"B": 3, "T": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["w", "C=3"], "the Workload has no size 'C'; its sizes are B=8, T=64"),
        (["unsized", "B=3"], "the Workload has no size 'B'; its sizes are none; name them, as Workload("),
        (["step", "B=3"], "target 'train.py:step' returned a function; fixes and sizes need a Workload"),
        (["w", "B=0"], "target 'train.py:w' is a program, and 'B=0' is not a size of its Workload"),
    ],
)
def test_sizes_that_a_program_does_not_have_are_refused(program, capsys, words, message):
    program(SIZED)
    name, *sizes = words
    (line,) = _error(capsys, "predict", f"train.py:{name}", *sizes)
    assert line.startswith(f"oomph: {message}")
