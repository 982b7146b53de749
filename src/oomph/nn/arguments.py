"""Checks of sizes that several modules share."""

from oomph.errors import ArgumentError


def check_positive(**sizes: object) -> None:
    for name, given in sizes.items():
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ArgumentError(f"{name}={given!r} is not valid; give a whole number >= 1")


def check_positive_if_given(**sizes: object) -> None:
    check_positive(**{name: given for name, given in sizes.items() if given is not None})


positive, positive_if_given = check_positive, check_positive_if_given
