"""What the benchmarks of reuse have in common on the command line: tables, then one JSON document as the last line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.documents import load_text
from kvtier.benchmarks.machine import machine
from kvtier.benchmarks.models import LoadedModel
from kvtier.errors import ConfigError
from kvtier.system import filesystem_kind, is_memory_backed
from kvtier.terminal import print_table


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with those that all share; torch then has `--threads` threads."""
    parser.add_argument("--folder", type=Path, default=None, help="where files go; the current folder by default")
    parser.add_argument("--model", default=None, help="a model's folder; SmolLM2-135M-Instruct by default")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--json", action="store_true", help="only the JSON document on standard output")
    options = parser.parse_args(arguments)
    options.folder = (options.folder or Path.cwd()).absolute()
    kind = filesystem_kind(options.folder)
    if is_memory_backed(kind):
        parser.error(f"--folder: {options.folder} lies on {kind}, which is memory: give one on a disk")
    torch.set_num_threads(options.threads)
    return options


def encode(loaded: LoadedModel, num_tokens: int) -> torch.Tensor:
    """The first tokens of Python's manual, `[1, num_tokens]`. Raises ConfigError: it has fewer."""
    text = load_text(None)
    ids = list(loaded.tokenizer(text[: 8 * num_tokens])["input_ids"])[:num_tokens]
    if len(ids) < num_tokens:
        raise ConfigError(f"the text has {len(ids)} tokens, {num_tokens} are asked for")
    return torch.tensor([ids])


def finish(document: dict[str, Any], tables: Sequence[Table], options: argparse.Namespace, load_before: float) -> None:
    """Print tables and document. `load_before`: the machine's load average before anything was measured."""
    console = console_of(stderr=options.json)
    for table in tables:
        print_table(table, console)
    load = [round(value, 1) for value in (load_before, os.getloadavg()[0])]
    print(json.dumps({**document, "threads": options.threads, "load": load, "machine": machine()}))


def in_a_new_process(module: str, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The document of a module of the benchmarks that takes a task's file, which is written to `folder`.

    Raises subprocess.CalledProcessError: it failed.
    """
    file = folder / "task.json"
    file.write_text(json.dumps(task))
    command = [sys.executable, "-m", f"kvtier.benchmarks.{module}", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def console_of(*, stderr: bool = False) -> Console:
    """A console whose tables are whole: a file has no width, and cells cut short say nothing."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=180)


def fill(table: Table, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Columns and rows into a table; all but the first column to the right."""
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    return table
