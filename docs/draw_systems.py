"""Draws docs/systems.svg from the rows of benchmarks/systems.py: sick and healthy peaks of each system.

    python docs/draw_systems.py [docs/systems.svg]

One line for each system, on a logarithmic axis: what a step of the report's program needed, and what the
healthy form needs. The dashed lines are two common cards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from drawing import STYLE, page, part  # noqa: E402
from system_tables import SYSTEMS, system_rows  # noqa: E402

WIDTH, HEAD, ROW, FOOT = 960, 76, 50, 44
LEFT, RIGHT = 270, 60
SPAN = (0.5, 160.0)  # GiB
TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
CARDS = ((24, "24 GiB"), (80, "80 GiB"))
MORE_STYLE = """
  .between { stroke: #8c959f; stroke-width: 2 } .shape { fill: #6e7781 }
  .name { font-size: 13px; font-weight: 600 }
  text.peer { font-weight: 600; stroke: none }
  @media (prefers-color-scheme: dark) { .between { stroke: #6e7681 } .shape { fill: #9198a1 } }
"""


@dataclass(frozen=True)
class Pair:
    system: str
    what: str
    shape: str
    sick: float  # GiB
    healthy: float


def pairs() -> tuple[list[Pair], str]:
    """The pairs of the README's table, and on what they were measured."""
    rows = system_rows()

    def gib(name: str) -> float:
        return float(rows[name]["measured_mib"]) / 1024

    found = [
        Pair(system, what, shape, gib(sick), gib(healthy)) for system, what, sick, healthy, shape in SYSTEMS
    ]
    first = rows[SYSTEMS[0][2]]
    return found, f"{first['gpu']}, torch {first['torch']}"


def picture(found: Sequence[Pair], where: str) -> str:
    height = HEAD + ROW * len(found) + FOOT
    parts = page(
        WIDTH,
        height,
        "Peak memory of the five systems, sick and healthy",
        "A training step of the five systems: the reports' programs and their healthy forms",
        f"{where}; peak of allocated memory in GiB, logarithmic; same parameters and outputs in both forms",
        STYLE + MORE_STYLE,
    )
    parts += _axis(HEAD + ROW * len(found))
    for number, pair in enumerate(found):
        parts += _row(pair, HEAD + ROW * number + ROW / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _across(gib: float) -> float:
    return LEFT + part(gib, SPAN) * (WIDTH - LEFT - RIGHT)


def _axis(bottom: float) -> Iterator[str]:
    for tick in TICKS:
        x = _across(tick)
        yield f'<path class="grid" d="M{x:.1f} {HEAD}V{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
    for size, name in CARDS:
        x = _across(size)
        yield f'<path class="limit" d="M{x:.1f} {HEAD - 4}V{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{HEAD - 9}" text-anchor="middle">{name}</text>'
    yield f'<text class="tick" x="{WIDTH - RIGHT}" y="{bottom + 32}" text-anchor="end">GiB</text>'


def _row(pair: Pair, y: float) -> Iterator[str]:
    healthy, sick = _across(pair.healthy), _across(pair.sick)
    yield f'<text class="name" x="16" y="{y - 8:.1f}">{escape(pair.system)}</text>'
    yield f'<text x="16" y="{y + 7:.1f}">{escape(pair.what)}</text>'
    yield f'<text class="shape" x="16" y="{y + 21:.1f}">{escape(pair.shape)}</text>'
    yield f'<path class="between" d="M{healthy:.1f} {y:.1f}H{sick:.1f}"/>'
    for kind, x, gib in (("ours", healthy, pair.healthy), ("peer", sick, pair.sick)):
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
        label = f"{'healthy' if kind == 'ours' else 'sick'} {gib:.3g}"
        yield f'<text class="{kind}" x="{x:.1f}" y="{y - 11:.1f}" text-anchor="middle">{label}</text>'


def main(arguments: Sequence[str]) -> None:
    out = Path(arguments[0]) if arguments else HERE / "systems.svg"
    out.write_text(picture(*pairs()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
