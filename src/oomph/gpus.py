"""The GPU catalogue: what a card really offers, and the way from a user's words to a card."""

from __future__ import annotations

import difflib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oomph.errors import UserError
from oomph.units import GiB, MiB, format_bytes, parse_bytes

Capability = tuple[int, int]
Pcie = tuple[int, int]  # generation and lanes of PCI Express


@dataclass(frozen=True, slots=True)
class GPU:
    """One card. Unknown figures are None; nothing is guessed silently."""

    name: str  # what people type: "rtx3090"
    title: str  # what people read: "RTX 3090"
    memory: int  # bytes, as torch.cuda.get_device_properties(0).total_memory has it: below the nominal size
    capability: Capability
    multiprocessors: int  # some kernels size their buffers by it
    bf16_tflops: float | None  # dense, accumulating in fp32; the fp16 rate where bf16 has no tensor cores
    fp32_tflops: float | None  # outside the tensor cores: what a float32 product takes unless TF32 is allowed
    bandwidth: int | None  # bytes per second
    context: int  # bytes that a CUDA process takes beside torch's allocator
    pcie: Pcie
    source: str  # where `memory` comes from

    def limit(self, most: str | int | None = None, budget: str | int | None = None, nccl: int = 0) -> int:
        """What the allocator may reserve: what the CUDA context and NCCL leave of the card or of `budget`;
        `most`, if that is less."""
        memory = self.memory if budget is None else min(self.memory, parse_bytes(budget))
        left = memory - self.context - nccl
        return left if most is None else min(left, parse_bytes(most))

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 runs on tensor cores; if not, `bf16_tflops` is the fp16 rate."""
        return self.capability >= (8, 0)

    @property
    def tf32_tflops(self) -> float | None:
        """Of float32 products that may round to TF32: half the bf16 rate, on every card that has TF32."""
        if not self.has_bf16 or self.bf16_tflops is None:
            return self.fp32_tflops
        return self.bf16_tflops / 2

    @property
    def fp64_tflops(self) -> float | None:
        """Of float64 products, on tensor cores where the card has such."""
        if self.fp32_tflops is None:
            return None
        return _FP64_TFLOPS.get(self.name, self.fp32_tflops * _of_generation(_FP64_SHARE, self.capability))

    @property
    def host_link(self) -> int:
        """Bytes per second between the card and pinned host memory, each way."""
        generation, lanes = self.pcie
        return int(_CHIP_LINK_GBPS.get(self.name, _PCIE_GBPS[generation] * lanes / 16) * 10**9)

    def link(self, ranks: int) -> int:
        """Bytes per second that a card sends to others in a group of so many: over NVLink or PCI Express
        inside a node of eight, else over the network."""
        inside = int(_NVLINK_GBPS.get(self.name, 0) * 10**9) or self.host_link
        return inside if ranks <= NODE else min(inside, _NETWORK_GBPS * 10**9)


NODE = 8  # cards
# Each way, from the vendor's data sheets, which give the sum of both.
_NVLINK_GBPS = {
    **dict.fromkeys(("b300", "b200"), 900),
    **dict.fromkeys(("h200", "gh200", "h100-80gb", "h20"), 450),
    **dict.fromkeys(("h200-nvl", "h100-nvl", "a100-40gb", "a100-80gb"), 300),
    "a800": 200,
    **dict.fromkeys(("v100-16gb", "v100-32gb"), 150),
}
_NETWORK_GBPS = 50  # assumed: a port of 400 Gbit/s for each card

# A card of unknown generation is modelled as this one.
UNKNOWN_CAPABILITY: Capability = (9, 0)
UNKNOWN_MULTIPROCESSORS = 132

# MiB that a process of torch takes beside its allocator once cuBLAS has run: the driver's context and the
# kernels loaded so far. Only Hopper's was measured. The others are our estimates, set between what torch's
# users and developers commonly state for CUDA 11.7 and later (300 to 600 MiB) and, for Blackwell, Hopper's.
_CONTEXT: dict[Capability, float] = {
    (6, 0): 300,
    (6, 1): 250,
    (7, 0): 350,
    (7, 5): 300,
    (8, 0): 450,
    (8, 6): 350,
    (8, 9): 400,
    (9, 0): 768,  # 751 to 771 MiB over eight workloads, H200, torch 2.11, CUDA 13
    (10, 0): 800,
    (12, 0): 550,
}

# The rate of float64 products relative to float32 outside the tensor cores, from the vendor's data sheets and
# architecture papers: sm_80 and sm_90 multiply float64 on tensor cores, at the float32 rate.
_FP64_SHARE: dict[Capability, float] = {
    (6, 0): 1 / 2,
    (6, 1): 1 / 32,
    (7, 0): 1 / 2,
    (7, 5): 1 / 32,
    (8, 0): 1.0,
    (8, 6): 1 / 64,
    (8, 9): 1 / 64,
    (9, 0): 1.0,
    (10, 0): 1 / 2,
    (10, 3): 1 / 60,
    (12, 0): 1 / 64,
}
_FP64_TFLOPS = {"h20": 1.0}  # cut down by the vendor

# What 16 lanes of PCI Express carry in large copies: of the nominal 15.8, 31.5, 63 and 121 GB/s each way.
_PCIE_GBPS = {3: 12.0, 4: 25.0, 5: 55.0, 6: 105.0}
_CHIP_LINK_GBPS = {"gh200": 450.0}  # NVLink-C2C, nominal
# Of a card that is not in the catalogue: that of its generation.
_PCIE: dict[Capability, int] = {(6, 0): 3, (8, 0): 4, (9, 0): 5}

# Rows: name, title, memory in MiB, capability, multiprocessors, bf16 and fp32 TFLOPS, bandwidth in GB/s,
# generation and lanes of PCI Express, and where the memory figure comes from.
# The driver keeps a part of the memory, and newer drivers tend to keep more: figures in users' logs differ by
# up to 2 %, and where several were found, that of a recent torch on Linux was taken. A torch version is given
# where the log states one. Rates and bandwidths are the vendor's nominal ones, and no basis for a promise;
# GeForce rates are those with fp32 accumulation, which is what torch uses: half the rate that is advertised.
_LOG = "reported by users' logs"
_P3, _P4, _P5, _P6 = ((generation, 16) for generation in (3, 4, 5, 6))
_ROWS: tuple[tuple[str, str, float, Capability, int, float | None, float, int, Pcie, str], ...] = (
    ("b300", "B300", 274115, (10, 3), 148, 2250, 75, 8000, _P6, f"{_LOG} (267.69 GiB)"),
    ("b200", "B200", 182631, (10, 0), 148, 2250, 75, 8000, _P5, f"{_LOG} (178.35 GiB)"),
    ("h200", "H200", 143155.9375, (9, 0), 132, 989, 67, 4800, _P5, f"{_LOG} (150109880320 bytes)"),
    ("h200-nvl", "H200 NVL", 143155.9375, (9, 0), 132, 835, 60, 4800, _P5, f"{_LOG} (150109880320 bytes)"),
    ("gh200", "GH200 (96 GB)", 96768, (9, 0), 132, 989, 67, 4000, _P5, f"{_LOG} (torch 2.14, 94.50 GiB)"),
    ("h100-80gb", "H100 SXM 80GB", 81089, (9, 0), 132, 989, 67, 3352, _P5, f"{_LOG} (torch 2.7)"),
    ("h100-pcie", "H100 PCIe 80GB", 81008, (9, 0), 114, 756, 51, 2039, _P5, _LOG),
    ("h100-nvl", "H100 NVL 94GB", 94849.5, (9, 0), 132, 835, 60, 3938, _P5, f"{_LOG} (99456909312 bytes)"),
    ("h20", "H20", 97285, (9, 0), 78, 148, 44, 4000, _P5, _LOG),
    ("a100-40gb", "A100 40GB", 40441, (8, 0), 108, 312, 19.5, 1555, _P4, f"{_LOG} (torch 2.11, SXM4)"),
    ("a100-80gb", "A100 80GB", 81051, (8, 0), 108, 312, 19.5, 2039, _P4, f"{_LOG} (torch 2.9, SXM4)"),
    ("a800", "A800 80GB", 81051, (8, 0), 108, 312, 19.5, 2039, _P4, "estimated: the A100 80GB's board"),
    ("a30", "A30", 24164, (8, 0), 56, 165, 10.3, 933, _P4, f"{_LOG} (torch 2.8)"),
    ("a40", "A40", 45416, (8, 6), 84, 149.7, 37.4, 696, _P4, _LOG),
    ("a10", "A10", 22589, (8, 6), 72, 125, 31.2, 600, _P4, "estimated: the A10G's; logs: 22.1 to 22.2 GiB"),
    ("a10g", "A10G", 22589, (8, 6), 80, 70, 31.5, 600, _P4, f"{_LOG} (torch 2.12, 22.06 GiB)"),
    ("a6000", "RTX A6000", 48538, (8, 6), 84, 154.8, 38.7, 768, _P4, f"{_LOG} (47.40 GiB)"),
    ("a5000", "RTX A5000", 24138, (8, 6), 64, 111.1, 27.8, 768, _P4, _LOG),
    ("a4000", "RTX A4000", 16117, (8, 6), 48, 76.7, 19.2, 448, _P4, f"{_LOG} (torch 1.12)"),
    (
        "rtx-pro-6000",
        "RTX PRO 6000 Blackwell",
        97250,
        (12, 0),
        188,
        503.8,
        126,
        1792,
        _P5,
        f"{_LOG} (torch 2.7)",
    ),
    ("rtx6000-ada", "RTX 6000 Ada", 48520, (8, 9), 142, 364, 91.1, 960, _P4, f"{_LOG} (torch 2.7)"),
    ("l40s", "L40S", 45495, (8, 9), 142, 362, 91.6, 864, _P4, f"{_LOG} (torch 2.2)"),
    ("l40", "L40", 45466, (8, 9), 142, 181, 90.5, 864, _P4, f"{_LOG} (44.4 GiB)"),
    ("l4", "L4", 22563, (8, 9), 58, 121, 30.3, 300, _P4, f"{_LOG} (torch 2.11)"),
    ("v100-16gb", "V100 16GB", 16130, (7, 0), 80, 125, 15.7, 900, _P3, f"{_LOG} (SXM2)"),
    ("v100-32gb", "V100 32GB", 32494, (7, 0), 80, 125, 15.7, 900, _P3, f"{_LOG} (torch 2.6, SXM2)"),
    ("t4", "T4", 14913, (7, 5), 40, 65, 8.1, 320, _P3, f"{_LOG} (torch 2.14)"),
    ("p100", "P100 16GB", 16280, (6, 0), 56, 18.7, 9.3, 732, _P3, f"{_LOG} (torch 1.8, PCIe)"),
    ("rtx5090", "RTX 5090", 32120, (12, 0), 170, 209.5, 104.8, 1792, _P5, f"{_LOG} (torch 2.6, 31.37 GiB)"),
    ("rtx5080", "RTX 5080", 15840, (12, 0), 84, 112.6, 56.3, 960, _P5, _LOG),
    ("rtx4090", "RTX 4090", 24081, (8, 9), 128, 165.2, 82.6, 1008, _P4, f"{_LOG} (torch 2.5)"),
    ("rtx4080-super", "RTX 4080 SUPER", 15944, (8, 9), 80, 104.4, 52.2, 736, _P4, f"{_LOG} (torch 2.12)"),
    ("rtx4080", "RTX 4080", 15944, (8, 9), 76, 97.5, 48.7, 717, _P4, "estimated: the RTX 4080 SUPER's"),
    ("rtx4070", "RTX 4070", 12002, (8, 9), 46, 58.3, 29.1, 504, _P4, f"{_LOG} (torch 2.5)"),
    ("rtx4060ti-16gb", "RTX 4060 Ti 16GB", 15974, (8, 9), 34, 44.1, 22.1, 288, (4, 8), f"{_LOG} (15.60 GiB)"),
    ("rtx4060ti-8gb", "RTX 4060 Ti 8GB", 7806, (8, 9), 34, 44.1, 22.1, 288, (4, 8), f"{_LOG} (torch 2.12)"),
    ("rtx3090ti", "RTX 3090 Ti", 24114, (8, 6), 84, 80, 40, 1008, _P4, _LOG),
    ("rtx3090", "RTX 3090", 24124, (8, 6), 82, 71, 35.6, 936, _P4, f"{_LOG} (torch 2.13)"),
    ("rtx3080ti", "RTX 3080 Ti", 11910, (8, 6), 80, 68.2, 34.1, 912, _P4, f"{_LOG} (11.63 GiB)"),
    ("rtx3080", "RTX 3080 10GB", 10009, (8, 6), 68, 59.5, 29.8, 760, _P4, f"{_LOG} (torch 1.13)"),
    ("rtx3070", "RTX 3070", 7753, (8, 6), 46, 40.6, 20.3, 448, _P4, f"{_LOG} (torch 2.6)"),
    ("rtx3060", "RTX 3060 12GB", 11910, (8, 6), 28, 25.5, 12.7, 360, _P4, f"{_LOG} (torch 2.10)"),
    ("rtx2080ti", "RTX 2080 Ti", 10825, (7, 5), 68, 53.8, 13.4, 616, _P3, f"{_LOG} (torch 2.6)"),
    ("titan-rtx", "TITAN RTX", 24190, (7, 5), 72, 130.5, 16.3, 672, _P3, _LOG),
    ("gtx1080ti", "GTX 1080 Ti", 11178, (6, 1), 28, None, 11.3, 484, _P3, _LOG),
)

# Other spellings, people's and the driver's own, without brand words, spaces and signs.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "b300": ("b300sxm6ac",),
    "gh200": ("gh200480gb", "gh200120gb"),
    "h100-80gb": ("h100sxm", "h100sxm5", "h10080gbhbm3"),
    "h100-nvl": ("h100nvl",),
    "h100-pcie": ("h100pcie",),
    "a100-40gb": ("a100sxm440gb", "a100pcie40gb"),
    "a100-80gb": ("a100sxm480gb", "a10080gbpcie", "a100pcie80gb"),
    "a800": ("a800sxm480gb", "a80080gbpcie"),
    "rtx-pro-6000": (
        "rtxpro6000blackwellserveredition",
        "rtxpro6000blackwellworkstationedition",
        "rtxpro6000blackwellmaxqworkstationedition",
    ),
    "rtx6000-ada": ("rtx6000adageneration", "6000ada"),
    "v100-16gb": ("v100sxm216gb", "v100pcie16gb"),
    "v100-32gb": ("v100sxm232gb", "v100sxm332gb", "v100pcie32gb", "v100spcie32gb"),
    "p100": ("p100pcie16gb", "p100sxm216gb"),
    # The driver gives both 4060 Ti one name; the memory tells them apart.
    "rtx4060ti-16gb": ("rtx4060ti",),
    "rtx4060ti-8gb": ("rtx4060ti",),
}
_BRAND_WORDS = {"nvidia", "geforce", "tesla", "quadro"}


def _of_generation(table: Mapping[Capability, float], capability: Capability) -> float:
    """The entry of a generation, or of the nearest older one."""
    return table[max((c for c in table if c <= capability), default=min(table))]


def _context(capability: Capability) -> int:
    return int(_of_generation(_CONTEXT, capability) * MiB)


def _pcie(capability: Capability) -> Pcie:
    return int(_of_generation(_PCIE, capability)), 16


_CATALOGUE = tuple(
    GPU(
        name,
        title,
        int(memory * MiB),
        capability,
        processors,
        rate,
        single,
        bandwidth * 10**9,
        _context(capability),
        pcie,
        source,
    )
    for name, title, memory, capability, processors, rate, single, bandwidth, pcie, source in _ROWS
)


RATES_OF = "h200"


def catalogue() -> tuple[GPU, ...]:
    """Every known card: data centre, workstation, desktop, each newest first."""
    return _CATALOGUE


def find(text: str) -> GPU:
    """The card that `text` names, or one of the size that it gives.

    "rtx3090", "3090", "NVIDIA GeForce RTX 3090", "A100-80GB"; "24GiB". "here": what is free now on the GPU of
    this machine.
    """
    if text == HERE:
        return _here()
    if not isinstance(text, str):
        raise UserError(f"GPU {text!r} is not a name; {_HINT}")
    words = _words(text)
    cards = _spelled("".join(words)) or _spelled_with_size(words)
    if len(cards) == 1:
        return cards[0]
    if not cards and re.match(r"[0-9.]+\s*[a-z]+$", text.strip().lower()):
        return _of_size(text)
    key = "".join(words)
    family = cards or [card for card in _CATALOGUE if _family(card) == key]
    if family:
        raise UserError(f"GPU {text!r} is ambiguous: {', '.join(card.name for card in family)}; {_HINT}")
    if text.strip().isdigit():
        size = f"; for a card of that size: {text.strip()}GiB" if int(text) else ""
        raise UserError(f"GPU {text!r} has no unit{size}; {_HINT}")
    near = _nearest(key)
    raise UserError(f"unknown GPU {text!r}{'; nearest: ' + ', '.join(near) if near else ''}; {_HINT}")


def with_rates(card: GPU) -> GPU:
    """Of a card of which only the size is known, with another's rates: for times that are only compared."""
    if card.bandwidth is not None:
        return card
    known = find(RATES_OF)
    return replace(
        card, bandwidth=known.bandwidth, bf16_tflops=known.bf16_tflops, fp32_tflops=known.fp32_tflops
    )


def for_device(name: str, total_memory: int, capability: Capability) -> GPU:
    """The card behind a real device's properties: its catalogue entry with its own memory, or a new one."""
    for card in _spelled("".join(_words(name))):
        # The name alone is not enough: some cards are sold with two sizes under one name.
        if card.capability == tuple(capability) and abs(card.memory - total_memory) < 0.06 * card.memory:
            return replace(card, memory=total_memory, source="measured: read off the device")
    return GPU(
        name="-".join(_words(name)) or "gpu",
        title=" ".join(word for word in name.split() if word.lower() not in _BRAND_WORDS) or name,
        memory=total_memory,
        capability=(capability[0], capability[1]),
        multiprocessors=UNKNOWN_MULTIPROCESSORS,
        bf16_tflops=None,
        fp32_tflops=None,
        bandwidth=None,
        context=_context(capability),
        pcie=_pcie(capability),
        source="measured: read off the device",
    )


_ASK = """
import json, torch
p = torch.cuda.is_available() and torch.cuda.get_device_properties(0)
print(json.dumps(p and [p.name, p.total_memory, [p.major, p.minor], torch.cuda.mem_get_info(0)[0]]))
"""


@functools.cache
def ask_device() -> tuple[GPU, int] | None:
    """The GPU of this machine, and its bytes that are free beside the context of a process. It is asked in a
    process of its own: a context takes memory, and forks of a process that has one cannot use CUDA."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"the GPU cannot be used:\n{asked.stderr.strip()}")
    if not (found := json.loads(asked.stdout.splitlines()[-1])):
        return None
    name, memory, capability, free = found
    return for_device(name, memory, tuple(capability)), free


def _here() -> GPU:
    """With the memory that a process could have now."""
    asked = ask_device()
    if asked is None:
        raise UserError(f"GPU {HERE!r}: there is no GPU here that torch can use; {_HINT}")
    card, free = asked
    memory = free + card.context
    if card.bandwidth is None:
        return _of_size(f"{memory // MiB}MiB")
    if memory > _WHOLE * card.memory:
        return card
    return replace(card, memory=memory, title=f"{card.title} with {format_bytes(memory)} free")


HERE = "here"
_WHOLE = 0.99  # of the memory: a desktop takes the rest
_HINT = "`oomph gpus` lists every name, and a size such as 24GiB works too"


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _BRAND_WORDS]


def _index() -> dict[str, list[GPU]]:
    index: dict[str, list[GPU]] = {}
    for card in _CATALOGUE:
        own = "".join(_words(card.name))
        # "3090" for "rtx3090": nobody else sells that number.
        short = re.sub(r"^[rg]tx(?=\d)", "", own)
        title = "".join(_words(card.title))
        for spelling in dict.fromkeys((own, short, title, *_SPELLINGS.get(card.name, ()))):
            index.setdefault(spelling, []).append(card)
    return index


_BY_SPELLING = _index()


def _spelled(key: str) -> list[GPU]:
    # "80g" for "80gb", as in "a100-80g".
    return _BY_SPELLING.get(key) or _BY_SPELLING.get(re.sub(r"(?<=\d)g$", "gb", key)) or []


def _spelled_with_size(words: list[str]) -> list[GPU]:
    """A name followed by the nominal size that this card does have, as in "RTX 3090 24GB"."""
    size = re.fullmatch(r"(\d{1,4})g(?:i?b)?", words[-1]) if len(words) > 1 else None
    if size is None:
        return []
    nominal = int(size.group(1)) * GiB
    return [card for card in _spelled("".join(words[:-1])) if 0.88 * nominal < card.memory <= 1.02 * nominal]


def _family(card: GPU) -> str:
    """What cards of one name and several forms share: "a100" for "a100-40gb"."""
    return "".join(_words(re.sub(r"-(\d+gb|pcie|nvl)$", "", card.name)))


def _nearest(key: str) -> list[str]:
    spellings = difflib.get_close_matches(key, _BY_SPELLING, n=5, cutoff=0.6)
    return list(dict.fromkeys(card.name for spelling in spellings for card in _BY_SPELLING[spelling]))[:3]


def _of_size(text: str) -> GPU:
    """A card of which only the size is known."""
    memory = parse_bytes(text)
    name = f"{memory // GiB}GiB" if memory % GiB == 0 else re.sub(r"\s+", "", text)
    return GPU(
        name=name,
        title=re.sub(r"(?<=\d)(?=[A-Za-z])", " ", name),
        memory=memory,
        capability=UNKNOWN_CAPABILITY,
        multiprocessors=UNKNOWN_MULTIPROCESSORS,
        bf16_tflops=None,
        fp32_tflops=None,
        bandwidth=None,
        context=_context(UNKNOWN_CAPABILITY),
        pcie=_pcie(UNKNOWN_CAPABILITY),
        source="given; of unknown generation, so modelled as sm_90",
    )
