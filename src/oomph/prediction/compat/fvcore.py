"""fvcore counts operations in a graph of torch.jit. It gets an empty one, which takes no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches
from oomph.torch_internals import GET_TRACE_GRAPH

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _trace_no_graph(patches: Patches, tracer: Tracer) -> None:
    def get_trace_graph(program: Any, args: Any = (), kwargs: Any = None, *_: Any, **__: Any) -> Any:
        return torch.Graph(), program(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))

    patches.set(*GET_TRACE_GRAPH, get_trace_graph)


LIBRARY = Library("fvcore", None, in_trace=_trace_no_graph)  # it imports the function by name
