"""Records as they look in a notebook: `_repr_html_` of a Prediction, a Diagnosis and a Plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from oomph.records import STAGES, Diagnosis, Plan, Prediction
from oomph.report.fixes import plan_verdict, short_fix_word
from oomph.report.terminal import file_and_line, printable, verdict
from oomph.units import format_bytes

_LINES = 6
_COLOURS = dict(
    zip(
        STAGES,
        "#3f6fd8 #8b5cf6 #0f9488 #38a8e0 #98a4b5 #f0a020 #e5484d #e0569b #41a85f #6b7686 #b5651d".split(),
        strict=True,
    )
)


def prediction_html(prediction: Prediction) -> str:
    line = verdict(prediction)
    total = max(prediction.peak.device, prediction.capacity or 0, 1)
    parts = "".join(
        f'<span title="{stage}: {format_bytes(size)}" style="display:inline-block;height:16px;'
        f'width:{100 * size / total:.2f}%;background:{_COLOURS[stage]}"></span>'
        for stage, size in prediction.by_stage()
    )
    legend = " &nbsp; ".join(
        f'<span style="color:{_COLOURS[stage]}">&#9632;</span> {stage} {format_bytes(size)}'
        for stage, size in prediction.by_stage()
    )
    rows = [(format_bytes(size), file_and_line(site)) for site, size in prediction.by_line()[:_LINES]]
    text = _text(line.line) + (f"<br>{_text(line.out_of_memory)}" if line.out_of_memory else "")
    return (
        f'<div style="max-width:900px"><b>{text}</b>'
        f'<div style="background:#8882;margin:6px 0;white-space:nowrap;font-size:0">{parts}</div>'
        f"<div>{legend}</div>{_table(rows)}</div>"
    )


def diagnosis_html(diagnosis: Diagnosis) -> str:
    rows = [
        (one.pattern, format_bytes(one.bytes), file_and_line(one.sites[0]) if one.sites else "", one.advice)
        for one in diagnosis.findings[:_LINES]
    ]
    return prediction_html(diagnosis.prediction) + _table(rows)


def plan_html(plan: Plan) -> str:
    rows = [
        (format_bytes(one.peak.device), f"x{one.slowdown:.2f}", " + ".join(map(short_fix_word, one.fixes)))
        for one in plan.front
    ]
    return f"<b>{_text(plan_verdict(plan))}</b>{_table(rows)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    cells = ("".join(f'<td style="text-align:left">{_text(one)}</td>' for one in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>" if rows else ""


def _text(value: str) -> str:
    return escape(printable(value, 600))


def register() -> None:
    """`import oomph` calls it in a notebook; records themselves are plain data."""
    Prediction._repr_html_ = prediction_html  # type: ignore[attr-defined]
    Diagnosis._repr_html_ = diagnosis_html  # type: ignore[attr-defined]
    Plan._repr_html_ = plan_html  # type: ignore[attr-defined]
