"""What all sections have in common: typed, frozen, and strict about keys and types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from oomph.errors import UserError
from oomph.training.config.problems import Problems, nearest
from oomph.units import parse_bytes

Count = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=2)]  # of a text: one token has none before it to be told from
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
# Before a Literal of dtypes: the short names that people use.
DtypeName = BeforeValidator(lambda value: _SHORT.get(value, value) if isinstance(value, str) else value)


def _is_size(value: str | None) -> str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except UserError as error:
            raise PydanticCustomError("size", "{why}", {"why": str(error)}) from None
    return value


Size = AfterValidator(_is_size)  # of a word such as "24GiB"
# Before it: a number without a unit is told so, not that it is no word.
SizeWord = BeforeValidator(lambda value: str(value) if type(value) is int else value)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Keys whose values are lists of a section of their own.
    nested: ClassVar[Mapping[str, type[Section]]] = {}


AnySection = TypeVar("AnySection", bound=Section)


def read_section(
    kind: type[AnySection], values: Mapping[str, Any], name: str, problems: Problems
) -> AnySection:
    """The section; wrong values are added to the problems, and stand at their defaults in what is given."""
    good = dict(values)
    for _ in range(2):  # the second time without what was refused
        try:
            # As JSON: strict about numbers and words, while a list may become a tuple.
            return kind.model_validate_json(_json(good), strict=True)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                _tell(one, kind, name, problems)
                good.pop(str(one["loc"][0]), None)
    return kind()


def _tell(error: Any, kind: type[Section], name: str, problems: Problems) -> None:
    place = error["loc"]
    key = ".".join(map(str, (name, *place)))
    if error["type"] == "missing":
        problems.add(key, "is missing")
    elif error["type"] == "extra_forbidden":
        known = kind.nested.get(str(place[0]), kind).model_fields
        close = nearest(str(place[-1]), known)
        problems.add(
            key, f"is not a key; {f'did you mean {close!r}?' if close else 'valid: ' + ', '.join(known)}"
        )
    else:
        problems.refuse(key, error["input"], advice(error))


def read_value(hint: Any, value: Any, key: str, problems: Problems) -> Any:
    """`value` as the type that a dataclass' field says; None, and a problem, where it is not."""
    try:
        return TypeAdapter(hint).validate_json(_json(value), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # One of several types: all of them are valid, so all are told.
        valid = " or ".join(dict.fromkeys(advice(one).removeprefix("give ") for one in found))
        problems.refuse(key, value, valid if valid.startswith("choose") else f"give {valid}")
        return None


def advice(error: Any) -> str:
    """What is valid, for an error of pydantic's."""
    limits = _limits(error)
    said = {
        "int_type": "give a whole number",
        "int_from_float": "give a whole number",
        "float_type": "give a number",
        "finite_number": "give a finite number",
        "bool_type": "give true or false",
        "string_type": "give a word",
        "tuple_type": "give a list",
        "list_type": "give a list",
        "dict_type": "give a mapping of keys",
        "model_type": "give a mapping of keys",
        "literal_error": f"choose from {limits.get('expected')}",
        "greater_than_equal": f"give a number >= {limits.get('ge')}",
        "greater_than": f"give a number > {limits.get('gt')}",
        "less_than": f"give a number < {limits.get('lt')}",
        "less_than_equal": f"give a number <= {limits.get('le')}",
        "too_long": f"give {limits.get('max_length')} values",
    }
    return said.get(error["type"]) or str(error["msg"])


def _limits(error: Any) -> dict[str, Any]:
    """Numbers without a needless .0."""
    found = error.get("ctx", {})
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in found.items()}


def _json(value: Any) -> str:
    return json.dumps(value, default=repr)
