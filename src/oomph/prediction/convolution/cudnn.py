"""The workspaces of convolutions as cuDNN states them, without a GPU.

cuDNN 9.8 and later chooses algorithms for a GPU that it only has a description of (deviceless ahead-of-time
compilation). The library comes with every CUDA build of torch, and as the package nvidia-cudnn-cu13. It
is not asked if the environment variable OOMPH_CUDNN is 0. Where there is a driver of GPUs, it is asked in
another process, from which GPUs are hidden: cuDNN would start the driver, which takes 520 MiB of an H200, and
which forks of a process that has started it cannot ask.

As in torch (ATen/native/cudnn/Conv_v8.cpp), the first configuration of cuDNN's heuristics that makes a plan
is taken, and its fallback list comes after them. Without a GPU, cuDNN makes no plan for engines that load
their kernels through the driver or call cuBLAS: Fourier transforms, Winograd's method, matrix products. It
leaves them out of its answer, and names them in its log, in their place. For which convolutions the card has
these engines, and their workspaces (workspaces.py), are known by measurements: of 8,000 random convolutions
on an H200, cuDNN's lists are then the same with and without the GPU. Of engines that only lack the driver,
which the log states, the card has all.

Kernels of Hopper's cards split sums so that all multiprocessors have a part. How multiprocessors are grouped
is not part of a card's description, and the parts that cuDNN states without it are often others than those of
a run. `parts_of_sums` gives as many as all multiprocessors compute at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import marshal
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from oomph.gpus import GPU, Capability
from oomph.prediction.allocator import round_up

Pass = Literal["forward", "data", "weight"]
T = TypeVar("T")
Algorithm = Literal["fourier", "winograd", "product", "direct"]

_LEAST_VERSION = 90800  # has descriptions of GPUs
_CUDA_ERROR_NO_DEVICE = 100


# Parts of the enumerations of cudnn_graph.h, by the names that they have there.


class _Kind(IntEnum):
    """CUDNN_BACKEND_..._DESCRIPTOR"""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATIONGRAPH = 15
    TENSOR = 17
    DEVICEPROP = 38


class _Type(IntEnum):
    """CUDNN_TYPE_..."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    NUMERICAL_NOTE = 11
    BACKEND_DESCRIPTOR = 15
    CHAR = 24


class _Attribute(IntEnum):
    """CUDNN_ATTR_..."""

    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_JSON_REPRESENTATION = 405
    EXECUTION_PLAN_DEVICEPROP = 407
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    ENGINE_NUMERICAL_NOTE = 1303
    DEVICEPROP_JSON_REPRESENTATION = 2702


# An operation, and its attributes: input, weight, output, convolution, alpha and beta.
_OPERATIONS: dict[Pass, tuple[_Kind, tuple[int, ...]]] = {
    "forward": (_Kind.OPERATION_CONVOLUTION_FORWARD, (704, 703, 705, 702, 700, 701)),
    "data": (_Kind.OPERATION_CONVOLUTION_BACKWARD_DATA, (710, 709, 711, 708, 706, 707)),
    "weight": (_Kind.OPERATION_CONVOLUTION_BACKWARD_FILTER, (716, 715, 717, 714, 712, 713)),
}
_DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
_CROSS_CORRELATION = 1
_HEUR_MODE_INSTANT, _HEUR_MODE_FALLBACK = 0, 2
_SEV_INFO_EN = 1 << 3
_NOTE_TENSOR_CORE, _NOTE_DOWN_CONVERT_INPUTS, _NOTE_NONDETERMINISTIC = 0, 1, 4
_C_TYPES: dict[_Type, Any] = {
    _Type.INT64: ctypes.c_int64,
    _Type.FLOAT: ctypes.c_float,
    _Type.DOUBLE: ctypes.c_double,
    _Type.BACKEND_DESCRIPTOR: ctypes.c_void_p,
    _Type.CHAR: ctypes.c_char,
}  # others are enumerations

# Engines that make no plan without a GPU, by their numbers in cuDNN 9.19 and 9.26.
_ENGINES_OF_GPU: dict[tuple[Pass, int], Algorithm] = {
    ("forward", 3): "fourier",
    ("data", 50): "fourier",
    ("weight", 18): "fourier",
    ("forward", 6): "winograd",
    ("data", 7): "winograd",
    ("weight", 17): "winograd",
    ("forward", 58): "product",
    ("data", 63): "product",
    ("weight", 62): "product",
}
_ENGINE_CONFIG = re.compile(r'engineConfig: type=json; val=\{"engineId":(\d+)')
_NO_DRIVER = "libcuda == nullptr"
# Tiles of results that kernels of Hopper's cards compute, by CUDNN_KNOB_TYPE_TILE_SIZE.
_HOPPER: Capability = (9, 0)
_TILES = {
    0: (128, 128),
    1: (128, 64),
    3: (256, 128),
    4: (256, 64),
    5: (64, 64),
    6: (128, 256),
    7: (64, 128),
    9: (64, 256),
}
_KNOB = re.compile(rb'CUDNN_KNOB_TYPE_(\w+)\\?":(\d+)')
_EXTRA_BYTES = 1700  # that belong to no tile
_LONGEST_TRANSFORM = 256  # rows or columns of a padded image
_WIDEST_KERNEL_IN_TILES = 32  # rows or columns
_WINOGRAD_KERNELS = (3, 3), (5, 5)

# Of a multiprocessor: bytes of shared memory for a block, bytes of it that the system keeps, blocks, threads
# (CUDA C++ Programming Guide, technical specifications per compute capability).
_MULTIPROCESSORS: dict[Capability, tuple[int, int, int, int]] = {
    (7, 5): (65536, 0, 16, 1024),
    (8, 0): (166912, 1024, 32, 2048),
    (8, 6): (101376, 1024, 16, 1536),
    (8, 9): (101376, 1024, 24, 1536),
    (9, 0): (232448, 1024, 32, 2048),
    (10, 0): (232448, 1024, 32, 2048),
    (10, 3): (232448, 1024, 32, 2048),
    (12, 0): (101376, 1024, 24, 1536),
}


class ConvolutionPass(NamedTuple):
    """A pass of a convolution; a transposed one is the data gradient of another."""

    kind: Pass
    input: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    deterministic: bool
    tf32: bool


class _Error(Exception):
    """cuDNN does not support what was asked for."""


# ------------------------------------------------------------------------------ in this process or in another


class _OtherProcess:
    """Of Python, without a GPU. It imports nothing before the first question, and ends when its input does.

    Forks of this process may ask as well, one at a time.
    """

    def __init__(self) -> None:
        code = f"import select, sys; select.select([0], [], []); sys.path[:] = {sys.path!r}; "
        code += f"from {__name__} import answer_questions; answer_questions()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is for this one, which ends that one
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._between_forks, self._between_threads = tempfile.TemporaryFile(), threading.Lock()  # noqa: SIM115
        self._asked = itertools.count()

    def ask(self, name: str, args: tuple[Any, ...]) -> Any:
        import fcntl  # not on Windows, where no process is a fork

        number = os.getpid(), next(self._asked)
        question = pickle.dumps((number, name, args))
        with self._between_threads, contextlib.suppress(OSError, EOFError, ValueError):
            fcntl.lockf(self._between_forks, fcntl.LOCK_EX)
            try:
                _write(self._questions.fileno(), question)
                while True:
                    of, answer = marshal.loads(_read(self._answers.fileno()))
                    if of == number:  # not to a question of a fork that has ended
                        return answer
            finally:
                fcntl.lockf(self._between_forks, fcntl.LOCK_UN)
        return None

    def end(self) -> None:
        with self._process, contextlib.suppress(BrokenPipeError):
            self._questions.close()
        self._between_forks.close()


_LENGTH = struct.Struct("q")
_other_process: _OtherProcess | None = None


def _write(pipe: int, message: bytes) -> None:
    message = _LENGTH.pack(len(message)) + message
    while message:
        message = message[os.write(pipe, message) :]


def _read(pipe: int) -> bytes:
    def exactly(count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = os.read(pipe, count - len(found))
            if not part:
                raise EOFError
            found += part
        return found

    [length] = _LENGTH.unpack(exactly(_LENGTH.size))
    return exactly(length)


@contextlib.contextmanager
def asked_without_gpu(always: bool = False) -> Iterator[None]:
    """While it lasts, cuDNN is asked in another process, if there is a driver of GPUs, or `always`."""
    global _other_process
    has_driver = os.environ.get("OOMPH_CUDNN") != "0" and _driver() is not None
    if _other_process is not None or not (always or has_driver) or sys.platform == "win32":
        yield
        return
    _other_process = _OtherProcess()
    try:
        yield
    finally:
        _other_process.end()
        _other_process = None


def answer_questions() -> None:
    """What the other process runs."""
    functions: dict[str, Callable[..., Any]] = {each.__name__: each for each in _ASKED}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            number, name, args = pickle.loads(_read(0))
            _write(1, marshal.dumps((number, functions[name](*args))))


_ASKED: list[Callable[..., Any]] = []


def _asked(function: Callable[..., T]) -> Callable[..., T]:
    _ASKED.append(function)
    here = functools.lru_cache(maxsize=4096)(function)
    elsewhere = functools.lru_cache(maxsize=4096)(lambda asked, *args: asked.ask(function.__name__, args))

    @functools.wraps(function)
    def ask(*args: Any) -> T:
        answer: T = here(*args) if _other_process is None else elsewhere(_other_process, *args)
        return answer

    return ask


# ---------------------------------------------------------------------------------------------- what is asked


@_asked
def version(gpu: GPU) -> str | None:
    """Of the library that is asked about the card, as "9.19.0"."""
    library = _library()
    if library is None or gpu.capability not in _MULTIPROCESSORS:
        return None
    return f"{library.version // 10000}.{library.version // 100 % 100}.{library.version % 100}"


@_asked
def workspace(conv_pass: ConvolutionPass, gpu: GPU, but: Algorithm | None = None) -> int | Algorithm | None:
    """Bytes of the algorithm that torch takes, or the algorithm's name if cuDNN does not state its workspace
    without a GPU; of the next one, if it is `but`. None where cuDNN cannot be asked."""
    with contextlib.suppress(_Error):
        listed = _workspaces(conv_pass, gpu, in_order=True)
        return next((each for each in listed if each != but), None)
    return None


@_asked
def workspaces(conv_pass: ConvolutionPass, gpu: GPU) -> frozenset[int | Algorithm]:
    """The same of all algorithms that torch may take; none where cuDNN cannot be asked."""
    with contextlib.suppress(_Error):
        return frozenset(_workspaces(conv_pass, gpu, in_order=False))
    return frozenset()


def _workspaces(conv_pass: ConvolutionPass, gpu: GPU, in_order: bool) -> Iterator[int | Algorithm]:
    library = _library()
    if library is None or conv_pass.dtype not in _DATA_TYPES or gpu.capability not in _MULTIPROCESSORS:
        return
    card, graph = _card(library, gpu), _graph(library, conv_pass)
    for mode in (_HEUR_MODE_INSTANT, _HEUR_MODE_FALLBACK):
        heuristics = library.descriptor(_Kind.ENGINEHEUR)
        heuristics.set_descriptors(_Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
        heuristics.set_descriptors(_Attribute.ENGINEHEUR_DEVICEPROP, card)
        heuristics.set(_Attribute.ENGINEHEUR_MODE, _Type.HEUR_MODE, mode)
        for listed in _listed(library, heuristics.finalize(), in_order):
            if isinstance(listed, LeftOut):
                algorithm = _ENGINES_OF_GPU.get((conv_pass.kind, listed.engine))
                if listed.lacks_driver:
                    yield "direct"
                elif algorithm is not None and has(algorithm, conv_pass):
                    yield algorithm
                continue
            [engine] = listed.get_descriptors(_Attribute.ENGINECFG_ENGINE, _Kind.ENGINE)
            notes = engine.get(_Attribute.ENGINE_NUMERICAL_NOTE, _Type.NUMERICAL_NOTE)
            if not _is_allowed(notes, conv_pass):
                continue
            plan = library.descriptor(_Kind.EXECUTION_PLAN)
            plan.set_descriptors(_Attribute.EXECUTION_PLAN_ENGINE_CONFIG, listed)
            plan.set_descriptors(_Attribute.EXECUTION_PLAN_DEVICEPROP, card)
            with contextlib.suppress(_Error):
                [stated] = plan.finalize().get(_Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, _Type.INT64)
                yield _on_card(stated, plan, conv_pass, gpu)


def _on_card(stated: int, plan: _Descriptor, conv_pass: ConvolutionPass, gpu: GPU) -> int:
    """The workspace with the parts of sums that all multiprocessors compute at a time."""
    (batch, channels, *image), (outputs, in_group, *kernel) = conv_pass.input, conv_pass.weight
    strided_data = conv_pass.kind == "data" and max(conv_pass.stride) > 1
    if gpu.capability != _HOPPER or max(kernel) == 1 or channels > in_group or strided_data:
        return stated
    text = bytes(plan.get(_Attribute.EXECUTION_PLAN_JSON_REPRESENTATION, _Type.CHAR))
    knobs = {name: int(value) for name, value in _KNOB.findall(text)}
    tile = _TILES.get(knobs.get(b"TILE_SIZE", -1))
    cluster = knobs.get(b"TILE_CGA_M", 0), knobs.get(b"TILE_CGA_N", 0)
    if knobs.get(b"WORKSPACE") != 0 or tile is None or not math.prod(cluster):
        return stated
    copies, tile_bytes = 0, 4 * math.prod(tile)
    if not conv_pass.channels_last:  # in NHWC, with channels in multiples of 16 bytes
        item = conv_pass.dtype.itemsize
        channels, outputs = (round_up(each * item, 16) // item for each in (channels, outputs))
        planes = batch * (channels * math.prod(image) + outputs * math.prod(conv_pass.output[2:]))
        copies = item * (planes + channels * outputs * math.prod(kernel))
    extra = (stated - copies) % tile_bytes
    if stated < copies or extra > _EXTRA_BYTES:
        return stated
    return copies + extra + tile_bytes * parts_of_sums(conv_pass, tile, cluster, gpu.multiprocessors)


def parts_of_sums(
    conv_pass: ConvolutionPass, tile: tuple[int, int], cluster: tuple[int, int], multiprocessors: int
) -> int:
    """How many tiles are held. Those of the last wave are split into as many parts as the multiprocessors
    can compute at a time, in whole clusters, if the parts are long enough."""
    slots = multiprocessors // math.prod(cluster) * math.prod(cluster)
    batch, channels, *image = conv_pass.input
    outputs, _, *kernel = conv_pass.weight
    plane = math.prod(image if conv_pass.kind == "data" else conv_pass.output[2:])
    is_float = conv_pass.dtype is torch.float32
    step = 32 if is_float else 64  # products that are added up at a time
    if conv_pass.kind == "weight":
        rows, columns = -(-outputs // tile[0]), math.prod(kernel) * -(-channels // tile[1])
        steps = -(-batch * plane // step)
    else:
        wide, deep = (outputs, channels) if conv_pass.kind == "forward" else (channels, outputs)
        rows, columns = -(-batch * plane // tile[0]), -(-wide // tile[1])
        steps = math.prod(kernel) * -(-deep // step)
    tiles = -(-rows // cluster[0]) * cluster[0] * -(-columns // cluster[1]) * cluster[1]
    last = tiles % slots if tiles >= slots else tiles
    most = slots // last if last else 1
    if tiles >= slots:
        parts = min(most, steps // (8 if is_float else 32))
    else:
        parts = min(most, steps // (32 if is_float else 16))
        if is_float and (halvings := min(most, steps // 16)):
            parts = max(parts, 1 << (halvings.bit_length() - 1))
    return last * parts if parts > 1 else 0


class LeftOut(NamedTuple):
    """From the list of configurations, for want of a GPU or because the card has no such engine either."""

    engine: int
    lacks_driver: bool


def _listed(library: _Library, heuristics: _Descriptor, in_order: bool) -> Iterator[_Descriptor | LeftOut]:
    """Configurations, and engines that are left out. In cuDNN's order, if asked for: the log does not tell
    between which configurations an engine was left out, so they are read one more at a time."""
    total = heuristics.count(_Attribute.ENGINEHEUR_RESULTS)
    known = 0
    for count in range(1 if in_order else total, total + 1):
        with library.log() as log:
            found = heuristics.get_descriptors(_Attribute.ENGINEHEUR_RESULTS, _Kind.ENGINECFG, count)
        missing = list(left_out(log))
        yield from missing[known:]
        known = len(missing)
        if not in_order:
            yield from found
        elif len(found) == count:
            yield found[-1]


def left_out(log: Sequence[str]) -> Iterator[LeftOut]:
    """Each engine is a line of the log, and the reasons are lines behind it."""
    _, *engines = _ENGINE_CONFIG.split("\n".join(log))
    for number, reasons in zip(engines[::2], engines[1::2], strict=True):
        yield LeftOut(int(number), _NO_DRIVER in reasons)


def has(algorithm: Algorithm, conv_pass: ConvolutionPass) -> bool:
    """Whether the card's engine supports it: so for all of 8,000 convolutions."""
    (_, channels, *image), (_, in_group, *kernel) = conv_pass.input, conv_pass.weight
    has_stride, is_padded = max(conv_pass.stride) > 1, max(conv_pass.padding) > 0
    is_dilated = any(gap > 1 < width for gap, width in zip(conv_pass.dilation, kernel, strict=True))
    if algorithm == "product":
        tensor_cores = conv_pass.tf32 or conv_pass.dtype is not torch.float32
        is_matrix = max(kernel) == 1 and channels == in_group and not has_stride and not is_padded
        return is_matrix and tensor_cores
    if algorithm == "winograd":
        reads_format = conv_pass.kind == "weight" or not conv_pass.channels_last
        return tuple(kernel) in _WINOGRAD_KERNELS and not has_stride and not is_dilated and reads_format
    if is_dilated or conv_pass.dtype not in (torch.float32, torch.float16):
        return False
    if conv_pass.kind == "data":
        return len(image) == 2 and min(kernel) > 1 and max(kernel) <= _WIDEST_KERNEL_IN_TILES
    sides = list(zip(image, conv_pass.padding, strict=True))
    is_plane = (
        len(image) < 3 and not has_stride and max(n + 2 * pad for n, pad in sides) <= _LONGEST_TRANSFORM
    )
    return is_plane and (conv_pass.kind == "forward" or all(pad < n for n, pad in sides))


def _is_allowed(notes: Sequence[int], conv_pass: ConvolutionPass) -> bool:
    """torch's own filter."""
    if conv_pass.deterministic and _NOTE_NONDETERMINISTIC in notes:
        return False
    if conv_pass.tf32 and conv_pass.dtype is not torch.float32:
        return True
    return _NOTE_DOWN_CONVERT_INPUTS not in notes and (conv_pass.tf32 or _NOTE_TENSOR_CORE not in notes)


def _graph(library: _Library, conv_pass: ConvolutionPass) -> _Descriptor:
    """The operation graph of one convolution. One of one dimension gets a second, of size 1, as in torch."""
    extra = max(2 - len(conv_pass.stride), 0)
    ones, zeros = (1,) * extra, (0,) * extra
    stride, padding, dilation = ones + conv_pass.stride, zeros + conv_pass.padding, ones + conv_pass.dilation
    computed_in = torch.float32 if conv_pass.dtype.itemsize == 2 else conv_pass.dtype
    convolution = library.descriptor(_Kind.CONVOLUTION)
    convolution.set(_Attribute.CONVOLUTION_COMP_TYPE, _Type.DATA_TYPE, _DATA_TYPES[computed_in])
    convolution.set(_Attribute.CONVOLUTION_CONV_MODE, _Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
    convolution.set(_Attribute.CONVOLUTION_SPATIAL_DIMS, _Type.INT64, len(stride))
    convolution.set(_Attribute.CONVOLUTION_DILATIONS, _Type.INT64, *dilation)
    convolution.set(_Attribute.CONVOLUTION_FILTER_STRIDES, _Type.INT64, *stride)
    convolution.set(_Attribute.CONVOLUTION_PRE_PADDINGS, _Type.INT64, *padding)
    convolution.set(_Attribute.CONVOLUTION_POST_PADDINGS, _Type.INT64, *padding)
    operands = [convolution.finalize()]
    for number, shape in enumerate((conv_pass.input, conv_pass.weight, conv_pass.output)):
        sizes = (*shape[:2], *ones, *shape[2:])
        tensor = library.descriptor(_Kind.TENSOR)
        tensor.set(_Attribute.TENSOR_UNIQUE_ID, _Type.INT64, number)
        tensor.set(_Attribute.TENSOR_DATA_TYPE, _Type.DATA_TYPE, _DATA_TYPES[conv_pass.dtype])
        tensor.set(_Attribute.TENSOR_DIMENSIONS, _Type.INT64, *sizes)
        tensor.set(_Attribute.TENSOR_STRIDES, _Type.INT64, *_strides(sizes, conv_pass.channels_last))
        tensor.set(_Attribute.TENSOR_BYTE_ALIGNMENT, _Type.INT64, 16)
        operands.insert(number, tensor.finalize())
    kind, (*of_operands, alpha, beta) = _OPERATIONS[conv_pass.kind]
    operation = library.descriptor(kind)
    for attribute, operand in zip(of_operands, operands, strict=True):
        operation.set_descriptors(attribute, operand)
    scale = _Type.DOUBLE if conv_pass.dtype is torch.float64 else _Type.FLOAT
    operation.set(alpha, scale, 1.0)
    operation.set(beta, scale, 0.0)
    graph = library.descriptor(_Kind.OPERATIONGRAPH)
    graph.set_descriptors(_Attribute.OPERATIONGRAPH_OPS, operation.finalize())
    return graph.finalize()


def _strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    order = [0, *range(2, len(shape)), 1] if channels_last else list(range(len(shape)))
    sizes = itertools.accumulate([1, *(shape[axis] for axis in reversed(order[1:]))], lambda a, b: a * b)
    by_axis = dict(zip(reversed(order), sizes, strict=True))
    return [by_axis[axis] for axis in range(len(shape))]


@functools.cache
def _card(library: _Library, gpu: GPU) -> _Descriptor:
    """The description of a card. The clocks and the cache are an H200's: others change almost nothing."""
    shared, reserved, blocks, threads = _MULTIPROCESSORS[gpu.capability]
    major, minor = gpu.capability
    properties = {
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "regsPerBlock": 65536,
        "multiProcessorCount": gpu.multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": shared,
        "reservedSharedMemoryPerBlock": reserved,
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": blocks,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": threads,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "totalGlobalMem": gpu.memory,
        "smClockRateKHz": 1980000,
        "memClockRateKHz": 3201000,
        "l2CacheSize": 60 << 20,
        "cudaDeviceId": 0,
        "deviceVer": 100 * major + 10 * minor,
        "driverVer": 13000,
        "deviceName": f"NVIDIA {gpu.title}",
    }
    text = json.dumps(properties).encode()
    card = library.descriptor(_Kind.DEVICEPROP)
    card.set_array(
        _Attribute.DEVICEPROP_JSON_REPRESENTATION, _Type.CHAR, ctypes.create_string_buffer(text, len(text))
    )
    return card.finalize()


# ------------------------------------------------------------------------------------ the library, by ctypes


@functools.cache
def _library() -> _Library | None:
    """cuDNN as torch would load it, if it is installed and recent enough."""
    if os.environ.get("OOMPH_CUDNN") == "0":
        return None
    if not _is_without_gpu():
        return None
    folders = {Path(torch.__file__).parent / "lib"}
    with contextlib.suppress(ImportError):
        spec = importlib.util.find_spec("nvidia")
        for place in (spec and spec.submodule_search_locations) or ():
            folders.update(Path(place).glob("*/lib"))
    found = _load(folders, "libcudnn.so.9")
    # Without these libraries, cuDNN ends the process.
    if found is None or _load(folders, "libcudnn_graph.so.9") is None:
        return None
    if _load(folders, f"libcublasLt.so.{found.cudnnGetCudartVersion() // 1000}") is None:
        return None
    return _Library(found) if found.cudnnGetVersion() >= _LEAST_VERSION else None


def _is_without_gpu() -> bool:
    """Whether there is no driver, or GPUs are hidden from this process. Else the driver is not started."""
    driver = _driver()
    if driver is None:
        return True
    getenv = ctypes.CDLL(None).getenv  # which sees os.putenv
    getenv.restype = ctypes.c_char_p
    hidden: bool = getenv(b"CUDA_VISIBLE_DEVICES") == b"" and driver.cuInit(0) == _CUDA_ERROR_NO_DEVICE
    return hidden


def _driver() -> ctypes.CDLL | None:
    return _load((), "libcuda.so.1")


def _load(folders: Iterable[Path], name: str) -> ctypes.CDLL | None:
    """What is loaded already, as with a CUDA build of torch; else from the folders."""
    for path in (name, *(str(folder / name) for folder in folders)):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class _Library:
    def __init__(self, functions: ctypes.CDLL) -> None:
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.version: int = functions.cudnnGetVersion()
        self.create = functions.cudnnBackendCreateDescriptor
        self.create.argtypes = [number, pointer]
        self.destroy = functions.cudnnBackendDestroyDescriptor
        self.destroy.argtypes = [pointer]
        self.finalize = functions.cudnnBackendFinalize
        self.finalize.argtypes = [pointer]
        self.set_attribute = functions.cudnnBackendSetAttribute
        self.set_attribute.argtypes = [pointer, number, number, count, pointer]
        self.get_attribute = functions.cudnnBackendGetAttribute
        self.get_attribute.argtypes = [pointer, number, number, count, pointer, pointer]
        self._set_callback = functions.cudnnSetCallback
        self._set_callback.argtypes = [ctypes.c_uint, pointer, pointer]
        self._log = list[str]()
        self._write = _CALLBACK(self._append)  # kept: cuDNN calls it

    @contextlib.contextmanager
    def log(self) -> Iterator[list[str]]:
        """What cuDNN logs in the meantime, line by line."""
        self._log = []
        _check(self._set_callback(_SEV_INFO_EN, None, self._write))
        try:
            yield self._log
        finally:
            _check(self._set_callback(0, None, None))

    def _append(self, severity: int, data: int, details: int, text: int) -> None:
        while line := ctypes.string_at(text):  # lines end with a zero, and the text with two
            self._log.append(line.decode(errors="replace"))
            text += len(line) + 1

    def descriptor(self, kind: _Kind) -> _Descriptor:
        return _Descriptor(self, kind)


class _Descriptor:
    """A descriptor of cuDNN's backend, destroyed with the object."""

    def __init__(self, library: _Library, kind: _Kind) -> None:
        self._library, self._held = library, list[_Descriptor]()
        self.pointer = ctypes.c_void_p()
        _check(library.create(kind, ctypes.byref(self.pointer)))

    def __del__(self) -> None:
        self._library.destroy(self.pointer)

    def set(self, attribute: int, type: _Type, *values: float) -> None:
        self.set_array(attribute, type, (_C_TYPES.get(type, ctypes.c_int) * len(values))(*values))

    def set_descriptors(self, attribute: int, *values: _Descriptor) -> None:
        """They live as long as this one."""
        self._held += values
        self.set_array(attribute, _Type.BACKEND_DESCRIPTOR, _pointers(values))

    def set_array(self, attribute: int, type: _Type, array: ctypes.Array[Any]) -> None:
        _check(self._library.set_attribute(self.pointer, attribute, type, len(array), array))

    def finalize(self) -> _Descriptor:
        _check(self._library.finalize(self.pointer))
        return self

    def get(self, attribute: int, type: _Type) -> list[Any]:
        array = (_C_TYPES.get(type, ctypes.c_int) * self._read(attribute, type))()
        return list(array[: self._read(attribute, type, array)])

    def get_descriptors(self, attribute: int, kind: _Kind, most: int | None = None) -> list[_Descriptor]:
        count = self.count(attribute) if most is None else most
        made = [_Descriptor(self._library, kind) for _ in range(count)]
        return made[: self._read(attribute, _Type.BACKEND_DESCRIPTOR, _pointers(made))]

    def count(self, attribute: int) -> int:
        return self._read(attribute, _Type.BACKEND_DESCRIPTOR)

    def _read(self, attribute: int, type: _Type, array: ctypes.Array[Any] | None = None) -> int:
        """Fill the array, and return the number of its values; without an array, of all that there are."""
        count = ctypes.c_int64()
        size = 0 if array is None else len(array)
        reading = (self.pointer, attribute, type, size, ctypes.byref(count), array)
        _check(self._library.get_attribute(*reading))
        return count.value


def _pointers(descriptors: Sequence[_Descriptor]) -> ctypes.Array[Any]:
    return (ctypes.c_void_p * len(descriptors))(*(one.pointer.value for one in descriptors))


def _check(status: int) -> None:
    if status:
        raise _Error
