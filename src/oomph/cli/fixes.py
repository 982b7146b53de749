"""`oomph fixes` and `oomph verify`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from rich.console import Console

from oomph import gpus
from oomph.cli.output import ProgressReport, progress_display, stdout_to_stderr, write_stdout
from oomph.cli.targets import check_target, config_limit, open_target, workload_of
from oomph.errors import UserError
from oomph.records import FIX_KINDS, FixKind, Prediction, Proposal, Verification
from oomph.report.fixes import (
    all_fixes_text,
    proposals_text,
    proposals_to_json,
    verification_text,
    verification_to_json,
)
from oomph.report.terminal import report_console

VERIFIED, DIFFERS = 0, 1  # exit statuses of `oomph verify`


@dataclass(frozen=True, slots=True)
class FixesOptions:
    target: str | None
    gpu: str | None = None
    allow: str = ""
    only: tuple[str, ...] = ()
    json: bool = False
    overrides: tuple[str, ...] = ()


def run_fixes(options: FixesOptions) -> int:
    kinds = fix_kinds(options.allow)
    if options.gpu is not None:
        gpus.find(options.gpu)
    if options.target is None:
        if options.only:
            raise UserError("--only tries fixes on a target: oomph fixes TARGET --only FIX")
        return _list_all(options.json)
    check_target(options.target, options.overrides)
    # Imported here: torch takes a second to load. Names are checked before the target, which may take longer.
    from oomph.fixes import find, propose
    from oomph.prediction import predict
    from oomph.prediction.isolation import run_isolated

    for name in options.only:
        find(name)
    given = options.target

    def run(progress: ProgressReport) -> tuple[Prediction, list[Proposal]]:
        with open_target(given, options.overrides) as target:
            workload = workload_of(target, given)
            limit = config_limit(given, options.overrides)
            card = None if options.gpu is None else gpus.with_rates(gpus.find(options.gpu))
            prediction = predict(workload, gpu=card, max=limit, progress=progress)
            return prediction, propose(
                prediction, workload, kinds=kinds, only=options.only, progress=progress
            )

    with stdout_to_stderr(), progress_display(Console(stderr=True)) as report:
        prediction, proposals = run_isolated(run, report)
    if options.json:
        write_stdout(json.dumps(proposals_to_json(prediction, proposals), allow_nan=False) + "\n")
    else:
        typed = shlex.join((options.target, *options.overrides))
        write_stdout(proposals_text(prediction, proposals, kinds, report_console(), typed))
    return 0


def fix_kinds(allow: str) -> tuple[FixKind, ...]:
    """Exact fixes, and the kinds that are allowed besides."""
    words = [word.strip() for word in allow.split(",") if word.strip()]
    for word in words:
        if word not in FIX_KINDS:
            raise UserError(f"--allow {word!r} is not a kind of fix; valid: {', '.join(FIX_KINDS)}")
    return tuple(kind for kind in FIX_KINDS if kind == "exact" or kind in words)


def _list_all(as_json: bool) -> int:
    from oomph.fixes import all_fixes

    if as_json:
        rows = [{"fix": fix.name, "kind": fix.kind, "changes": fix.changes} for fix in all_fixes()]
        write_stdout(json.dumps({"schema": 1, "fixes": rows}) + "\n")
    else:
        rows_of_text = [(fix.name, fix.kind, fix.changes) for fix in all_fixes()]
        write_stdout(all_fixes_text(rows_of_text, report_console()))
    return 0


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    target: str
    words: tuple[str, ...]  # fixes, and overrides of a config
    sizes: str = ""
    json: bool = False


def run_verify(options: VerifyOptions) -> int:
    from oomph.fixes import uses_of, verify
    from oomph.prediction.isolation import run_isolated
    from oomph.training.config.reading import is_override

    overrides = tuple(word for word in options.words if is_override(word))
    words = [word for word in options.words if word not in overrides]
    check_target(options.target, overrides)
    if not words:
        raise UserError("verify needs a fix: oomph verify TARGET FIX ...; `oomph fixes` lists them")
    sizes, uses = parse_sizes(options.sizes), uses_of(words)

    def run(progress: ProgressReport) -> Verification:
        with open_target(options.target, overrides) as target:
            progress("running the model without the fixes and with them", None)
            return verify(uses, workload_of(target, options.target), sizes=sizes)

    with stdout_to_stderr(), progress_display(Console(stderr=True)) as report:
        found = run_isolated(run, report)
    if options.json:
        write_stdout(json.dumps(verification_to_json(found), allow_nan=False) + "\n")
    else:
        write_stdout(verification_text(found))
    return VERIFIED if found.holds else DIFFERS


def parse_sizes(text: str) -> dict[str, int]:
    """`B=1,T=16`"""
    sizes = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch("[1-9][0-9]{0,17}", value.strip()):
            raise UserError(f"--sizes {pair!r} is not valid; give NAME=NUMBER,..., e.g. B=1,T=16")
        sizes[name.strip()] = int(value)
    return sizes
