"""`oomph fit`: the cheapest set of fixes with which a training step fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from oomph import gpus, units
from oomph.cli.common import (
    Allow,
    Html,
    Json,
    Quiet,
    check_output_file,
    load_torch,
    program_output,
    write_json,
    write_page,
    write_stdout,
)
from oomph.cli.fixes import fix_kinds
from oomph.cli.predict import BatchSizes, PredictOptions, batch_sizes, predict_target
from oomph.cli.targets import (
    StepOptions,
    TargetOptions,
    allocator_limit,
    find_target,
    is_config,
    workload_of,
)
from oomph.errors import ExitStatus, UserError
from oomph.records import Plan, Prediction, Progress
from oomph.report.fixes import fix_word, plan_text, plan_verdict, ranks_text
from oomph.report.terminal import report_console

LARGEST = ("batch", "sequence")


@dataclass(frozen=True, slots=True)
class FitOptions(StepOptions):
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of the process, CUDA context included, e.g. 20GiB."),
    ] = None
    allow: Allow = ""
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that fixes may pin; default: all.")
    ] = None
    sizes: BatchSizes = None
    plan: Annotated[str | None, typer.Option(metavar="FILE.json", help="Write the plan to this file.")] = None
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="batch|sequence",
            help="Also find the largest batch or the longest sequence that fits, without fixes and with.",
        ),
    ] = None
    gpus: Annotated[bool, typer.Option("--gpus", help="Also list the GPUs on which it fits.")] = False
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Also find how many of these GPUs FSDP2 needs, without fixes.")
    ] = False
    json: Json = False
    quiet: Quiet = False
    html: Html = None


def run_fit(given: FitOptions) -> ExitStatus:
    """Find the cheapest set of fixes with which the step fits."""
    options = find_target(given, "fit")
    kinds = fix_kinds(options.allow)
    _check(options)
    load_torch(options.quiet)
    from oomph.planning import fit, ranks_needed, write_plan
    from oomph.planning.plan import plan_to_json
    from oomph.prediction.isolation import run_isolated
    from oomph.prediction.result import fits_on

    search = partial(
        fit,
        gpu=options.gpu,
        budget=options.budget,
        allow=kinds,
        host_memory=options.host_memory,
        sizes=batch_sizes(options, options.sizes),
        largest=options.largest,
    )

    def run(progress: Progress) -> Plan:
        with options.open() as target:
            return search(target, max=allocator_limit(options, options.max), progress=progress)

    def count(progress: Progress) -> Any:
        with options.open() as target:
            workload = workload_of(target, options.target)
            return ranks_needed(workload, str(options.gpu or options.budget), options.max, progress)

    trials: Any = ()
    with program_output(options.quiet) as report:
        if options.is_script:
            plan = search(options.script(options.steps), max=options.max, progress=report)
        else:
            plan = run_isolated(run, report)
            trials = run_isolated(count, report) if options.ranks else ()
    if options.plan is not None:
        write_plan(plan, options.plan)
    # Both steps are predicted once more: a plan has their peaks only.
    runs = _predictions(options, plan) if options.gpus or options.html is not None else []
    cards: list[tuple[str, bool, bool]] = []
    if options.gpus:
        catalogue = sorted(gpus.catalogue(), key=lambda card: card.memory)
        titles = [card.title for card in catalogue]
        before, after = (fits_on(runs[index][1], catalogue) for index in (0, -1))
        cards = list(zip(titles, before, after, strict=True))
    if options.html is not None:
        write_page(options.html, options.typed, runs, plan=plan, plan_file=options.plan)
    if options.json:
        found = plan_to_json(plan)
        if trials:
            found["ranks"] = [{**one._asdict(), "peak": asdict(one.peak)} for one in trials]
        if cards:
            found["gpus"] = [{"gpu": name, "before": before, "after": after} for name, before, after in cards]
        write_json(found)
    elif options.quiet:
        write_stdout("\n".join([plan_verdict(plan), *(f"  {fix_word(use)}" for use in plan.fixes)]) + "\n")
    else:
        write_stdout(plan_text(plan, report_console(), options.typed, options.plan, cards))
        write_stdout(ranks_text(trials, plan.gpu_title))
    return ExitStatus.FITS if plan.fits else ExitStatus.DOES_NOT_FIT


def _predictions(options: FitOptions, plan: Plan) -> list[tuple[str, Prediction]]:
    """The step as it is, and with the fixes of the plan if it has some."""
    limit = f"{plan.limit}B" if options.gpu and options.budget else options.max
    given = {field.name: getattr(options, field.name) for field in fields(TargetOptions)}
    asked = PredictOptions(
        **given,
        gpu=options.gpu or options.budget,
        max=limit,
        steps=options.steps,
        sizes=options.sizes,
        quiet=options.quiet,
    )
    runs = [("as it is", predict_target(asked, silent=True, search=False))]
    if plan.fixes:
        fixed = replace(asked, fix=tuple(map(fix_word, plan.fixes)))
        runs.append(("with the plan", predict_target(fixed, silent=True, search=False)))
    return runs


def _check(options: FitOptions) -> None:
    """Raise for mistakes that show before torch is imported and the target traced."""
    no_limit = options.gpu is None and options.budget is None and options.max is None
    if no_limit and not is_config(options.target):  # which may have a limit of its own
        raise UserError("fit needs a card or a budget: --gpu rtx4090, or --budget 20GiB")
    batch_sizes(options, options.sizes)
    for size in (options.budget, options.host_memory):
        if size is not None:
            units.parse_bytes(size)
    if options.largest is not None and options.largest not in LARGEST:
        raise UserError(f"--largest {options.largest!r} is not valid; valid: {', '.join(LARGEST)}")
    if options.ranks and (options.is_script or not (options.gpu or options.budget)):
        raise UserError("--ranks needs a Workload or config, and a card: --gpu rtx4090")
    check_output_file("--html", options.html, "report.html")
    if options.plan is not None and not Path(options.plan).absolute().parent.is_dir():
        raise UserError(f"--plan {options.plan!r}: the directory does not exist")
    if options.plan is not None:
        from oomph.planning.plan import check_overwritten

        check_overwritten(options.plan)
    options.check()
