"""Validation of the systems' config dataclasses. All invalid fields of a config are reported together."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from oomph.errors import UserError

Config = TypeVar("Config")


@dataclass(frozen=True)
class InvalidField:
    field: str
    given: object
    advice: str

    def __str__(self) -> str:
        return f"{self.field}={self.given!r} is not valid; {self.advice}"


class InvalidConfig(UserError):
    """`problems` lets a caller report the fields under other names."""

    def __init__(self, config: object, problems: tuple[InvalidField, ...]) -> None:
        super().__init__("\n".join(f"{type(config).__name__} {problem}" for problem in problems))
        self.problems = problems


class FieldChecks:
    """Checks the fields of one config and collects what is invalid; each field is rejected at most once."""

    def __init__(self, config: object) -> None:
        self._config = config
        self._invalid: dict[str, InvalidField] = {}

    def integers(self, *fields: str, minimum: int = 1) -> None:
        for field in fields:
            value = self._value(field)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                self.reject(field, f"give a whole number >= {minimum}")

    def number(self, field: str, minimum: float, below: float = float("inf")) -> None:
        """minimum <= field < below."""
        value = self._value(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < below:
            upper = f" and < {below:g}" if below < 1e30 else ""
            self.reject(field, f"give a number >= {minimum:g}{upper}")

    def choice(self, field: str, valid: Collection[object]) -> None:
        value = self._value(field)
        # `in` would raise for an unhashable value, such as a list.
        if not isinstance(value, str | None) or value not in valid:
            self.reject(field, f"choose from {', '.join(map(repr, valid))}")

    def booleans(self, *fields: str) -> None:
        for field in fields:
            if not isinstance(self._value(field), bool):
                self.reject(field, "give true or false")

    def multiple(self, field: str, of: str) -> None:
        """Call it after `integers` for both."""
        if self.valid(field, of) and self._value(field) % self._value(of):  # type: ignore[operator]
            self.reject(field, f"give a multiple of {of}={self._value(of)}")

    def valid(self, *fields: str) -> bool:
        """Whether none of the fields is rejected so far, so that a further check can compute with them."""
        return not any(field in self._invalid for field in fields)

    def reject(self, field: str, advice: str) -> None:
        self._invalid.setdefault(field, InvalidField(field, self._value(field), advice))

    def raise_invalid(self) -> None:
        if self._invalid:
            raise InvalidConfig(self._config, tuple(self._invalid.values()))

    def _value(self, field: str) -> object:
        value: object = getattr(self._config, field)
        return value


@contextmanager
def checking(config: object) -> Iterator[FieldChecks]:
    """For __post_init__ of a dataclass: raises one InvalidConfig at the end of the block."""
    checks = FieldChecks(config)
    yield checks
    checks.raise_invalid()


def find_preset(presets: Mapping[str, Config], name: object, system: str) -> Config:
    if not isinstance(name, str) or name not in presets:
        raise UserError(f"{system} has no size {name!r}; choose from {', '.join(presets)}")
    return presets[name]
