"""`oomph run`: the user's own script on the real device, with fixes applied to its model.

Its memory is recorded. Where it runs out, a report says what was alive, which line asked for how much, and
which fixes would have saved it.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from oomph import gpus
from oomph.cli.common import (
    Fix,
    PlanFile,
    check_output_file,
    fix_words,
    stdout_to_stderr,
    write_page,
    write_stdout,
)
from oomph.cli.targets import check_python_file, raised_at
from oomph.errors import OomphError, UserError, is_missing_gpu, program_traceback
from oomph.records import Plan

_PLAN_SECONDS = 300


def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script (.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS ...]", help="The script's own arguments.")
    ] = None,
    plan: PlanFile = None,
    fix: Fix = None,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the report to this file if the script runs out of memory."),
    ] = None,
) -> int:
    """Run a script on the real device: with fixes, and with a report if it runs out of memory."""
    words, fixes = list(arguments or ()), fix_words(fix, plan)
    words = words[1:] if words[:1] == ["--"] else words
    check_python_file(script)
    check_output_file("--html", html, "report.html")
    import torch

    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, check_for_scripts, on_each_optimizer
    from oomph.measurement.oplog import record_history
    from oomph.prediction.program import no_model_error

    has_gpu = torch.cuda.device_count() > 0
    if not fixes and not has_gpu:
        raise UserError(
            f"`oomph run` records GPU memory, and there is no GPU here; `oomph predict {script}` needs none "
            "(with --plan FILE or --fix NAME, run also runs scripts that need no GPU)"
        )
    uses = uses_of(fixes)
    check_for_scripts(uses)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    change = ModelChange(uses, lambda text: print(f"oomph: {text}", file=sys.stderr))
    if has_gpu:
        record_history()
    try:
        with on_each_optimizer(change) if uses else contextlib.nullcontext():
            runpy.run_path(script, run_name="__main__")
    except OomphError:
        raise
    except Exception as error:
        if not has_gpu and is_missing_gpu(error):
            given = shlex.join(word for one in fixes for word in ("--plan" if one == plan else "--fix", one))
            raise UserError(
                f"{raised_at(error) or script} uses CUDA, and there is no GPU here; "
                f"`oomph predict {script} {given}` predicts it without one"
            ) from error
        sys.stderr.write(program_traceback(error))
        if has_gpu and isinstance(error, torch.OutOfMemoryError):
            with stdout_to_stderr():
                _post_mortem(script, words, fixes, html or f"{Path(script).stem}-out-of-memory.html")
        return 1
    if uses and not change.changed:
        raise UserError(no_model_error(script))
    return 0


def _post_mortem(script: str, arguments: Sequence[str], fixes: Sequence[str], html: str) -> None:
    """On stderr and as a page. Whatever fails here, the script's own traceback has been printed."""
    try:
        from oomph.measurement.oplog import snapshot
        from oomph.report.fixes import plan_text
        from oomph.report.recording import recording_of
        from oomph.report.terminal import report_console, report_text

        recorded = recording_of(snapshot(), script)
        console = report_console(sys.stderr)
        write_stdout("\n" + report_text(recorded, console))
        plan = None if fixes else _plan(script, arguments)
        if plan is not None:
            write_stdout("\n" + plan_text(plan, console, shlex.join((script, *arguments)), None))
        write_page(html, script, [("recorded", recorded)], plan=plan)
    except Exception as error:
        print(f"oomph: no report of the failure could be made ({error})", file=sys.stderr)


def _plan(script: str, arguments: Sequence[str]) -> Plan | None:
    """What `oomph fit` finds for this GPU, in a process without it: forks of this one cannot predict."""
    import torch

    from oomph.planning.plan import read_plan

    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    card = gpus.for_device(device.name, device.total_memory, (device.major, device.minor))
    gpu = card.name if card.bandwidth is not None else f"{device.total_memory >> 20}MiB"
    print("\noomph: looking for fixes with which it fits (Ctrl-C to skip)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        words = [sys.executable, "-m", "oomph", "fit", script, "--gpu", gpu, "--plan", str(file), "--"]
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired, OSError, OomphError):
            subprocess.run(
                [*words, *arguments],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                timeout=_PLAN_SECONDS,
            )
            return read_plan(file)
    command = shlex.join(["oomph", "fit", script, "--gpu", gpu, "--", *arguments]).removesuffix(" --")
    print(f"oomph: no plan was found; `{command}` says why", file=sys.stderr)
    return None
