"""Data of a run: sources, tokenizers, and batches that are streamed, packed, shuffled and resumable."""

from oomph.training.data.opening import Data, open_data
from oomph.training.data.settings import DataSettings
from oomph.training.data.stages import Schedule, Stage
from oomph.training.data.tokens import Tokenizer

__all__ = ["Data", "DataSettings", "Schedule", "Stage", "Tokenizer", "open_data"]
