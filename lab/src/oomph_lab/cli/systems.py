"""`oomph systems`: the five reference systems. For one: its report's failure, predicted, and its claims."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from oomph.cli.common import Json, progress_display, stdout_to_stderr, write_json, write_stdout
from oomph.errors import ExitStatus, OomphError, ProgramError
from oomph.records import Prediction, Progress, Site
from oomph.report.terminal import report_console, short_path
from oomph.units import format_bytes
from oomph_lab.cli.systems_text import (
    ClaimLine,
    FormLine,
    ReportLines,
    SystemLines,
    report_text,
    systems_text,
)
from oomph_lab.systems import SYSTEMS, System, find_system
from oomph_lab.systems.reports import FormRun

if TYPE_CHECKING:
    from oomph.workload import Workload

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Name = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A system, or the number of its report; default: list all."),
]


@app.command()
def run_systems(
    name: Name = None,
    claims: Annotated[bool, typer.Option("--claims", help="Print only the claims; predict nothing.")] = False,
    as_json: Json = False,
) -> int:
    """List the reference systems. For one: predict its report's failure and fixes, and check its claims."""
    return _show(name, as_json, claims_only=claims)


def _show(name: str | None, as_json: bool, claims_only: bool = False) -> ExitStatus:
    if name is None:
        rows = [_lines(system) for system in SYSTEMS.values()]
        if as_json:
            write_json({"schema": 1, "systems": [row._asdict() for row in rows]})
        else:
            write_stdout(systems_text(rows, report_console()))
        return ExitStatus.FITS
    system = find_system(name)
    with stdout_to_stderr():  # libraries may print while they are imported
        claims = [ClaimLine(**claim) for claim in system.claims]
        story = system.story
        with progress_display(Console(stderr=True)) as report:
            forms = [] if claims_only else predicted_forms(system, report)
    lines = ReportLines(story.failed, tuple(story.commands.items()), tuple(forms))
    if as_json:
        found = {"system": _lines(system)._asdict(), "claims": [claim._asdict() for claim in claims]}
        found |= {"failed": story.failed, "commands": dict(story.commands)}
        found |= {"forms": [form._asdict() for form in forms]}
        write_json({"schema": 1, **found})
    else:
        write_stdout(report_text(_lines(system), lines, claims, report_console()))
    return ExitStatus.FITS


def predicted_forms(system: System, progress: Progress) -> list[FormLine]:
    """Each form of the story at the report's shape and GPU, two predictions at a time."""
    from oomph_lab.training.config import CONFIGS, load
    from oomph_lab.training.step import predicted_workload

    # Before the threads start: libraries such as transformers cannot be imported by two at a time.
    configs = [load(CONFIGS / f"{form.config}.yaml", form.overrides) for form in system.story.forms]
    workloads = [predicted_workload(config) for config in configs]
    found: list[FormLine] = []
    progress(f"predicting {len(workloads)} forms", 0.0)
    with ThreadPoolExecutor(2) as pool:
        predict = partial(_predicted, gpu=system.story.gpu)
        for line in pool.map(predict, system.story.forms, workloads):
            found.append(line)
            progress(f"predicting {len(workloads)} forms", len(found) / len(workloads))
    return found


def _predicted(form: FormRun, workload: Workload, gpu: str) -> FormLine:
    from oomph.prediction import predict

    try:
        found = predict(workload, gpu=gpu)
    except ProgramError as error:
        return FormLine(form.what, form.command(gpu), "fails", None, str(error).splitlines()[-1])
    except OomphError as error:
        return FormLine(form.what, form.command(gpu), "not predicted", None, str(error))
    return FormLine(form.what, form.command(gpu), found.verdict or "", found.peak.device, _failure(found))


def _failure(found: Prediction) -> str:
    refused = found.refused
    if refused is None:
        return ""
    where = "" if refused.site is None else f" at {_place(refused.site)}"
    return f"tried to allocate {format_bytes(refused.bytes)}{where}"


def _place(site: Site) -> str:
    """With the text of the line."""
    path = Path(site.file)
    text = path.read_text().splitlines()[site.line - 1].strip() if path.is_file() else ""
    return f"{short_path(site.file)}:{site.line}: {text}"


def _lines(system: System) -> SystemLines:
    return SystemLines(system.name, system.report, system.title, system.naive, system.model)
