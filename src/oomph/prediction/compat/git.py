"""git: programs write its answers into their logs."""

from __future__ import annotations

from oomph.prediction.compat.library import Library, begins

_QUERIES = (
    *(("git", each) for each in "rev-parse rev-list describe log show status diff ls-files".split()),
    *(("git", "config", "--get"), ("git", "branch", "--show-current"), ("git", "remote", "get-url")),
)


def _is_query(words: tuple[str, ...]) -> bool:
    if words[:2] == ("git", "-C"):  # in another folder
        words = "git", *words[3:]
    if words == ("git", "symbolic-ref", "--short", "HEAD"):  # with more words, it writes
        return True
    return begins(words, _QUERIES) and not any(each.startswith(("--output", "--ext-diff")) for each in words)


LIBRARY = Library("git", None, is_query=_is_query, environment={"GIT_OPTIONAL_LOCKS": "0"})
