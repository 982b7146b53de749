"""Data of a run: sources, tokenizers, and batches that are streamed, packed, shuffled and resumable."""

from oomph_lab.training.data.loader import STOP_SIGNALS, Data, open_data
from oomph_lab.training.data.tokenizers import Tokenizer

__all__ = ["STOP_SIGNALS", "Data", "Tokenizer", "open_data"]
