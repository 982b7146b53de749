"""Arguments and options that several commands have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import typer

from oomph.errors import UserError

TAKES_KEYS = {"ignore_unknown_options": True}  # --key value may be a key of a config

Target = Annotated[str, typer.Argument(metavar="TARGET", help="As for predict.")]
_OVERRIDES = typer.Argument(
    metavar="[KEY=VALUE ...]",
    help="For a config: override a key, e.g. data.batch_size=4 or --batch_size 4. "
    "For a Workload: override a size, e.g. B=4. Arguments of a script come after --.",
)
Overrides = Annotated[list[str] | None, _OVERRIDES]
OverrideWords = Annotated[tuple[str, ...], _OVERRIDES]
Gpu = Annotated[
    str | None, typer.Option(metavar="NAME|SIZE", help="The GPU: a name from `oomph gpus`, or a size.")
]
Max = Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of the caching allocator, e.g. 24GiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the report.")]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write the report as one HTML file.")]
_FIX = typer.Option(
    metavar="FIX", help="Apply this fix; repeatable. name, name:option=value, or a .json file."
)
Fix = Annotated[list[str] | None, _FIX]
FixWords = Annotated[tuple[str, ...], _FIX]
PlanFile = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="Apply the fixes of a plan of `oomph fit`.")
]
Allow = Annotated[
    str, typer.Option(metavar="KINDS", help="Kinds of fixes besides exact: precision, training, compile.")
]


def fix_words(fix: Sequence[str] | None, plan: str | None) -> tuple[str, ...]:
    if plan is not None and not plan.endswith(".json"):
        raise UserError(f"--plan {plan!r} is no .json file; `oomph fit TARGET --plan plan.json` writes one")
    return (*(fix or ()), *([plan] if plan is not None else []))


def command(run: Callable[[Any], int], options: type) -> Callable[..., int]:
    """A function for typer: its parameters are the fields of the dataclass `options`, which `run` takes."""
    types = get_type_hints(options, include_extras=True)
    signature = inspect.signature(options)
    for name, kind in types.items():
        if kind.__origin__ == tuple[str, ...]:  # typer takes lists
            types[name] = Annotated[list[str], *kind.__metadata__]
    fields = [each.replace(annotation=types[name]) for name, each in signature.parameters.items()]

    def call(**given: Any) -> int:
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return run(options(**{**given, **lists}))

    call.__doc__ = run.__doc__
    call.__signature__ = signature.replace(parameters=fields)  # type: ignore[attr-defined]
    return call
