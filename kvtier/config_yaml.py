"""YAML that people write, read strictly: what cannot be read is named by its line, with the line and a mend.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier.errors import ConfigError

_MAX_SHOWN = 80
# What the parser says, in part, and what to do. The first that fits.
_MENDS = (
    ("Mend:", ""),
    ("'\\t'", "indent with spaces"),
    ("while parsing a flow", "close the bracket or brace that was opened there, and put commas between what is inside"),
    ("while scanning a quoted scalar", "close the quotation mark that was opened there"),
    ("mapping values are not allowed", "begin the line before with `key:`, or put a value with a colon into quotes"),
    ("expected <block end>, but found '}'", "remove a bracket or brace that was not opened"),
    ("expected <block end>, but found ']'", "remove a bracket or brace that was not opened"),
    ("expected <block end>", "indent the keys of one level by the same number of spaces"),
    ("could not find expected ':'", "write `key: value`, with a colon and a space behind it"),
    ("that cannot start any token", "put the value into quotes"),
    ("alias", "put the value into quotes: * and & have a meaning of their own in front"),
    ("another document", "keep one document: remove the line ---"),
    ("constructor for the tag", "remove the tag: plain values only"),
    ("unhashable key", "write a plain word as the key"),
    ("", "write it as in the presets"),
)  # fmt: skip


def read_text(path: Path) -> str:
    """A file of text.

    Raises ValueError: it cannot be read; says why, and of what is not UTF-8 in which line.
    """
    try:
        if path.is_dir():
            raise ValueError("it is a folder")
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise ValueError("it is not a regular file")
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        line = raw.split(b"\n")[number - 1].decode("utf-8", "replace")
        bad = f"byte 0x{raw[error.start]:02x} is not UTF-8: save the file as UTF-8"
        raise ValueError(f"line {number}, {_shown(line)}: {bad}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if isinstance(key, yaml.ScalarNode) and name in seen:
                first = f", first in line {seen[name]}"
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands twice{first}. Mend: remove one", key.start_mark
                )
            seen[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # `2026-99-99` looks like a date
            raise yaml.constructor.ConstructorError(
                None, None, f"{error}. Mend: put the value into quotes", node.start_mark
            ) from None


def parse_yaml(text: str, where: str, example: str = "tiers: {gpu: {budget: 1GiB}}") -> Mapping[str, Any]:
    """The mapping that a text is.

    Args:
        where: what it is called in messages.
        example: a mapping that would do.

    Raises:
        ConfigError: one line: `where`, the line's number and text, what is wrong, and the mend.
    """
    try:
        # A SafeLoader: it builds plain values only.
        document = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_explained(error, text, where)) from None
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        what = f"a character that YAML does not take, {chr(error.character)!r}. Mend: remove it"
        raise ConfigError(f"{where} {_line(text, number)}: {what}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())  # one mistake, one line
        raise ConfigError(f"{where}: is not YAML: {reason}. Mend: write it as in the presets") from None
    if document is None:
        raise ConfigError(f"{where}: is empty. Mend: it must be a mapping such as `{example}`")
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: must be a mapping such as `{example}`, got {document!r:.80}")
    return document


def _explained(error: yaml.MarkedYAMLError, text: str, where: str) -> str:
    said = f"{error.context or ''} {error.problem}"
    mend = next(mend for part, mend in _MENDS if part in said)
    mark, began = error.problem_mark, error.context_mark
    place = where
    if mark is not None:
        if began is not None and mark.line >= len(text.splitlines()):  # the end of the file says nothing
            mark, began = began, None
        place = f"{where} {_line(text, mark.line + 1)}"
        if began is not None and began.line != mark.line:
            place += f", in what began in {_line(text, began.line + 1)}"
    return f"{place}: {error.problem}" + (f". Mend: {mend}" if mend else "")


def _line(text: str, number: int) -> str:
    lines = text.splitlines() or [""]
    number = min(number, len(lines))  # behind the last one it only ends
    return f"line {number}, {_shown(lines[number - 1])}"


def _shown(line: str) -> str:
    """A line with escapes for what a terminal would obey, and its beginning alone where it is long."""
    return repr(line.rstrip() if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}…")
