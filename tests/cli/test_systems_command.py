"""`oomph systems`, and the old name of the command."""

from __future__ import annotations

import json

import pytest

from oomph.cli.main import run


def test_systems_lists_the_five_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["systems", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["systems"]
    assert len(found) == 5
    assert set(found[0]) == {"name", "report", "title", "naive", "model"}
    assert run(["systems"]) == 0
    out = capsys.readouterr().out
    assert all(system["name"] in out for system in found)


def test_cases_is_the_old_name_with_its_keys_and_one_deprecation_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["cases", "--json"]) == 0
    old = capsys.readouterr()
    assert set(json.loads(old.out)["cases"][0]) == {"name", "report", "title", "sick", "healthy"}
    assert old.err == "oomph: oomph cases is deprecated; use oomph systems\n"
    assert run(["cases", "npt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["case"]["name"] == "npt"
