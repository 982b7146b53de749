"""Programs under torch.compile: what their compiled graphs allocate.

Dynamo, AOTAutograd and Inductor run as they do on a GPU, on fake tensors, up to the Python program that
Inductor generates: it allocates buffers, launches kernels and frees buffers. The trace runs that program in
place of the compiled one. Its allocations, reuses and frees are Inductor's; matrix products, convolutions and
attention run as in eager mode, with their temporaries. Triton kernels allocate nothing.

To Python, and in its dispatch keys, a fake tensor of the compiler is on CUDA. To C++ it is on the host: on
device "cuda" autograd's engine would look for a CUDA driver.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from oomph.prediction import compiler_internals as internals
from oomph.prediction.allocator import round_up
from oomph.prediction.compat.triton_stand_in import triton_importable
from oomph.prediction.isolation import can_restart, restart
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.attribution import CompiledSite, is_internal, is_loss_name
from oomph.prediction.tracer.fake_cuda import L2_CACHE, NullContext, shared_memory
from oomph.prediction.tracer.placement import PlacementMode
from oomph.prediction.tracer.streams import DEVICE, Stream, current_streams
from oomph.prediction.tracer.tracer import Tracer
from oomph.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, current_autograd_node

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE_OP = torch.ops.prim.device.default
_INTERFACE = (
    "current_device set_device device_count current_stream synchronize get_device_properties "
    "memory_allocated is_bf16_supported"
).split()
_FILE = "<compiled graph>"
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n?(.*)')


class _OnHost(TorchDispatchMode):
    """Real tensors that the compiler makes on the GPU, constants of one element, are made on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(given.get("device"), "type", "") == "cuda":
            given["device"] = _CPU
        return func(*args, **given)


class Compiler:
    """The compiler of one trace, for as long as `patches` last."""

    def __init__(self, patches: Patches, tracer: Tracer, placement: PlacementMode) -> None:
        self._patches, self._tracer, self._placement = patches, tracer, placement
        self._graph_pool = 0  # the number of a stream: CUDA graphs have memory of their own
        internals.forget_triton()
        convert = getattr(*internals.CONVERT_FRAME)

        def convert_frame(*args: Any) -> Any:
            try:
                with self._compiling(_name_of_frame(args[1])):
                    return convert(*args)
            except (internals.Unsupported, internals.FailOnRecompileLimitHit):
                raise  # as with fullgraph=True on a GPU
            except Exception as error:
                self._note_eager("a function", error)
            return internals.ConvertFrameReturn()

        patches.set(*internals.CONVERT_FRAME, convert_frame)
        set_modes = partial(internals.keep_function_mode, placement, getattr(*internals.SET_FUNCTION_MODES))
        patches.set(*internals.SET_FUNCTION_MODES, set_modes)
        patches.set(*internals.CUDA_DEVICE_GUARD, NullContext)
        # init_process_group forgets the rules: they would be those of the functions that replace torch's.
        patches.set(*internals.CLEAR_RULES, _nothing)
        internals.skip_in_dynamo("oomph.prediction")
        tracer.after_trace += [internals.reset_dynamo, internals.forget_triton]
        ignoring = warnings.catch_warnings()
        ignoring.__enter__()
        patches.callback(lambda: ignoring.__exit__(None, None, None))
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")

    def _note_eager(self, what: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._tracer.compiled_as_eager = True
        self._tracer.note_once(f"torch.compile: {what} is traced as eager, which may need more ({reason})")

    # -- the compiler's environment -------------------------------------------------------------------

    @contextlib.contextmanager
    def _compiling(self, what: str = "a backward pass") -> Iterator[None]:
        """Run the compiler as if no trace ran, on a GPU that has no driver."""
        if self._tracer.compiling:
            yield
            return
        self._tracer.compiling = True
        self._tracer.progress(f"compiling {what}", None)
        began = time.perf_counter()
        try:
            with (
                self._patches.suspended(internals.FAKE_CUDA),
                Patches() as patches,
                internals.without_function_modes(),
                internals.without_caches(),
                triton_importable(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                self._install_devices(patches)
                self._install_inductor(patches)
                yield
        finally:
            self._tracer.compiling = False
            self._tracer.compile_seconds += time.perf_counter() - began

    def _install_devices(self, patches: Patches) -> None:
        tracer = self._tracer
        dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
        functionalize = internals.FunctionalTensorMode.__torch_dispatch__
        handlers = internals.dispatch_meta_handlers

        def cpp_device(args: Sequence[Any]) -> torch.device:
            return _META if args[0].fake_mode.in_kernel_invocation else _CPU

        def dispatch_device(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cpp_device(args) if func is _DEVICE_OP else dispatch(cls, func, types, args, kwargs or {})

        def device(tensor: Any) -> torch.device:
            if tensor.fake_mode.in_kernel_invocation:
                return _META
            if tensor.fake_mode is tracer.fake_mode and tracer.recorder.is_on_gpu(tensor):
                return DEVICE
            return tensor.fake_device

        def functionalize_on_gpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and kwargs.get("device") == _CPU and current_autograd_node() is not None:
                kwargs = {**kwargs, "device": DEVICE}  # made by an autograd formula, in C++
            return functionalize(mode, func, types, args, kwargs)

        patches.set(FakeTensor, "__torch_dispatch__", classmethod(dispatch_device))
        patches.set(FakeTensor, "device", property(device))
        patches.set(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
        patches.set(internals.FunctionalTensor, "device", property(_functional_device))
        patches.set(internals.FunctionalTensorMode, "__torch_dispatch__", functionalize_on_gpu)
        for kind in (FakeTensor, internals.FunctionalTensor):
            patches.set(kind, "to", _to_method(kind.to))
            patches.set(kind, "type_as", _type_as)
            patches.set(kind, "cuda", _cuda)
            patches.set(kind, "is_cuda", property(lambda tensor: tensor.device.type == "cuda"))
        patches.set(*internals.INIT_GPU_CONTEXT, lambda device: None)
        patches.callback(lambda known=handlers[_DEVICE_OP]: handlers.update({_DEVICE_OP: known}))  # type: ignore[misc]
        handlers[_DEVICE_OP] = cpp_device
        for name in _INTERFACE:
            patches.set(internals.CudaInterface, name, staticmethod(getattr(torch.cuda, name)))

    def _install_inductor(self, patches: Patches) -> None:
        compile_fx, fold = getattr(*internals.COMPILE_FX), getattr(*internals.FOLD_CONSTANTS)
        guard_id = getattr(*internals.ID_GUARD)

        def guard_id_unless_patched(builder: Any, guard: Any, *args: Any) -> None:
            """The compiler sees torch's own functions, and the guard would find the trace's."""
            if not self._patches.has_replaced(builder.get(guard)):
                guard_id(builder, guard, *args)

        def compile_graph(graph: Any, inputs: Sequence[Any], inner: Any = None, **kwargs: Any) -> Any:
            if inner is not None or "inner_compile" in kwargs:
                return compile_fx(graph, inputs, *filter(None, [inner]), **kwargs)
            mode: Any = internals.TracingContext.get().fake_mode
            fakes = [mode.from_tensor(each) if isinstance(each, FakeTensor) else each for each in inputs]
            try:
                return compile_fx(graph, fakes, self._compile_inner, **kwargs)
            except Exception as error:
                self._note_eager("a graph", error)
            return graph

        def fold_constants(folder: Any, *args: Any, **kwargs: Any) -> Any:
            with _OnHost():
                return fold(folder, *args, **kwargs)

        gpu = self._tracer.gpu
        patches.set(*internals.CACHING_ALLOCATOR, lambda: True, missing_ok=True)
        patches.set(*internals.COMPILE_FX, compile_graph)
        patches.set(*internals.CONSTANT_LIMIT, -1)  # constants are not computed: some are moved to the GPU
        patches.set(*internals.FOLD_CONSTANTS, fold_constants)
        patches.set(*internals.ID_GUARD, guard_id_unless_patched)
        patches.set(*internals.MODE_STACK_GUARD, lambda builder, guard: None)  # the trace's own mode is on it
        patches.set(*internals.SHOULD_PAD, self._pads_product)
        patches.set(*internals.TRITON_DRIVER, internals.triton_driver(gpu.capability, shared_memory(gpu)))
        patches.set(*internals.TRITON_HASH, lambda: "")
        patches.set(*internals.CUDA_SYSTEM_INFO, lambda: "")

    def _pads_product(self, match: Any, left: Any, right: Any, op: Any, input: Any = None) -> bool:
        """Whether Inductor pads a product whose rows are not aligned.

        It times both on the GPU. The padded one is taken to win if a size is odd and the product is bound by
        compute: rows that are not aligned to four bytes cannot be copied asynchronously.
        """
        gpu = self._tracer.gpu
        with contextlib.ExitStack() as timed:
            for size in _timed(left, right):
                timed.enter_context(self._tracer.workspace(size, "inductor.benchmark"))
        if left.dtype not in (torch.float16, torch.bfloat16) or not gpu.bf16_tflops or not gpu.bandwidth:
            return False
        m, k, n = (int(size) for size in (left.shape[-2], left.shape[-1], right.shape[-1]))
        intensity = m * n * k / max(m * k + k * n + m * n, 1)
        is_odd = m % 2 or k % 2 or n % 2
        pads = bool(is_odd) and intensity > 0.5 * 1e12 * gpu.bf16_tflops / gpu.bandwidth
        if pads:
            self._tracer.note_once("torch.compile: products with odd sizes are taken to be padded")
        return pads

    # -- graphs ---------------------------------------------------------------------------------------

    def _compile_inner(self, graph: Any, inputs: Sequence[Any], **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Compile one forward or backward graph up to Inductor's generated program."""
        programs: list[Any] = []

        def keep(lowering: Any, code: Any) -> Any:
            programs.append((code.value, list(code.line_map), dict(lowering.constants)))
            return SimpleNamespace(call=lambda args: None, __file__="")

        with self._compiling(), Patches() as patches:
            patches.set(*internals.COMPILE_TO_MODULE, keep)
            if internals.autotunes():
                self._tracer.note_once("torch.compile: without autotuning; products are cuBLAS's")
            cuda_graphs = bool(kwargs.get("cudagraphs"))
            kwargs["cudagraphs"] = internals.BoxedBool(False)
            with internals.without_autotuning():
                result = internals.compile_fx_inner(graph, inputs, **kwargs)
            if not programs:  # a graph without ops
                return result
        call = self._load(*programs[-1])
        if cuda_graphs:
            call = self._in_graph_pool(call, frozenset(kwargs.get("static_input_idxs") or ()))

        def run(args: list[Any]) -> Any:
            try:
                with self._placement.for_program():
                    return call(args)
            except Exception:
                if can_restart():
                    restart("compiled programs")
                raise

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _load(self, code: str, lines: Sequence[Any], constants: Mapping[str, Any]) -> Callable[..., Any]:
        """The generated program, with tensors of the trace."""
        count = self._tracer.count_kernel

        class Kernel:
            def run(self, *args: Any, **kwargs: Any) -> None:
                count(*(each for each in args if isinstance(each, torch.Tensor)))

        class AsyncCompile:
            def __getattr__(self, name: str) -> Any:
                return lambda *args, **kwargs: Kernel()

        program: dict[str, Any] = {"__name__": _FILE}
        with Patches() as patches, triton_importable():
            patches.set(*internals.ASYNC_COMPILE, AsyncCompile)
            code = code.replace("torch.ops.higher_order.run_", "run_")  # ops with random numbers
            exec(compile(code, _FILE, "exec"), program)
        program.update(
            empty_strided_cuda=_empty_strided,
            reinterpret_tensor=_reinterpret,
            assert_size_stride=_nothing,
            assert_alignment=_nothing,
            run_and_save_rng_state=lambda op, *args, **kwargs: (torch.zeros(16), op(*args, **kwargs)),
            run_with_rng_state=lambda state, op, *args, **kwargs: op(*args, **kwargs),
        )
        for name, constant in constants.items():
            size, stride = constant.size(), constant.stride()
            with self._placement.for_program():
                program[name] = torch.empty_strided(
                    size, stride, dtype=constant.dtype, device=constant.device
                )
        site = _site_of_line(lines)
        call = program["call"]
        self._tracer.boundary.compiled[getattr(call, "__func__", call).__code__] = site
        return call

    def _in_graph_pool(self, call: Callable[..., Any], static: frozenset[int]) -> Callable[..., Any]:
        """A graph that is captured as a CUDA graph.

        Its memory is not shared with the rest of the program. Inputs that may move are copied into it; the
        copies last as long as the graph runs.
        """
        tracer = self._tracer
        if not self._graph_pool:
            self._graph_pool = current_streams().number(Stream())
        tracer.note_once("CUDA graphs: their inputs are copied, and their memory is kept apart")

        def run(args: list[Any]) -> Any:
            before, tracer.graph_pool = tracer.graph_pool, self._graph_pool
            try:
                given = [each for index, each in enumerate(args) if index not in static]
                copies = [torch.empty_like(each) for each in given if isinstance(each, torch.Tensor)]
                del given
                result = call(args)
                del copies
                return result
            finally:
                tracer.graph_pool = before

        return run


def _timed(left: Any, right: Any) -> list[int]:
    """Bytes that Inductor takes to time a product: factors made anew, padded ones and their product, and a
    buffer that is written to clear the cache (_inductor/fx_passes/pad_mm.py, runtime/benchmarking.py)."""
    item, aligned = left.element_size(), 16 // left.element_size()
    batch = math.prod(int(size) for size in left.shape[:-2])
    given = [int(size) for size in (left.shape[-2], left.shape[-1], right.shape[-1])]
    m, k, n = padded = [size if size == 1 else round_up(size, aligned) for size in given]
    factors = [batch * given[0] * given[1] * item, batch * given[1] * given[2] * item]
    copies = [batch * m * k * item] if padded[:2] != given[:2] else []
    copies += [batch * k * n * item] if padded[1:] != given[1:] else []
    return [*factors, L2_CACHE, *copies, batch * m * n * item]


def _name_of_frame(frame: Any) -> str:
    """The class of the module whose method is compiled, or the function."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return type(first).__name__ if isinstance(first, torch.nn.Module) else str(code.co_name)


def _functional_device(tensor: Any) -> torch.device:
    device: torch.device = internals.from_functional_tensor(tensor.elem).device
    return device


def _to_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.to(other)` reads the device in C++."""

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        return method(tensor, *args, **kwargs)

    return to


def _type_as(tensor: Any, other: torch.Tensor) -> Any:
    return tensor.to(other)


def _cuda(tensor: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    return tensor.to(DEVICE, non_blocking=non_blocking, **options)


# Dynamo traces into what a tensor has under another name, and fails.
_type_as.__name__, _cuda.__name__ = "type_as", "cuda"


def _nothing(*args: Any) -> None:
    return None


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=DEVICE)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


# ---------------------------------------------------------------------------------------------- attribution


def _site_of_line(lines: Sequence[tuple[int, Any]]) -> Callable[[int], CompiledSite | None]:
    """For a line of a generated program: the user's line, from the graph node that it was generated for."""
    numbers = [number for number, _ in lines]
    sites: dict[int, CompiledSite | None] = {}

    def site(line: int) -> CompiledSite | None:
        index = bisect.bisect_right(numbers, line) - 1
        if index < 0:
            return None
        if index not in sites:
            sites[index] = _site_of_node(lines[index][1])
        return sites[index]

    return site


def _site_of_node(node: Any) -> CompiledSite | None:
    frames = [match.groups() for match in _FRAME.finditer(getattr(node, "stack_trace", None) or "")]
    own = [frame for frame in frames if not is_internal(frame[0])]
    if not own:
        return None
    meta = getattr(node, "meta", {})
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = list(modules.values())[-1][0] if modules else ""
    file, line, function, text = own[-1]
    op = str(getattr(node, "target", "")).removesuffix(".default")
    is_loss = is_loss_name(text) or any(is_loss_name(frame[2]) for frame in own)
    return CompiledSite(file, int(line), function, _module_path(path), op, is_loss)


def _module_path(path: str) -> str:
    """`transformer.h.0.attn` of "L['self'].transformer.h[0].attn" or "L['self']._modules['h']..."."""
    path = re.sub(r"_modules\['(\w+)'\]|\[(\w+)\]", r".\1\2", path)
    parts = re.sub(r"^L\['\w+'\]|^G\['\w+'\]", "", path).split(".")
    return ".".join(part for part in parts if part and part not in ("_orig_mod", "self"))
