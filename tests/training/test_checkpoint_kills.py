"""kill -9 leaves the old checkpoints, or those and the new one; never half of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("killed_writer.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("killed")
    # Python 3.12 warns of every fork where there are threads, and numpy has some.
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_twenty_kills_at_random_moments_lose_no_complete_checkpoint(found: dict[str, Any]) -> None:
    found = found["random"]
    assert found["kills"] == 20
    assert found["last"] > 0
    # Else the kills never came while something was being written.
    assert found["leftovers"] > 0


def test_a_kill_at_any_call_that_touches_a_file_leaves_whole_checkpoints_only(found: dict[str, Any]) -> None:
    found = found["calls"]
    assert found["calls"] > 8
    # Once the new one is in place it stays: the old one until there, the new one after.
    assert found["newest"] == sorted(found["newest"])
    assert set(found["newest"]) == {1, 2}
