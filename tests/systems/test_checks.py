"""A config reports all of its invalid fields together."""

from __future__ import annotations

import pytest

from oomph.systems.config_checks import InvalidConfig, InvalidField
from oomph.systems.hatchling import HatchlingConfig
from oomph.systems.longctx import PRESETS, LongContextConfig
from oomph.systems.npt import NPTConfig
from oomph.systems.pythia import PythiaConfig


def problems(config, **fields):
    with pytest.raises(InvalidConfig) as caught:
        config(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (HatchlingConfig, {"d_model": 0, "gate": "gru", "lam": -1.0, "token_drop_layers": (5, 4)}),
        (PythiaConfig, {"vocab_size": 2.5, "parallel_residual": 1, "positions": "none", "sparse": "all"}),
        (NPTConfig, {"model_name": "bert", "stream": "both", "rank": 0, "regularization": -1}),
    ],
)
def test_every_wrong_field_has_its_line(config, fields):
    error = problems(config, **fields)
    assert {problem.field for problem in error.problems} == set(fields)
    assert len(str(error).splitlines()) == len(fields)
    assert all(line.startswith(config.__name__) for line in str(error).splitlines())


def test_what_depends_on_a_wrong_field_is_not_computed():
    error = problems(PythiaConfig, num_heads="eight", hidden_size=0, positions="rotary")
    assert [problem.field for problem in error.problems] == ["hidden_size", "num_heads"]


def test_a_field_is_refused_for_one_reason():
    fields = {**vars(PRESETS["tiny"]), "head_dim": 0, "rope_theta": "large"}
    assert problems(LongContextConfig, **fields).problems == (
        InvalidField("head_dim", 0, "give a whole number >= 1"),
        InvalidField("rope_theta", "large", "give a number >= 0"),
    )
