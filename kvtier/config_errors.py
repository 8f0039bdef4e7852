"""One line for each thing that is wrong with a config: the key's path, the value, the mend. Pure Python."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from kvtier.errors import ConfigError

_MAX_DEPTH = 8  # a config is three levels deep; more is a mistake, or a YAML alias that contains itself

BOOLEANS = ("prefix_cache",)
"""The keys that are true or false; every other choice is a word."""


def check_shape(value: object, path: str = "", depth: int = 0) -> None:
    """Refuse what no key takes at any level: booleans (words that YAML misread), odd keys, bottomless nesting."""
    if isinstance(value, bool) and path not in BOOLEANS:
        raise ConfigError(
            f"{path}: got {value}; YAML reads on, off, yes and no as booleans. Mend: write the word meant"
        )
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path[:80]}…: is nested more than {_MAX_DEPTH} deep. Mend: see the presets for the layout")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                raise ConfigError(f"{inner_path}: the key {key!r} is not a word. Mend: remove it or quote it")
            check_shape(inner, inner_path, depth + 1)


def explain_all(details: list[ErrorDetails], root: type[BaseModel]) -> list[str]:
    """One line for each mistake. A key that is missing beside an unknown one is most likely that one, misspelt."""
    misspelt = {detail["loc"][:-1] for detail in details if detail["type"] == "extra_forbidden"}
    told = (d for d in details if d["type"] != "missing" or d["loc"][:-1] not in misspelt)
    return [_explain(detail, root) for detail in told]


def _explain(detail: ErrorDetails, root: type[BaseModel]) -> str:
    """One line for one of pydantic's errors: the key's path, the problem, the value, the mend."""
    loc, kind = detail["loc"], detail["type"]
    path = ".".join(map(str, loc)) or "config"
    if kind == "extra_forbidden":
        key, known = str(loc[-1]), _keys(loc[:-1], root)
        hint = _glued(key, known) or closest(key, known) or _elsewhere(key, root)
        return f"{path}: unknown key{hint}. {_known_keys(loc[:-1], root)}"
    mend = f"Mend: give {_title(loc, root)}" if loc else ""
    if kind == "missing":
        return f"{path}: is missing. {mend}"
    problem = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind in ("model_type", "model_attributes_type"):
        problem = "must be a mapping"
    elif kind == "string_pattern_mismatch":
        problem = "is not the name of a policy"
    if isinstance(detail["input"], Mapping | BaseModel):  # a rule between keys; its message holds the values
        return f"{path}: {problem}. {mend}"
    return f"{path}: {problem}, got {detail['input']!r:.80}. {mend}"


def _model_at(loc: tuple[int | str, ...], root: type[BaseModel]) -> type[BaseModel]:
    """The model whose keys stand at `loc`."""
    model = root
    for key in loc:
        annotation = model.model_fields[str(key)].annotation
        candidates = [annotation, *typing.get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model


def _keys(loc: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    return list(_model_at(loc, root).model_fields)


def _glued(key: str, known: list[str]) -> str:
    """`gpu:{budget` or `gpu {budget` is what YAML makes of a value without `: ` before it."""
    first = key.replace(":", " ").split(" ")[0]
    return f" (write `{first}: ` with a colon and a space behind it)" if first != key and first in known else ""


def _elsewhere(key: str, root: type[BaseModel]) -> str:
    """Where there is such a key, if it stands at another level."""
    places = [path for path in _paths(root) if path.rpartition(".")[2] == key]
    return f" (did you mean {' or '.join(places)}?)" if places else ""


def _paths(model: type[BaseModel]) -> Iterator[str]:
    """Every key below a model."""
    for name, field in model.model_fields.items():
        yield name
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from (f"{name}.{path}" for path in _paths(kind))


def _known_keys(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    return f"Known keys here: {', '.join(_keys(loc, root))}"


def _title(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    return _model_at(loc[:-1], root).model_fields[str(loc[-1])].title or "a value as in the presets"


def closest(word: str, words: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""
