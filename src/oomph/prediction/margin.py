"""How far the predicted `reserved` may be off, as a share of it, from what was measured.

`python -m benchmarks.accuracy.margins` compares predicted and measured `reserved`
(benchmarks/results/margins.csv). The shares of plain programs and of convolutions come from it; those of the
other classes, of which few or no runs are measured, are estimates. A program of several classes gets the
largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomph.gpus import GPU
from oomph.records import Allocation
from oomph.units import MiB

MARGINS = {
    "plain": 0.01,
    "convolutions": 0.03,  # which algorithm cuDNN takes, and with it the workspace, is estimated
    "several streams": 0.02,  # when a block that two streams use is free again depends on the GPU's progress
    "data-dependent shapes": 0.03,  # beside the interval, which holds for other values
    "GPU or torch never measured": 0.03,  # no residuals: kernels and the CUDA context are estimated
}
# One segment more or less, for requests of 1 to 10 MiB, is decided by the order of a few frees.
_SEGMENT = 20 * MiB
_MEASURED_CAPABILITIES = {(9, 0)}
_MEASURED_TORCH = {"2.11", "2.13"}  # measured with 2.11, predicted with both


def margin(
    reserved: int, allocations: Sequence[Allocation], sizes_assumed: bool, card: GPU, torch_version: str
) -> int:
    """Bytes by which the predicted `reserved` may be off, either way."""
    share = max(MARGINS[name] for name in classes(allocations, sizes_assumed, card, torch_version))
    return min(max(int(share * reserved), _SEGMENT), int(max(MARGINS.values()) * reserved))


def classes(
    allocations: Sequence[Allocation], sizes_assumed: bool, card: GPU, torch_version: str
) -> Iterator[str]:
    """The classes of programs that the traced one belongs to. `sizes_assumed`: a size depends on values."""
    yield "plain"
    if any(one.kind == "workspace" and one.op.startswith("aten.convolution") for one in allocations):
        yield "convolutions"
    if any(one.stream for one in allocations):
        yield "several streams"
    if sizes_assumed:
        yield "data-dependent shapes"
    version = ".".join(torch_version.split(".")[:2])
    if card.capability not in _MEASURED_CAPABILITIES or version not in _MEASURED_TORCH:
        yield "GPU or torch never measured"
