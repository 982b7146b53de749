"""`oomph cases`."""

from __future__ import annotations

import json

import pytest

from oomph.cli.main import run


def test_cases_lists_the_five_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cases", "--json"]) == 0
    names = {case["name"] for case in json.loads(capsys.readouterr().out)["cases"]}
    assert len(names) == 5
    assert run(["cases"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)
