"""What the pictures of the benchmarks share: colours in light and dark, and positions on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

STYLE = """
  text { font: 11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #3d444d }
  .paper { fill: #ffffff } .title { font-size: 15px; font-weight: 600; fill: #1f2328 }
  .panel { font-size: 12.5px; font-weight: 600; fill: #1f2328 } .tick { fill: #6e7781 }
  .grid { stroke: #d8dee4; stroke-width: 1 } .limit { stroke: #6e7781; stroke-dasharray: 4 3 }
  .front { stroke: #cf5b00; stroke-width: 1.5; fill: none; opacity: .55 }
  .ours { fill: #cf5b00; stroke: #cf5b00 } text.ours { font-weight: 600; stroke: none }
  .peer { fill: #0969da; stroke: #0969da } .hollow { fill: #ffffff }
  .lead { stroke: #8c959f; stroke-width: .7 }
  @media (prefers-color-scheme: dark) {
    text { fill: #c9d1d9 } .paper { fill: #0d1117 } .title, .panel { fill: #f0f6fc } .tick { fill: #9198a1 }
    .grid { stroke: #2a313c } .limit { stroke: #9198a1 } .front { stroke: #ffa657 }
    .ours { fill: #ffa657; stroke: #ffa657 } .peer { fill: #58a6ff; stroke: #58a6ff }
    .hollow { fill: #0d1117 } .lead { stroke: #6e7681 }
  }
"""


def page(width: float, height: float, label: str, title: str, about: str, style: str = STYLE) -> list[str]:
    """The beginning of a picture: its size, its colours, and two lines of text."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}">',
        f"<style>{style}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text x="16" y="46">{escape(about)}</text>',
    ]


def part(value: float, span: tuple[float, float]) -> float:
    """How far along a logarithmic axis: 0 at the span's beginning, 1 at its end."""
    low, high = (math.log(end) for end in span)
    return (math.log(value) - low) / (high - low)


def spaced(ticks: Sequence[float], down: Callable[[float], float]) -> list[float]:
    """Those whose labels do not touch."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or down(kept[-1]) - down(tick) >= 13:
            kept.append(tick)
    return kept
