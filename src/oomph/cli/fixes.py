"""`oomph fixes` and `oomph verify`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from oomph import gpus
from oomph.cli.common import Allow, Json, load_torch, program_output, write_json, write_stdout
from oomph.cli.targets import (
    StepOptions,
    allocator_limit,
    check_target,
    find_target,
    open_target,
    workload_of,
)
from oomph.errors import UserError
from oomph.records import FIX_KINDS, FixKind, Prediction, Progress, Proposal, Verification
from oomph.report.fixes import (
    all_fixes_text,
    proposals_text,
    proposals_to_json,
    verification_text,
    verification_to_json,
)
from oomph.report.terminal import report_console

_OVERRIDE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*=.*", re.DOTALL)
VERIFIED, DIFFERS = 0, 1  # exit statuses of `oomph verify`


@dataclass(frozen=True, slots=True)
class FixesOptions(StepOptions):
    allow: Allow = ""
    only: Annotated[tuple[str, ...], typer.Option(metavar="FIX", help="Try this fix; repeatable.")] = ()
    json: Json = False


def run_fixes(given: FixesOptions) -> int:
    """List all fixes. For a target: those that lower its peak, with what each one saves and costs.

    Exit status 0 also if the step does not fit.
    """
    kinds = fix_kinds(given.allow)
    if not given.target and given.module is None:
        if given.only:
            raise UserError("--only tries fixes on a target: oomph fixes TARGET --only FIX")
        if given.limits:
            raise UserError(f"{given.limits[0]} is for the step of a target: oomph fixes TARGET")
        return _list_all(given.json)
    options = find_target(given, "fixes")
    options.check()
    load_torch()
    from oomph.fixes import find, propose
    from oomph.planning.programs import propose_for_program
    from oomph.prediction import call_on_fake_gpu, predict
    from oomph.prediction.isolation import run_isolated
    from oomph.workload import Workload

    for name in options.only:
        find(name)
    card = None if options.gpu is None else gpus.with_rates(gpus.find(options.gpu))
    only = options.only

    def run(progress: Progress) -> tuple[Prediction, list[Proposal]]:
        with options.open() as target:
            limit = allocator_limit(options, options.max)
            workload = target if isinstance(target, Workload) else call_on_fake_gpu(target)
            if not isinstance(workload, Workload):
                return propose_for_program(target, card, limit, kinds, only, progress)  # type: ignore[arg-type]
            prediction = predict(workload, gpu=card, max=limit, progress=progress, search=False)
            return prediction, propose(prediction, workload, kinds=kinds, only=only, progress=progress)

    with program_output() as report:
        if options.is_script:
            script, limit = options.script(options.steps), allocator_limit(options, options.max)
            prediction, proposals = propose_for_program(script, card, limit, kinds, only, report)
        else:
            prediction, proposals = run_isolated(run, report)
    if options.json:
        write_json(proposals_to_json(prediction, proposals))
    else:
        if options.is_script:
            kinds = (*kinds, "precision", "training")  # a script has no fixes of these kinds
        fit = shlex.join(("oomph", *options.command("fit", *options.limits)))
        write_stdout(proposals_text(prediction, proposals, kinds, report_console(), options.typed, fit))
    return 0


def fix_kinds(allow: str) -> tuple[FixKind, ...]:
    """Exact fixes, and the kinds of --allow."""
    words = [word.strip() for word in allow.split(",") if word.strip()]
    for word in words:
        if word not in FIX_KINDS:
            raise UserError(f"--allow {word!r} is not a kind of fix; valid: {', '.join(FIX_KINDS)}")
    return tuple(kind for kind in FIX_KINDS if kind == "exact" or kind in words)


def _list_all(as_json: bool) -> int:
    from oomph.fixes import all_fixes

    if as_json:
        rows = [{"fix": fix.name, "kind": fix.kind, "changes": fix.changes} for fix in all_fixes()]
        write_json({"schema": 1, "fixes": rows})
    else:
        rows_of_text = [(fix.name, fix.kind, fix.changes) for fix in all_fixes()]
        write_stdout(all_fixes_text(rows_of_text, report_console()))
    return 0


def run_verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="As for predict; give a small model.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIX ...",
            help="name, name:option=value,..., or a .json file; and key=value overrides of a config.",
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="B=1,T=16", help="Override sizes of the Workload.")] = "",
    as_json: Json = False,
) -> int:
    """Check fixes on the CPU. Exit status 1 if loss or gradients change."""
    # A fix with options, `activation_checkpointing:keep=matmuls`, is no override.
    overrides = [word for word in words or () if _OVERRIDE.fullmatch(word)]
    fixes = [word for word in words or () if not _OVERRIDE.fullmatch(word)]
    check_target(target, overrides)
    if not fixes:
        raise UserError("verify needs a fix: oomph verify TARGET FIX ...; `oomph fixes` lists them")
    parsed = parse_sizes(sizes)
    from oomph.fixes import uses_of, verify
    from oomph.prediction.isolation import run_isolated

    uses = uses_of(fixes)

    def run(progress: Progress) -> Verification:
        with open_target(target, overrides) as opened:
            return verify(uses, workload_of(opened, target), sizes=parsed, progress=progress)

    with program_output() as report:
        found = run_isolated(run, report)
    if as_json:
        write_json(verification_to_json(found))
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
