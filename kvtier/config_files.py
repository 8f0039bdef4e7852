"""Where a configuration comes from: presets and files; and whether the nvme folder can be had.

Pure Python. Nothing is kept open; the nvme path is tried with an empty file that is removed at once.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtier.config_errors import closest
from kvtier.config_yaml import read_text
from kvtier.errors import ConfigError


def preset_names() -> list[str]:
    """The presets that `load_config` takes by name, sorted."""
    files = importlib.resources.files("kvtier.configs").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def check_nvme_path(path: Path) -> None:
    """Try whether files can be made in the folder `path`; leaves nothing behind and does not create the folder.

    Permission bits say nothing for root, nor on a read-only mount, so this makes and removes an empty file.

    Raises:
        ConfigError: the path is (or leads through) a file, or nothing can be written there.
    """
    existing = path
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # a name that is too long, say
        raise ConfigError(
            f"tiers.nvme.path: {path} cannot be used ({error.strerror}). Mend: give a shorter one"
        ) from None
    if not existing.is_dir():
        below = "" if existing == path else f"{path}: "
        raise ConfigError(f"tiers.nvme.path: {below}{existing} is not a folder. Mend: give a folder's path")
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".kvtier-probe-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"tiers.nvme.path: {path} cannot be written ({error.strerror}). Mend: give a folder that can be written"
        ) from None


def source_name(source: object) -> str:
    """The name, for messages, of the preset or file that a config comes from; empty where it has none."""
    if isinstance(source, str) and source in preset_names():
        return f"preset {source}"
    return str(source) if isinstance(source, str | Path) else ""


@contextlib.contextmanager
def names_source(source: str) -> Iterator[None]:
    """Put that name, if there is one, before each mistake of the config that is found inside."""
    try:
        yield
    except ConfigError as error:
        if source:
            error.name_source(source)
        raise


def read_source(source: str | Path) -> tuple[str, str]:
    """The source's name for messages, and its text. A preset's name wins over a file of that name."""
    if isinstance(source, str):
        presets = preset_names()
        if source in presets:
            file = importlib.resources.files("kvtier.configs") / f"{source}.yaml"
            return source_name(source), file.read_text(encoding="utf-8")
        if os.sep not in source and not source.endswith((".yaml", ".yml")) and not Path(source).is_file():
            hint = closest(source, presets)
            raise ConfigError(f"config: no preset is named {source!r}{hint}. Presets: {', '.join(presets)}")
    try:
        path = Path(source).expanduser()
        return str(source), read_text(path)
    except (RuntimeError, ValueError) as error:  # RuntimeError: a ~name that nobody has
        raise ConfigError(
            f"config: {source} cannot be read ({error}). "
            f"Mend: give a YAML file or one of the presets {', '.join(preset_names())}"
        ) from None
