"""Documents cut into pieces that are quick to tokenise, and gathered into chunks of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Characters. A tokenizer's memory and time grow with what it is given at once.
PIECE = 1 << 11
CHUNK = 1 << 16


class Piece(NamedTuple):
    text: str
    starts: bool  # a document starts with it
    ends: bool


def cut(document: str) -> Iterator[str]:
    """Pieces of at most PIECE characters: cut after a line's end where there is one, else before a space."""
    start = 0
    while len(document) - start > PIECE:
        limit = start + PIECE
        end = document.rfind("\n", start, limit) + 1
        if end <= start:
            end = document.rfind(" ", start + 1, limit)
        if end <= start:
            end = limit
        yield document[start:end]
        start = end
    yield document[start:]


def chunks(documents: Iterable[str]) -> Iterator[list[Piece]]:
    """Consecutive pieces, about CHUNK characters together: the unit that a stream's position counts."""
    gathered: list[Piece] = []
    size = 0
    for document in documents:
        pieces = list(cut(document))
        for index, text in enumerate(pieces):
            gathered.append(Piece(text, index == 0, index == len(pieces) - 1))
            # A document without characters still takes memory.
            size += len(text) + 1
            if size >= CHUNK:
                yield gathered
                gathered, size = [], 0
    if gathered:
        yield gathered
