"""Draws docs/ops.svg from the rows of benchmarks/ops.py: time and memory of linear cross-entropy.

    python docs/draw_ops.py [benchmarks/results/ops_h200.csv] [docs/ops.svg]

One panel for each shape. To the left: less memory above the two gradients; downwards: nearer to the time of
the three matrix products alone. The line is the front: nothing exact lies below and to the left of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from drawing import page, part, spaced  # noqa: E402
from op_rows import Row, read_rows  # noqa: E402

WIDTH, HEIGHT = 480, 390  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 46, 44  # its margins
HEAD = 66
CHARACTER, BOLD, LINE = 6.5, 8.2, 12  # of a label's text, in pixels
X_TICKS = (1, 10, 100, 1000, 10_000, 100_000)
Y_TICKS = (1, 1.05, 1.1, 1.2, 1.35, 1.5, 2, 3, 5, 8, 12, 20)
NEAR = 0.9  # times are shown as log(ratio - NEAR): most of the room goes to ratios near 1


@dataclass(frozen=True)
class Box:
    """A rectangle that a label or a dot takes."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return max(0.0, wide) * max(0.0, high)


@dataclass(frozen=True)
class Dot:
    name: str
    ours: bool
    exact: bool
    ratio: float
    above: float  # MiB above the floor, at least 1: the axis is logarithmic
    x: float = 0.0
    y: float = 0.0


def dots_of(rows: Sequence[Row]) -> list[Dot]:
    found = []
    for row in rows:
        if row.ratio_to_limit is None or row.above_floor_mib is None or "limit" in row.contender:
            continue
        above = max(1.0, row.above_floor_mib)
        found.append(Dot(row.contender, row.ours, row.exact, row.ratio_to_limit, above))
    return found


def front(dots: Sequence[Dot]) -> list[Dot]:
    """The exact dots that no exact dot beats in both, from the least memory to the least time."""
    kept: list[Dot] = []
    for dot in sorted((dot for dot in dots if dot.exact), key=lambda dot: (dot.above, dot.ratio)):
        if not kept or dot.ratio < kept[-1].ratio:
            kept.append(dot)
    return kept


def panels_of(rows: Sequence[Row]) -> dict[str, list[Dot]]:
    """The dots by shape, where there are others than ours to compare with."""
    shapes = dict.fromkeys(row.shape for row in rows if row.op == "cross_entropy")
    panels = {
        shape: dots_of([row for row in rows if row.op == "cross_entropy" and row.shape == shape])
        for shape in shapes
    }
    return {shape: dots for shape, dots in panels.items() if any(not dot.ours for dot in dots)}


def _limit_holds(dots: Sequence[Dot]) -> bool:
    """Where cuBLAS is slow (an odd number of classes), three of its products are no lower bound."""
    return min(dot.ratio for dot in dots) >= 1


def picture(rows: Sequence[Row], columns: int = 2) -> str:
    panels = {shape: dots for shape, dots in panels_of(rows).items() if _limit_holds(dots)}
    if not panels:
        raise SystemExit("error: no rows of cross_entropy with times and peaks; run benchmarks/ops.py first")
    lines = -(-len(panels) // columns)
    width, height = columns * WIDTH, HEAD + lines * HEIGHT
    every = [dot for dots in panels.values() for dot in dots]
    x_span = (0.8, 1.6 * max(dot.above for dot in every))
    y_span = (0.98, 1.25 * max(2.0, *(dot.ratio for dot in every)))
    about = "bf16, peaked logits, all contenders interleaved; hollow: leaves out small gradients"
    parts = page(
        width,
        height,
        "Time and memory of linear cross-entropy",
        "Linear cross-entropy, forward + backward: memory and time",
        f"{rows[0].gpu}, torch {rows[0].torch}, {about}",
    )
    for number, (shape, dots) in enumerate(panels.items()):
        x, y = number % columns * WIDTH, HEAD + number // columns * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(shape, dots, x_span, y_span), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    shape: str, dots: Sequence[Dot], x_span: tuple[float, float], y_span: tuple[float, float]
) -> list[str]:
    def across(value: float) -> float:
        return LEFT + part(value, x_span) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - part(value - NEAR, (y_span[0] - NEAR, y_span[1] - NEAR)) * (HEIGHT - TOP - BOTTOM)
        )

    n, h, v = (f"{int(size):,}" for size in shape.split("x"))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<text class="panel" x="{LEFT}" y="{TOP - 14}">{n} tokens x {h} features x {v} classes</text>']
    for tick in (tick for tick in X_TICKS if x_span[0] <= tick <= x_span[1]):
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,}</text>')
    for tick in spaced([tick for tick in Y_TICKS if tick <= y_span[1]], down):
        y = down(tick)
        parts.append(f'<path class="{"limit" if tick == 1 else "grid"}" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}x</text>')
    about = "MiB above the two gradients"
    parts.append(f'<text class="tick" x="{right}" y="{bottom + 33}" text-anchor="end">{about}</text>')
    parts.append(
        f'<text class="tick" x="{LEFT}" y="{bottom + 33}">1x: the three matrix products alone</text>'
    )
    placed = [Dot(d.name, d.ours, d.exact, d.ratio, d.above, across(d.above), down(d.ratio)) for d in dots]
    line = front(placed)
    if len(line) > 1:
        steps = "".join(f"H{dot.x:.1f}V{dot.y:.1f}" for dot in line[1:])
        parts.append(f'<path class="front" d="M{line[0].x:.1f} {line[0].y:.1f}{steps}"/>')
    return [*parts, *_marks(placed, line)]


def _marks(dots: Sequence[Dot], line: Sequence[Dot]) -> list[str]:
    """Dots and their names, each where it covers the least of what is there already."""
    taken = [Box(dot.x - 5, dot.y - 5, 10, 10) for dot in dots]
    for here, there in pairwise(line):
        taken.append(Box(here.x, here.y - 1, there.x - here.x, 2))
        taken.append(Box(there.x - 1, here.y, 2, there.y - here.y))
    parts = []
    for dot in sorted(dots, key=lambda dot: (not dot.ours, dot.x)):
        box = min(_places(dot), key=lambda place: _cost(place, dot, taken))
        taken.append(box)
        kind = "ours" if dot.ours else "peer"
        hollow = "" if dot.exact else " hollow"
        if _distance(box, dot) > 12:
            end = min(max(dot.x, box.x), box.x + box.width)
            parts.append(
                f'<path class="lead" d="M{dot.x:.1f} {dot.y:.1f}L{end:.1f} {box.y + LINE / 2:.1f}"/>'
            )
        parts.append(f'<circle class="{kind}{hollow}" cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="4.2"/>')
        colour = ' class="ours"' if dot.ours else ""
        place = f'x="{box.x:.1f}" y="{box.y + LINE - 2:.1f}"'
        parts.append(f"<text{colour} {place}>{escape(dot.name)}</text>")
    return parts


def _places(dot: Dot) -> list[Box]:
    wide = (BOLD if dot.ours else CHARACTER) * len(dot.name)
    found = []
    for drop in (0, -11, 11, -22, 22, -34, 34, -46, 46, -58, 58):
        y = dot.y - LINE / 2 + drop
        found += [Box(dot.x + 8, y, wide, LINE), Box(dot.x - 8 - wide, y, wide, LINE)]
        if drop:
            found.append(Box(dot.x - wide / 2, y, wide, LINE))
    return found


def _cost(box: Box, dot: Dot, taken: Sequence[Box]) -> float:
    outside = (
        max(0.0, LEFT + 2 - box.x)
        + max(0.0, box.x + box.width - (WIDTH - 4))
        + max(0.0, TOP - box.y)
        + max(0.0, box.y + LINE - (HEIGHT - BOTTOM))
    )
    return 50 * outside + 10 * sum(box.overlap(other) for other in taken) + _distance(box, dot)


def _distance(box: Box, dot: Dot) -> float:
    x = min(max(dot.x, box.x), box.x + box.width)
    return math.hypot(x - dot.x, box.y + LINE / 2 - dot.y)


def main(arguments: Sequence[str]) -> None:
    results = HERE.parent / "benchmarks" / "results"
    rows = read_rows(Path(arguments[0]) if arguments else results / "ops_h200.csv")
    out = Path(arguments[1]) if len(arguments) > 1 else HERE / "ops.svg"
    out.write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
