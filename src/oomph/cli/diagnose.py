"""`oomph diagnose`: name the causes of the target's peak."""

from __future__ import annotations

import json
from dataclasses import replace

from oomph.cli.output import write_page, write_stdout
from oomph.cli.predict import PredictOptions, check_options, next_step, predict_target
from oomph.cli.targets import is_script
from oomph.errors import ExitStatus
from oomph.records import Diagnosis
from oomph.report.diagnosis import diagnosis_text, diagnosis_to_json
from oomph.report.terminal import report_console


def _for_script(diagnosis: Diagnosis) -> Diagnosis:
    """With those fixes alone that `oomph run` and `oomph fit` can apply to a script."""
    from oomph.fixes.scripts import fixes_for_scripts

    valid = {fix.name for fix in fixes_for_scripts()}
    findings = tuple(
        replace(one, fixes=tuple(name for name in one.fixes if name in valid)) for one in diagnosis.findings
    )
    return replace(diagnosis, findings=findings)


def run_diagnose(options: PredictOptions) -> ExitStatus:
    check_options(options)
    # Imported here: torch takes a second to load.
    from oomph.diagnosis.api import diagnose_with

    diagnosis = diagnose_with(lambda sizes: predict_target(options, sizes))
    if options.module or is_script(options.target):
        diagnosis = _for_script(diagnosis)
    if options.json:
        write_stdout(json.dumps(diagnosis_to_json(diagnosis), allow_nan=False) + "\n")
    else:
        text = diagnosis_text(diagnosis, report_console())
        write_stdout(text + next_step(options, diagnosis.prediction))
    if options.html is not None:
        runs = [("as it is", diagnosis.prediction)]
        write_page(options.html, options.typed, runs, findings=diagnosis.findings, notes=diagnosis.notes)
    return ExitStatus.DOES_NOT_FIT if diagnosis.prediction.fits is False else ExitStatus.FITS
