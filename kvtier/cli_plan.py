"""`kvtier plan`: what a model, a context and a number of users ask of a config, without weights or a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.config_files import preset_names
from kvtier.errors import ConfigError
from kvtier.terminal import page_console


def plan(
    model: Annotated[
        str, typer.Option(metavar="PATH|NAME", help="A folder with a config.json, or a preset such as Llama-3.1-8B.")
    ],
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Of each user: 8192, or 32k (of 1,024).")],
    config: Annotated[str, typer.Option(help="A preset's name, or the path of a YAML file.")] = "",
    users: Annotated[int, typer.Option(help="Conversations that are kept at once.")] = 1,
    rates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A saved `kvtier doctor --json`: predict tokens/s by it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16, instead of what the model's config says.")
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the weights, for families whose config does not tell.")
    ] = "",
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the device, such as 24GiB, instead of what the rates say.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(help="torch's threads without CUDA: 1, or left out for all cores.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say what lies on which tier, how many users fit with and without kvtier, and what breaks first."""
    if not config:
        raise ConfigError(
            f"--config: none was given, and a plan is one of budgets. Mend: a preset ({', '.join(preset_names())}), or "
            "the path of a YAML file, such as `kvtier doctor` proposes"
        )
    from kvtier.planner.report import Wishes, make_plan  # numpy: not for the other commands to wait for
    from kvtier.planner.show import print_plan

    made = make_plan(Wishes(model, context, users, config, rates, dtype, weights, device_memory, threads))
    if as_json:
        sys.stdout.write(json.dumps(made.document(), allow_nan=False) + "\n")
    else:
        print_plan(made, page_console())
    raise typer.Exit(made.exit_status)
