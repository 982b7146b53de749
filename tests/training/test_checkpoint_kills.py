"""kill -9 at any call that touches a file leaves complete checkpoints only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("killed_writer.py")


def test_a_kill_at_any_call_that_touches_a_file_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    # Python 3.12 warns of every fork where there are threads, and numpy has some.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["calls"] > 8
    # The old one until the new one is in place, the new one after.
    assert found["newest"] == sorted(found["newest"])
    assert set(found["newest"]) == {1, 2}
