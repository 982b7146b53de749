"""One self-contained HTML page: verdict, memory over the run, what is alive at each moment, findings, plans.

The data is a JSON object inside the page; `assets/report.js` renders it with Apache ECharts, which is inside
the page as well. Nothing is loaded from elsewhere, which a Content-Security-Policy enforces. Strings of the
user's program reach the page as JSON only, and the script sets them as text, never as markup.
"""

from __future__ import annotations

import json
import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from oomph.records import STAGES, Allocation, Event, Finding, Note, Plan, Prediction, Site
from oomph.report.as_json import downsample
from oomph.report.comparison import line_changes
from oomph.report.fixes import RunLine, apply_commands, failed_lines, plan_verdict, short_fix_word
from oomph.report.measurement import Comparison
from oomph.report.terminal import (
    assumptions,
    called_from,
    collapse_modules,
    file_and_line,
    gpu_name,
    printable,
    source_code,
    verdict,
    without_numbers,
)

MOMENTS = 500
_MOST_GROUPS = 6000  # of tensors; what is beyond counts as one per stage
_MOST_PHASES = 60
_MOST_CHANGES = 40
_EXCERPT = 3  # lines before and after the line of a finding
_PHASE = re.compile(r"step \d+|forward|backward|optimizer")


@dataclass(frozen=True, slots=True)
class Page:
    """What a report shows. All but `target` and `runs` may be empty."""

    target: str  # as typed
    runs: Sequence[
        tuple[str, Prediction]
    ]  # ("as it is", ...), ("with the plan", ...); the last is shown first
    gpus: Sequence[tuple[str, int, int]] = ()  # title, memory, CUDA context: limits to choose from
    findings: Sequence[Finding] = ()
    plan: Plan | None = None
    plan_file: str | None = None  # where the plan was written
    run_line: RunLine | None = None  # of a launch line of several ranks
    measured: Sequence[Comparison] = ()
    notes: Sequence[Note] = ()


def write_html(path: str | os.PathLike[str], page: Page) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(html_report(page))


def html_report(page: Page) -> str:
    data = {
        "target": printable(page.target),
        "stages": STAGES,
        "runs": [_run(title, prediction) for title, prediction in page.runs],
        "gpus": [[printable(title), memory, memory - context] for title, memory, context in page.gpus],
        "findings": [_finding(one) for one in page.findings],
        "plan": None if page.plan is None else _plan(page.plan, page),
        "changes": [] if len(page.runs) < 2 else _changes(page.runs[0][1], page.runs[-1][1]),
        "measured": [_measured(one) for one in page.measured],
        "notes": [_note(note) for note in page.notes],
    }
    # In JSON "<" occurs inside strings only; without it no string can end the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    assets = resources.files("oomph.report") / "assets"
    page_text = (assets / "report.html").read_text("utf-8")
    parts = {"DATA": text}
    for name in ("report.css", "echarts.min.js", "report.js"):
        parts[name] = (assets / name).read_text("utf-8")
    return re.sub(r"/\*\{(.+?)\}\*/", lambda match: parts[match[1]], page_text)


def _run(title: str, prediction: Prediction) -> dict[str, Any]:
    line = verdict(prediction)
    peak = prediction.peak
    return {
        "title": printable(title),
        "outcome": line.outcome,
        "details": printable(line.details.removeprefix(":").strip() + line.growth),
        "outOfMemory": printable(line.out_of_memory),
        "gpu": printable(gpu_name(prediction)),
        "capacity": prediction.capacity,
        "limit": prediction.limit,
        "peak": {"allocated": peak.allocated, "reserved": peak.reserved, "device": peak.device},
        "needed": prediction.needed.device,
        "margin": prediction.margin,
        "nccl": prediction.nccl,
        "stepSeconds": prediction.step_seconds,
        "seconds": prediction.seconds,
        "events": len(prediction.events),
        "assumptions": [printable(text) for text in assumptions(prediction)],
        "notes": [_note(note) for note in prediction.notes],
        **_tensors_over_time(prediction),
    }


# ------------------------------------------------------------------------------------- tensors over time


def _tensors_over_time(prediction: Prediction) -> dict[str, Any]:
    """Groups of tensors alike, and for each sampled moment which of them came and went since the last.

    Each group is a row of the table of tensors and one module. A moment is [event, reserved, what is being
    allocated, changes]; changes is a flat list of group, tensors more, bytes more.
    """
    sampled = moments = downsample(prediction.timeline, MOMENTS)
    failed = bool(prediction.recorded) and prediction.refused is not None  # at the end of the recording
    if failed and moments and moments[-1] != prediction.timeline[-1]:
        sampled = moments = (*moments, prediction.timeline[-1])
    if prediction.events:
        born, died = _survivors(prediction, [moment.event for moment in moments])
    else:  # from JSON, which has the tensors of the peak only
        highest = max(range(len(moments)), key=lambda i: moments[i].allocated, default=0)
        moments = moments[highest : highest + 1]
        born = [[(alive.allocation, alive.bytes) for alive in prediction.at_peak]]
        died = [[]]
    groups = _Groups(one for births in born for one in births)
    found = []
    for moment, births, deaths in zip(moments, born, died, strict=True):
        changes: dict[int, list[int]] = {}
        for sign, several in ((1, births), (-1, deaths)):
            for allocation, size in several:
                change = changes.setdefault(groups.index(allocation), [0, 0])
                change[0] += sign
                change[1] += sign * size
        flat = [n for group, (count, size) in changes.items() if count or size for n in (group, count, size)]
        found.append([moment.event, moment.reserved, _request(prediction, moment.event), flat])
    return {
        "moments": found,
        "failed": failed,
        "line": [[moment.event, moment.allocated] for moment in sampled],
        "phases": _phases(prediction.events),
        "modules": groups.modules,
        "ops": list(groups.ops),
        "sites": groups.sites,
        "rows": groups.table(),
        "groups": groups.members,
    }


_Sized = tuple[Allocation, int]  # with the bytes of its block


def _survivors(
    prediction: Prediction, samples: Sequence[int]
) -> tuple[list[list[_Sized]], list[list[_Sized]]]:
    """For each sampled event, what came and what went since the one before.

    Tensors that live between two samples only are left out at once: in a long trace they are most.
    """
    born: list[list[_Sized]] = [[] for _ in samples]
    died: list[list[_Sized]] = [[] for _ in samples]
    alive: dict[int, tuple[int, int]] = {}  # id: sample, bytes
    allocations = prediction.allocations
    timeline = iter(prediction.timeline)
    sample, end, allocated = 0, samples[0] if samples else -1, 0
    for index, (action, id, _) in enumerate(prediction.events):
        if index > end:
            sample += 1
            if sample == len(samples):
                break
            end = samples[sample]
        if action == "mark":
            continue
        now = next(timeline).allocated
        if action == "alloc":
            alive[id] = sample, now - allocated
        elif id in alive:
            first, size = alive.pop(id)
            if first != sample:
                born[first].append((allocations[id], size))
                died[sample].append((allocations[id], size))
        allocated = now
    for id, (first, size) in alive.items():
        if first < len(samples):
            born[first].append((allocations[id], size))
    return born, died


class _Groups:
    """Tensors of one line, shape, dtype, stage and module; without a line, of one op."""

    def __init__(self, tensors: Iterable[_Sized]) -> None:
        self.modules: list[str] = []
        self.sites: list[list[Any]] = []
        self.ops: dict[str, int] = {}
        self.members: list[list[int]] = []  # row, module, op
        self._rows: list[_Row] = []
        self._row_of: dict[Any, int] = {}
        self._module_of: dict[str, int] = {}
        self._site_of: dict[Site, int] = {}
        self._group_of: dict[Any, int] = {}
        self._key_of: dict[int, Any] = {}  # by id of the Allocation
        self._add(tensors)

    def index(self, allocation: Allocation) -> int:
        key = self._key_of[allocation.id]
        return self._group_of[key if key in self._group_of else allocation.stage]

    def _add(self, tensors: Iterable[_Sized]) -> None:
        sizes: dict[Any, int] = {}
        examples: dict[Any, Allocation] = {}
        for one, size in tensors:
            key = (one.site, one.op, one.module, one.shape, one.dtype, one.stage)
            self._key_of[one.id] = key
            sizes[key] = sizes.get(key, 0) + size
            examples.setdefault(key, one)
        kept = sorted(sizes, key=lambda key: -sizes[key])
        for key in kept[:_MOST_GROUPS]:
            self._group_of[key] = self._group(examples[key])
        for key in kept[_MOST_GROUPS:]:
            stage = examples[key].stage
            if stage not in self._group_of:
                rest = examples[key]._replace(
                    site=None, op="many small tensors", module="", shape=(), dtype=""
                )
                self._group_of[stage] = self._group(rest)

    def _group(self, one: Allocation) -> int:
        where = one.site if one.site is not None else (without_numbers(one.module), one.op)
        key = where, one.shape, one.dtype, one.stage
        if key not in self._row_of:
            self._row_of[key] = len(self._rows)
            self._rows.append(_Row(one, self._site(one.site)))
        row = self._rows[self._row_of[key]]
        row.modules.setdefault(one.module)
        if one.module not in self._module_of:
            self._module_of[one.module] = len(self.modules)
            self.modules.append(printable(one.module))
        op = self.ops.setdefault(printable(one.op.removeprefix("aten.")), len(self.ops))
        self.members.append([self._row_of[key], self._module_of[one.module], op])
        return len(self.members) - 1

    def _site(self, site: Site | None) -> int:
        """-1 for none."""
        if site is None:
            return -1
        if site not in self._site_of:
            self._site_of[site] = len(self.sites)
            code = "\n".join(filter(None, (source_code(site), called_from(site))))
            self.sites.append([printable(file_and_line(site)), printable(site.function), code])
        return self._site_of[site]

    def table(self) -> list[list[Any]]:
        """[shape, dtype, modules, site, stage] of each row."""
        return [
            [
                f"[{', '.join(map(str, row.first.shape))}]" if row.first.dtype else "",
                printable(row.first.dtype),
                printable(collapse_modules(row.modules)),
                row.site,
                STAGES.index(row.first.stage),
            ]
            for row in self._rows
        ]


class _Row:
    def __init__(self, first: Allocation, site: int) -> None:
        self.first, self.site = first, site
        self.modules: dict[str, None] = {}


def _request(prediction: Prediction, event: int) -> str:
    """What the event does: `allocates 1.5 GiB for aten._softmax` as far as a reader can use it."""
    if event >= len(prediction.events) or prediction.events[event].action != "alloc":
        return ""
    one = prediction.allocations[prediction.events[event].id]
    at = f", {file_and_line(one.site)}" if one.site else ""
    return printable(f"{one.op.removeprefix('aten.')}{at}")


def _phases(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Where steps and their parts begin: (event, "step 2"), (event, "backward")."""
    marks = [(i, event.label) for i, event in enumerate(events) if event.action == "mark"]
    found = [(i, label) for i, label in marks if _PHASE.fullmatch(label)]
    if len(found) > _MOST_PHASES:
        found = [(i, label) for i, label in found if label.startswith("step")]
    return found[:: -(-len(found) // _MOST_PHASES)] if found else []


# ------------------------------------------------------------------------------------- other sections


def _note(note: Note) -> list[str]:
    return [printable(note.text, 600), printable(file_and_line(note.site)) if note.site else ""]


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "pattern": printable(one.pattern),
        "bytes": one.bytes,
        "formula": printable(one.formula),
        "growth": printable(one.growth),
        "advice": printable(f"{one.advice[:1].upper()}{one.advice[1:]}", 600),
        "fixes": [printable(name) for name in one.fixes],
        "lines": [_excerpt(site) for site in one.sites[:4]],
    }


def _excerpt(site: Site) -> dict[str, Any]:
    """The lines around a site, without their common indentation."""
    first = max(1, site.line - _EXCERPT)
    lines = [
        linecache.getline(site.file, number).rstrip() for number in range(first, site.line + _EXCERPT + 1)
    ]
    while lines and not lines[-1]:
        lines.pop()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return {
        "label": printable(file_and_line(site)),
        "function": printable(site.function),
        "first": first,
        "line": site.line,
        "code": [printable(line[indent:]) for line in lines],
    }


def _plan(plan: Plan, page: Page) -> dict[str, Any]:
    front = list(plan.front)
    if plan.after not in front:
        front.append(plan.after)
    how, commands = "", tuple[str, ...]()
    if plan.fixes and plan.fits:
        how, commands = apply_commands(plan, page.target, page.plan_file, page.run_line)
    return {
        "verdict": printable(plan_verdict(plan)),
        "fits": plan.fits,
        "limit": plan.limit + plan.after.peak.device - plan.after.peak.reserved,
        "gpu": printable(plan.gpu_title),
        "sets": [
            {
                "fixes": [printable(short_fix_word(use)) for use in one.fixes],
                "bytes": one.peak.device,
                "slowdown": one.slowdown,
                "fits": one.fits,
                "tooClose": one.too_close,
                "host": one.host_bytes,
                "estimated": one.estimated,
                "role": role,
            }
            for role, one in (
                ("as it is", plan.before),
                *(("the plan" if one == plan.after else "", one) for one in front if one != plan.before),
            )
        ],
        "remarks": [
            printable(text, 600)
            for text in (
                *(f"exact only if {each}" for each in plan.conditions),
                *plan.remarks,
                *(f"not predicted: {each}" for each in failed_lines(plan)),
            )
        ],
        "host": plan.after.host_bytes,
        "apply": printable(how),
        "commands": [printable(command, 4000) for command in commands],
    }


def _changes(before: Prediction, after: Prediction) -> list[list[Any]]:
    """[[label, function, code], bytes before, bytes after] for each line."""
    found = line_changes(before, after)[:_MOST_CHANGES]
    return [
        [[printable(one.label), printable(one.function), printable(one.code)], one.before, one.after]
        for one in found
    ]


def _measured(one: Comparison) -> dict[str, Any]:
    return {
        "title": printable(one.title),
        "gpu": printable(one.measured.gpu_title) if one.measured else "",
        "rows": one.rows,
        "failure": printable(one.failure),
        "differences": [
            [printable(each.op), printable(each.aspect), each.times, each.bytes] for each in one.differences
        ],
    }
