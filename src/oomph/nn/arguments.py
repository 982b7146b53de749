"""Checks that several layers make of their sizes."""

from oomph.errors import ArgumentError


def positive(**numbers: object) -> None:
    for name, given in numbers.items():
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ArgumentError(f"{name}={given!r} is not valid; give a whole number >= 1")


def positive_if_given(**numbers: object) -> None:
    positive(**{name: given for name, given in numbers.items() if given is not None})
