"""Files that a soak leaves: checked before it starts, replaced at once when it ends."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvtier.errors import ConfigError


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError, naming `option`, if a file could not be written there."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; give a file in it")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: cannot be written, there is no folder {folder}; make it, or give another")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"{option} {path}: cannot be written; give a file in a folder that you may write to")


def write_whole(path: Path, text: str, option: str) -> None:
    """Replace the file at once, so that a reader never sees half of it.

    Raises:
        ConfigError: it cannot be written; the file that was there is as it was.
    """
    name = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-", delete=False
        ) as file:
            name = file.name
            file.write(text)
        Path(name).replace(path)
    except BaseException as error:  # a Ctrl-C too: no half file is left
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{option} {path}: {error.strerror}") from error
        raise
