"""On two ranks: a vocabulary-sharded weight, and FSDP2."""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

import ce_fsdp
import ce_split
from ce_ranks import Work, failures_of

WORKS: list[Work] = [
    ce_split.losses_and_gradients_are_those_of_the_whole_vocabulary,
    ce_split.what_cannot_be_split_is_refused,
    ce_fsdp.a_sharded_model_trains_like_the_whole_one,
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_of(WORKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_on_two_ranks(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
