"""`kvtier selftest`: whether kvtier is exact on this machine's devices, in under 3 minutes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvtier.errors import ConfigError
from kvtier.terminal import page_console, printable


def selftest(
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where files go for a while; the temporary folder otherwise.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compare kvtier with the plain cache on each device of this machine, and print a report to paste."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("kvtier selftest needs transformers, which is not installed: pip install 'kvtier[hf]'")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--folder {folder}: not a folder")
    errors = Console(stderr=True)
    with errors.status("Starting …") as status:
        from kvtier.selftest import run_all  # torch and transformers: not for the other commands to wait for
        from kvtier.selftest.show import print_report

        report = run_all(folder, lambda name: status.update(printable(name)))
    if as_json:
        sys.stdout.write(json.dumps(report.document(), allow_nan=False) + "\n")
    else:
        print_report(report, page_console())
    raise typer.Exit(0 if report.is_ok else 1)
