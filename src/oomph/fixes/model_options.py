"""Cheaper forms of a model that its own config offers.

A Workload's model function may be a factory: it has a `config`, and `with_options(field=value)` gives a
factory of the model with that field changed. oomph's own systems come so; a user's may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oomph.errors import UserError
from oomph.workload import Changed, Workload


def option(workload: Workload, field: str) -> Any:
    """The config's value of that field; None where there is no such config or field."""
    return getattr(getattr(_factory(workload.model), "config", None), field, None)


def with_option(workload: Workload, field: str, value: Any, fix: str) -> Workload:
    if option(workload, field) is None:
        raise UserError(
            f"fix {fix!r}: the workload's model is not made from a config with {field!r}; it needs "
            "model=factory, with factory.config and factory.with_options()"
        )
    return replace(
        workload, model=_changed(workload.model, lambda factory: factory.with_options(**{field: value}))
    )


def _factory(model: Any) -> Any:
    while isinstance(model, Changed):
        model = model.build
    return model


def _changed(model: Any, change: Callable[[Any], Any]) -> Any:
    """The changes of other fixes stay around it."""
    if isinstance(model, Changed):
        return replace(model, build=_changed(model.build, change))
    return change(model)
