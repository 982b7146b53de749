"""Every private torch API that oomph uses, under a name of its own.

No other file of oomph reaches into torch's private names, so this file is all there is to read when a torch
release moves something. `self_test` names what is missing in one sentence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._C import DisableTorchFunction as disable_torch_function
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _will_engine_execute_node as will_engine_execute_node
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes

__all__ = [
    "FakeTensor",
    "current_graph_task_id",
    "disable_dispatch_modes",
    "disable_torch_function",
    "dynamo_config_patch",
    "get_eval_frame_callback",
    "will_engine_execute_node",
]

# ops.softmax_attention.flex


def dynamo_config_patch(**options: Any) -> AbstractContextManager[None]:
    """torch._dynamo.config.patch. Imported when called: loading the compiler takes seconds."""
    import torch._dynamo.config

    return torch._dynamo.config.patch(**options)
