"""One trace: everything that has to be in place while a program runs on the pretend GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda import recurrent
from oomph.prediction.cuda.autocast import cuda_autocast
from oomph.prediction.cuda.composites import cuda_composites
from oomph.prediction.trace import estimates, hooks, pretend_cuda, program_view, streams
from oomph.prediction.trace.dispatch import DispatchMode
from oomph.prediction.trace.module_moves import move_modules_in_place
from oomph.prediction.trace.oplog import OpLog
from oomph.prediction.trace.patching import Patches
from oomph.prediction.trace.placement import PlacementMode
from oomph.prediction.trace.tracer import Tracer


@contextlib.contextmanager
def tracing(gpu: GPU, log: OpLog | None = None) -> Iterator[Tracer]:
    """Run the body on a pretend `gpu`. Whatever happens in it, torch is afterwards as it was before."""
    tracer = Tracer(gpu)
    with contextlib.ExitStack() as stack:
        stack.callback(tracer.ledger.close)
        patches = stack.enter_context(Patches())
        tracer.log = log
        # It logs the inner workings of every shape error; the error itself is enough.
        patches.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        pretend_cuda.pretend(patches, gpu, tracer.ledger)
        streams.now.on_other = tracer.note_stream
        stack.enter_context(torch.inference_mode(False))  # the caller's own modes are not the program's
        stack.enter_context(torch.enable_grad())
        placement, dispatch = PlacementMode(tracer), DispatchMode(tracer)
        hooks.run_saved_tensor_hooks_as_program(patches, placement)
        hooks.follow_backward(patches, tracer)
        hooks.follow_optimizers(patches, stack, tracer)
        hooks.remember_parameters(patches, tracer)
        move_modules_in_place(patches, tracer)
        hooks.keep_function_mode_on(patches)
        program_view.keep_default_device(patches, placement)
        program_view.answer_device(patches, tracer)
        program_view.copy_without_data(patches)
        program_view.hide_the_trace(patches)
        program_view.format_scalars(patches)
        program_view.save_nothing(patches, tracer)
        program_view.make_generators_on_the_host(patches)
        program_view.follow_resized_storages(patches, tracer)
        program_view.run_compiled_as_eager(patches, tracer)
        patches.set(torch.nn.RNNBase, "flatten_parameters", recurrent.flatten_parameters(tracer.on_gpu))
        tracer.modules.follow(patches, tracer.boundary)
        program_view.keep_defaults(patches)
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(cuda_composites(tracer.on_gpu, gpu, estimates.note_one_hot, tracer.count_kernel))
        stack.enter_context(cuda_autocast(tracer.on_gpu))
        stack.enter_context(placement)
        stack.enter_context(dispatch)
        yield tracer
