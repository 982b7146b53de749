"""Workspaces of cuDNN's algorithms, as closed forms.

Those of Fourier transforms, Winograd's method and copies are exact, as plans and measurements on an H200 show
(docs/lab_notes.md); parts of sums are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oomph.gpus import GPU
from oomph.prediction.allocator import round_up
from oomph.prediction.convolution.cudnn import Algorithm, Pass, parts_of_sums
from oomph.prediction.convolution.description import Convolution, Side, pass_of

_TILE = (128, 128)  # of a weight gradient, computed by one multiprocessor at a time
_LEAST_PART = 1024  # positions that a part of a split sum adds up
_COPY_EXTRA_BYTES = 16  # behind copies
_FOURIER_TILE = 32  # rows and columns that data gradients by Fourier transforms compute at a time
_PARTS_OF_DEPTHWISE = 8  # in which each sample's weight gradient is summed, in channels last
_GROUPS_AT_A_TIME = 8  # of Fourier transforms and Winograd's method


def bytes_of(taken: int | Algorithm, found: Convolution, kind: Pass, gpu: GPU) -> int:
    """Of what cuDNN states: a workspace, or an algorithm."""
    if taken == "direct":
        if kind != "weight" or not found.channels_last:
            return 0
        return _PARTS_OF_DEPTHWISE * found.batch * round_up(found.output.channels, 32) * found.kernel * 4
    if taken == "fourier":
        return _fourier(found, kind)
    if taken == "winograd":
        return _winograd(found, kind)
    if taken == "product":  # one for each sample; weight gradients are their sum
        if kind != "weight":
            return 0
        return parts_of_weight(found, gpu) if found.channels_last else found.batch * found.weight * 4
    return taken


def all_copies(found: Convolution) -> int:
    """Copies of all three in NHWC, with channels filled up to a multiple of 16 bytes."""
    return _copied(found, (found.input, found.output), weight=True)


def _copied(found: Convolution, sides: Sequence[Side], weight: bool) -> int:
    aligned = 16 // found.item
    grown = max(side.padded(aligned) / side.bytes for side in sides)
    weights = math.ceil(found.weight * found.item * grown) if weight else 0
    return sum(side.padded(aligned) for side in sides) + weights + _COPY_EXTRA_BYTES


def _fourier(found: Convolution, kind: Pass) -> int:
    """Spectra of whole planes, filled up to a power of two; data gradients are made of tiles of 32 x 32."""
    one = _one_group(found)
    if kind == "data":
        size = _fourier_in_tiles(one)
    else:
        spectrum = _spectrum(_longest_side(one))
        inputs, outputs = one.batch * one.input.channels, one.batch * one.output.channels
        weights = one.input.channels * one.output.channels
        if kind == "forward":
            size = 2 * spectrum * max(inputs + weights, outputs) + round_up(one.weight * 4, 16)
        else:
            size = 2 * spectrum * max(inputs + outputs, weights) + round_up(one.output.bytes, 16)
    in_groups = found.groups > 1 and found.batch > 1
    return _of_all_groups(size, one, found, found.stride == 1 and (found.channels_last or in_groups))


def _fourier_in_tiles(found: Convolution) -> int:
    """With a stride, the convolution without one of the image whose positions at each offset from the stride
    are channels of their own. Image, weight and gradient are then copied."""
    channels, outside = found.input.channels, found.output.channels
    image, kernel, copied = found.image, found.kernel_size, 0
    if found.stride > 1:
        steps = found.strides
        channels, outside = round_up(channels * math.prod(steps), 8), round_up(outside, 8)
        padded = (size + -pad % step for size, pad, step in zip(kernel, found.padding, steps, strict=True))
        kernel = tuple(map(_ceil_div, padded, steps))
        image = tuple(map(_ceil_div, image, steps))
        padding = map(_ceil_div, found.padding, steps)
        gradient = math.prod(map(lambda size, pad, width: size + 2 * pad - width + 1, image, padding, kernel))
        elements = channels * outside * math.prod(kernel)
        elements += found.batch * (channels * math.prod(image) + outside * gradient)
        copied = elements * found.item + _COPY_EXTRA_BYTES
    fits_tile = all(size + width - 1 <= _FOURIER_TILE for size, width in zip(image, kernel, strict=True))
    planes = found.batch * (channels + outside) * (1 if fits_tile else 2)
    return _spectrum(_FOURIER_TILE) * (channels * outside + planes) + copied


def _spectrum(side: int) -> int:
    """Bytes of the transform of a real plane of side x side elements."""
    return 8 * side * (side // 2 + 1)


def _longest_side(found: Convolution) -> int:
    """Of the padded image, filled up to a power of two."""
    side = max(size + 2 * pad for size, pad in zip(found.image, found.padding, strict=True))
    return max(16, 1 << (side - 1).bit_length())


def _ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def _winograd(found: Convolution, kind: Pass) -> int:
    """Tiles of 4 x 4 results, each transformed to 6 x 6 elements of input and output; of 9 x 9 results, to
    13 x 13, with kernels of 5 x 5. But for weight gradients of 3 x 3, tiles are of 16 samples."""
    one = _one_group(found)
    side, transformed = (4, 36) if one.kernel_size == (3, 3) else (9, 169)
    samples = one.batch if kind == "weight" and side == 4 else round_up(one.batch, 16)
    plane = one.image if kind == "data" else one.output_image
    tiles = samples * math.prod(_ceil_div(size, side) for size in plane)
    inside, outside = one.input.channels, one.output.channels
    size = 4 * transformed * (tiles * (inside + outside) + inside * outside)
    return _of_all_groups(round_up(size, 16), one, found, found.channels_last)


def _one_group(found: Convolution) -> Convolution:
    groups = found.groups
    sides = [
        side._replace(channels=side.channels // groups, bytes=side.bytes // groups)
        for side in (found.input, found.output)
    ]
    return found._replace(input=sides[0], output=sides[1], weight=found.weight // groups, groups=1)


def _of_all_groups(size: int, one: Convolution, found: Convolution, copies: bool) -> int:
    """One group's workspace, with copies in NCHW or without, for as many groups as run at a time."""
    if copies:
        weight = one.weight * one.item if found.channels_last and one.kernel > 1 else 0
        size += one.input.bytes + one.output.bytes + weight + _COPY_EXTRA_BYTES
    return size * min(found.groups, _GROUPS_AT_A_TIME)


def readable_copies(found: Convolution) -> int:
    """Input and output that tensor cores cannot read as they are, and the weight with them: they read NHWC
    with channels in multiples of 16 bytes."""
    aligned = 16 // found.item
    sides = [one for one in (found.input, found.output) if not found.channels_last or one.channels % aligned]
    return _copied(found, sides, weight=found.kernel > 1) if sides else 0


def parts_of_weight(found: Convolution, gpu: GPU) -> int:
    """Of a weight gradient that is split among the multiprocessors, in tiles of one size at most."""
    if found.groups > 1:
        return 0
    parts = parts_of_sums(pass_of(found, "weight"), _TILE, (1, 1), gpu.multiprocessors)
    return parts * min(_TILE[0], found.output.channels) * min(_TILE[1], found.input.channels) * 4


def most_parts(found: Convolution, gpu: GPU) -> int:
    """If every multiprocessor has one, and none is short."""
    sums = gpu.multiprocessors * math.prod(_TILE) * 4
    return min(sums, 4 * found.weight * max(1, found.positions // _LEAST_PART))
