"""Convolutions: the workspaces that cuDNN takes, and the layout of the results.

A convolution takes one workspace per pass, freed when the pass is over. cuDNN's heuristics choose the
algorithm. Where the library is installed, it is asked without a GPU (cudnn.py). Else there is one estimate:
copies of tensors in a layout that tensor cores do not read, and parts of sums in weight gradients. Nothing is
the least and `_most` the largest that is known; intervals.py says how far towards these an interval reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.convolution import cudnn
from oomph.prediction.convolution.closed_forms import (
    all_copies,
    bytes_of,
    most_parts,
    parts_of_weight,
    readable_copies,
)
from oomph.prediction.convolution.cudnn import Pass
from oomph.prediction.convolution.description import (
    Convolution,
    describe,
    memory_format,
    output_shape,
    pass_of,
)
from oomph.prediction.ops.registry import cuda_kernel, temporaries, temporaries_of
from oomph.prediction.ops.rules import (
    NEXT_RESULT,
    BoundArguments,
    Estimated,
    Fake,
    Search,
    Temporary,
    bind,
    contiguous_copy_bytes,
    in_memory_format,
)
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_NARROW_KERNEL = 5  # rows or columns: up to it, Fourier transforms are not the fastest algorithm
_OF_GPU: tuple[cudnn.Algorithm, ...] = "fourier", "winograd"


@temporaries(aten.convolution.default)
def _forward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    format = memory_format(call["input"], call["weight"])
    found = describe(call, output_shape(call), format)
    kind: Pass = "data" if call["transposed"] else "forward"
    copies = (contiguous_copy_bytes(call[name], format) for name in ("input", "weight"))
    return [*copies, NEXT_RESULT, *_search(found, kind, gpu), _workspace(found, kind, gpu)]


@temporaries(aten.convolution_backward.default)
def _backward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    format = memory_format(call["input"], call["weight"])
    gradient = call["grad_output"]
    found = describe(call, tuple(gradient.shape), format)
    gradient_copy = contiguous_copy_bytes(gradient, format)
    sizes: list[Temporary] = [gradient_copy]
    if call["output_mask"][0]:
        kind: Pass = "forward" if call["transposed"] else "data"
        weight_copy, workspace = contiguous_copy_bytes(call["weight"], format), _workspace(found, kind, gpu)
        search = _search(found, kind, gpu)
        sizes += [NEXT_RESULT, weight_copy, *search, workspace, -workspace, -weight_copy]
    if call["output_mask"][1]:
        input_copy, workspace = contiguous_copy_bytes(call["input"], format), _workspace(found, "weight", gpu)
        search = _search(found, "weight", gpu)
        sizes += [input_copy, NEXT_RESULT, *search, workspace, -workspace, -input_copy]
    if call["output_mask"][2]:
        others = [dim for dim in range(gradient.dim()) if dim != 1]
        sums = temporaries_of(aten.sum.dim_IntList, (gradient, others), {}, gpu)
        sizes += [-gradient_copy, NEXT_RESULT, *sums]
    return sizes


def _workspace(found: Convolution, kind: Pass, gpu: GPU) -> int:
    if not found.input.bytes or not found.output.bytes:  # torch does not call cuDNN
        return 0
    if not torch.backends.cudnn.enabled:  # torch's own kernels: the columns of one sample (im2col)
        columns = found.input.channels // found.groups * found.kernel * found.output.plane * found.item
        has_columns = found.kernel > 1 or found.is_strided
        return columns if has_columns and not found.depthwise else 0
    if found.depthwise and not _is_left_to_cudnn(found):
        return 0
    # Of 25 searches whose list begins with Fourier transforms, with such kernels, one took them.
    slow = torch.backends.cudnn.benchmark and max(found.kernel_size) <= _NARROW_KERNEL
    taken = cudnn.workspace(pass_of(found, kind), gpu, "fourier" if slow else None)
    if taken is not None:
        return bytes_of(taken, found, kind, gpu)
    if kind != "weight" and (found.is_product or found.depthwise):  # 94 % take none
        return 0
    # Recorded with what it may take, even where none is expected.
    return Estimated(max(_estimate(found, kind, gpu), 1), _most(found, kind, gpu))


def _estimate(found: Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked: as tensor cores compute it. Without them, nothing. Of matrix products, one
    for each sample is added up in the weight's gradient, if those are less."""
    if found.depthwise or _is_without_tensor_cores(found, kind):
        return 0
    size = readable_copies(found) + (parts_of_weight(found, gpu) if kind == "weight" else 0)
    return min(size, found.batch * found.weight * 4) if found.is_product else size


def _most(found: Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked, the largest workspace that it may choose: copies, and parts of sums. It
    often takes Fourier transforms and Winograd's method where the tensor cores are not used, and rarely where
    they are."""
    if found.depthwise:  # copies, in which each channel is one of four
        return max(all_copies(found), (2 + found.kernel_size[-1]) * found.input.bytes)
    sizes = [all_copies(found) + (most_parts(found, gpu) if kind == "weight" else 0)]
    if _is_without_tensor_cores(found, kind) and found.kernel > 1:
        conv_pass = pass_of(found, kind)
        algorithms = (algorithm for algorithm in _OF_GPU if cudnn.has(algorithm, conv_pass))
        sizes += [bytes_of(algorithm, found, kind, gpu) for algorithm in algorithms]
    return max(sizes)


def _is_without_tensor_cores(found: Convolution, kind: Pass) -> bool:
    """float32 that is not computed in TF32."""
    return found.dtype is torch.float32 and not pass_of(found, kind).tf32


def _search(found: Convolution, kind: Pass, gpu: GPU) -> Iterator[Search]:
    """The workspaces of the algorithms that torch.backends.cudnn.benchmark tries. Where cuDNN cannot be
    asked, they are what the convolution takes without a search, and Fourier transforms: in float32, those are
    in 72 % (weight gradients) to 91 % (data gradients) of its lists where the card has them."""
    searches = torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark
    searches &= not found.depthwise or _is_left_to_cudnn(found)
    if not searches or not found.input.bytes * found.output.bytes:
        return
    conv_pass = pass_of(found, kind)
    tried = {bytes_of(each, found, kind, gpu) for each in cudnn.workspaces(conv_pass, gpu) or ()}
    if not tried:
        tried |= {_workspace(found, kind, gpu), all_copies(found)}
        if found.item == 4 and found.groups == 1:
            tried |= {
                bytes_of(algorithm, found, kind, gpu)
                for algorithm in _OF_GPU
                if cudnn.has(algorithm, conv_pass) and (algorithm == "fourier" or kind == "weight")
            }
    yield Search((found, kind), tuple(sorted(tried)))


def _is_left_to_cudnn(found: Convolution) -> bool:
    """Of depthwise convolutions, for most of which torch has kernels of its own, without workspace (ATen/
    native/Convolution.cpp)."""
    if found.channels_last:
        return True
    if found.dtype is not torch.float16 or len(found.image) > 2 or found.dilated:
        return False
    channels, (height, width) = found.input.channels, ((1, *found.image)[-2:])
    step, kernel = found.strides[-1], found.kernel_size[-1]
    if channels < 32 or (found.strides[0] != step and height != 1):
        return False
    if height == 1 and step == 1:
        return True
    if len({*found.kernel_size}) > 1 or kernel not in (1, 3, 5) or width < 7 or step > 2:
        return False
    if step == 1:
        return True
    if found.batch == 1:
        return kernel > 1 or width <= 28
    if kernel == 1:
        return found.batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


@cuda_kernel(aten.convolution.default, aten.convolution_backward.default)
def _convolution_results(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """cuDNN's layout. The fake kernel gives that of the backend which the *host* would take, and so follows
    its processor, its thread count and whether oneDNN is still on: torch turns oneDNN off for the whole
    process when a half-precision product fails on a processor without such instructions."""
    call = bind(func, args, kwargs)
    format = memory_format(call["input"], call["weight"])
    out = fake(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return in_memory_format(fake, out, format)
    input, weight, bias = out  # the gradients that were asked for
    return in_memory_format(fake, input, format), in_memory_format(fake, weight, format), bias
