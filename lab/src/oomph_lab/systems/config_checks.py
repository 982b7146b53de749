"""What the systems' config dataclasses share: pydantic validates them."""

from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Probability = Annotated[float, Field(ge=0, lt=1)]

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def valid_if(valid: Callable[[Any], bool], advice: str) -> AfterValidator:
    """For a field that takes some of the values of its type."""

    def check(value: Any) -> Any:
        if not valid(value):
            raise PydanticCustomError("value", "{advice}", {"advice": advice})
        return value

    return AfterValidator(check)


def one_of(valid: Collection[str]) -> AfterValidator:
    return valid_if(lambda value: value in valid, f"choose from {', '.join(map(repr, valid))}")


def invalid_if(wrong: bool, field: str, advice: str) -> None:
    """For __post_init__, which is called where each field by itself is valid. `field`: the one to change."""
    if wrong:
        raise PydanticCustomError("fields", "{field}: {advice}", {"field": field, "advice": advice})


def check_multiple(config: object, field: str, *, of: str) -> None:
    divisor: int = getattr(config, of)
    invalid_if(getattr(config, field) % divisor > 0, field, f"give a multiple of {of}={divisor}")
