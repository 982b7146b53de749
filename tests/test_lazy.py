"""oomph offers its names at once, and imports what is behind them when it is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import oomph


def test_every_name_that_is_offered_is_there():
    assert oomph.__all__ == sorted(oomph.__all__)
    for name in oomph.__all__:
        assert getattr(oomph, name) is not None
        assert name in dir(oomph)
    with pytest.raises(AttributeError, match="module 'oomph' has no attribute 'not_there'"):
        oomph.not_there  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(oomph.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert set(imported) == set(oomph.__all__)
    for name, home in imported.items():
        assert getattr(importlib.import_module(home), name) is getattr(oomph, name)


def test_importing_oomph_imports_nothing_behind_it():
    program = (
        "import sys, oomph\n"
        "loaded = {name for name in sys.modules if name.startswith('oomph')}\n"
        "assert loaded == {'oomph'}, loaded\n"
        "assert 'torch' not in sys.modules\n"
        "import oomph.ops, oomph.nn\n"
        "slow = {'torch._dynamo', 'triton', 'transformers', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
