"""`oomph fixes`: what could be done about a target's peak, what each saves and what it costs."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from rich.console import Console

from oomph import gpus
from oomph.cli.config_targets import config_limit
from oomph.cli.output import progress_display, stdout_to_stderr, write_stdout
from oomph.cli.targets import check_target, open_target, workload_of
from oomph.errors import UserError
from oomph.records import FIX_KINDS, FixKind, Prediction, Proposal
from oomph.report.proposals import catalogue_text, proposals_text, proposals_to_json
from oomph.report.terminal import report_console


@dataclass(frozen=True, slots=True)
class FixesOptions:
    """What stands on the command line."""

    target: str | None
    gpu: str | None = None
    allow: str = ""
    only: tuple[str, ...] = ()
    json: bool = False
    overrides: tuple[str, ...] = ()


def run_fixes(options: FixesOptions) -> int:
    kinds = _kinds(options.allow)
    if options.gpu is not None:
        gpus.find(options.gpu)
    if options.target is None:
        if options.only:
            raise UserError("--only tries fixes on a target: oomph fixes TARGET --only FIX")
        return _list_all(options)
    check_target(options.target, options.overrides)
    _check_names(options.only)
    prediction, proposals = _propose(options, options.target, kinds)
    if options.json:
        write_stdout(json.dumps(proposals_to_json(prediction, proposals), allow_nan=False) + "\n")
    else:
        target = shlex.join((options.target, *options.overrides))
        write_stdout(proposals_text(prediction, proposals, kinds, report_console(), target))
    return 0


def _kinds(allow: str) -> tuple[FixKind, ...]:
    """Exact fixes, and the kinds that are allowed besides."""
    words = [word.strip() for word in allow.split(",") if word.strip()]
    for word in words:
        if word not in FIX_KINDS:
            raise UserError(f"--allow {word!r} is not a kind of fix; valid: {', '.join(FIX_KINDS)}")
    return tuple(kind for kind in FIX_KINDS if kind == "exact" or kind in words)


def _check_names(only: tuple[str, ...]) -> None:
    """Before the program is loaded, which may take longer than anyone waits for a typing mistake."""
    if only:
        from oomph.fixes import find

        for name in only:
            find(name)


def _list_all(options: FixesOptions) -> int:
    from oomph.fixes import all_fixes

    rows = [(fix.name, fix.kind, fix.changes) for fix in all_fixes()]
    if options.json:
        found = [{"fix": name, "kind": kind, "changes": changes} for name, kind, changes in rows]
        write_stdout(json.dumps({"schema": 1, "fixes": found}) + "\n")
    else:
        write_stdout(catalogue_text(rows, report_console()))
    return 0


def _propose(
    options: FixesOptions, name: str, kinds: tuple[FixKind, ...]
) -> tuple[Prediction, list[Proposal]]:
    with (
        stdout_to_stderr(),
        progress_display(Console(stderr=True)) as report,
        open_target(name, options.overrides) as target,
    ):
        from oomph.fixes import propose
        from oomph.prediction import predict

        workload = workload_of(target, name)
        limit = config_limit(name, options.overrides)
        prediction = predict(workload, gpu=options.gpu, max=limit, progress=report)
        return prediction, propose(prediction, workload, kinds=kinds, only=options.only, progress=report)
