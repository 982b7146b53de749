"""YAML as people write it in configs: 1e-4 is a number, `no` is a word, a key stands once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from oomph.errors import UserError
from oomph.training.config.problems import nearest


class _Loader(yaml.SafeLoader):
    """Plain words by the rules of YAML 1.2; those of 1.1 make a string of 1e-4 and false of `no`."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what is no plain word by either rules."""


for _tag, _words, _first in (
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
    for _kind_of in (_Loader, _Dumper):
        _kind_of.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_words})$"), list(_first)
        )


def _number(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(node.value).replace("_", ""))  # 010 is ten


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """A key that stands twice is a mistake; YAML itself would silently take the second."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands twice", key_node.start_mark
            )
        seen.add(key)
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:int", _number)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The file's mapping. Whatever is wrong with the file as such is one line."""
    file = check_file(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise UserError(f"config {str(path)!r} cannot be read: {why}") from None
    found = parse(text, f"config {str(path)!r}", tell_line=True)
    if found is None:
        raise UserError(f"config {str(path)!r} is empty; it should say at least: system: pythia")
    if not isinstance(found, dict):
        raise UserError(
            f"config {str(path)!r} holds {_kind(found)}; it should be a mapping, like `system: pythia`"
        )
    return {str(key): value for key, value in found.items()}


def check_file(path: str | Path) -> Path:
    """Needs nothing but the file system, so that a slip of the keyboard is told at once."""
    file = Path(path)
    if file.is_dir():
        raise UserError(f"config {str(path)!r} is a directory; give a .yaml file")
    if not file.is_file():
        folder = file.parent
        names = [one.name for one in folder.glob("*.y*ml")] if folder.is_dir() else []
        close = nearest(file.name, names)
        hint = f"did you mean {str(folder / close)!r}?" if close else "give a .yaml file, e.g. in configs/"
        raise UserError(f"config {str(path)!r} does not exist; {hint}")
    return file


def parse(text: str, what: str, *, tell_line: bool = False) -> Any:
    """One YAML value. A mistake in its syntax is told in one line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark and tell_line else ""
        raise UserError(f"{what}{line} is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{what} is not valid YAML: {str(error).splitlines()[0]}") from None


def as_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def _kind(found: Any) -> str:
    return "a list" if isinstance(found, list) else f"one {type(found).__name__}"
