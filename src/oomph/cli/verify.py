"""`oomph verify`: loss and every gradient with fixes and without, on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rich.console import Console

from oomph.cli.output import progress_display, stdout_to_stderr, write_stdout
from oomph.cli.targets import check_target, open_target, workload_of
from oomph.errors import UserError
from oomph.report.verification import verification_text, verification_to_json

HOLDS = 0
DOES_NOT_HOLD = 1


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What stands on the command line. words: fixes, and overrides of a config."""

    target: str
    words: tuple[str, ...]
    sizes: str = ""
    json: bool = False


def run_verify(options: VerifyOptions) -> int:
    from oomph.training.config.overrides import is_override

    overrides = tuple(word for word in options.words if is_override(word))
    words = [word for word in options.words if word not in overrides]
    check_target(options.target, overrides)
    if not words:
        raise UserError("verify needs a fix: oomph verify TARGET FIX ...; `oomph fixes` lists them")
    sizes = _sizes(options.sizes)
    from oomph.fixes import uses_of

    uses = uses_of(words)
    with (
        stdout_to_stderr(),
        progress_display(Console(stderr=True)) as report,
        open_target(options.target, overrides) as target,
    ):
        from oomph.fixes import verify

        report("running the model without the fixes and with them", None)
        found = verify(uses, workload_of(target, options.target), sizes=sizes)
    if options.json:
        write_stdout(json.dumps(verification_to_json(found), allow_nan=False) + "\n")
    else:
        write_stdout(verification_text(found))
    return HOLDS if found.holds else DOES_NOT_HOLD


def _sizes(text: str) -> dict[str, int]:
    sizes = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not value.isdigit() or int(value) < 1:
            raise UserError(f"--sizes {pair!r} is not valid; give NAME=NUMBER,..., e.g. B=1,T=16")
        sizes[name.strip()] = int(value)
    return sizes
