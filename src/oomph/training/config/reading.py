"""What is written in a config file or on the command line: YAML, `key=value`, `--key value`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from oomph.errors import UserError
from oomph.training.metrics import METRICS

RUN_CONFIG, RUN_LOCK = "config.yaml", "lock"
_MOST_VALUES = 100_000
_KEY = r"[A-Za-z_][A-Za-z0-9_.-]*"
_OVERRIDE = re.compile(rf"({_KEY})=(.*)", re.DOTALL)


def is_run(folder: Path) -> bool:
    """Whether a run wrote to the folder. A config.yaml alone may be anybody's."""
    return (folder / RUN_CONFIG).exists() and any((folder / name).is_file() for name in (RUN_LOCK, METRICS))


def nearest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


# -------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Plain scalars by YAML 1.2. By 1.1, 1e-4 is a string and `no` is false."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what is not a plain string by either version."""


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
        )


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(node.value).replace("_", ""))  # 010 is ten


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Refuse duplicate keys, of which PyYAML silently takes the last."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        problem = None
        if not isinstance(key, str | int | float | bool | None):
            problem = "a key is not a word"
        elif key in seen:
            problem = f"the key {key!r} is given twice"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse_yaml(text: str, what: str, *, with_line: bool = False) -> Any:
    """One YAML value; a syntax error is one line."""
    try:
        value = yaml.load(text, _Loader)
        _check_extent(value)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and with_line else ""
        raise UserError(f"{what}{line} is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{what} is not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{what} is not valid YAML: it is nested too deeply") from None


def _check_extent(value: Any) -> None:
    """Refuse what aliases expand to millions of values, or to itself."""
    pending, left = [value], _MOST_VALUES
    while pending and left:
        value, left = pending.pop(), left - 1
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
    if pending:
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES} values")


def to_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    name = f"config {str(path)!r}"
    file = check_file(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise UserError(f"{name} cannot be read: {why}") from None
    found = parse_yaml(text, name, with_line=True)
    if found is None:
        raise UserError(f"{name} is empty; it needs at least: system: pythia")
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else f"one {type(found).__name__}"
        raise UserError(f"{name} holds {kind}; it should be a mapping, like `system: pythia`")
    return {str(key): value for key, value in found.items()}


def check_file(path: str | Path) -> Path:
    """Needs only the file system, so that a mistyped name is reported at once."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"config {str(path)!r} is a directory; give a .yaml file")
    if not file.is_file():
        folder = file.parent
        names = [one.name for one in folder.glob("*.y*ml") if one.is_file()] if folder.is_dir() else []
        close = nearest(file.name, names)
        hint = f"did you mean {str(folder / close)!r}?" if close else "give a .yaml file, e.g. in configs/"
        raise UserError(f"config {str(path)!r} does not exist; {hint}")
    return file


# --------------------------------------------------------------------------------------- overrides


def is_override(word: str) -> bool:
    """Whether it is key=value. A fix with options, `activation_checkpointing:keep=products`, is not."""
    return _OVERRIDE.fullmatch(word) is not None


def parse_override(word: str) -> tuple[str, Any]:
    """`data.seq_len=128` -> ("data.seq_len", 128). The value is YAML."""
    match = _OVERRIDE.fullmatch(word)
    if match is None:
        raise UserError(f"override {word!r} is not key=value, e.g. data.batch_size=8")
    key, text = match[1], match[2].strip()
    if not text:
        raise UserError(f"override {word!r} has no value; write {key}=null for none")
    value: Any = text
    if not text.startswith("*"):  # a glob, not an alias of YAML
        value = parse_yaml(text, f"override {word!r}")
        if isinstance(value, str) and " #" in text and text[0] not in "'\"":  # not a comment
            value = text
    return key.replace("-", "_"), value


def overrides_from_words(words: Iterable[str]) -> tuple[str, ...]:
    """The overrides among command-line words.

    `--vocab_size 10000`, `--vocab-size=10000` and `vocab_size=10000` are the same; a flag without a value,
    `--sparse`, is true.
    """
    found: list[str] = []
    flag: str | None = None  # the next word may be its value
    for word in words:
        starts_flag = word.startswith("--")
        if flag is not None and (starts_flag or is_override(word)):
            found.append(f"{flag}=true")
            flag = None
        if starts_flag:
            key, equals, value = word[2:].partition("=")
            if not re.fullmatch(_KEY, key):
                raise UserError(f"{word!r} is not a flag; give --key value, --flag, or key=value")
            if equals:
                found.append(f"{key}={value}")
            else:
                flag = key
        elif is_override(word):
            found.append(word)
        elif flag is not None:
            found.append(f"{flag}={word}")
            flag = None
        else:
            also = "; give one config" if word.endswith((".yaml", ".yml")) else ""
            raise UserError(f"{word!r} is not an override; give key=value, --key value, or --flag{also}")
    if flag is not None:
        found.append(f"{flag}=true")
    return tuple(found)
