"""How much of the copies of `activation_offloading` is hidden behind the computation, at a 4B model's sizes.

    python -m benchmarks.fixes.offloading     # on a GPU; results/offload_<gpu>.csv

Blocks of width 2560, 20 heads, MLP 9728, in bf16, recomputed, so that what goes to the host is their inputs.
Steps with and without offloading alternate. Hidden is what the copies alone would take, less what the step
takes longer; and, apart from that difference's noise, less what the compute stream waited for copies.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import RESULTS
from benchmarks.rows import need_gpu, short_name, write
from oomph import fixes
from oomph.fixes.activation_offloading import CopyStreams, PinnedBufferPool

WIDTH, HEADS, HIDDEN = 2560, 20, 9728
CASES = ((8, 8192, 8), (8, 32768, 4), (4, 131072, 2))  # blocks, tokens, rounds
WAYS = {
    "without": ["activation_checkpointing"],
    "with": ["activation_checkpointing", "activation_offloading"],
}
THRESHOLD = 85.0  # percent


@dataclass(frozen=True)
class Row:
    gpu: str
    torch: str
    tokens: int
    blocks: int
    input_mib: float  # of one block
    without_ms: float
    with_ms: float
    copies_alone_ms: float
    waited_ms: float  # the compute stream, for copies
    hidden_percent: float
    hidden_by_waiting_percent: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def measured(blocks: int, tokens: int, rounds: int) -> Row:
    ids = torch.randint(0, 1000, (1, tokens), device="cuda")
    with torch.device("cuda"):
        model = Model(blocks).to(torch.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    waits: list[float] = []
    pool: PinnedBufferPool | None = None
    for number in range(rounds + 1):  # the first is not timed: it pins memory and loads kernels
        for name, uses in WAYS.items():
            fixes.apply_to_model(uses, model)
            if name == "with":
                copies = model.blocks[0].forward.wrapper.keywords["offloader"]
                if pool is not None:
                    copies.pool = pool
                pool = copies.pool
            took, waited = _step(model, ids)
            fixes.undo(model)
            if number:
                times[name].append(took)
                waits += [waited] if name == "with" else []
    assert pool is not None
    there_and_back = _copy_ms(tokens, pool)
    without, with_ = (statistics.median(times[name]) for name in WAYS)
    alone, waited = (blocks - 1) * there_and_back, statistics.median(waits)  # the last block's input stays
    return Row(
        torch.cuda.get_device_name(),
        torch.__version__,
        tokens,
        blocks,
        tokens * WIDTH * 2 / 2**20,
        round(without, 1),
        round(with_, 1),
        round(alone, 1),
        round(waited, 2),
        round(100 * (1 - (with_ - without) / alone), 1),
        round(100 * (1 - waited / alone), 1),
    )


def _step(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """Milliseconds of forward and backward, and those in which the compute stream waited for copies."""
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    wait = CopyStreams.wait

    def timed(self: CopyStreams, done: torch.cuda.Event) -> None:
        before, after = _event(), _event()
        before.record()
        wait(self, done)
        after.record()
        waits.append((before, after))

    CopyStreams.wait = timed
    try:
        began, ended = _event(), _event()
        began.record()
        model(ids).square().mean().backward()
        ended.record()
    finally:
        CopyStreams.wait = wait
    model.zero_grad()
    torch.cuda.synchronize()
    return began.elapsed_time(ended), sum(before.elapsed_time(after) for before, after in waits)


def _copy_ms(tokens: int, pool: PinnedBufferPool) -> float:
    """A block's input to the host and back, by itself: the best of four."""
    data = torch.empty(tokens * WIDTH * 2, dtype=torch.uint8, device="cuda")
    pieces = pool.take(data.numel(), True)
    best = {True: float("inf"), False: float("inf")}
    for _ in range(4):
        for to_host in (True, False):
            began, ended = _event(), _event()
            began.record()
            start = 0
            for piece in pieces:
                part = data[start : start + piece.numel()]
                host = piece[: part.numel()]
                (host if to_host else part).copy_(part if to_host else host, non_blocking=True)
                start += piece.numel()
            ended.record()
            torch.cuda.synchronize()
            best[to_host] = min(best[to_host], began.elapsed_time(ended))
    return sum(best.values())


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def main() -> int:
    need_gpu()
    rows = []
    for case in CASES:
        row = measured(*case)
        rows.append(row)
        print(f"{row.tokens} tokens: {row.hidden_percent} % of {row.copies_alone_ms} ms hidden", flush=True)
    write(RESULTS / f"offload_{short_name(rows[0].gpu)}.csv", rows)
    return 0 if all(row.hidden_percent >= THRESHOLD for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
