"""`oomph fit`: the cheapest set of fixes with which a training step fits."""

from __future__ import annotations

import math
import re
import shlex
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
    launch_notes,
    launch_to_json,
    workload_of,
)
from oomph.errors import ExitStatus, UserError
from oomph.models.finetuning import FineTuning
from oomph.records import FixKind, Ladder, Plan, Prediction, Progress
from oomph.report.fixes import fix_word, plan_text, plan_verdict, ranks_text
from oomph.report.ladder import ladder_text, ladder_to_json
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
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Of a model's name: cards and what they cost an hour, as `rtx4090,0.35` in each line.",
        ),
    ] = None
    json: Json = False
    quiet: Quiet = False
    html: Html = None


def run_fit(given: FitOptions) -> ExitStatus:
    """Find the cheapest set of fixes with which the step fits. For a model's name without --method: what fits
    with each method, how large, and which cards do."""
    options = find_target(given, "fit")
    kinds = fix_kinds(options.allow)
    if options.model is not None and _asks_for_ladder(options):
        return run_ladder(options, options.model, kinds)
    if options.prices is not None:
        raise UserError("--prices is for a model's name, as Qwen/Qwen3-8B")
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
            plan = replace(plan, notes=(*launch_notes(options), *plan.notes))
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
    launch = options.launch
    run_line = launch.with_oomph_run if launch is not None and launch.ranks > 1 else None
    if options.html is not None:
        write_page(options.html, options.typed, runs, plan=plan, plan_file=options.plan, run_line=run_line)
    if options.json:
        found = plan_to_json(plan) | launch_to_json(options)
        if trials:
            found["ranks"] = [{**one._asdict(), "peak": asdict(one.peak)} for one in trials]
        if cards:
            found["gpus"] = [{"gpu": name, "before": before, "after": after} for name, before, after in cards]
        write_json(found)
    elif options.quiet:
        write_stdout("\n".join([plan_verdict(plan), *(f"  {fix_word(use)}" for use in plan.fixes)]) + "\n")
    else:
        write_stdout(plan_text(plan, report_console(), options.typed, options.plan, cards, run_line))
        write_stdout(ranks_text(trials, plan.gpu_title))
    return ExitStatus.FITS if plan.fits else ExitStatus.DOES_NOT_FIT


def _asks_for_ladder(options: FitOptions) -> bool:
    no_card = options.gpu is None and options.budget is None and options.max is None
    return options.method is None or options.prices is not None or options.ranks or no_card


def run_ladder(options: FitOptions, model: FineTuning, kinds: tuple[FixKind, ...]) -> ExitStatus:
    """Of the method that was given, or of all."""
    names = ("plan", "largest", "gpus", "sizes", "html", "host_memory", "steps")
    for name in (name for name in names if getattr(options, name)):
        raise UserError(
            f"--{name.replace('_', '-')} is for one method and a card: add --method qlora and --gpu "
            "rtx4090, and leave out --ranks and --prices"
        )
    if model.method == "generate":
        raise UserError("method 'generate' has no ladder; `oomph predict` predicts it")
    if options.ranks and not (options.gpu or options.budget):
        raise UserError("--ranks needs a card: --gpu rtx4090")
    options.check()
    prices = None if options.prices is None else _read_prices(options.prices)
    load_torch(options.quiet)
    from oomph.planning.ladder import DEFAULT_METHODS, ladder

    methods = DEFAULT_METHODS if options.method is None else (options.method,)
    optimizer = options.optimizer or ""  # else that of each method
    asked = [replace(model, method=method, optimizer=optimizer) for method in methods]
    with program_output(options.quiet) as report:
        found = ladder(
            asked,
            gpu=options.gpu,
            budget=options.budget,
            max=options.max,
            allow=kinds,
            prices=prices,
            count_ranks=options.ranks,
            progress=report,
        )
    if options.json:
        write_json(ladder_to_json(found))
    else:
        commands = _next_commands(options, found)
        write_stdout(ladder_text(found, report_console(), commands, priced=prices is not None))
    if found.limit is None:
        return ExitStatus.FITS if any(rung.cards for rung in found.rungs) else ExitStatus.DOES_NOT_FIT
    return ExitStatus.FITS if found.fits else ExitStatus.DOES_NOT_FIT


def _next_commands(options: FitOptions, found: Ladder) -> tuple[str, ...]:
    """For a method that fits, else for the last that was predicted."""
    predicted = [rung for rung in found.rungs if not rung.failed]
    if not predicted:
        return ()
    fitting = next((rung for rung in predicted if rung.fits), predicted[-1])
    verb = "fit" if fitting.plan is not None and fitting.plan.fixes else "predict"
    card = options.gpu or options.budget or next((one.gpu for one in fitting.cards), "h200")
    limit = f"{found.limit}B" if options.gpu and options.budget else options.max
    limits = ["--gpu", card, *(["--max", limit] if limit else [])]
    limits += ["--allow", options.allow] if verb == "fit" and options.allow else []
    words = options.command("", *limits)[1:]
    if options.method is None:
        words[1:1] = ["--method", fitting.method]
    command = shlex.join(words)
    what = "how to apply the fixes" if verb == "fit" else "what uses the memory"
    return (f"oomph {verb} {command}    # {what}",)


def _read_prices(file: str) -> dict[str, float]:
    """By names of cards: money for an hour."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"--prices {file!r} cannot be read: {reason}") from error
    prices: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        name, comma, price = (part.strip() for part in line.partition(","))
        if not name or name.startswith("#") or (number == 1 and not re.search(r"\d", price)):  # a heading
            continue
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if not comma or not 0 < value < math.inf:
            raise UserError(f"{file}:{number}: {line!r} is not a price; give lines as `rtx4090,0.35`")
        prices[gpus.find(name).name] = value
    if not prices:
        raise UserError(f"{file} has no prices; give lines as `rtx4090,0.35`")
    return prices


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
