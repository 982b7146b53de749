"""`oomph diagnose`: name the causes of the target's peak."""

from __future__ import annotations

import json

from oomph.cli.output import write_stdout
from oomph.cli.predict import PredictOptions, check_options, next_step, predict_target
from oomph.errors import ExitStatus
from oomph.report.diagnosis import diagnosis_text, diagnosis_to_json
from oomph.report.terminal import report_console


def run_diagnose(options: PredictOptions) -> ExitStatus:
    check_options(options)
    # Imported here: torch takes a second to load.
    from oomph.diagnosis.api import diagnose_with

    diagnosis = diagnose_with(lambda sizes: predict_target(options, sizes))
    if options.json:
        write_stdout(json.dumps(diagnosis_to_json(diagnosis), allow_nan=False) + "\n")
    else:
        text = diagnosis_text(diagnosis, report_console())
        write_stdout(text + next_step(options, diagnosis.prediction))
    return ExitStatus.DOES_NOT_FIT if diagnosis.prediction.fits is False else ExitStatus.FITS
