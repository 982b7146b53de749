"""`oomph run`: the user's own script on the real device, with fixes applied to its model.

Its memory is recorded. Where it runs out, a report says what was alive, which line asked for how much, and
which fixes would have saved it.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from oomph import gpus
from oomph.cli.common import (
    Fix,
    Module,
    PlanFile,
    Torchrun,
    check_output_file,
    fix_words,
    stdout_to_stderr,
    write_page,
    write_stdout,
)
from oomph.cli.targets import TargetOptions, check_python_file, find_target, one_process, raised_at
from oomph.errors import OomphError, UserError, is_missing_gpu, program_traceback
from oomph.records import Note, Plan
from oomph.units import format_bytes

_PLAN_SECONDS = 300
_WHOLE = 0.99  # of the GPU's memory: a desktop takes the rest


def run_script(
    path: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A script (.py), or a launch line: python train.py.")
    ] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS ...]", help="The script's own arguments.")
    ] = None,
    module: Module = None,
    torchrun: Torchrun = False,
    plan: PlanFile = None,
    fix: Fix = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the report to this file if the script runs out of memory."),
    ] = None,
) -> int:
    """Run a script on the real device: with fixes, and with a report if it runs out of memory."""
    given = TargetOptions(path, tuple(arguments or ()), module, torchrun)
    options, fixes = find_target(given, "run"), fix_words(fix, plan)
    if options.overrides[:1] == ("--",) and options.launch is None:
        options = replace(options, overrides=options.overrides[1:])
    name = options.target
    if options.module is None and options.launch is None:
        check_python_file(name, "give a script, as train.py")
    check_output_file("--html", html, "report.html")
    import torch

    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, check_for_scripts, on_each_optimizer, set_allocator_for
    from oomph.measurement.oplog import record_history
    from oomph.prediction.program import no_model_error, run_as_main

    has_gpu = torch.cuda.device_count() > 0
    words = [word for one in fixes for word in ("--plan" if one == plan else "--fix", one)]
    one_process(options, "run", *words)
    predict = shlex.join(("oomph", *options.command("predict", *words)))
    if not fixes and not has_gpu:
        late = next((word for word in options.overrides if word in ("--plan", "--fix")), None)
        if late:
            raise UserError(f"{late} after {name} is an option of the script; give {late} before {name}")
        raise UserError(
            f"`oomph run` records GPU memory, and there is no GPU here; `{predict}` "
            "needs none (with --plan FILE or --fix NAME, run also runs scripts that need no GPU)"
        )
    uses = uses_of(fixes)
    check_for_scripts(uses)
    unrecorded = "" if has_gpu else "; no memory is recorded, because there is no GPU"
    change = ModelChange(uses, lambda text: print(f"oomph: {text}{unrecorded}", file=sys.stderr))
    set_allocator_for(uses)
    if has_gpu:
        record_history()
    try:
        with on_each_optimizer(change) if uses else contextlib.nullcontext():
            run_as_main(options.script())
    except OomphError:
        raise
    except Exception as error:
        if not has_gpu and is_missing_gpu(error):
            raise UserError(
                f"{raised_at(error) or name} uses CUDA, and there is no GPU here; "
                f"`{predict}` predicts it without one"
            ) from error
        if not has_gpu:
            print(f"oomph: {name} failed, where there is no GPU; `{predict}` needs none", file=sys.stderr)
        sys.stderr.write(program_traceback(error))
        if has_gpu and isinstance(error, torch.OutOfMemoryError):
            with stdout_to_stderr():
                stem = Path(name).stem if options.module is None else options.module.rpartition(".")[2]
                _post_mortem(options, fixes, html or f"{stem}-out-of-memory.html")
        return 1
    if uses and not change.changed:
        raise UserError(no_model_error(name))
    return 0


def _post_mortem(options: TargetOptions, fixes: Sequence[str], html: str) -> None:
    """On stderr and as a page. Whatever fails here, the script's own traceback has been printed."""
    try:
        from oomph.measurement.oplog import snapshot
        from oomph.report.fixes import plan_text
        from oomph.report.recording import recording_of
        from oomph.report.terminal import report_console, report_text

        recorded = recording_of(snapshot(), options.target)
        limits, note = _limits()
        recorded = replace(recorded, notes=(*map(Note, note), *recorded.notes))
        console = report_console(sys.stderr)
        write_stdout("\n" + report_text(recorded, console))
        plan = None if fixes else _plan(options, limits)
        if plan is not None:
            write_stdout("\n" + plan_text(plan, console, options.typed, None))
        write_page(html, options.typed, [("recorded", recorded)], plan=plan)
    except Exception as error:
        print(f"oomph: no report of the failure could be made ({error})", file=sys.stderr)


def _limits() -> tuple[list[str], list[str]]:
    """Of what the process could have had: options for `oomph fit`, and a note where it was less than the GPU
    has."""
    import torch

    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    card = gpus.for_device(device.name, device.total_memory, (device.major, device.minor))
    allowed = int(torch.cuda.get_per_process_memory_fraction() * card.memory)
    left = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()  # by other processes
    limits = ["--gpu", card.name if card.bandwidth is not None else f"{card.memory >> 20}MiB"]
    if min(allowed, left) > _WHOLE * card.limit():
        return limits, []
    why = "per_process_memory_fraction" if allowed <= left else "the rest is in use outside of it"
    note = (
        f"the allocator could reserve {format_bytes(min(allowed, left))} of the {card.title}'s "
        f"{format_bytes(card.memory)}: {why}"
    )
    return [*limits, "--max", f"{min(allowed, left) >> 20}MiB"], [note]


def _plan(options: TargetOptions, limits: Sequence[str]) -> Plan | None:
    """What `oomph fit` finds for what the process could have had, in another process."""
    from oomph.planning.plan import read_plan

    print("\noomph: looking for fixes with which it fits (Ctrl-C to skip)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words = [sys.executable, "-m", "oomph", *options.command("fit", *limits, "--plan", str(file))]
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired, OSError, OomphError):
            subprocess.run(words, capture_output=True, timeout=_PLAN_SECONDS)
            return read_plan(file)
    command = shlex.join(("oomph", *options.command("fit", *limits)))
    print(f"oomph: no plan was found; `{command}` says why", file=sys.stderr)
    return None
