"""Every private torch API that oomph uses, under a name of its own.

No other file of oomph reaches into torch's private names, so this file is all there is to read when a torch
release moves something. `self_test` names what is missing in one sentence.
"""

from __future__ import annotations

from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["FakeTensor", "get_eval_frame_callback"]
