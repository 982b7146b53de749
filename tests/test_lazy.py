"""Packages that offer their names at once, and import what is behind them when it is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ["oomph", "oomph.fixes"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_is_offered_is_there(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'not_there'"):
        module.not_there  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names(package):
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(imported) == set(module.__all__)
    for name, home in imported.items():
        assert home is not None
        assert getattr(importlib.import_module(home), name) is getattr(module, name)


def test_importing_the_packages_imports_nothing_behind_them():
    program = (
        "import sys, oomph, oomph.fixes\n"
        "loaded = {name for name in sys.modules if name.startswith('oomph')}\n"
        "assert loaded == {'oomph', 'oomph.fixes'}, loaded\n"
        "assert 'torch' not in sys.modules\n"
        "import oomph.ops, oomph.nn\n"
        "slow = {'torch._dynamo', 'triton', 'transformers', 'typer', 'rich'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
