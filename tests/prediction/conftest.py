"""Fixtures that several files of this folder share."""

import pytest
from small_programs import linear_workload, stack_workload

import oomph
from oomph.prediction.ops.rules import RuleGuard


@pytest.fixture(autouse=True, scope="module")
def _strict_rules():
    """A rule that raises fails its test, instead of falling back to an estimate."""
    before, RuleGuard.strict = RuleGuard.strict, True
    yield
    RuleGuard.strict = before


@pytest.fixture(scope="module")
def linear():
    return oomph.predict(linear_workload(), gpu="h200")


@pytest.fixture(scope="module")
def stack():
    return oomph.predict(stack_workload(), gpu="h200")
