"""A tokenizer takes longer to learn than most of these runs; one that was learnt is used again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def learnt_tokenizer(config: Any, run: Path) -> Iterator[None]:
    """`run`: the folder of a run that begins inside; all that are tokenised here are of one source."""
    kept = Path(tempfile.gettempdir()) / f"oomph-{config.data.tokenizer}-{config.data.vocab_size}"
    if kept.exists():
        shutil.copytree(kept, run)
    yield
    if config.data.tokenizer is not None and not kept.exists():
        partly = Path(tempfile.mkdtemp(dir=kept.parent))
        for file in run.glob("tokenizer*.json"):
            shutil.copy(file, partly)
        try:
            partly.rename(kept)
        except OSError:  # another run was first
            shutil.rmtree(partly)
