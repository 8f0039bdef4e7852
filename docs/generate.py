"""Writes docs/configuration.md from the config's own models, the presets and pyproject.toml: `make docs`."""

from __future__ import annotations

import ast
import enum
import re
import sys
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvtier.config import KVTierConfig
from kvtier.config_files import preset_names, read_source
from kvtier.duration import Duration
from kvtier.rate import Rate
from kvtier.size import Size, unit_names

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"

INTRO = """\
# Configuration

<!-- Made by `make docs` from kvtier/config.py and config_tiers.py. Change the docstrings there, not this page. -->

`TieredKV(model, config)` and `kvtier soak --config` take a preset's name, the path of a YAML file, and in Python also a
mapping of the same layout, a `KVTierConfig`, or nothing for the defaults below.

```yaml
# my.yaml
block_tokens: 256
tiers:
  gpu: {budget: 1GiB}
  cpu: {budget: 4GiB}
  nvme: {budget: 64GiB, path: /fast/disk/kvtier}
```

A config is checked when it is loaded. A key that does not exist, a value of another type (`"256"` and `256.0` are not
256) or out of bounds is a `ConfigError`, one line for each mistake: the key's path, the value, the mend. What depends
on the model and the machine, such as a budget below its minimum, is checked when the model is wrapped, and leaves
nothing behind. A config cannot be changed afterwards: close the wrapper and wrap again.
"""

SIZES = """\
## Sizes

A budget is one of

- a number and a unit, such as `512MiB` or `1.5 GiB`. The units are
  {units}:
  `kB` is 1,000 bytes, `KiB` 1,024, and so on. Capitals matter: `8G` and `8gib` are refused;
- a whole number of bytes, such as `4096`;
- a percentage from `0%` to `100%`. Each budget's key says of what. It is worked out once, when the model is wrapped,
  and does not follow the machine afterwards.

Budgets are ceilings, and `stats()` shows them in bytes (`budget_bytes`).
"""

POLICIES = """\
## Policies

Names for `eviction.*` and `prefetch.policy`. `module:Class` takes any class that Python can import;
[CONTRIBUTING](../CONTRIBUTING.md) shows how to write one.
"""

PRESETS = """\
## Presets

What each preset sets, smallest gpu budget first. – is left out: the default for a key, no such tier for a `budget`.
"""


@dataclass(frozen=True)
class Key:
    """One key of the config, by its path from the top."""

    path: str
    model: type[BaseModel]
    field: FieldInfo

    @property
    def types(self) -> list[Any]:
        """What the annotation is made of, without Annotated and Optional."""
        return list(_plain(self.field.annotation))

    @property
    def mapping(self) -> type[BaseModel] | None:
        """The model of the keys below this one."""
        return next((t for t in self.types if isinstance(t, type) and issubclass(t, BaseModel)), None)

    @property
    def choices(self) -> list[str]:
        """The words that the key takes, if it takes no others."""
        enums = (t for t in self.types if isinstance(t, type) and issubclass(t, enum.Enum))
        return [str(member.value) for kind in enums for member in kind] + [t for t in self.types if isinstance(t, str)]

    def limits(self) -> dict[str, float]:
        """The bounds as pydantic checks them: `gt`, `ge`, `le` and `multiple_of`."""
        names = ("gt", "ge", "lt", "le", "multiple_of")
        return {name: getattr(m, name) for m in self.field.metadata for name in names if hasattr(m, name)}

    def kind(self) -> str:
        """What the key takes, in words."""
        if self.mapping is not None:
            return "mapping"
        if self.choices:
            return " or ".join(f"`{word}`" for word in self.choices) + (
                " only, so far" if len(self.choices) == 1 else ""
            )
        if float in self.types:
            return "fraction" if self.limits().get("le") == 1 else "number"
        words = {
            Size: "size",
            Duration: "duration",
            Rate: "size in a time",
            bool: "`true` or `false`",
            int: "whole number",
            str: "policy",
            Path: "path of a folder",
        }
        return next(words[kind] for kind in self.types)  # a KeyError: a new kind of key, which needs its words

    def bounds(self) -> str:
        """The bounds in words; empty where there are none."""
        if Duration in self.types:
            return "0 or more"
        if Rate in self.types:
            return "more than 0"
        if Size in self.types:
            return "0 or more" if self._takes(0) else "more than 0"
        limits = self.limits()
        parts = [f"more than {limits['gt']:g}"] if "gt" in limits else []
        parts += [f"at least {limits['ge']:g}"] if "ge" in limits else []
        parts += [f"at most {limits['le']:g}"] if "le" in limits else []
        parts += [f"a multiple of {limits['multiple_of']:g}"] if "multiple_of" in limits else []
        return ", ".join(parts)

    def _takes(self, value: object) -> bool:
        try:
            self.model.model_validate({self.path.rpartition(".")[2]: value})
        except ValidationError:
            return False
        return True

    def default(self) -> str:
        """The default as YAML."""
        if self.field.is_required():
            return "must be given"
        value = self.field.get_default(call_default_factory=True)
        if value is None:
            return "left out"
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
            if not value:
                return "its keys' defaults"
            return f"`{yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()}`"
        value = (
            value.value if isinstance(value, enum.Enum) else str(value).lower() if isinstance(value, bool) else value
        )
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _plain(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]  # the others are validators
    if typing.get_args(annotation):
        for inner in typing.get_args(annotation):
            yield from _plain(inner)
    elif annotation is not type(None):
        yield annotation


def keys(model: type[BaseModel] = KVTierConfig, path: str = "") -> Iterator[Key]:
    """Every key in the order of the models, required ones first, each mapping before what is in it."""
    for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
        key = Key(f"{path}{name}", model, field)
        yield key
        if key.mapping is not None:
            yield from keys(key.mapping, f"{key.path}.")


def _link(path: str) -> str:
    return f"[`{path}`](#{path.replace('.', '')})"


def _overview() -> str:
    rows = [
        f"| {_link(key.path)} | {', '.join(filter(None, (key.kind(), key.bounds())))} | {key.default()} |"
        for key in keys()
        if key.mapping is None
    ]
    return "\n".join(["## All keys", "", "| key | value | default |", "|---|---|---|", *rows, ""])


def _key(key: Key, told: dict[str, str]) -> str:
    description = key.field.description or ""
    if description in told:  # the two tiers of memory share their watermarks
        description = f"As {_link(told[description])}."
    told.setdefault(description, key.path)
    facts = [f"*{key.kind()}*", key.bounds(), key.default() if key.field.is_required() else f"default: {key.default()}"]
    return f"### `{key.path}`\n\n{' · '.join(filter(None, facts))}\n\n{description}\n"


def _policies() -> str:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rows = []
    for name, target in sorted(pyproject["project"]["entry-points"]["kvtier.policies"].items()):
        module, _, _ = target.partition(":")
        source = (ROOT / "policies" / f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")
        kind = "eviction" if "def victims(" in source else "prefetch"
        first_line = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
        rows.append((kind, f"| `{name}` | {kind} | {first_line} |"))
    header = ["| name | for | what it does |", "|---|---|---|"]
    return "\n".join([POLICIES, *header, *(row for _, row in sorted(rows)), ""])


def _flat(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _presets() -> str:
    texts = {name: read_source(name)[1] for name in preset_names()}
    parsed = {name: yaml.safe_load(text) for name, text in texts.items()}
    names = sorted(texts, key=lambda name: KVTierConfig(**parsed[name]).tiers.gpu.budget.amount)
    values = {name: dict(_flat(parsed[name])) for name in names}
    lines = [PRESETS]
    for name in names:
        head = re.match(r"(?:#.*\n)+", texts[name])
        lines.append(f"- `{name}`: {' '.join((head[0] if head else '').replace('#', '').split())}")
    lines += ["", f"| key | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for key in keys():
        if key.mapping is None:
            cells = (f"`{values[name][key.path]}`" if key.path in values[name] else "–" for name in names)
            lines.append(f"| `{key.path}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole page."""
    told: dict[str, str] = {}
    sizes = SIZES.format(units=", ".join(f"`{name}`" for name in unit_names()))
    details = (_key(key, told) for key in keys())
    return "\n".join([INTRO, _overview(), sizes, "## What each key does\n", *details, _policies(), _presets()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}\n")
