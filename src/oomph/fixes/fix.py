"""What every fix is: a name, a kind, one sentence on what it changes, and how it is proposed and applied.

A fix changes the Workload (its loss, batch, optimizer, precision) or the model that the Workload builds, or
both. The model is changed after it is built and before it is moved, through a Journal.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.prediction import built
from oomph.records import FixKind, Prediction, Proposal
from oomph.workload import Workload


@dataclass(frozen=True)
class Patient:
    """What a fix looks at before it proposes itself."""

    prediction: Prediction
    workload: Workload

    @cached_property
    def model(self) -> nn.Module:
        """The workload's model, without data."""
        return built(self.workload)


@dataclass(frozen=True)
class Place:
    """Where a fix applies, and with which options."""

    where: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    condition: str = ""  # of the proposal


class Fix:
    name: ClassVar[str]
    kind: ClassVar[FixKind]
    changes: ClassVar[str]  # one plain sentence for people
    # Fixes that cannot be combined with this one, and why. Said on one side is enough.
    excludes: ClassVar[Mapping[str, str]] = {}
    only_in_workloads: ClassVar[bool] = (
        False  # the model is only looked at; by itself it would change nothing
    )

    def places(self, patient: Patient) -> Iterable[Place]:
        """Where it applies, each with options that make sense there. Nothing where it does not."""
        return ()

    def change_workload(self, workload: Workload, *_: Any, **options: Any) -> Workload:
        """The Workload with the fix in. What it changes in the model is change_model's."""
        return workload

    def change_model(self, model: nn.Module, journal: Journal, *_: Any, **options: Any) -> None:
        """Change this instance, through the journal. A UserError where a precondition fails."""

    @property
    def changes_model(self) -> bool:
        return type(self).change_model is not Fix.change_model

    def propose(self, prediction: Prediction, workload: Workload) -> list[Proposal]:
        """Where it applies, what it saves and costs: each proposal is predicted with the fix in."""
        from oomph.fixes.proposing import priced

        patient = Patient(prediction, workload)
        return [priced(proposal, patient) for proposal in self.found(patient)]

    def found(self, patient: Patient) -> list[Proposal]:
        """Its proposals without their prices."""
        return [
            Proposal(
                self.name,
                self.kind,
                self.changes,
                place.where,
                dict(place.options),
                place.note,
                condition=place.condition,
            )
            for place in self.places(patient)
        ]

    def whole(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the defaults of those that are left out."""
        defaults = {**_defaults_of(self.change_workload), **_defaults_of(self.change_model)}
        return {key: _as_list(value) for key, value in {**defaults, **options}.items()}

    def check_options(self, options: Mapping[str, Any]) -> None:
        """One line for an option that does not exist or is missing."""
        for change in (self.change_workload, self.change_model):
            parameters = _options_of(change)
            if parameters is None:
                continue
            unknown = [name for name in options if name not in parameters]
            missing = [name for name, required in parameters.items() if required and name not in options]
            valid = f"its options are {', '.join(parameters)}" if parameters else "it takes none"
            if unknown:
                raise UserError(f"fix {self.name!r} has no option {unknown[0]!r}; {valid}")
            if missing:
                raise UserError(f"fix {self.name!r} needs the option {missing[0]!r}; {valid}")


def _defaults_of(change: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(change).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _options_of(change: Callable[..., Any]) -> dict[str, bool] | None:
    """Its keyword arguments, and whether each is required; None where it takes any (the base class's)."""
    parameters = inspect.signature(change).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {one.name: one.default is one.empty for one in parameters if one.kind is one.KEYWORD_ONLY}
