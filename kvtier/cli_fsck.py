"""`kvtier fsck`: what lies in an nvme folder, read and verified."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from kvtier.terminal import page_console, print_page

EXIT_DAMAGED = 1


def fsck(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="What tiers.nvme.path says, or the folder kv in it.")],
    repair: Annotated[bool, typer.Option("--repair", help="Free bad slots, remove files that cannot be used.")] = False,
    drop: Annotated[
        str | None, typer.Option(metavar="NAMESPACE", help="Free all slots of a namespace, given by its first digits.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Read and verify every block that the nvme tier left on disk; without --repair and --drop write nothing."""
    from kvtier.fsck import check_folder  # numpy: not for the other commands to wait for
    from kvtier.fsck_report import Outcome

    errors = Console(stderr=True)
    with Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=json_ or not errors.is_terminal,
    ) as bar:
        task = bar.add_task("checking", total=None)
        report = check_folder(
            path, repair=repair, drop=drop, progress=lambda done, of: bar.update(task, completed=done, total=of)
        )
    if json_:
        sys.stdout.write(json.dumps(report.document(), allow_nan=False) + "\n")
    else:
        print_page(report.page(), page_console())
    raise typer.Exit(EXIT_DAMAGED if report.outcome is Outcome.DAMAGED else 0)
