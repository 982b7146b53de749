"""`oomph run`: a script with fixes applied to its model, on the real device."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from oomph.cli.options import Fix, PlanFile, fix_words
from oomph.cli.targets import check_python_file
from oomph.errors import OomphError, UserError, program_traceback


def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script (.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS ...]", help="The script's own arguments.")
    ] = None,
    plan: PlanFile = None,
    fix: Fix = None,
) -> int:
    """Run a script with fixes applied to its model, on the real device."""
    words, fixes = list(arguments or ()), fix_words(fix, plan)
    words = words[1:] if words[:1] == ["--"] else words
    check_python_file(script)
    if not fixes:
        raise UserError("run needs a plan or a fix: oomph run --plan plan.json train.py, or --fix NAME")
    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, check_for_scripts, on_each_optimizer
    from oomph.prediction.script import no_model_error

    uses = uses_of(fixes)
    check_for_scripts(uses)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    change = ModelChange(uses, lambda text: print(f"oomph: {text}", file=sys.stderr))
    try:
        with on_each_optimizer(change):
            runpy.run_path(script, run_name="__main__")
    except OomphError:
        raise
    except Exception as error:
        sys.stderr.write(program_traceback(error))
        return 1
    if not change.changed:
        raise UserError(no_model_error(script))
    return 0
