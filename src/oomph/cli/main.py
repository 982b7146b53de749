"""The command `oomph`: its commands and options, and the exit status of every outcome."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from typing import Annotated, Any

import typer

from oomph.advice import what_helps
from oomph.cli import extensions
from oomph.cli.common import TAKES_KEYS, command, flush_streams, open_missing_streams, write_stdout
from oomph.cli.compare import run_compare
from oomph.cli.explain import ExplainOptions, run_explain
from oomph.cli.fit import FitOptions, run_fit
from oomph.cli.fixes import FixesOptions, run_fixes, run_verify
from oomph.cli.gpus import run_gpus
from oomph.cli.measure import MeasureOptions, run_measure
from oomph.cli.predict import DiagnoseOptions, PredictOptions, run_diagnose, run_predict
from oomph.cli.run import run_script
from oomph.cli.targets import TargetCommand
from oomph.errors import (
    ExitStatus,
    FixWarning,
    OomphError,
    ProgramError,
    environment_error,
)

# Some versions of typer contain a copy of click, others use the installed one; the base of typer's public
# BadParameter is the right class in both.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_OVERLONG = re.compile(r"\S{250,}")  # a name or number that an error quotes

_STATUSES = (
    "Exit status: 0 fits, 1 does not fit or too close to call, 2 invalid input, 3 the traced program failed, "
    "70 a bug in oomph, 130 interrupted."
)


_FIRST_COMMANDS = """\
oomph: does a PyTorch program fit a GPU? Predicted on this machine, without one.

  oomph predict train.py --gpu rtx3090 -- --its --flags     does it fit, and which lines take the memory?
  oomph fit train.py --gpu rtx3090 --plan plan.json         the cheapest fixes with which it fits
  oomph run --plan plan.json train.py --its --flags         run it with them on the GPU, unedited
  oomph explain oom.txt                                     an out-of-memory error, in plain words

train.py: also a notebook (exp.ipynb), a module (-m package.train) or a model's name (Qwen/Qwen3-8B).
`oomph --help` lists all commands, `oomph gpus` the cards; `oomph predict --help` has the options.
"""


class _Commands(typer.core.TyperGroup):
    """Commands of other distributions are loaded when one of them is asked for, or all are listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        for name in extensions.names(extensions.COMMANDS):
            self.get_command(ctx, name)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            added = extensions.load(extensions.COMMANDS, cmd_name)
            if added is None:  # a mistake; the error names those that there are
                self.list_commands(ctx)
                return None
            self.add_command(typer.main.get_command(added), cmd_name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="oomph",
    cls=_Commands,
    help="Will it fit? Predict the GPU memory of a training step, without a GPU.",
    epilog=_STATUSES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("oomph")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"oomph {version}")
        raise typer.Exit


@app.callback()
def _oomph(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


app.command("predict", cls=TargetCommand, epilog=_STATUSES)(command(run_predict, PredictOptions))
app.command("diagnose", cls=TargetCommand, epilog=_STATUSES)(command(run_diagnose, DiagnoseOptions))
app.command("fixes", cls=TargetCommand)(command(run_fixes, FixesOptions))
app.command("fit", cls=TargetCommand, epilog=_STATUSES)(command(run_fit, FitOptions))
app.command("measure", cls=TargetCommand)(command(run_measure, MeasureOptions))
app.command("compare")(run_compare)
app.command("explain", cls=TargetCommand)(command(run_explain, ExplainOptions))
app.command("run", context_settings={"allow_interspersed_args": False, **TAKES_KEYS})(run_script)
app.command("verify")(run_verify)
app.command("gpus")(run_gpus)


def main() -> None:
    """Of `oomph.__main__`."""
    open_missing_streams()
    if "_OOMPH_COMPLETE" in os.environ:  # the shell asks for completions; see --install-completion
        app(prog_name="oomph")
    status = run(sys.argv[1:])
    flush_streams()
    sys.exit(status)


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command; errors are printed to stderr. Returns the exit status."""
    try:
        with _warnings_on_stderr(), _own_environment():
            if not arguments:
                write_stdout(_FIRST_COMMANDS)
                return ExitStatus.FITS
            # Not `app()`, which handles Ctrl-C, closed pipes and the end of the input in its own way.
            command = _command()
            with command.make_context("oomph", list(arguments)) as context:
                return int(command.invoke(context) or 0)
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:  # of `oomph --help | head`
        return ExitStatus.FITS
    except _UsageError as error:
        message, advice = _one_line(error.format_message()), _advice(error)  # type: ignore[attr-defined]
        _print_error(f"{message} ({advice})" if message.endswith("?") else f"{message}; {advice}")
        return ExitStatus.USER_ERROR
    except ProgramError as error:
        from oomph.cli.targets import program_error_text

        trace, line = program_error_text(error)
        with suppress(OSError):
            sys.stderr.write(trace)
        _print_error(line)
        if helps := what_helps(error):
            _print_error(helps)
        return error.exit_status
    except OomphError as error:
        # A config has one line per problem; all other messages are one line.
        problems = getattr(error, "problems", ())
        message = str(error) if len(problems) > 1 else _one_line(str(error))
        _print_error(message + _nearest_option(arguments, problems))
        return error.exit_status
    except Exception as error:
        if refused := environment_error(error):
            _print_error(_one_line(str(refused)))
            return refused.exit_status
        # A whole package; without a part of one, either of them has a bug.
        if isinstance(error, ModuleNotFoundError) and not re.search(r"^oomph|\.", str(error.name)):
            _print_error(f"the module {error.name!r}, which this command needs, is not installed")
            return ExitStatus.USER_ERROR
        traceback.print_exc()
        _print_error("this is a bug in oomph, not in your program")
        return ExitStatus.BUG


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print our warnings as one line, without the place in our code that raised them."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, FixWarning):
                print(f"oomph: {message}", file=sys.stderr)
            else:
                shown(message, category, *where)

        warnings.showwarning = show  # type: ignore[assignment]  # restored by catch_warnings
        yield


@contextmanager
def _own_environment() -> Iterator[None]:
    """A launch line sets variables for its program."""
    before, path = dict(os.environ), [*sys.path]
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)
            sys.path[:] = path


def _print_error(message: str) -> None:
    """Escape sequences of a file or name that is quoted do not reach the terminal."""
    shown = "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in message)
    with suppress(OSError):  # a closed terminal does not change the exit status
        print(f"oomph: {shown}", file=sys.stderr)


def _one_line(message: str) -> str:
    line = " ".join(message.split()).rstrip(".")
    return _OVERLONG.sub(lambda word: f"{word[0][:100]}...{word[0][-20:]}", line)


def _options(command: str) -> list[str]:
    parameters = _command().commands[command].params
    return ["--help", *(name for each in parameters for name in each.opts if name.startswith("--"))]


def _nearest_option(arguments: Sequence[str], problems: Sequence[str]) -> str:
    """A misspelt option such as --resum is read as a key of the config: name the nearest option as well."""
    unknown = [problem.split()[0] for problem in problems if " is not a key; " in problem]
    if not unknown:
        return ""
    for word in arguments[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in unknown:
            close = difflib.get_close_matches(name, _options(arguments[0]), n=1, cutoff=0.75)
            if close:
                return f" (the nearest option to {name} is {close[0]})"
    return ""


def _advice(error: Exception) -> str:
    """The valid commands, or where to find the help of the command."""
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands:
        visible = [name for name, command in commands.items() if not command.hidden]
        return f"the commands are {', '.join(visible)}"
    return f"see `{context.command_path if context else 'oomph'} --help`"
