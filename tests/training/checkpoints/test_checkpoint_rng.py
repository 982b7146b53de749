"""Random numbers go on where they were."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oomph.errors import UserError
from oomph.training.checkpoints import Checkpoints, rng_state, set_rng_state


def draw() -> list[Any]:
    return [
        *(random.random(), random.gauss(0, 1)),
        *(torch.rand(3).tolist(), torch.randn(17).tolist()),
        *(np.random.rand(), np.random.randn()),
    ]


def test_every_generator_goes_on_where_it_was_when_saved(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number waiting, which is part of the state
    np.random.randn()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"rng": rng_state()})
    checkpoints.close()
    expected = draw()
    draw()
    saved = checkpoints.latest()
    assert saved is not None
    set_rng_state(checkpoints.load(saved)["rng"])
    assert draw() == expected


def test_the_state_is_tensors_and_plain_data() -> None:
    state = rng_state()
    assert isinstance(state.pop("torch"), torch.Tensor)
    state.pop("cuda", None)
    json.dumps(state)


def test_a_state_that_is_none_is_one_line() -> None:
    with pytest.raises(UserError, match="random number state cannot be used here"):
        set_rng_state({"python": {"version": 1, "numbers": [], "gauss": None}})
