"""Fixtures that several files of this folder share."""

from __future__ import annotations

import pytest
from small_programs import linear_workload, stack_workload

import oomph
from oomph import Prediction
from oomph.prediction.cuda.rules import RuleGuard


@pytest.fixture(autouse=True, scope="session")
def _strict_rules() -> None:
    """A rule that raises fails its test, instead of falling back to an estimate."""
    RuleGuard.strict = True


@pytest.fixture(scope="session")
def linear() -> Prediction:
    return oomph.predict(linear_workload(), gpu="h200")


@pytest.fixture(scope="session")
def stack() -> Prediction:
    return oomph.predict(stack_workload(), gpu="h200")
