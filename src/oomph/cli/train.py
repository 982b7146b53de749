"""`oomph train`: predict first, refuse what will not fit, then train with everything in sight."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from oomph.cli.output import progress_display
from oomph.errors import ExitStatus, UserError
from oomph.report.labels import short_path
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.records import Prediction


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What stands on the command line. words: key=value, or --key value as the reports write them."""

    config: str
    words: tuple[str, ...] = ()
    resume: bool = False
    force: bool = False
    fixes: str | None = None
    export: str | None = None


def run_train(options: TrainOptions) -> int:
    """Returns the exit status."""
    from oomph.training.config import load, overrides_from_words

    config = load(options.config, (*overrides_from_words(options.words), *_recorded(options.fixes)))
    console = Console(stderr=True)

    from oomph.training.loop.failures import OutOfMemory
    from oomph.training.run import device_of, train
    from oomph.training.run_folder import check_folder, folder_of

    check_folder(config, folder_of(config), options.resume)
    device = device_of(config)
    prediction = card = None
    if device.type == "cuda":
        from oomph.cli.train_fit import card_of, fitting, refusal

        card = card_of(device)

        with progress_display(console) as report:
            prediction = fitting(config, device, report)
            if prediction.fits is False and not options.force:
                told = refusal(config, prediction, device, report)
                console.print(told, markup=False, highlight=False, soft_wrap=True)
                return ExitStatus.DOES_NOT_FIT
    from oomph.cli.train_display import TrainDisplay

    with TrainDisplay(console, config, prediction, card) as display:
        try:
            outcome = train(config, resume=options.resume, listener=display, export_to=options.export)
        except KeyboardInterrupt:  # the second one; the first lets the step end
            display.said("ended at once; what was saved before is as it was")
            return ExitStatus.INTERRUPTED
        except OutOfMemory as error:
            raise UserError(f"{error}; {_what_to_change(options.config, prediction)}") from error
    if outcome.stopped is not None:
        again = f"go on with: {_again(options)}"
        if not config.training.save:
            again = "nothing is saved, as training.save=false says"
        display.said(f"stopped by {outcome.stopped} after step {outcome.step}; {again}")
        return ExitStatus.INTERRUPTED
    return 0


def _again(options: TrainOptions) -> str:
    """The command that goes on where the run stopped."""
    words = ["oomph", "train", options.config, *options.words, "--resume"]
    if options.fixes is not None:
        words += ["--fixes", options.fixes]
    if options.export is not None:
        words += ["--export", options.export]
    if options.force:
        words.append("--force")
    return shlex.join(words)


def _recorded(file: str | None) -> tuple[str, ...]:
    """The fixes of a file, which take the place of the config's and are checked with the rest of it."""
    from oomph.fixes import uses_of

    if file is None:
        return ()
    if not file.endswith(".json"):
        raise UserError(f"--fixes {file!r} is not a .json file; single fixes are given as fixes=[name, ...]")
    uses = [{"fix": use.fix, "options": dict(use.options)} for use in uses_of([file])]
    return (f"fixes={json.dumps(uses)}",)


def _what_to_change(config: str, prediction: Prediction | None) -> str:
    """After running out in spite of the prediction, or without one."""
    told = f"see `oomph fixes {config}` for what would lower the peak, and what each change costs"
    if prediction is None:
        return told
    lines = [
        f"{short_path(site.file)}:{site.line} {format_bytes(size)}" for site, size in prediction.by_line()[:3]
    ]
    return (
        f"predicted were {format_bytes(prediction.peak.allocated)}, most of it of {', '.join(lines)}; {told}"
    )
