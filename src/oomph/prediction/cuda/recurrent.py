"""nn.LSTM, nn.GRU and nn.RNN as cuDNN runs them: one op per call, not one per time step.

The composites dissolve into cells above the dispatch mode, so CUDA's path is taken at autograd's key. A call
makes what _cudnn_rnn makes on a GPU (ATen/native/cudnn/RNN.cpp): the results, a workspace while it runs and a
reserve kept for the backward pass, which in turn makes one flat gradient for all weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda.recurrent_memory import Recurrence, reserve_bytes, workspace_bytes

aten = torch.ops.aten
Tensor = torch.Tensor

_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_ACCEPTED = (torch.float64, torch.float32, torch.float16)  # what torch hands to cuDNN's recurrent kernels
_DROPOUT_STATE_PER_MULTIPROCESSOR = 2048 * 24  # a random number generator per thread; measured on an H200


@dataclass(frozen=True)
class _Path:
    """The decision for one trace: which tensors are the GPU's, and what it keeps."""

    on_gpu: Callable[[Any], bool]
    gpu: GPU
    dropout_state: list[Tensor]  # made at the first dropout and kept for good
