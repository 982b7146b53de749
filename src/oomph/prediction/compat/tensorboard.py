"""TensorBoard: add_graph compiles the model to draw it. It runs once, and the graph is empty."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _draw_nothing(patches: Patches, tracer: Tracer) -> None:
    from tensorboard.compat.proto.config_pb2 import RunMetadata
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    def graph(model: Any, args: Any, verbose: bool = False, use_strict_trace: bool = True) -> tuple[Any, Any]:
        model(*(args if isinstance(args, (list, tuple)) else [args]))
        return GraphDef(), RunMetadata()

    patches.set(sys.modules[_WRITER], "graph", graph)


_WRITER = "torch.utils.tensorboard.writer"
LIBRARY = Library("TensorBoard", _WRITER, in_trace=_draw_nothing)
