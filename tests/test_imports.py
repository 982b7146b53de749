"""Imports between our own files have a direction: no cycles, and private torch names in one file only."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src", ROOT / "lab/src")


@cache
def _modules():
    found = {}
    for folder in SOURCES:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _statements(body):
    """All of them, also inside functions; not their expressions, which are many."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, name, []))


def _imports(path):
    """The modules of ours that a file imports: at its top, inside functions, under TYPE_CHECKING.

    The parent package of an imported module is left out: it only re-exports.
    """
    for node in _statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in _modules())
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in _modules() else node.module
                if target in _modules():
                    yield target


def test_no_file_imports_itself_through_others():
    TopologicalSorter({name: set(_imports(path)) for name, path in _modules().items()}).prepare()


# Not the names of aten ops, such as torch.ops.aten._to_copy.
PRIVATE = re.compile(r"\btorch\.(?!ops\.)([a-z_]+\.)*_[a-zA-Z]|from torch[a-z_.]* import (.*, )?_[a-z]")


def _private_uses(path):
    """The lines of code, without strings and comments, that use a private name of torch."""
    text = path.read_text()
    if not PRIVATE.search(text):
        return []
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = "" if number != node.lineno else lines[number - 1][: node.col_offset]
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if PRIVATE.search(line.partition("#")[0])
    ]


def test_private_torch_names_are_used_in_two_files_only():
    users = ("oomph.torch_internals", "oomph.prediction.compiler_internals")  # the second loads the compiler
    others = [path for name, path in _modules().items() if name not in users]
    uses = [use for path in others for use in _private_uses(path)]
    assert not uses


# Inductor generates Triton kernels: these two files run it.
OF_THE_COMPILER = ("compiled.py", "compiler_internals.py")


def _strings_and_imports(path):
    """What a file may name a library by: not its docstrings and comments."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield node.value


def test_predictions_name_libraries_in_compat_only():
    names = {path.stem.replace("_", "-") for path in (ROOT / "src/oomph/prediction/compat").glob("*.py")}
    names -= {"--init--", "library", "registry", "data-parallel", "pass-through", "git", "torchscript"}
    pattern = re.compile(rf"\b({'|'.join(names | {'accelerate', 'deepspeed', 'datasets', 'pynvml'})})\b")
    found = [
        f"{path.name}: {text}"
        for name, path in _modules().items()
        if name.startswith("oomph.prediction.") and ".compat" not in name and path.name not in OF_THE_COMPILER
        for text in _strings_and_imports(path)
        if not text.startswith("oomph.") and " " not in text and pattern.search(text)
    ]
    assert not found
