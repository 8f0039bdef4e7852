"""Which model a plan is for: a preset's name, or a folder with a config.json. Pure Python."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.config_errors import closest
from kvtier.errors import ConfigError
from kvtier.planner.card import ModelCard
from kvtier.planner.model_config import read_card
from kvtier.size import size_words

_CONFIG_BYTES_MAX = 16 << 20


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """The models that are known by name: `source`, where the numbers are from, and `config`. Reads a file once."""
    file = importlib.resources.files("kvtier.planner") / "models.json"
    models: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return models


def find_card(model: str, *, dtype: str | None = None, weights_bytes: int | None = None) -> tuple[ModelCard, str]:
    """The model's card, and where its numbers are from.

    Args:
        model: a preset's name, in any case, which wins over a folder of that name; or a folder with a config.json, or
            that file.
        dtype, weights_bytes: as `read_card`.

    Raises:
        ConfigError: there is no such model, or its config cannot be used.
    """
    known = {name.lower(): name for name in presets()}
    if name := known.get(model.lower()):
        preset = presets()[name]
        return read_card(preset["config"], name, dtype=dtype, weights_bytes=weights_bytes), preset["source"]
    path = Path(model)
    try:
        path = path.expanduser()
        file = path / "config.json" if path.is_dir() else path
        is_there = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--model {model}: cannot be used ({error}). {_mend()}") from None
    if not is_there:
        hint = closest(model, presets())
        what = "has no config.json" if path.is_dir() else f"is neither a preset{hint} nor a folder with a config.json"
        raise ConfigError(f"--model {model}: {what}. {_mend()}")
    return read_card(_read(file), str(file), dtype=dtype, weights_bytes=weights_bytes), str(file)


def read_json(file: Path, where: str, mend: str) -> Mapping[str, Any]:
    """A JSON mapping. Raises ConfigError, whose text begins with `where` and ends with `mend`."""
    try:
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ValueError(f"it has more than {size_words(_CONFIG_BYTES_MAX)}")
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where}: cannot be read as JSON ({reason}). {mend}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: must be a mapping, got {document!r:.80}. {mend}")
    return document


def _read(file: Path) -> Mapping[str, Any]:
    return read_json(file, f"--model {file}", _mend())


def _mend() -> str:
    return f"Mend: give the folder of a model, or one of the presets {', '.join(presets())}"
