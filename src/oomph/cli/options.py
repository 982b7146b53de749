"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

TAKES_KEYS = {"ignore_unknown_options": True}  # --key value may be a key of a config

Target = Annotated[str, typer.Argument(metavar="TARGET", help="As for predict.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE ...]",
        help="For a config: override a key, e.g. data.batch_size=4 or --batch_size 4. "
        "For a Workload: override a size, e.g. B=4.",
    ),
]
Gpu = Annotated[
    str | None, typer.Option(metavar="NAME|SIZE", help="The GPU: a name from `oomph gpus`, or a size.")
]
Max = Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of the caching allocator, e.g. 24GiB.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the report.")]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write the report as one HTML file.")]
Fix = Annotated[
    list[str] | None,
    typer.Option(metavar="FIX", help="Apply this fix; repeatable. name, name:option=value, or a .json file."),
]
PlanFile = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="Apply the fixes of a plan of `oomph fit`.")
]
Allow = Annotated[
    str, typer.Option(metavar="KINDS", help="Kinds besides exact: precision, training, or both.")
]


def fix_words(fix: list[str] | None, plan: str | None) -> tuple[str, ...]:
    return (*(fix or ()), *([plan] if plan is not None else []))
