"""The registry of fixes: what a fix is, the order in which fixes are applied, and how users name them.

A fix changes the Workload (its loss, batch, optimizer, precision) or the model that the Workload builds, or
both. The model is changed after it is built and before it is moved to the device, through a Journal.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fix_names import APPLICATION_ORDER, check_name
from oomph.fixes.journal import Journal
from oomph.prediction import fake_model
from oomph.prediction.trainers import TrainingLoop
from oomph.records import FixKind, FixUse, Prediction, Proposal
from oomph.units import parse_bytes
from oomph.workload import Workload

VALID_FIX = (
    "give name, name:option=value,option=value (a list in brackets: option=[a,b]), or a .json file with rows "
    "of `oomph fixes --json`"
)


@dataclass(frozen=True)
class FixContext:
    """What a fix reads before it proposes itself."""

    prediction: Prediction
    workload: Workload
    loop: TrainingLoop | None = None  # of a program's Trainer, which has no Workload

    @cached_property
    def model(self) -> nn.Module:
        """The workload's model, without data."""
        return fake_model(self.workload)

    @cached_property
    def batch(self) -> Any:
        """A batch of the workload, or None: see `example_batch`."""
        return example_batch(self.workload)

    @cached_property
    def optimizer(self) -> Optimizer | None:
        """The workload's optimizer, over meta parameters. None where there is none or it cannot be made."""
        if self.workload.optimizer is None:
            return None
        parameters = [
            nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.requires_grad)
            for p in self.model.parameters()
            for dtype in (parameter_dtype(self.workload, p),)
        ]
        try:
            return self.workload.optimizer(iter(parameters))
        except Exception:  # the user's factory needs data or fails; the prediction reports what is wrong
            return None


def example_batch(workload: Workload) -> Any:
    """A batch of the workload, without data where its factory allows that; None where it cannot be made."""
    for device in ("meta", "cpu"):  # a factory may need data
        try:
            with torch.random.fork_rng(devices=()):
                return workload.make_batch(torch.device(device))
        except Exception:  # the user's factory may fail on a device that it does not support
            continue
    return None


def parameter_dtype(workload: Workload, parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter after the workload's `dtype` is applied."""
    if workload.dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    assert isinstance(workload.dtype, torch.dtype)
    return workload.dtype


@dataclass(frozen=True)
class Target:
    """Where a fix applies, and with which options."""

    where: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    condition: str = ""  # that the user must check for the fix to be exact
    assumes: str = ""  # what was decided by names; `fit` compares a small copy instead
    saving: int | None = None  # computed, where it cannot be predicted


class Fix:
    """Base class of the fixes. A subclass overrides `targets`, and `change_workload` or `change_model`."""

    name: ClassVar[str]
    kind: ClassVar[FixKind]
    changes: ClassVar[str]  # one sentence for people
    # Fixes that cannot be combined with this one, and why. One side of a pair is enough.
    excludes: ClassVar[Mapping[str, str]] = {}
    # `change_model` is for models that are there: a Workload's is spread over ranks once it is built.
    places_model: ClassVar[bool] = False

    def targets(self, context: FixContext) -> Iterable[Target]:
        """Where the fix applies, each with useful options; empty where it does not apply."""
        return ()

    def change_workload(self, workload: Workload, *_: Any, **options: Any) -> Workload:
        """Return the Workload with the fix applied, except for what `change_model` changes."""
        return workload

    def change_model(self, model: nn.Module, journal: Journal, *_: Any, **options: Any) -> None:
        """Change this instance, through the journal. Raises UserError where a precondition fails."""

    def change_loop(self, loop: TrainingLoop, *_: Any, **options: Any) -> str:
        """Change the arguments of a Trainer that is about to train; what they are then."""
        return ""

    @property
    def changes_model(self) -> bool:
        return type(self).change_model is not Fix.change_model

    @property
    def changes_loop(self) -> bool:
        return type(self).change_loop is not Fix.change_loop

    def proposals(self, context: FixContext) -> list[Proposal]:
        """Proposals without predicted peak, saving and slowdown; `oomph.fixes.propose` adds those."""
        return [self.proposal(target) for target in self.targets(context)]

    def proposal(self, target: Target) -> Proposal:
        return Proposal(
            self.name,
            self.kind,
            self.changes,
            target.where,
            dict(target.options),
            "; ".join(filter(None, (target.assumes, target.note))),
            saving=target.saving,
            condition=target.condition,
        )

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The options by name: the keyword arguments of `change_workload`, `change_model`, `change_loop`."""
        changes = (self.change_workload, self.change_model, self.change_loop)
        parameters = [one for change in changes for one in inspect.signature(change).parameters.values()]
        return {one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY}

    def with_defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, and the defaults of those that are left out."""
        defaults = {name: one.default for name, one in self.options.items() if one.default is not one.empty}
        complete = {**defaults, **options}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in complete.items()}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise UserError for an option that does not exist, is missing, or is not true or false."""
        valid = f"its options are {', '.join(self.options)}" if self.options else "it takes none"
        for name in options:
            if name not in self.options:
                raise UserError(f"fix {self.name!r} has no option {name!r}; {valid}")
        for name, one in self.options.items():
            if one.default is one.empty and name not in options:
                raise UserError(f"fix {self.name!r} needs the option {name!r}; {valid}")
            is_flag, given = one.annotation in ("bool", "bool | None"), options.get(name, one.default)
            if is_flag and not isinstance(given, bool) and given is not one.default:
                raise UserError(f"fix {self.name!r}: {name}={given!r} is not valid; valid: true, false")


def check_choice(fix: str, option: str, value: Any, valid: Sequence[str]) -> None:
    if value not in valid:
        raise UserError(f"fix {fix!r}: {option}={value!r} is not valid; valid: {', '.join(valid)}")


def check_whole_number(fix: str, option: str, value: Any, low: int, high: int | None = None) -> None:
    """UserError unless `value` is an int of at least `low` and at most `high`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        valid = f"a whole number >= {low}" if high is None else f"{low} to {high}"
        raise UserError(f"fix {fix!r}: {option}={value!r} is not valid; give {valid}")


def bytes_option(fix: str, option: str, value: Any) -> int:
    """The bytes that an option gives, as a number or as text such as "64MiB"."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"fix {fix!r}: {option}={value!r} is not valid; give bytes or e.g. '1MiB'")
    try:
        return parse_bytes(value)
    except UserError as error:
        raise UserError(f"fix {fix!r}: {option}: {error}") from None


# ------------------------------------------------------------------------------------------- by name


@cache
def all_fixes() -> tuple[Fix, ...]:
    """Every fix, in the order of application."""
    homes = APPLICATION_ORDER.values()
    return tuple(getattr(import_module(f"oomph.fixes.{module}"), name)() for module, name in homes)


@cache
def _by_name() -> dict[str, tuple[int, Fix]]:
    return {fix.name: (position, fix) for position, fix in enumerate(all_fixes())}


def find(name: str) -> Fix:
    """The fix of that name; another library's name gets a hint."""
    if name not in _by_name():
        check_name(name)
    return _by_name()[name][1]


def position(name: str) -> int:
    """The fix's place in the order of application."""
    return _by_name()[find(name).name][0]


def same_use(one: FixUse, other: FixUse) -> bool:
    """Whether both are the same fix with the same options; an option that is left out is its default."""
    if one.fix != other.fix:
        return False
    fix = find(one.fix)
    return fix.with_defaults(one.options) == fix.with_defaults(other.options)


def conflict(one: FixUse, other: FixUse) -> str | None:
    """Why two uses cannot be combined, in one line; None where they can."""
    if one.fix == other.fix:
        return (
            f"fix {one.fix!r} is already applied with the options {dict(other.options)}, and was given again "
            f"with {dict(one.options)}; give it once"
        )
    for a, b in ((one, other), (other, one)):
        why = find(a.fix).excludes.get(b.fix)
        if why is not None:
            return f"fixes {a.fix!r} and {b.fix!r} cannot be combined: {why}"
    return None


# --------------------------------------------------------------------------------- as users write them


class HasFixes(Protocol):
    """A plan."""

    @property
    def fixes(self) -> Sequence[FixUse]: ...


FixLike = str | FixUse | Proposal | Mapping[str, Any]
Fixes = FixLike | Iterable[FixLike] | HasFixes


def uses_of(fixes: Fixes) -> list[FixUse]:
    """Fixes and their options, from every form in which they can be given.

    One fix or several, each as `"name"`, `"name:option=value,option=value"`, the path of a .json file with
    rows of `oomph fixes --json`, a Proposal, a FixUse, or `{"fix": name, "options": {...}}`; or a plan.
    """
    if isinstance(fixes, str | FixUse | Proposal | Mapping):
        fixes = [fixes]
    elif hasattr(fixes, "fixes"):
        fixes = [replace(use, model_id=getattr(fixes, "model_id", "")) for use in fixes.fixes]
    if not isinstance(fixes, Iterable):
        raise UserError(f"fixes={fixes!r} is not valid; give names, proposals or a plan")
    rows: list[Any] = []
    for one in fixes:
        rows += _rows_of_file(one) if isinstance(one, str) and one.endswith(".json") else [one]
    return [_use_of(row) for row in rows]


def _use_of(one: Any) -> FixUse:
    if isinstance(one, str):
        use = _parse(one)
    elif isinstance(one, Proposal):
        use = one.use
    elif isinstance(one, FixUse):
        use = one
    elif isinstance(one, Mapping) and isinstance(one.get("fix"), str) and "option" not in one:
        options = one.get("options") or {}  # a row of `oomph fixes --json` has more
        if not isinstance(options, Mapping):
            raise UserError(f"fix {one['fix']!r}: options={options!r} is not a mapping of names to values")
        use = FixUse(one["fix"], dict(options), str(one.get("model_id", "")))
    else:
        raise UserError(f"a fix is given as {one!r}; {VALID_FIX}, or {{'fix': name, 'options': {{...}}}}")
    fix = find(use.fix)
    fix.check_options(use.options)
    return use if use.fix == fix.name else FixUse(fix.name, use.options, use.model_id)


def _parse(text: str) -> FixUse:
    name, _, rest = text.partition(":")
    name = find(name.strip()).name
    options: dict[str, Any] = {}
    for pair in re.split(r",(?![^[]*\])", rest):  # at commas outside of lists
        if not pair.strip():
            continue
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"fix {text!r}: {pair!r} is not option=value; {VALID_FIX}")
        try:
            options[key.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            word = value.strip()  # without quotes, as those in a list
            is_list = word.startswith("[") and word.endswith("]")
            options[key.strip()] = [one.strip() for one in word[1:-1].split(",")] if is_list else word
    return FixUse(name, options)


def _rows_of_file(file: str) -> list[Any]:
    try:
        content = json.loads(Path(file).read_text())
    except OSError as error:
        raise UserError(f"file {file!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"file {file!r} is not JSON: {error}") from None
    rows = content.get("fixes") if isinstance(content, dict) else content
    if content == []:
        raise UserError(f"file {file!r} holds an empty list; give at least one fix")
    if not isinstance(rows, list) or not all(isinstance(row, str | dict) for row in rows):
        raise UserError(f'file {file!r} is not a list of fixes such as [{{"fix": ..., "options": ...}}]')
    made_for = content.get("model_id", "") if isinstance(content, dict) else ""
    return [{**row, "model_id": made_for} if made_for and isinstance(row, dict) else row for row in rows]
