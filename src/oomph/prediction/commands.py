"""Which other programs a predicted program may start: queries, which change nothing."""

from __future__ import annotations

import posixpath
import re

from oomph.prediction.compat import registry
from oomph.prediction.compat.library import begins

# What programs ask before they train. With more words, some of those in the second row write.
_QUERIES = (("uname",), ("lscpu",), ("ldconfig", "-p"), ("/sbin/ldconfig", "-p"))
_WHOLE_QUERIES = (("hostname",), ("lspci",), ("stty", "size"))
# What queries start in turn, as the kernel sees it: `git describe --broken`; Ubuntu's ldconfig is a script.
_STARTED_BY_QUERIES = (("git", "diff-index"), ("/sbin/ldconfig.real", "-p"))


def is_query(words: tuple[str, ...]) -> bool:
    """A shell's command, too, if all that it starts are queries."""
    if words[:1] in (("sh",), ("/bin/sh",)) and words[1:2] == ("-c",):
        script = words[3:] if words[2:3] == ("--",) else words[2:]  # newer C libraries write the dashes
        return len(script) == 1 and _is_shell_query(script[0])
    return words in _WHOLE_QUERIES or begins(words, _QUERIES) or registry.is_query(words)


def _is_shell_query(command: str) -> bool:
    """Also of several, one after the other, as in `git describe 2>/dev/null || git rev-parse HEAD`."""
    silent = re.sub(r"\s2>(/dev/null|&1)(?=[\s;&|]|$)", "", command)
    commands = re.split(r"\|\||&&|;", silent)
    plain = silent.isprintable() and not set("".join(commands)) & set("|&<>`$")
    return plain and all(is_query(tuple(each.split())) for each in commands)


def may_be_executed(path: str, words: tuple[str, ...]) -> bool:
    """`words` as the arguments of a process that executes `path`: those of a query, or what one starts."""
    name = posixpath.basename(path)
    if not words or name not in (posixpath.basename(words[0]), "true"):  # in place of a missing nvidia-smi
        return False
    short = (name, *words[1:]) if name == "git" else words
    return is_query(short) or any(short[: len(each)] == each for each in _STARTED_BY_QUERIES)
