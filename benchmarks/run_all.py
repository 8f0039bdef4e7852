"""All benchmarks one after the other, their results kept: `make bench`, or `python -m kvtier.benchmarks.run_all`.

Each runs in a process of its own. Its document goes, with the date, as one more line into `results/NAME.jsonl`, and
`RESULTS.md` beside that folder is written anew, with plots. What follows `--` is passed to every benchmark, as in
`run_all --only decode,prefill -- --quick`. A benchmark that is not there, fails or says no document is named at the
end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier.benchmarks.results import append, latest, page

NAMES = (
    "decode", "prefill", "overlap", "scale", "lookup", "resume", "prefix", "worst_case", "storage", "compression",
    "predict",
)  # fmt: skip
"""All benchmarks, in the order in which they run and are shown. A new one is entered here."""
RESULTS = Path(__file__).resolve().parent / "results"

Start = Callable[[str, Sequence[str]], tuple[int, str]]


def start(name: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run a benchmark and show what it prints but for its last line; its exit status, and that line."""
    command = [sys.executable, "-m", f"kvtier.benchmarks.{name}", *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(last, end="", flush=True)
            last = line
    return process.returncode, last


def is_there(name: str) -> bool:
    """Whether there is such a module."""
    return importlib.util.find_spec(f"kvtier.benchmarks.{name}") is not None


def run(
    names: Sequence[str], arguments: Sequence[str], results: Path, console: Console, start: Start = start
) -> list[str]:
    """Run these benchmarks and keep their results; what went wrong, a line each.

    Args:
        arguments: passed to every one.
        results: the folder of all results; `RESULTS.md` goes beside it after every benchmark.
    """
    wrong = []
    for name in names:
        if not is_there(name):
            wrong.append(f"{name}: there is no benchmarks/{name}.py")
            continue
        console.rule(name)
        status, last = start(name, arguments)
        if status:
            wrong.append(f"{name}: ended with status {status}")
        document = _document(last)
        if document is None:
            wrong.append(f"{name}: its last line is no JSON document")
            continue
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        how = {"date": now, "arguments": list(arguments), "quick": "--quick" in arguments}
        append({"benchmark": name, **how, **document}, results)
        write_page(results)
    return wrong


def _document(line: str) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def write_page(results: Path) -> None:
    """`RESULTS.md` beside the folder, from what is in it, and its plots in the folder."""
    from kvtier.benchmarks.result_plots import draw

    documents = latest(results, NAMES)
    plots: dict[str, list[str]] = {}
    for name, document in documents.items():
        for metric, svg in draw(document).items():
            file = results / f"{name}-{metric}.svg"
            file.write_text(svg, encoding="utf-8")
            plots.setdefault(name, []).append(f"{results.name}/{file.name}")
    (results.parent / "RESULTS.md").write_text(page(documents, plots), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them, and say what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help="comma list of benchmarks")
    parser.add_argument("--without", default="", help="comma list of benchmarks to leave out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results")
    parser.add_argument("--page", action="store_true", help="run nothing: write RESULTS.md from what is there")
    parser.add_argument("arguments", nargs="*", help="behind --: what each benchmark is passed")
    options = parser.parse_args(arguments)
    only, without = (set(filter(None, names.split(","))) for names in (options.only, options.without))
    if not only | without <= set(NAMES):
        parser.error(f"--only, --without: no such benchmark: {', '.join(sorted((only | without) - set(NAMES)))}")
    console = Console(stderr=True)
    if options.page:
        write_page(options.results)
        return 0
    names = [name for name in NAMES if name in only - without]
    wrong = run(names, options.arguments, options.results, console)
    for line in wrong:
        console.print(line, style="red", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
