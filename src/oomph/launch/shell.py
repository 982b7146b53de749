"""Shell scripts with one command, such as those that projects have beside their configs."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from oomph.errors import UserError
from oomph.launch.lines import Line

# Commands that neither train nor change what is trained.
_IGNORED = (
    *("set", "echo", "printf", "mkdir", "module", "source", ".", "conda", "ulimit", "nvidia-smi", "date"),
    *("exit", "wait", "sleep", "hostname", "shopt", "trap", "true", ":", "unset", "chmod"),
)
_BLOCKS = ("if", "for", "while", "case", "function", "until", "select", "{")
_EXPORTS = ("export", "declare", "local", "readonly")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# In place of $: within double quotes, where a value stays one word, and within single ones.
_QUOTED, _LITERAL = "\x01", "\x02"
_VARIABLE = re.compile(r"[$\x01](?:(\w+|[@*#])|\{([\w@*]+)(?::?-([^}$`\x01]*))?\})")
_ALL = tuple(f"{sign}{name}" for sign in ("$", _QUOTED) for name in ("@", "*", "{@}", "{*}"))
_ADVICE = "give the launch line itself, as oomph predict -- torchrun train.py"


def only_command(line: Line, script: str, arguments: Sequence[str]) -> list[str]:
    """The words of its one command. The variables that it exports are set, and its own are inserted."""
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"shell script {script!r} cannot be read: {reason}; {_ADVICE}") from error
    run = _Run(line, script, arguments)
    for number, statement in _statements(text):
        run.where = f"{script}:{number}"
        for words in _commands(statement, run.where):
            run.command(words)
    if len(run.commands) == 1:
        return run.commands[0]
    if not run.commands:
        raise UserError(f"{script} runs no command; {_ADVICE}")
    lines = ", ".join(f"`{' '.join(words[:3])} ...`" for words in run.commands[:3])
    raise UserError(
        f"{script} runs {len(run.commands)} commands ({lines}); give the one that trains, as oomph predict "
        f"-- {shlex.join(run.commands[-1])}"
    )


class _Run:
    """What the shell would do with one simple command after the other."""

    def __init__(self, line: Line, script: str, arguments: Sequence[str]) -> None:
        self._line, self._script, self.where = line, script, script
        self._variables: dict[str, str] = {}
        self._set_arguments(arguments)
        self.commands: list[list[str]] = []

    def _set_arguments(self, arguments: Sequence[str]) -> None:
        self._arguments = [*arguments]
        self._variables = {name: value for name, value in self._variables.items() if not name.isdigit()}
        self._variables |= {str(index): word for index, word in enumerate((self._script, *arguments))}
        self._variables["#"] = str(len(arguments))

    def command(self, words: list[str]) -> None:
        if words[0] == "shift":
            self._set_arguments(self._arguments[int(words[1]) if words[1:] else 1 :])
            return
        if words[0] in ("cd", "pushd"):
            raise UserError(f"{self.where} goes to another folder; go there, and {_ADVICE}")
        exports = words[0] in _EXPORTS
        words = [word for word in words if "=" in word] if exports else words
        begun = [_ASSIGNMENT.fullmatch(word) for word in words]
        if all(begun):  # assignments alone
            for match in filter(None, begun):
                self._assign(match[1], " ".join(self._insert(match[2], split=False)), exports)
            return
        if words[0] in ("source", ".") and words[1:] and Path(words[1]).name != "activate":
            self._line.notes.append(f"{self.where}: {_shown(words[1])} was not read")
        if words[0] in _IGNORED and words[:2] != ["conda", "run"]:
            return
        self.commands.append([one for word in words for one in self._insert(word)])

    def _assign(self, name: str, value: str, exports: bool) -> None:
        self._variables[name] = value
        if exports or self._line.variable(name) is not None:
            self._line.environment[name] = value

    def _insert(self, word: str, split: bool = True) -> list[str]:
        """The word with values in place of variables; outside of quotes, several words may become of one."""
        if word in _ALL:
            return [*self._arguments]
        found = _VARIABLE.sub(self._value, word)
        if "`" in found or "$" in found.replace("$ ", "") or _QUOTED in found:
            raise UserError(f"{self.where}: {_shown(word)!r} cannot be followed; {_ADVICE}")
        found = found.replace(_LITERAL, "$")
        return found.split() if split and "$" in word else [found]

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        known = self._variables.get(name, self._line.variable(name))
        if known is None and default is None:
            raise UserError(f"{self.where}: ${name} has no value here; set it, or {_ADVICE}")
        return str(known or default or "")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each, as typed. Nothing of what cannot be read."""
    for _, statement in _statements(text):
        with contextlib.suppress(UserError):
            for words in _commands(statement, ""):
                yield [_shown(word) for word in words]


def _shown(word: str) -> str:
    return word.replace(_QUOTED, "$").replace(_LITERAL, "$")


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Lines with what they continue on, and the number of the first of each."""
    begun, number = "", 0
    for index, each in enumerate(text.splitlines(), 1):
        number = number if begun else index
        begun += each
        if begun.lstrip().startswith("#"):
            begun = ""
        elif begun.endswith("\\"):
            begun = begun[:-1] + " "
        elif _is_open(begun):
            begun += "\n"
        else:
            if begun.strip():
                yield number, begun.strip()
            begun = ""
    if begun.strip():
        yield number, begun.strip()


def _is_open(text: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(_marked(text))
    except ValueError:
        return True
    return False


def _commands(statement: str, where: str) -> Iterator[list[str]]:
    """The words of each in `a && b 2>&1 | tee log`, without redirections and what only reads the output."""
    try:
        lexer = shlex.shlex(_marked(statement), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}); {_ADVICE}") from error
    if words[:1] and (words[0] in _BLOCKS or any("(" in word for word in words if set(word) <= set("()$="))):
        raise UserError(f"{where}: {_shown(words[0])!r} cannot be followed; {_ADVICE}")
    found: list[str] = []
    reads_output = skip = False
    for word in words:
        if skip:
            skip = False
        elif word and set(word) <= set(";&|"):
            if found and not reads_output:
                yield found
            found, reads_output = [], word in ("|", "|&")
        elif word and set(word) <= set("<>&|"):
            skip = True
        else:
            found.append(word)
    if found and not reads_output:
        yield found


def _marked(statement: str) -> str:
    """With _QUOTED and _LITERAL for each $ within quotes; without a comment, and the 2 of 2>&1."""
    quote, marked = "", []
    for index, sign in enumerate(statement):
        begins = not quote and (not index or statement[index - 1].isspace())
        if begins and sign == "#":
            break
        if begins and re.match(r"\d[<>]", statement[index : index + 2]):
            continue
        escaped = statement[index - 1 : index] == "\\"
        if sign in "\"'" and not escaped and quote in ("", sign):
            quote = "" if quote else sign
        marked.append({"'": _LITERAL, '"': _QUOTED}.get(quote, sign) if sign == "$" else sign)
    return "".join(marked)
