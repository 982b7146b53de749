"""The command `oomph`: its grammar, and how every ending becomes an exit status."""

from __future__ import annotations

import difflib
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Annotated, Any

import typer

from oomph.cli.streams import let_go_of_streams
from oomph.errors import DeprecatedName, OomphError, ProgramError, warn_deprecated

# typer carries its own copy of click in some versions and uses the installed one in others;
# its public BadParameter leads to the right base class in both.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

INTERRUPTED = 130  # as a shell says it of Ctrl-C
OUR_BUG = 70  # 1 would read as "does not fit"

_OVERRIDES = typer.Argument(
    metavar="[KEY=VALUE ...]",
    help="Of a config: other values than the file's, e.g. data.batch_size=4 or --batch_size 4. "
    "Of a Workload: other sizes than its own, e.g. B=4.",
)
_TAKES_KEYS = {"ignore_unknown_options": True}  # --key value may be a config's key

app = typer.Typer(
    name="oomph",
    help="Will it fit? Predict the GPU memory of a training step, without a GPU.",
    epilog="Exit status: 0 fits, 1 does not fit, 2 a mistake of the user's, 3 the traced program failed.",
    add_completion=False,
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


@app.command(context_settings=_TAKES_KEYS)
def predict(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A config (.yaml), or file.py:name or package.module:name; name is a Workload, a function "
            "that returns one, or a function that sets up and returns the step.",
        ),
    ],
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|SIZE", help="The card to fit: a name from `oomph gpus`, or a size."),
    ] = None,
    max: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most that the allocator may reserve, e.g. 24GiB."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not the report.")] = False,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a snapshot that PyTorch's memory visualiser opens."),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIX", help="Predict with this fix in; repeatable: name, name:option=value, or a .json."
        ),
    ] = None,
) -> int:
    """Predict the memory of one training step: does it fit, and which lines own the peak."""
    from oomph.cli.predict import PredictOptions, run_predict

    options = PredictOptions(target, gpu, max, json, snapshot, tuple(fix or ()), tuple(overrides or ()))
    return run_predict(options)


@app.command(context_settings=_TAKES_KEYS)
def fixes(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="A Workload, as for predict; without one, all are listed."),
    ] = None,
    overrides: Annotated[list[str] | None, _OVERRIDES] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME|SIZE", help="The card that it shall run on.")
    ] = None,
    allow: Annotated[
        str, typer.Option(metavar="KINDS", help="Besides exact fixes: precision, training, or both.")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(metavar="FIX", help="Try this fix; repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not the table.")] = False,
) -> int:
    """List what could lower the peak: what each fix changes, saves and costs."""
    from oomph.cli.fixes import FixesOptions, run_fixes

    return run_fixes(FixesOptions(target, gpu, allow, tuple(only or ()), json, tuple(overrides or ())))


@app.command()
def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A small Workload, as for predict.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIX ...",
            help="name, name:option=value,..., or a .json of fixes; and key=value overrides of a config.",
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(metavar="B=1,T=16", help="Other sizes than the Workload's own.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Check on the CPU that fixes leave loss and gradients as they were. Exit status 1 if not."""
    from oomph.cli.verify import VerifyOptions, run_verify

    return run_verify(VerifyOptions(target, tuple(words or ()), sizes, json))


@app.command(context_settings={"allow_extra_args": True, **_TAKES_KEYS})
def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A config (.yaml).")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest checkpoint of the run's folder.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also when the prediction says that it does not fit.")
    ] = False,
    fixes: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Recorded fixes, in the place of the config's.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write the weights, as safetensors.")
    ] = None,
) -> int:
    """Train as a config says; after it key=value, or --key value, for other values than the file's."""
    from oomph.cli.train import TrainOptions, run_train

    return run_train(TrainOptions(config, tuple(context.args), resume, force, fixes, export))


_SYSTEM = typer.Argument(metavar="[NAME]", help="A system, or the number of its report; default: list all.")


@app.command()
def systems(
    name: Annotated[str | None, _SYSTEM] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List the five reference systems, or check the claims of one system's report."""
    from oomph.cli.systems import run_systems

    return run_systems(name, json)


@app.command(hidden=True)
def cases(
    name: Annotated[str | None, _SYSTEM] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Deprecated: `oomph systems`."""
    from oomph.cli.systems import run_systems

    warn_deprecated("oomph cases", "oomph systems")
    return run_systems(name, json, old_keys=True)


@app.command()
def gpus(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not the table.")] = False,
) -> int:
    """List the GPUs that oomph knows by name."""
    from oomph.cli.gpus import run_gpus

    return run_gpus(json)


@app.command(hidden=True)
def diverge(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="As for predict.")],
    measured: Annotated[str, typer.Argument(metavar="LOG", help="An op log written on a GPU.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="The GPU that the log was written on.")] = "h200",
    limit: Annotated[int, typer.Option(help="How many differences to print.")] = 20,
) -> int:
    """For developers: where the prediction parts from the op log of a real GPU run."""
    from oomph.cli.diverge import run_diverge

    return run_diverge(target, measured, gpu, limit)


def main() -> None:
    """The console script, and `python -m oomph`."""
    status = run(sys.argv[1:])
    let_go_of_streams()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """One command; returns the exit status, errors having been printed to stderr."""
    try:
        with _deprecations_on_stderr():
            status = app(list(arguments) or ["--help"], prog_name="oomph", standalone_mode=False)
            return int(status or 0)
    except (typer.Abort, KeyboardInterrupt):
        print("oomph: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _UsageError as error:
        return _complain(f"{_one_line(error.format_message())}; {_advice(error)}")  # type: ignore[attr-defined]
    except ProgramError as error:
        from oomph.cli.failures import failure_text

        print(failure_text(error), file=sys.stderr)
        return error.exit_status
    except OomphError as error:
        # The problems of a config are a line each; all other messages are one line.
        problems = getattr(error, "problems", ())
        message = str(error) if len(problems) > 1 else _one_line(str(error))
        _complain(message + _meant_option(arguments, problems))
        return error.exit_status
    except Exception:
        traceback.print_exc()
        print("oomph: this is a bug in oomph, not in your program", file=sys.stderr)
        return OUR_BUG


@contextmanager
def _deprecations_on_stderr() -> Iterator[None]:
    """Print a DeprecatedName warning as one line, without the place in our code that raised it."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", DeprecatedName)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, DeprecatedName):
                print(f"oomph: {message}", file=sys.stderr)
            else:
                shown(message, category, *where)

        warnings.showwarning = show  # restored by catch_warnings
        yield


def _complain(message: str) -> int:
    with suppress(OSError):  # a terminal that is gone does not change how the command ends
        print(f"oomph: {message}", file=sys.stderr)
    return OomphError.exit_status


def _one_line(message: str) -> str:
    return " ".join(message.split()).rstrip(".")


def _meant_option(arguments: Sequence[str], problems: Sequence[str]) -> str:
    """--resum is taken for a key of the config: that an option was meant is said besides."""
    unknown = [problem.split()[0] for problem in problems if " is not a key; " in problem]
    if not unknown:
        return ""
    command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    for word in arguments[1:]:
        name = word.partition("=")[0]
        if name.startswith("--") and name[2:].replace("-", "_") in unknown:
            close = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
            if close:
                return f" (of the options, {close[0]} is nearest to {name})"
    return ""


def _advice(error: Exception) -> str:
    """What is valid where the usage error arose: the commands, or the command's own help."""
    context = getattr(error, "ctx", None)
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands:
        return f"the commands are {', '.join(commands)}"
    return f"see `{context.command_path if context else 'oomph'} --help`"
