"""`oomph run`: the user's own script with fixes applied to its model, on the real device."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from oomph.cli.targets import check_python_file
from oomph.errors import OomphError, UserError, program_traceback


def run_script(script: str, arguments: Sequence[str], fixes: Sequence[str]) -> int:
    """As `python script arguments`, with its own output and exit status. Its exceptions are its own."""
    check_python_file(script)
    if not fixes:
        raise UserError("run needs a plan or a fix: oomph run --plan plan.json train.py, or --fix NAME")
    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, check_for_scripts, on_each_optimizer
    from oomph.prediction.script import no_model_error

    uses = uses_of(fixes)
    check_for_scripts(uses)
    sys.argv = [script, *arguments]
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
