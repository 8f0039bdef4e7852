"""Where a configuration comes from: presets, YAML files read strictly; and whether the nvme folder can be had.

Pure Python. Nothing is kept open; the nvme path is tried with an empty file that is removed at once.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtier.config_errors import closest
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
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise ValueError("it is not a regular file")
        return str(source), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"config: {source} cannot be read ({reason}). "
            f"Mend: give a YAML file or one of the presets {', '.join(preset_names())}"
        ) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice. Mend: remove one", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str, example: str = "tiers: {gpu: {budget: 1GiB}}") -> Mapping[str, Any]:
    try:
        # A SafeLoader: it builds plain values only.
        document = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        place = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        mend = ". Mend: indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise ConfigError(f"{where}{place}: {error.problem}{mend}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: is not YAML: {' '.join(str(error).split())}") from None  # one mistake, one line
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: must be a mapping such as `{example}`, got {document!r:.80}")
    return document
