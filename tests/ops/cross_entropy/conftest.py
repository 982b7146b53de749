"""Every test here runs with poisoned memory."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poisoned): ...
