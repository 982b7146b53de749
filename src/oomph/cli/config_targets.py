"""TARGET as one of our configs: `configs/longctx_4b.yaml model.attention=nsa`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.workload import Workload


def is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def check_config(target: str, overrides: Sequence[str]) -> None:
    """Raise for mistakes that show before the config, and torch with it, is loaded."""
    from oomph.training.config.reading import check_file, overrides_from_words, parse_override

    check_file(target)
    for word in overrides_from_words(overrides):
        parse_override(word)


def open_config(target: str, overrides: Sequence[str]) -> Workload:
    from oomph.training.config import load, overrides_from_words
    from oomph.training.workloads import predicted_workload

    return predicted_workload(load(target, overrides_from_words(overrides)))


def config_limit(target: str, overrides: Sequence[str]) -> str | None:
    """A config's own training.memory_limit; a program has none."""
    if not is_config(target):
        return None
    from oomph.training.config import load, overrides_from_words

    return load(target, overrides_from_words(overrides)).training.memory_limit
