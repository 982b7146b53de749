"""Draws docs/training.svg from the runs of benchmarks/training.py: a small loss curve for each config.

    python docs/draw_training.py [benchmarks/results/training_h200.json] [docs/training.svg]

Says so, and draws nothing, while there are no runs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from drawing import STYLE, page  # noqa: E402

COLUMNS = 4
WIDTH, HEIGHT = 240, 150  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 34, 26  # its margins
HEAD = 62
_SMOOTHED = 25  # a mean is taken over a part of the curve to either side; short ones are drawn as they are
_ORDERS = 20  # highest over lowest loss from which on the axis is logarithmic
_LONG_NAME = 30  # letters
MORE_STYLE = """
  .line { stroke-width: 1.8; fill: none } .raw { fill: #8c959f; opacity: .55 }
  .panel { font-size: 12px } .frame { stroke: #d8dee4; fill: none }
  @media (prefers-color-scheme: dark) { .frame { stroke: #2a313c } .raw { fill: #9198a1 } }
"""
Curve = list[tuple[int, float]]


def picture(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = math.ceil(len(runs) / COLUMNS)
    columns = min(COLUMNS, len(runs))
    first = runs[0]["row"]
    parts = page(
        max(columns, 3) * WIDTH,  # the two lines of text need room
        HEAD + rows * HEIGHT,
        "Loss over the steps of each run",
        "Loss over the steps, for each config",
        f"{first['gpu']}, torch {first['torch']}; dots: logged steps, line: their running mean; each panel "
        "has its own axes, logarithmic for ginr",
        STYLE + MORE_STYLE,
    )
    for number, run in enumerate(runs):
        at = f"{number % COLUMNS * WIDTH} {HEAD + number // COLUMNS * HEIGHT}"
        parts += [f'<g transform="translate({at})">', *_panel(run["row"], finite(run["curve"])), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def finite(curve: Sequence[Sequence[Any]]) -> Curve:
    """Without losses that are no numbers; metrics write those as words."""
    return [
        (int(step), float(loss))
        for step, loss in curve
        if not isinstance(loss, str) and math.isfinite(float(loss))
    ]


def smoothed(curve: Curve) -> Curve:
    """Running means."""
    around = len(curve) // _SMOOTHED
    return [
        (step, statistics.mean(loss for _, loss in curve[max(0, at - around) : at + around + 1]))
        for at, (step, _) in enumerate(curve)
    ]


def _panel(row: Mapping[str, Any], curve: Curve) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    narrow = ' style="font-size: 11px"' if len(row["name"]) > _LONG_NAME else ""
    yield f'<text class="panel" x="{LEFT}" y="{TOP - 20}"{narrow}>{escape(row["name"])}</text>'
    if not curve:
        yield f'<text class="tick" x="{LEFT}" y="{TOP + 14}">no finite losses</text>'
        return
    yield f'<text class="tick" x="{LEFT}" y="{TOP - 6}">{escape(about(row))}</text>'
    least, most = min(loss for _, loss in curve), max(loss for _, loss in curve)
    # Losses of images fall by two orders: on a plain axis all but the first steps would lie on one line.
    scale = math.log if 0 < least * _ORDERS < most else float
    room = (scale(most) - scale(least)) * 0.06 or abs(most) * 0.05 or 1.0
    low, high = scale(least) - room, scale(most) + room
    last = max(step for step, _ in curve)

    def place(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + (step - 1) / max(1, last - 1) * (right - LEFT)
        return x, bottom - (scale(loss) - low) / (high - low) * (bottom - TOP)

    yield f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}"/>'
    digits = next((n for n in (2, 3, 4) if f"{least:.{n}g}" != f"{most:.{n}g}"), 5)
    for value in (most, least):
        y = place(1, value)[1]
        label = figure(value, digits)
        yield f'<text class="tick" x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for step, anchor in ((1, "start"), (last, "end")):
        x = place(step, least)[0]
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{step:,}</text>'
    for x, y in (place(step, loss) for step, loss in curve):
        yield f'<circle class="raw" cx="{x:.1f}" cy="{y:.1f}" r="1.3"/>'
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in smoothed(curve)))
    yield f'<path class="line front" style="opacity: 1" d="M{line}"/>'


def figure(value: float, digits: int) -> str:
    """5.9e-4 rather than 0.00059, which has no room beside the axis."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    return f"{value:.{digits}g}"


def about(row: Mapping[str, Any]) -> str:
    """The peak, the speed, and what was found on the data held out."""
    unit = "img/s" if row.get("psnr") is not None else "tok/s"
    parts = [f"{row['measured_mib'] / 1024:.3g} GiB", f"{short(row['tokens_per_second'])} {unit}"]
    if row.get("psnr") is not None:
        parts.append(f"{row['psnr']:.1f} dB")
    elif row.get("perplexity") is not None and row.get("matching") is None:
        parts.append(f"ppl {short(row['perplexity'])}")
    return ", ".join(parts)


def short(number: float) -> str:
    """173k rather than 172,896: a panel is narrow."""
    return f"{number / 1000:.3g}k" if number >= 1000 else f"{number:.3g}"


def main(arguments: Sequence[str]) -> None:
    source = Path(arguments[0]) if arguments else HERE.parent / "benchmarks/results/training_h200.json"
    out = Path(arguments[1]) if len(arguments) > 1 else HERE / "training.svg"
    runs = json.loads(source.read_text(encoding="utf-8")) if source.exists() else []
    if not runs:
        print(f"no runs in {source}: nothing is drawn", file=sys.stderr)
        return
    out.write_text(picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
