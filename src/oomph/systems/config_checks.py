"""What configs check of themselves. All problems are told at once: field, what was given, what is valid."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from oomph.errors import UserError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Problem:
    field: str
    given: object
    advice: str

    def __str__(self) -> str:
        return f"{self.field}={self.given!r} is not valid; {self.advice}"


class InvalidConfig(UserError):
    """`problems` are for whoever knows the fields by other names."""

    def __init__(self, config: object, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(f"{type(config).__name__} {problem}" for problem in problems))
        self.problems = problems


class Checks:
    """Looks at one config, and goes on after the first problem. A field is refused once, for one reason."""

    def __init__(self, config: object) -> None:
        self._config = config
        self._found: dict[str, Problem] = {}

    def whole_numbers(self, *fields: str, smallest: int = 1) -> None:
        for field in fields:
            value = self._value(field)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                self.refuse(field, f"give a whole number >= {smallest}")

    def number_from(self, field: str, low: float, below: float = float("inf")) -> None:
        """low <= field < below."""
        value = self._value(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < below:
            self.refuse(field, f"give a number >= {low:g}" + (f" and < {below:g}" if below < 1e30 else ""))

    def one_of(self, field: str, valid: Collection[object]) -> None:
        value = self._value(field)
        # A list is in no dict, and asking would be a TypeError.
        if not isinstance(value, str | None) or value not in valid:
            self.refuse(field, f"choose from {', '.join(map(repr, valid))}")

    def booleans(self, *fields: str) -> None:
        for field in fields:
            if not isinstance(self._value(field), bool):
                self.refuse(field, "give true or false")

    def multiple(self, field: str, of: str) -> None:
        """After both were checked to be whole numbers."""
        if self.fine(field, of) and self._value(field) % self._value(of):  # type: ignore[operator]
            self.refuse(field, f"give a multiple of {of}={self._value(of)}")

    def fine(self, *fields: str) -> bool:
        """Whether none has a problem, so that a further check may compute with them."""
        return not any(field in self._found for field in fields)

    def refuse(self, field: str, advice: str) -> None:
        self._found.setdefault(field, Problem(field, self._value(field), advice))

    def finish(self) -> None:
        if self._found:
            raise InvalidConfig(self._config, tuple(self._found.values()))

    def _value(self, field: str) -> object:
        value: object = getattr(self._config, field)
        return value


@contextmanager
def checking(config: object) -> Iterator[Checks]:
    """For a dataclass' __post_init__: at the end of the block, one error with all that was refused."""
    checks = Checks(config)
    yield checks
    checks.finish()


def preset(presets: Mapping[str, Config], name: object, system: str) -> Config:
    """The preset of that name; one line with the valid names where there is none."""
    if not isinstance(name, str) or name not in presets:
        raise UserError(f"{system} has no size {name!r}; choose from {', '.join(presets)}")
    return presets[name]
