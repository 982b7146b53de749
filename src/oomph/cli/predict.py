"""`oomph predict` and `oomph diagnose`: trace the target; report its memory, or the causes of its peak."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oomph import gpus, units
from oomph.cli.common import (
    FixWords,
    Html,
    Json,
    PlanFile,
    Quiet,
    check_output_file,
    fix_words,
    load_torch,
    program_output,
    progress_display,
    write_json,
    write_page,
    write_stdout,
)
from oomph.cli.fixes import parse_sizes
from oomph.cli.targets import (
    StepOptions,
    allocator_limit,
    find_target,
    is_config,
    launch_notes,
    launch_to_json,
    workload_of,
)
from oomph.errors import ExitStatus, ProgramError, UserError
from oomph.records import Diagnosis, FixUse, Note, Plan, Prediction, Progress
from oomph.report.as_json import prediction_to_json
from oomph.report.diagnosis import cause_text, diagnosis_text, diagnosis_to_json
from oomph.report.stages import stage_table, stage_table_text, stage_table_to_json
from oomph.report.terminal import is_size, report_console, report_text, verdict_text

if TYPE_CHECKING:
    from oomph.prediction import Script


BatchSizes = Annotated[
    str | None,
    typer.Option(
        "--sizes",
        metavar="T=4096|longest",
        help="Sizes of the batch (B, T, H, W, or 512=4096), or those of the data set's longest sample.",
    ),
]


@dataclass(frozen=True, slots=True)
class DiagnoseOptions(StepOptions):
    json: Json = False
    quiet: Quiet = False
    html: Html = None
    fix: FixWords = ()
    sizes: BatchSizes = None
    allow_subprocesses: Annotated[
        bool,
        typer.Option("--allow-subprocesses", help="Let the program start others; their effects are real."),
    ] = False
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Let the program use the network.")
    ] = False

    @property
    def allow(self) -> tuple[str, ...]:
        """What the program may do outside of its process."""
        allowed = {"subprocesses": self.allow_subprocesses, "network": self.allow_network}
        return tuple(name for name, allow in allowed.items() if allow)


@dataclass(frozen=True, slots=True)
class PredictOptions(DiagnoseOptions):
    snapshot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a snapshot for PyTorch's memory visualizer.")
    ] = None
    plan: PlanFile = None
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Print only how memory grows over the first step, stage by stage."),
    ] = False
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Predict one of N ranks; a script runs as under torchrun.")
    ] = None
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="fsdp2|ddp|tp|cp",
            help="How a Workload, config or model's name is spread over the ranks, e.g. fsdp2:cp=8; of a "
            "name fsdp2 or ddp (default: fsdp2).",
        ),
    ] = None

    @property
    def fixes(self) -> tuple[str, ...]:
        return fix_words(self.fix, self.plan)


def run_predict(given: PredictOptions) -> ExitStatus:
    """Predict the memory of a training step. Report whether it fits and which lines hold the peak."""
    options = find_target(given, "predict")
    check_options(options)
    if options.plan is not None:
        from oomph.planning.plan import read_plan

        with suppress(UserError):  # a file with rows of fixes names no card
            options = _on_card_of(read_plan(options.plan), options)
    prediction = predict_target(options)
    if options.fixes:
        from oomph.fixes import uses_of
        from oomph.fixes.registry import position

        names = ", ".join(sorted({use.fix for use in uses_of(options.fixes)}, key=position))
        notes = (Note(f"with the fixes {names}"), *prediction.notes)  # which a Workload's has already
        prediction = replace(prediction, notes=tuple(dict.fromkeys(notes)))
    if options.snapshot is not None:
        _write_snapshot(options.snapshot, prediction)
    # The memory profiler of report 002, for every config whose model is a stack of layers.
    stages = stage_table(prediction) if options.stages or is_config(options.target) else None
    table = stage_table_text(stages, report_console()) if stages is not None else ""
    if options.json:
        found = prediction_to_json(prediction) | launch_to_json(options)
        if stages is not None:
            found["forward_stages"] = stage_table_to_json(stages)
        write_json(found)
    elif options.stages:
        if stages is None:
            raise UserError(f"--stages: the model of {options.target} is not a stack of layers")
        write_stdout(table.lstrip("\n"))
    elif options.quiet:
        write_stdout(verdict_text(prediction))
    else:
        write_stdout(report_text(prediction, report_console()) + table + next_step(options, prediction))
    if options.html is not None:
        write_page(options.html, options.typed, [("with fixes" if options.fixes else "as it is", prediction)])
    return ExitStatus.DOES_NOT_FIT if prediction.fits is False else ExitStatus.FITS


def _on_card_of(plan: Plan, options: PredictOptions) -> PredictOptions:
    """The card and budget of the plan; a size that is given is a budget of that card, with its context."""
    limit = plan.limit if plan.is_budget else None
    if options.gpu is not None:
        card, size = gpus.find(plan.gpu), gpus.find(options.gpu).memory
        limit = card.limit(budget=size)
        if not (is_size(options.gpu) and card.context < size < card.memory):
            return options
    return replace(options, gpu=plan.gpu, max=options.max or (f"{limit}B" if limit else None))


def run_diagnose(given: DiagnoseOptions) -> ExitStatus:
    """Name the cause of the peak: the pattern, its formula and growth, its lines, and the fixes."""
    found = find_target(given, "diagnose")
    options = PredictOptions(**{field.name: getattr(found, field.name) for field in fields(found)})
    check_options(options)
    load_torch(options.quiet)
    from oomph.diagnosis.api import diagnose_with
    from oomph.planning.programs import with_applicable_fixes

    diagnosis = diagnose_with(
        lambda sizes: predict_target(options, sizes, on_end=with_applicable_fixes, search=False)
    )
    diagnosis = _with_applicable_fixes(diagnosis, options)
    if options.json:
        write_json(diagnosis_to_json(diagnosis) | launch_to_json(options))
    elif options.quiet:
        write_stdout(verdict_text(diagnosis.prediction) + cause_text(diagnosis))
    else:
        text = diagnosis_text(diagnosis, report_console())
        write_stdout(text + next_step(options, diagnosis.prediction))
    if options.html is not None:
        runs = [("as it is", diagnosis.prediction)]
        write_page(options.html, options.typed, runs, findings=diagnosis.findings, notes=diagnosis.notes)
    return ExitStatus.DOES_NOT_FIT if diagnosis.prediction.fits is False else ExitStatus.FITS


def _with_applicable_fixes(diagnosis: Diagnosis, options: PredictOptions) -> Diagnosis:
    """With those fixes alone that apply to the Workload, or to the model of a program."""
    from oomph.fixes.registry import FixContext, all_fixes
    from oomph.fixes.scripts import fixes_for_scripts
    from oomph.planning.programs import FunctionProgram, ScriptProgram
    from oomph.prediction import call_on_fake_gpu
    from oomph.prediction.isolation import run_isolated
    from oomph.workload import Workload

    def applicable(progress: Progress) -> set[str]:
        with options.open() as target:
            found = target if isinstance(target, Workload) else call_on_fake_gpu(target)
            if isinstance(found, Workload):
                context = FixContext(diagnosis.prediction, found)
                return {fix.name for fix in all_fixes() if fix.proposals(context)}
            proposals = FunctionProgram(target, None, None).proposals(diagnosis.prediction)  # type: ignore[arg-type]
            return {one.fix for one in proposals.found}

    # The target runs again; a script only if its model is gone, until it makes its optimizer. What
    # --allow-subprocesses and --allow-network allow is refused then, so that it has no effect twice.
    notes = diagnosis.notes
    shown = program_output(quiet=True) if options.quiet else progress_display(Console(stderr=True))
    with shown as report:
        report("looking for the fixes that apply", None)
        try:
            if diagnosis.prediction.fixes is not None:
                valid = set(diagnosis.prediction.fixes)
            elif options.is_script:
                program = ScriptProgram(script_with_fixes(options), None, None)
                valid = {one.fix for one in program.proposals(diagnosis.prediction).found}
            else:
                valid = run_isolated(applicable, report)
        except ProgramError as error:
            valid = {fix.name for fix in fixes_for_scripts()}
            notes = (*notes, Note(f"which fixes apply to the model is not known: {error.args[0]}"))
    findings = tuple(
        replace(one, fixes=tuple(name for name in one.fixes if name in valid)) for one in diagnosis.findings
    )
    return replace(diagnosis, findings=findings, notes=notes)


def next_step(options: PredictOptions, prediction: Prediction) -> str:
    if prediction.fits is not False or options.plan is not None:
        return ""
    if options.fixes:  # which `oomph fit` does not take
        return "\nNext: `oomph fit` looks for the cheapest fixes with which a step fits.\n"
    sizes = ("--sizes", options.sizes) if options.sizes else ()
    command = shlex.join(("oomph", *options.command("fit", *options.limits, *sizes)))
    return f"\nNext: `{command}` looks for the cheapest fixes with which it fits.\n"


def check_options(options: PredictOptions) -> None:
    """Raise for mistakes that show before torch is imported and the target traced."""
    check_output_file("--snapshot", options.snapshot, "run.pickle")
    check_output_file("--html", options.html, "report.html")
    if options.ranks is not None and options.ranks < 1:
        raise UserError(f"--ranks {options.ranks} is not valid; give a positive number")
    if options.parallel is not None and options.ranks is None:
        raise UserError("--parallel needs the number of ranks: --ranks N")
    if options.model is not None and options.ranks is not None:
        replace(options.model, parallel=options.parallel or "fsdp2").check_parallel()
    elif options.parallel is not None and options.is_script:
        raise UserError(
            "--parallel is for Workloads and configs; a script distributes its model itself, by "
            "torch.distributed.init_process_group() and fully_shard or DistributedDataParallel: then "
            "--ranks N alone runs it as under torchrun"
        )
    if options.model is None:
        _parallel(options)
    batch_sizes(options, options.sizes)
    options.check()
    if options.fixes:
        from oomph.fixes import uses_of
        from oomph.fixes.scripts import check_for_scripts

        uses = uses_of(options.fixes)
        if options.is_script:
            check_for_scripts(uses)


def predict_target(
    options: PredictOptions,
    sizes: Mapping[str, int] | None = None,
    silent: bool = False,
    on_end: Callable[[Any, Prediction], Prediction] | None = None,
    search: bool = True,
) -> Prediction:
    """`sizes`: of the Workload, instead of its own. `silent`: without what the program prints. `on_end`: of a
    Script. `search`: with what cuDNN's search for algorithms takes."""
    load_torch(options.quiet)
    from oomph.prediction import predict as predict_program
    from oomph.prediction.retry import predict_isolated, run_silently

    def run(progress: Progress) -> Prediction:
        predict = partial(
            predict_program,
            gpu=options.gpu,
            sizes=batch_sizes(options, options.sizes if sizes is None else None),
            progress=progress,
            search=search,
        )
        if options.is_script:
            return predict(replace(script_with_fixes(options), on_end=on_end), max=options.max)
        with options.open() as target:
            if options.fixes:
                target = with_fixes(target, options.fixes)
            if options.ranks is not None:
                target = _on_ranks(workload_of(target, options.target), options)
            if sizes is not None:
                target = replace(workload_of(target, options.target), sizes=sizes)
            return predict(target, max=allocator_limit(options, options.max))

    # The program's own output goes to stderr; the progress bar comes second, so that it wraps that output.
    with program_output(options.quiet) as report:
        found = predict_isolated(partial(run_silently, run) if silent else run, report, options.allow)
    return replace(found, notes=(*launch_notes(options, options.ranks), *found.notes))


def script_with_fixes(options: PredictOptions) -> Script:
    script = options.script(options.steps)
    if options.ranks is not None:
        if options.model is not None:
            script = replace(options.model, parallel=options.parallel or "fsdp2").script()
        script = replace(script, torchrun=True, ranks=options.ranks)
    if options.fixes:
        from oomph.fixes import uses_of
        from oomph.fixes.scripts import ModelChange

        script = replace(script, on_optimizer=ModelChange(uses_of(options.fixes)))
    return script


def with_fixes(target: Any, fixes: Sequence[str | FixUse]) -> Any:
    """A Workload with the fixes; a function that returns the step, with those of its model."""
    from oomph.fixes import apply, uses_of
    from oomph.fixes.scripts import ModelChange, check_for_scripts, on_each_optimizer
    from oomph.workload import Workload

    uses = uses_of(fixes)
    if isinstance(target, Workload):
        return apply(uses, target)

    def function() -> Any:
        with on_each_optimizer(ModelChange(uses)):
            made = target()
        if isinstance(made, Workload):
            return apply(uses, made)
        check_for_scripts(uses, is_function=True)
        return made

    return function


def batch_sizes(options: StepOptions, given: str | None) -> Any:
    """As `oomph.predict` takes them."""
    if given is not None and is_config(options.target):
        raise UserError("--sizes is for programs; override the keys of a config, e.g. data.seq_len=4096")
    sizes: Any = given if given in (None, "longest") else parse_sizes(given)
    if options.is_script and sizes is not None:
        units.check_batch_sizes(sizes)
    return sizes


def _parallel(options: PredictOptions) -> Any:
    if options.ranks is None:
        return None
    from oomph.parallel import parse_parallel

    return parse_parallel(options.parallel or "fsdp2", options.ranks)


def _on_ranks(workload: Any, options: PredictOptions) -> Any:
    """A config's batch is that of all ranks; a Workload's is that of one."""
    parallel = _parallel(options)
    if options.config is None:
        return replace(workload, parallel=parallel)
    return options.config.on_ranks(workload, parallel, options.parallel is not None)


def _write_snapshot(file: str, prediction: Prediction) -> None:
    from oomph.prediction.allocator import replay
    from oomph.report.snapshot import write_snapshot

    # Without a limit, so that the snapshot shows the whole run instead of ending at the failed allocation.
    settings = prediction.allocator
    trace = replay(prediction.events, prediction.allocations, settings=settings, record=True).trace
    try:
        write_snapshot(file, prediction, trace)
    except OSError as error:
        raise UserError(f"--snapshot {file!r} cannot be written: {error.strerror or error}") from error
