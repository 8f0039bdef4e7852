"""The command line: `kvtier soak`, `doctor`, `plan`, `selftest`, `fsck`, `chat`, `sessions`, `version`.

Exit statuses: 0 all is well; 1 the soak or the selftest failed, the folder is damaged, the config given to the doctor
cannot work here, or a plan's users do not fit; 2 bad input, with a line on stderr for each mistake, or a standard
output that cannot be written; 3 the soak was not fully verified; 130 interrupted; 141 the pipe's reader has left. Only
this module and the benchmarks print.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvtier import __version__, cli_sessions
from kvtier.cli_chat import chat
from kvtier.cli_fsck import fsck
from kvtier.cli_json import json_mend
from kvtier.cli_plan import plan
from kvtier.cli_selftest import selftest
from kvtier.errors import ConfigError, KVTierError
from kvtier.log_level import VARIABLE, parse_level
from kvtier.terminal import OutputLostError, guarded_errors, guarded_output, page_console, printable, sigterm_is_ctrl_c

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130
EXIT_READER_LEFT = 128 + signal.SIGPIPE  # as the shell says of a command that SIGPIPE ended

app = typer.Typer(
    name="kvtier",
    help="A KV cache on three tiers of memory for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.command()(chat)
app.command()(fsck)
app.command()(plan)
app.command()(selftest)
app.add_typer(cli_sessions.app, name="sessions")


class Verify(enum.StrEnum):
    """How much of a soak the plain model recomputes."""

    ALL = "all"
    SAMPLE = "sample"
    NONE = "none"


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def _commands(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print kvtier's version.")
    ] = False,
) -> None:
    # With a callback, typer keeps sub-commands even when there is only one.
    pass


@app.command()
def version() -> None:
    """Print kvtier's version."""
    typer.echo(__version__)


@app.command()
def soak(
    context_: typer.Context,
    config: Annotated[str, typer.Option(help="A preset's name, or the path of a YAML file.")] = "quickstart",
    model: Annotated[str | None, typer.Option(help="A local model folder; the demo's SmolLM2 otherwise.")] = None,
    documents: Annotated[
        str | None, typer.Option(help="A text file, or a folder of .txt and .md; Python's manual otherwise.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Conversations that are alive at once.")] = 4,
    context: Annotated[str, typer.Option(help="Tokens of context, one number or a list: 1500,4000.")] = "1500",
    turns: Annotated[int, typer.Option(help="Turns of each session.")] = 3,
    minutes: Annotated[float | None, typer.Option(help="Go on with new sessions for so long.")] = None,
    arrival: Annotated[
        str, typer.Option(help="Think time between a session's turns: none, seconds, or exponential:MEAN.")
    ] = "none",
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 24,
    seed: Annotated[int, typer.Option(help="Draws the texts, the facts, the order of turns and think times.")] = 0,
    verify: Annotated[Verify, typer.Option(help="Sessions to check against the plain model.")] = Verify.ALL,
    threads: Annotated[int, typer.Option(help="torch's threads.")] = 1,
    faults: Annotated[
        str | None, typer.Option(metavar="FILE.yaml", help="Inject faults into the nvme tier, as this file says.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with plots there, for people.")
    ] = None,
    json_files: Annotated[
        list[str] | None, typer.Option("--json", metavar="FILE", help="Write the result there; - for standard output.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the run there after each turn; with --report, beside it otherwise."),
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Go on from a checkpoint; options are the checkpoint's."),
    ] = None,
) -> None:
    """Run conversations under small budgets, watch memory, and check every token against the plain model."""
    # The benchmarks stand above the library and need transformers: they are looked up when they are asked for.
    files: Any = importlib.import_module("kvtier.benchmarks.files")
    outputs = json_files or []
    for output in outputs:
        if output != "-":
            files.check_writable(Path(output), "--json")
    if checkpoint:
        files.check_writable(checkpoint, "--checkpoint")
    if report:
        files.check_writable(report, "--report")
        page: Any = importlib.import_module("kvtier.benchmarks.page")
        page.check_installed()
    console = Console(highlight=False, stderr="-" in outputs)  # standard output is then the result's alone
    with console.status("Starting …"):
        benchmark: Any = importlib.import_module("kvtier.benchmarks.soak")
        checkpoints: Any = importlib.import_module("kvtier.benchmarks.checkpoint")
    fields = {
        "config": config,
        "model": model,
        "documents": documents,
        "sessions": sessions,
        "contexts": _token_counts(context),
        "turns": turns,
        "minutes": minutes,
        "arrival": arrival,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "verify": verify.value,
        "threads": threads,
        "faults": faults,
    }
    saved: Any = None
    if resume_from:
        saved = checkpoints.CheckpointFile(resume_from).load()
        options = saved.soak_options({name: value for name, value in fields.items() if _is_given(context_, name)})
    else:
        options = benchmark.SoakOptions(**fields)
    place = resume_from or checkpoint or (report.with_suffix(".checkpoint.json") if report else None)
    if resume_from and checkpoint and checkpoint != resume_from:
        raise ConfigError(f"--checkpoint {checkpoint}: a resumed run goes on saving to {resume_from}; leave it out")
    file = checkpoints.CheckpointFile(place) if place else None
    if file and not saved:
        file.check_new()
    result: Any = benchmark.run_soak(options, console, file=file, saved=saved)
    line = json.dumps(result.document, allow_nan=False)
    for output in outputs:
        if output == "-":
            sys.stdout.write(line + "\n")
        else:
            files.write_whole(Path(output), line + "\n", "--json")
    if report:
        files.write_whole(report, page.render(result.document), "--report")
        console.print(printable(f"report: {report}"), markup=False, soft_wrap=True)
    if file and file.path.exists() and result.document["interrupted"]:
        console.print(printable(f"to go on: kvtier soak --resume-from {file.path}"), markup=False, soft_wrap=True)
    elif file:
        file.remove()
    raise typer.Exit(int(result.exit_status))


@app.command()
def doctor(
    config: Annotated[
        str | None, typer.Option(help="A preset's name, or a YAML file: can it work on this machine?")
    ] = None,
    path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure the disk of this folder, not the config's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Under 15 seconds, with rougher figures.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all that was measured too.")] = False,
) -> None:
    """Measure this machine's disk, memory and processor, and propose a config, with a reason for each line."""
    # torch takes a second or two to import: not for `kvtier version`.
    from kvtier.doctor import NoWatch, Wishes, examine
    from kvtier.doctor.show import Bars, print_report

    wishes = Wishes(config, path, quick)
    if as_json:
        report = examine(wishes, NoWatch())
        sys.stdout.write(json.dumps(report.document(), allow_nan=False) + "\n")
    else:
        with Bars(Console(stderr=True)) as bars:
            report = examine(wishes, bars)
        print_report(report, page_console(), verbose)
    raise typer.Exit(report.exit_status)


def _is_given(context: typer.Context, field: str) -> bool:
    """Whether the command line itself has this option of SoakOptions."""
    source = context.get_parameter_source("context" if field == "contexts" else field)
    return source is not None and source.name == "COMMANDLINE"


def _token_counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--context {text}: give a token count or a list of them, such as 1500,4000") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Whatever the input and the streams, one line and no traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    with guarded_errors():
        try:
            with guarded_output():
                return _run(words)
        except OutputLostError as error:
            return EXIT_READER_LEFT if error.is_pipe_closed else _complain(f"standard output: {error}")


def _run(words: list[str]) -> int:
    for before, word in pairwise(["kvtier", *words]):
        if not word or (word.startswith("--") and word.endswith("=")):  # "$UNSET", which a Path takes for this folder
            name = word[:-1] or before
            return _complain(f"{name}: an empty argument; give a value, or leave it out (. is the current folder)")
    try:
        parse_level(os.environ.get(VARIABLE) or "warning")
    except ValueError as error:
        return _complain(str(error))
    try:
        with sigterm_is_ctrl_c():
            result = app(args=words, prog_name="kvtier", standalone_mode=False)
    except ConfigError as error:
        return _complain(*error.mistakes)
    except KVTierError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    except OutputLostError:
        raise
    except Exception as error:
        # Wrong options: typer's own errors, which older versions take from click, hence known by what they can say.
        explain = getattr(error, "format_message", None)
        if explain is None:
            raise
        message = str(explain())  # empty where the help was printed instead
        more = ". `kvtier --help` lists them" if message.startswith("No such command") else json_mend(words, message)
        return _complain(message.removesuffix(".") + more if more else message)
    if result == EXIT_INTERRUPTED:  # newer versions of typer return it themselves
        sys.stderr.write("kvtier: interrupted\n")
    return result if isinstance(result, int) else 0


def _complain(*messages: str) -> int:
    for message in filter(None, messages):
        sys.stderr.write(f"kvtier: {printable(' '.join(message.split()))}\n")
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
