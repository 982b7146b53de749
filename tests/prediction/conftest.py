"""Fixtures that several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_programs import linear_workload, stack_workload

import oomph
from oomph import Prediction
from oomph.prediction.cuda.rules import RuleGuard


@pytest.fixture(autouse=True, scope="module")
def _strict_rules() -> Iterator[None]:
    """A rule that raises fails its test, instead of falling back to an estimate."""
    before, RuleGuard.strict = RuleGuard.strict, True
    yield
    RuleGuard.strict = before


@pytest.fixture(scope="module")
def linear() -> Prediction:
    return oomph.predict(linear_workload(), gpu="h200")


@pytest.fixture(scope="module")
def stack() -> Prediction:
    return oomph.predict(stack_workload(), gpu="h200")
