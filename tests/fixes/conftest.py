"""Small workloads that the fixes are tried on."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _in_process(in_process):
    """Predictions of every test here."""
