from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oomph.cli.targets import open_target, split_target
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
    program("def make():\n    raise RuntimeError('called')\n")
    with open_target("train.py:make") as found:
        assert found.__name__ == "make"


def test_a_function_whose_arguments_all_have_defaults_is_accepted(program):
    program("def make(size=3, *rest, **options): ...\n")
    with open_target("train.py:make") as found:
        assert callable(found)


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


def test_a_target_without_a_colon_is_told_what_is_valid():
    with pytest.raises(UserError, match=r"'train' has no colon; give file.py:name or package.module:name"):
        split_target("train")


def test_a_script_is_told_that_it_needs_a_name_today():
    with pytest.raises(UserError, match=r"'train.py' is a whole script, which oomph cannot .*; give file"):
        split_target("train.py")


@pytest.mark.parametrize("target", [":name", "train.py:", "train.py:a b", "train.py:3"])
def test_an_empty_or_impossible_name_is_refused(target):
    with pytest.raises(UserError, match=r"is not valid; give file\.py:name"):
        split_target(target)


def test_a_file_that_is_not_there_suggests_its_neighbour(program):
    program(WORKLOAD)
    assert _refusal("trian.py:workload").startswith(
        "file 'trian.py' does not exist (did you mean 'train.py'?); give file.py:name"
    )


def test_a_directory_is_not_a_file(program, tmp_path):
    (tmp_path / "folder.py").mkdir()
    assert "file 'folder.py' is a directory" in _refusal("folder.py:x")


def test_a_file_that_is_not_python_is_refused(program):
    program("hello", "a.txt")
    assert "file './a.txt' is not a Python file" in _refusal("./a.txt:x")


def test_a_module_that_is_not_there_is_the_users_mistake():
    assert _refusal("nothing_of_test:x").startswith("module 'nothing_of_test' was not found; give")
    assert "module 'json.nothing' was not found; give" in _refusal("json.nothing:x")
    assert "module 'nopkg_.a.b' was not found (there is no 'nopkg_'); give" in _refusal("nopkg_.a.b:x")
    assert "module 'a-b' is not a valid module name; give" in _refusal("a-b:x")


def test_a_wrong_name_suggests_the_nearest(program):
    program(WORKLOAD)
    assert _refusal("train.py:worklod") == "train.py has no 'worklod'; did you mean 'workload'?"


def test_a_wrong_name_near_nothing_lists_what_the_file_defines(program):
    program(WORKLOAD + "import os\nclass Model: ...\ndef make(): ...\n")
    assert _refusal("train.py:zzz") == "train.py has no 'zzz'; it defines workload, make"


def test_a_wrong_name_in_an_empty_file_says_so(program):
    program("")
    assert _refusal("train.py:zzz") == "train.py has no 'zzz'; it defines nothing that could be a target"


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
