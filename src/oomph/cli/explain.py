"""`oomph explain`: a memory snapshot, the output of `oomph predict --json`, or the text of an error."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer
from rich.text import Text

from oomph import gpus
from oomph.cli.common import check_output_file, write_json, write_page, write_stdout
from oomph.cli.compare import prediction_of, read_file
from oomph.cli.predict import DiagnoseOptions, PredictOptions, check_options, predict_target
from oomph.cli.targets import find_target, is_script
from oomph.errors import ExitStatus, UserError
from oomph.records import Allocation, Prediction
from oomph.report import error_text
from oomph.report.as_json import prediction_to_json
from oomph.report.error_text import ErrorText
from oomph.report.recording import is_pickle
from oomph.report.terminal import (
    called_from,
    file_and_line,
    print_verdict,
    report_console,
    report_text,
    section,
    source_code,
    strip_lines,
    verdict_text,
)
from oomph.units import format_bytes

_NEAR = 0.01  # of a card's memory: drivers keep some of it
_REQUESTS = 3
_CARDS = 5


@dataclass(frozen=True, slots=True)
class ExplainOptions(DiagnoseOptions):
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="The text of an error (- or nothing: standard input), a file of "
            "torch.cuda.memory._dump_snapshot, or the output of `oomph predict --json`.",
        ),
    ] = ""
    overrides: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="[TARGET ...]",
            help="With the text of an error: the program, as `oomph predict` takes it, to find the tensor.",
        ),
    ] = ()
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="The program runs on N ranks; see oomph predict.")
    ] = None


def run_explain(given: ExplainOptions) -> int:
    """Explain an out-of-memory error, or a memory snapshot: what was alive, and which lines made it."""
    check_output_file("--html", given.html, "report.html")
    words = [*([given.target] if given.target else []), *given.overrides]
    file = "-" if not words or is_script(words[0]) else words.pop(0)
    if file == "-" and given.target != "-" and sys.stdin.isatty():
        raise UserError(
            "explain needs a file: an error's text, a memory snapshot, or - for standard input; "
            "`python train.py 2>&1 | oomph explain` reads what the program prints"
        )
    data = sys.stdin.buffer.read() if file == "-" else read_file(file)
    shown = "standard input" if file == "-" else file
    # A log may begin with {'loss': 2.1}.
    if not is_pickle(data) and not re.match(rb'\s*\{\s*"', data):
        return _explain_error(data.decode("utf-8", "replace"), shown, words, given)
    if words or given.module:
        raise UserError(f"a program, as {[*words, given.module][0]!r}, is compared with the text of an error")
    prediction = prediction_of(data, shown)
    if given.json:
        write_json(prediction_to_json(prediction))
    elif given.quiet:
        write_stdout(verdict_text(prediction))
    else:
        write_stdout(report_text(prediction, report_console()))
    if given.html is not None:
        title = "recorded" if prediction.recorded else "predicted"
        write_page(given.html, shown, [(title, prediction)])
    return ExitStatus.FITS


def _explain_error(text: str, file: str, words: Sequence[str], given: ExplainOptions) -> int:
    error = error_text.read(text)
    if error is None:
        raise UserError(
            f"{file} has no out-of-memory error that is known, and is no memory snapshot and no output of "
            "`oomph predict --json`; give the lines that the program printed when it failed"
        )
    program = " ".join(words) or given.module or ""
    if given.html is not None and not program:
        raise UserError("--html needs the program: oomph explain oom.txt train.py --html report.html")
    cards = _cards(error)
    options = _target(words, given, _gpu(error, cards)) if program else None
    prediction = None if options is None else predict_target(options)
    groups = [] if prediction is None else _requests(prediction, error)
    if given.json:
        found = error_text.to_json(error)
        found["gpus"] = list(cards)
        if prediction is not None:
            found["requests"] = [_request_to_json(one) for one in groups]
            found["prediction"] = prediction_to_json(prediction)
        write_json(found)
    elif given.quiet:
        write_stdout(error_text.summary(error) + "\n")
    else:
        console = report_console()
        with console.capture() as capture:
            console.print(Text(error_text.summary(error), "bold red"), soft_wrap=True)
            if rows := error_text.numbers(error):
                lines = [Text(f"{format_bytes(size):>10}  {what}") for size, what in rows]
                section(console, "What the numbers mean", lines)
            for position, (name, sentence) in enumerate(error_text.causes(error)):
                title = f"Cause: {name}" if position == 0 else f"Also: {name}"
                section(console, "What it means" if error.advice else title, [Text(sentence)])
            if prediction is not None:
                section(console, f"The prediction of {program}", [])
                print_verdict(prediction, console)
                section(console, "The request in it", _request_lines(groups, error))
            if commands := _next(error, file, options, cards):
                section(console, "Next", [])
                for command in commands:  # whole, to be copied
                    console.print(Text(f"  {command}"), soft_wrap=True)
        write_stdout(strip_lines(capture.get()))
    if given.html is not None and prediction is not None:
        write_page(given.html, program, [("as it is", prediction)])
    return ExitStatus.FITS


def _cards(error: ErrorText) -> tuple[str, ...]:
    """Those of the catalogue that have the memory of the message, the most usual first."""
    size = error.capacity
    if size is None:
        return ()
    near = [card for card in gpus.catalogue() if abs(card.memory - size) < _NEAR * size]
    usual = sorted(near, key=lambda card: (not card.name.startswith("rtx"), abs(card.memory - size)))
    return tuple(card.name for card in usual)


def _gpu(error: ErrorText, cards: Sequence[str]) -> str | None:
    if cards or error.capacity is None:
        return cards[0] if cards else None
    return f"{error.capacity >> 20}MiB"


def _target(words: Sequence[str], given: ExplainOptions, gpu: str | None) -> PredictOptions:
    target = "" if given.module else words[0]
    values = {field.name: getattr(given, field.name) for field in fields(ExplainOptions)}
    values |= {"target": target, "overrides": tuple(words if given.module else words[1:]), "html": None}
    options = find_target(PredictOptions(**values), "explain")
    if options.gpu is None and options.max is None:
        options = replace(options, gpu=gpu)
    check_options(options)
    return options


def _requests(prediction: Prediction, error: ErrorText) -> list[Allocation]:
    """Requests of that size, those of the lines of the traceback first."""
    from oomph.diagnosis.requests import requests_of_size

    lines = [(frame.file, frame.line) for frame in reversed(error.frames)]
    return requests_of_size(prediction, error.requested, lines, error.phase)[:_REQUESTS]


def _request_lines(groups: Sequence[Allocation], error: ErrorText) -> list[Text]:
    if error.requested is None:
        return [Text("The text has no size to look for.")]
    if not groups:
        return [
            Text(
                f"No request of it has {format_bytes(error.requested)}: that run had other arguments, data "
                "or versions. Arguments of the program come after --."
            )
        ]
    lines = []
    for one in groups:
        shape = f"[{', '.join(map(str, one.shape))}] {one.dtype}"
        where = f" in {one.module}" if one.module else ""
        what = f"{one.op.removeprefix('aten.')}{where}, in {one.during or one.stage}"
        lines.append(Text(f"{format_bytes(one.bytes)}  {shape}  {what}"))
        if one.site is not None:
            lines.append(Text(f"    {file_and_line(one.site)}  {source_code(one.site)}".rstrip()))
            if called := called_from(one.site):
                lines.append(Text(f"    {called}"))
    return lines


def _request_to_json(one: Allocation) -> dict[str, Any]:
    site = one.site
    found = {"bytes": one.bytes, "shape": list(one.shape), "dtype": one.dtype, "op": one.op}
    found |= {"module": one.module, "stage": one.stage, "step": one.step}
    return found | {"file": site and site.file, "line": site and site.line}


def _next(error: ErrorText, file: str, options: PredictOptions | None, cards: Sequence[str]) -> list[str]:
    """Commands to type."""
    if error.advice:
        return []
    script, card = error.script or "train.py", _gpu(error, cards) or "NAME"
    names = [name for name, _ in error_text.causes(error)]
    lines = []
    if "other processes" in names:
        lines.append("nvidia-smi    # which processes hold the GPU")
    if "fragmentation" in names:
        lines.append(f"{error_text.EXPANDABLE} python {script} ...    # free blocks grow together")
    if options is not None:
        return [*lines, shlex.join(("oomph", *options.command("fit", *options.limits)))]
    text = "oom.txt" if file == "standard input" else shlex.quote(file)
    lines.append(f"oomph explain {text} {script} -- ITS ARGUMENTS    # which tensor it was")
    lines.append(f"oomph fit {script} --gpu {card} -- ITS ARGUMENTS    # the cheapest fixes that fit")
    if len(cards) > 1:
        lines.append(f"(--gpu: the memory is that of {', '.join(cards[:_CARDS])})")
    return lines
