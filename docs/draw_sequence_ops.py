"""Draws docs/sequence_ops.svg from the rows of benchmarks/ops.py: kda and nsa over the number of tokens.

    python docs/draw_sequence_ops.py [benchmarks/results/ops_h200.csv] [docs/sequence_ops.svg]

Two panels for each kind of layer that was run at several lengths: time on the left, memory on the right, both
logarithmic, forward + backward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from drawing import STYLE, page, part, spaced  # noqa: E402
from op_bars_sequence import tokens_of  # noqa: E402
from op_rows import Row, read_rows  # noqa: E402

WIDTH, HEIGHT = 480, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 30, 44  # its margins; names stand on the right
HEAD = 66
LENGTHS = 3  # fewer are no curve
TICKS = tuple(digit * 10**power for power in range(-2, 7) for digit in (1, 2, 5))
# Contender, the name it is given here, and its class of line.
LINES = {
    "kda": (
        ("fla", "fla", "peer"),
        ("oomph", "oomph", "ours"),
        ("oomph tight", "oomph, tight", "ours tight"),
    ),
    "nsa": (
        ("SDPA cuDNN dense", "dense, cuDNN", "dense"),
        ("fla, no window", "fla, no window", "peer"),
        ("oomph", "oomph", "ours"),
    ),
}
OPS = {"kda": "Delta attention", "nsa": "Native sparse attention"}
VALUES = (("median_ms", "milliseconds"), ("peak_mib", "MiB"))
MORE_STYLE = """
  .line { stroke-width: 2; fill: none } .tight { stroke-dasharray: 5 3 } .dense { stroke: #6e7781 }
  circle.dense { fill: #6e7781 }
  @media (prefers-color-scheme: dark) { .dense { stroke: #9198a1 } circle.dense { fill: #9198a1 } }
"""


@dataclass(frozen=True)
class Line:
    name: str
    kind: str
    points: tuple[tuple[int, float], ...]  # tokens, value


def families_of(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by op and shape without its length, where there are lengths enough."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.op in LINES and not row.gpu.startswith("cpu"):
            found.setdefault((row.op, re.sub(r"\s*\bT\d+", "", row.shape)), []).append(row)
    return {
        key: group for key, group in found.items() if len({tokens_of(row.shape) for row in group}) >= LENGTHS
    }


def lines_of(op: str, rows: Sequence[Row], value: str) -> list[Line]:
    found = []
    for contender, name, kind in LINES[op]:
        known = {
            tokens_of(row.shape): getattr(row, value)
            for row in rows
            if row.contender == contender and getattr(row, value)
        }
        if known:
            found.append(Line(name, kind, tuple(sorted(known.items()))))
    return found


def picture(rows: Sequence[Row]) -> str:
    families = families_of(rows)
    if not families:
        raise SystemExit("error: no rows of kda or nsa at several lengths; run benchmarks/ops.py first")
    width, height = len(VALUES) * WIDTH, HEAD + len(families) * HEIGHT
    first = next(iter(families.values()))[0]
    parts = page(
        width,
        height,
        "Time and memory of kda and nsa over the number of tokens",
        "Delta attention and sparse attention, forward + backward, over the number of tokens",
        f"{first.gpu}, torch {first.torch}, bf16, all contenders interleaved; memory above the inputs; "
        "logarithmic axes",
        STYLE + MORE_STYLE,
    )
    for number, ((op, family), group) in enumerate(families.items()):
        for column, (value, unit) in enumerate(VALUES):
            parts.append(f'<g transform="translate({column * WIDTH} {HEAD + number * HEIGHT})">')
            parts += _panel(f"{OPS[op]}, {family}", unit, lines_of(op, group, value))
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, unit: str, lines: Sequence[Line]) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<text class="panel" x="{LEFT}" y="{TOP - 12}">{escape(title)}: {escape(unit)}</text>'
    if not lines:
        yield f'<text class="tick" x="{LEFT}" y="{TOP + 14}">not measured</text>'
        return
    tokens = sorted({at for line in lines for at, _ in line.points})
    values = [value for line in lines for _, value in line.points]
    x_span, y_span = (tokens[0] * 0.9, tokens[-1] * 1.1), (min(values) / 1.3, max(values) * 1.3)

    def across(at: float) -> float:
        return LEFT + part(at, x_span) * (right - LEFT)

    def down(value: float) -> float:
        return bottom - part(value, y_span) * (bottom - TOP)

    for at in (2**power for power in range(8, 25) if x_span[0] <= 2**power <= x_span[1]):
        x = across(at)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_short(at)}</text>'
    for tick in spaced([tick for tick in TICKS if y_span[0] <= tick <= y_span[1]], down):
        yield f'<path class="grid" d="M{LEFT} {down(tick):.1f}H{right}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'
    yield f'<text class="tick" x="{right}" y="{bottom + 32}" text-anchor="end">tokens</text>'
    for line in lines:
        places = [(across(at), down(value)) for at, value in line.points]
        yield f'<path class="line {line.kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
        yield from (f'<circle class="{line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
    ends = {line.name: down(line.points[-1][1]) for line in lines}
    for line, y in zip(lines, apart([ends[line.name] for line in lines]), strict=True):
        ours = ' class="ours"' if line.kind.startswith("ours") else ""
        yield f'<text{ours} x="{right + 10}" y="{y + 4:.1f}">{escape(line.name)}</text>'


def apart(places: Sequence[float], gap: float = 14) -> list[float]:
    """The same places in the same order, moved down where two would be nearer than `gap`."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, here in pairwise(order):
        moved[here] = max(moved[here], moved[before] + gap)
    return moved


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def main(arguments: Sequence[str]) -> None:
    results = HERE.parent / "benchmarks" / "results"
    rows = read_rows(Path(arguments[0]) if arguments else results / "ops_h200.csv")
    out = Path(arguments[1]) if len(arguments) > 1 else HERE / "sequence_ops.svg"
    out.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
