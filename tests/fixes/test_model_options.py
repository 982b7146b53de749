"""Fixes that ask a model's own config for a cheaper form."""

from dataclasses import replace

import pytest

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import FixContext
from oomph.records import FixUse
from oomph.systems.ginr import PRESETS as GINR
from oomph.systems.npt import PRESETS as NPT
from oomph.training.config import OptimizerConfig
from oomph.training.workloads import AdamW, ModelFactory, RandomImages, RandomText


def npt(**changes):
    config = replace(NPT["tiny"], **changes)
    return oomph.Workload(
        ModelFactory("npt", "model", config),
        RandomText(256),
        optimizer=AdamW(OptimizerConfig()),
        sizes={"B": 2, "T": 16},
    )


def ginr(**changes):
    config = replace(GINR["tiny"], **changes)
    return oomph.Workload(
        ModelFactory("ginr", "model", config), RandomImages(3, config.image_size), sizes={"B": 2}
    )


def test_fewer_layers_are_converted_and_other_fixes_stay():
    work = fixes.apply(
        [FixUse("fewer_converted_layers", {"layers": 1}), FixUse("fused_optimizer")],
        npt(convert_layers="all"),
    )
    assert work.model().converted == (3,)
    assert [use.fix for use in work.fixes] == ["fewer_converted_layers", "fused_optimizer"]


def test_half_of_the_layers_are_proposed():
    (found,) = fixes.find("fewer_converted_layers").proposals(FixContext(None, npt()))
    assert dict(found.use.options) == {"layers": 1}


def test_every_cheaper_mixing_is_proposed():
    found = fixes.find("cheaper_mixing").proposals(FixContext(None, ginr()))
    assert [one.use.options["mixing"] for one in found] == ["cross", "feedforward", "residual"]
    work = fixes.apply([found[-1].use], ginr())
    assert work.model().config.query_mixing == "residual"


@pytest.mark.parametrize(
    ("use", "work", "message"),
    [
        (
            FixUse("fewer_converted_layers", {"layers": 2}),
            npt(),
            "layers=2 is not valid; 2 are converted: give 1 to 1",
        ),
        (
            FixUse("fewer_converted_layers", {"layers": 1}),
            ginr(),
            "not made from a config with 'convert_layers'",
        ),
        (
            FixUse("cheaper_mixing", {"mixing": "self"}),
            ginr(query_mixing="cross"),
            "cheaper than cross: feedforward, residual",
        ),
        (FixUse("cheaper_mixing", {"mixing": "cross"}), npt(), "not made from a config with 'query_mixing'"),
    ],
)
def test_what_cannot_be_is_told(use, work, message):
    with pytest.raises(UserError, match=message):
        fixes.apply([use], work)
