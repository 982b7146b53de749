"""A config as the TARGET of `oomph predict`, `diagnose`, `fixes`, `fit`, `verify` and `measure`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from oomph_lab.training.config import TrainConfig, find_config, load, overrides_from_words, parse_override

if TYPE_CHECKING:
    from oomph.parallel import Parallel
    from oomph.workload import Workload


class ConfigTarget:
    """See oomph.cli.extensions.Config. The file is read when the config is first asked for, and once."""

    def __init__(self, file: str, words: Sequence[str]) -> None:
        self.file, self.overrides = file, overrides_from_words(words)
        find_config(file)
        for word in self.overrides:
            parse_override(word)

    @cached_property
    def config(self) -> TrainConfig:
        return load(self.file, self.overrides)

    @property
    def memory_limit(self) -> str | None:
        return self.config.training.memory_limit

    def workload(self) -> Workload:
        from oomph_lab.training.step import predicted_workload

        return predicted_workload(self.config)

    def on_ranks(self, workload: Workload, parallel: Parallel, chosen: bool) -> Workload:
        from oomph_lab.training.ranks import parallel_of
        from oomph_lab.training.step import on_ranks

        return on_ranks(workload, parallel_of(self.config, parallel.ranks, parallel if chosen else None))
