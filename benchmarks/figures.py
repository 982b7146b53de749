"""Draw the figures of README.md and docs/ from the committed rows.

    python -m benchmarks.figures [predict ops sequence_ops systems training ginr]

`predict` is the terminal output of `oomph predict`, exported by rich; the others are matplotlib figures.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from lab.benchmarks import RESULTS as LAB_RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks import RESULTS, ROOT
from benchmarks.ops.rows import Row, read_rows
from benchmarks.ops.thresholds import tokens_of
from benchmarks.tables import SYSTEMS, system_rows

DOCS, LAB_DOCS = ROOT / "docs", ROOT / "lab" / "docs"
OURS, PEER, NEUTRAL = "#cf5b00", "#0969da", "#6e7781"
CARDS = {24: "24 GiB", 80: "80 GiB"}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e8ec",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "oomph",  # the same file for the same rows
}


def predict() -> None:
    from rich.console import Console
    from rich.text import Text

    from oomph.cli.targets import open_target
    from oomph.prediction import predict
    from oomph.report.terminal import report_text

    with open_target("examples/gpt2.py:workload") as target:
        prediction = predict(target, gpu="rtx3090")
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=112)
    recorder = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    recorder.print(Text.from_ansi(report_text(prediction, terminal)))
    svg = recorder.export_svg(title="oomph predict examples/gpt2.py:workload --gpu rtx3090")
    # Rich names a web font; a figure must load nothing.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    (DOCS / "predict.svg").write_text(svg)


def ops() -> None:
    """Linear cross-entropy: one panel for each shape, memory above the two gradients against time."""
    rows = [row for row in read_rows(RESULTS / "ops_h200.csv") if row.op == "cross_entropy"]
    shapes = [shape for shape in dict.fromkeys(row.shape for row in rows) if _can_be_compared(rows, shape)]
    figure, panels = plt.subplots(
        math.ceil(len(shapes) / 2), 2, figsize=(11, 3.6 * math.ceil(len(shapes) / 2))
    )
    for axes, shape in zip(panels.flat, shapes, strict=False):
        points = [row for row in rows if row.shape == shape and _is_contender(row)]
        for row in sorted(points, key=lambda row: row.ratio_to_limit or 0):
            x, y = max(1.0, row.above_floor_mib or 0), row.ratio_to_limit or 0
            color = OURS if row.ours else PEER
            axes.scatter(x, y, s=28, color=color, facecolor=color if row.exact else "white", zorder=3)
            axes.annotate(row.contender, (x, y), (5, 3), textcoords="offset points", fontsize=7, color=color)
        n, h, v = (f"{int(size):,}" for size in shape.split("x"))
        axes.set(xscale="log", yscale="log", title=f"{n} tokens x {h} features x {v} classes")
        axes.set(xlabel="MiB above the two gradients", ylabel="time / three matrix products")
        axes.axhline(1, color=NEUTRAL, linestyle="--", linewidth=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks([1, 1.2, 1.5, 2, 3, 5, 10])
    for axes in panels.flat[len(shapes) :]:
        axes.set_visible(False)
    about = f"{rows[0].gpu}, torch {rows[0].torch}, bf16, interleaved; hollow: leaves out small gradients"
    _save(figure, "ops", f"Linear cross-entropy, forward + backward. {about}")


def _is_contender(row: Row) -> bool:
    return row.ratio_to_limit is not None and row.above_floor_mib is not None and "limit" not in row.contender


def _can_be_compared(rows: Sequence[Row], shape: str) -> bool:
    """A shape with peers, and where cuBLAS is not slow (an odd number of classes): there 1x is no bound."""
    points = [row for row in rows if row.shape == shape and _is_contender(row)]
    return any(not row.ours for row in points) and min(row.ratio_to_limit or 0 for row in points) >= 1


SEQUENCE_LINES = {
    "kda": {"fla": (PEER, "-"), "oomph": (OURS, "-"), "oomph tight": (OURS, "--")},
    "nsa": {"SDPA cuDNN dense": (NEUTRAL, "-"), "fla, no window": (PEER, "-"), "oomph": (OURS, "-")},
}
SEQUENCE_TITLES = {"kda": "Kimi delta attention", "nsa": "Native sparse attention"}


def sequence_ops() -> None:
    """kda and nsa over the number of tokens: time on the left, memory on the right."""
    families: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(RESULTS / "ops_h200.csv"):
        if row.op in SEQUENCE_LINES:
            families.setdefault((row.op, re.sub(r"\s*\bT\d+", "", row.shape)), []).append(row)
    families = {
        key: rows for key, rows in families.items() if len({tokens_of(row.shape) for row in rows}) >= 3
    }
    figure, panels = plt.subplots(len(families), 2, figsize=(11, 2.9 * len(families)), squeeze=False)
    for ((op, shape), rows), (left, right) in zip(families.items(), panels, strict=True):
        for axes, value, unit in ((left, "median_ms", "milliseconds"), (right, "peak_mib", "MiB")):
            for contender, (color, style) in SEQUENCE_LINES[op].items():
                points = sorted(
                    (tokens_of(row.shape), getattr(row, value))
                    for row in rows
                    if row.contender == contender and getattr(row, value)
                )
                if points:
                    axes.plot(
                        *zip(*points, strict=True), style, color=color, marker="o", ms=3, label=contender
                    )
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
            axes.set_title(f"{SEQUENCE_TITLES[op]}, {shape}")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at / 1024:g}k"))
            axes.legend(frameon=False, fontsize=7)
    first = next(iter(families.values()))[0]
    about = f"{first.gpu}, torch {first.torch}, bf16, interleaved; memory above the inputs"
    _save(figure, "sequence_ops", f"Forward + backward over the number of tokens. {about}")


def systems() -> None:
    """Peak memory of the five systems: the report's program and the implementation to use."""
    rows = system_rows()
    figure, axes = plt.subplots(figsize=(11, 3.6))
    for y, (system, what, naive, model, shape) in enumerate(reversed(SYSTEMS)):
        before, after = (float(rows[name]["measured_mib"]) / 1024 for name in (naive, model))
        axes.plot([after, before], [y, y], color="#b8c0c8", linewidth=2, zorder=1)
        for value, color, label in ((after, OURS, "model"), (before, PEER, "naive")):
            axes.scatter(value, y, s=45, color=color, zorder=2, label=label if y == 0 else None)
            axes.annotate(
                f"{value:.3g}", (value, y), (0, 7), textcoords="offset points", ha="center", color=color
            )
        axes.annotate(
            f"{system}: {what}\n{shape}", (0, y), (-8, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=8,
        )  # fmt: skip
    for size, name in CARDS.items():
        axes.axvline(size, color=NEUTRAL, linestyle="--", linewidth=1)
        axes.text(size, 1.02, name, transform=axes.get_xaxis_transform(), ha="center")
    axes.set(xscale="log", xlabel="peak of allocated memory, GiB", yticks=[], ylim=(-0.6, len(SYSTEMS) - 0.3))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(frameon=False, loc="lower right")
    first = rows[SYSTEMS[0][2]]
    _save(figure, "systems", f"A training step of the five systems. {first['gpu']}, torch {first['torch']}")


def training() -> None:
    """Loss curves of the measured training runs."""
    runs = json.loads((LAB_RESULTS / "training_h200.json").read_text(encoding="utf-8"))
    columns = 4
    lines = math.ceil(len(runs) / columns)
    figure, panels = plt.subplots(lines, columns, figsize=(13, 2.2 * lines), squeeze=False)
    for axes, run in zip(panels.flat, runs, strict=False):
        _loss_curve(axes, run["row"], [(step, float(loss)) for step, loss in run["curve"]])
    for axes in panels.flat[len(runs) :]:
        axes.set_visible(False)
    row = runs[0]["row"]
    _save(figure, "training", f"Training runs: loss over steps. {row['gpu']}, torch {row['torch']}")


def _loss_curve(axes: Axes, row: Mapping[str, Any], curve: Sequence[tuple[int, float]]) -> None:
    points = [(step, loss) for step, loss in curve if math.isfinite(loss)]
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, color="#b8c0c8", linewidth=0.6)
    width = max(1, len(losses) // 20)
    means = [sum(losses[max(0, i - width) : i + 1]) / (i + 1 - max(0, i - width)) for i in range(len(losses))]
    axes.plot(steps, means, color=OURS, linewidth=1.2)
    images = row.get("psnr") is not None
    rate = row["tokens_per_second"]
    parts = [
        f"{row['measured_mib'] / 1024:.3g} GiB",
        f"{rate / 1000:.3g}k" if rate >= 1000 else f"{rate:.3g}",
        "img/s" if images else "tok/s",
    ]
    if images:
        parts.append(f"{row['psnr']:.1f} dB")
    axes.set_title(row["name"], fontsize=9)
    axes.set_xlabel(" ".join(parts), fontsize=7)
    axes.tick_params(labelsize=7)


_DECODERS = {  # file of ginr_samples, or the run of its quality -> what it is
    "feedforward": "1: feed-forwards",
    "cross": "2: cross-attention",
    "batch_16": "3: batch 16",
    "self": "4: self-attention",
    "resolution_16": "5: 16 x 16 pixels",
    "queries": "256 of 1,024 queries",
    "residual": "residual blocks",
}


def ginr() -> None:
    """Held-out crops after 200 steps. A sample has the originals in its upper half."""
    images = {name: plt.imread(LAB_RESULTS / "ginr_samples" / f"{name}.png") for name in _DECODERS}
    originals = images["self"][: len(images["self"]) // 2]
    rows = {"held-out originals": originals}
    rows |= {title: images[name][len(images[name]) // 2 :] for name, title in _DECODERS.items()}
    figure, axes = plt.subplots(len(rows), 1, figsize=(7, 0.92 * len(rows)))
    for each, (title, image) in zip(axes, rows.items(), strict=True):
        each.imshow(image, interpolation="nearest", extent=(0, 8, 0, 1))
        each.set_ylabel(title, rotation=0, ha="right", va="center")
        each.set_xticks([])
        each.set_yticks([])
        each.grid(visible=False)
        each.spines[:].set_visible(False)
    _save(figure, "ginr", "Report 004's decoders after 200 steps on eight photographs, seed 0")


def _save(figure: Figure, name: str, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    path = (LAB_DOCS if name in ("systems", "training", "ginr") else DOCS) / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


FIGURES: Mapping[str, Callable[[], None]] = {
    draw.__name__: draw for draw in (predict, ops, sequence_ops, systems, training, ginr)
}


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        print(f"error: there is no figure {unknown[0]!r}; valid: {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    plt.switch_backend("svg")
    with plt.rc_context(STYLE):
        for name in names or FIGURES:
            FIGURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
