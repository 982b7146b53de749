"""The bars of kda, nsa and selective_scan, read off the rows. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from op_bar import NOISE, Bar, on_gpu, over
from op_rows import Row

GiB = 1024  # in MiB
REPORT = "B16 T256 H8 D64"  # report 000's layer
REPORT_MIB = 60  # for forward and backward; 40 with a tight budget
DENSE_MIB = 2056  # of the report's form, forward alone, as it was announced
CPU_SPEEDUP = 10
DENSE = "SDPA cuDNN dense"
FLA_NSA = "fla, no window"
LONG = 32768  # tokens from which on sparse attention must be faster than dense attention
LONGEST = "B1 T131072 HQ32 H8 D128"
GRADIENT_ERROR = 1.0  # %: bfloat16 rounds to 0.2 %, a wrong kernel is off by tens


def kda(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "kda").items():
        ours, tight, fla = group.get("oomph"), group.get("oomph tight"), group.get("fla")
        about = f"kda {shape}"
        if fla is not None:
            yield Bar(f"{about}: time over fla's", over(ours, fla), NOISE)
            yield Bar(f"{about}: peak over fla's", over(ours, fla, "peak_mib"), 0.5)
        if fla is not None and (fla.peak_mib or 0) > GiB:
            yield Bar(f"{about}: tight budget, peak over fla's", over(tight, fla, "peak_mib"), 0.25)
            yield Bar(f"{about}: tight budget, time over fla's", over(tight, fla), 1.5)
        if shape == REPORT:
            yield Bar(f"{about}: peak", ours and ours.peak_mib, REPORT_MIB, "MiB")
            yield Bar(f"{about}: tight budget, peak", tight and tight.peak_mib, 40, "MiB")
            dense = group.get("dense scan, forward alone")
            share = over(ours, dense, "peak_mib")
            yield Bar(f"{about}: peak over the dense scan's, forward alone", share, REPORT_MIB / DENSE_MIB)


def kda_on_cpu(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row.op == "kda" and row.gpu.startswith("cpu") and row.ours and row.median_ms is not None:
            about = f"kda {row.shape} on the CPU: {row.contender}, time over the loop over tokens"
            yield Bar(about, row.ratio_to_limit, 1 / CPU_SPEEDUP)


def nsa(rows: Sequence[Row]) -> Iterator[Bar]:
    groups = on_gpu(rows, "nsa")
    for shape, group in groups.items():
        dense, fla, about = group.get(DENSE), group.get(FLA_NSA), f"nsa {shape}"
        for name in ("oomph", "oomph learned"):
            ours = group.get(name)
            if ours is None and name != "oomph":
                continue
            if tokens_of(shape) >= LONG:
                most = 1 / 3 if shape == LONGEST else 1.0
                yield Bar(f"{about}: {name}, time over dense attention's", over(ours, dense), most)
            memory = over(ours, dense, "peak_mib")
            yield Bar(f"{about}: {name}, peak over dense attention's", memory, 1.2)
            if fla is not None:
                yield Bar(f"{about}: {name}, time over fla's", over(ours, fla), 1.0)
    yield from _linear(groups)


def _linear(groups: dict[str, dict[str, Row]]) -> Iterator[Bar]:
    """Between the fewest and the most tokens, does the peak grow faster than their number?"""
    families: dict[str, list[tuple[int, Row]]] = {}
    for shape, group in groups.items():
        if "oomph" in group:
            family = re.sub(r" T\d+", "", shape)
            families.setdefault(family, []).append((tokens_of(shape), group["oomph"]))
    for family, found in families.items():
        (few, less), (many, more) = min(found, key=_first), max(found, key=_first)
        if many > few:
            growth = over(more, less, "peak_mib")
            about = f"nsa {family}: growth of the peak over that of the tokens, T{few} to T{many}"
            yield Bar(about, None if growth is None else growth * few / many, 1.05)


def _first(pair: tuple[int, Row]) -> int:
    return pair[0]


def tokens_of(shape: str) -> int:
    found = re.search(r"\bT(\d+)", shape)
    return int(found.group(1)) if found else 0


def selective_scan(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "selective_scan").items():
        ours = group.get("oomph")
        inputs = scan_inputs_mib(shape)
        peak = None if ours is None or ours.peak_mib is None else ours.peak_mib
        # The inputs are resident: they are not in the peak, but are part of the memory it takes.
        whole = None if peak is None else (inputs + peak) / (2 * inputs)
        yield Bar(f"selective_scan {shape}: memory over that of inputs and gradients", whole, 2)


def scan_inputs_mib(shape: str) -> float:
    """Of the sequences, as `B64 L512 d512 n16 bf16` names them; A and D are some kilobytes."""
    b, length, d, n = (int(size) for size in re.findall(r"[BLdn](\d+)", shape)[:4])
    ways, item = (2 if "both" in shape else 1), (4 if "fp32" in shape else 2)
    return b * length * (d + ways * (d + 2 * n)) * item / 2**20


def errors(rows: Sequence[Row]) -> Iterator[Bar]:
    """Every gradient of ours on the GPU against float64: Triton has miscompiled kernels of this kind."""
    for row in rows:
        if row.op in ("kda errors", "nsa errors", "selective_scan errors") and row.ours:
            if row.gpu.startswith("cpu"):
                continue
            off = None if row.dx_error is None else 100 * row.dx_error
            yield Bar(f"{row.op} {row.shape}: {row.contender}, {row.data} off by", off, GRADIENT_ERROR, "%")


PARTS: tuple[Callable[[Sequence[Row]], Iterator[Bar]], ...] = (
    kda,
    kda_on_cpu,
    nsa,
    selective_scan,
    errors,
)
