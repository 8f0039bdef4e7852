"""The report for people: what to paste."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.selftest.check import Check, Outcome
from kvtier.selftest.report import Report
from kvtier.size import size_words, speed_words
from kvtier.terminal import print_table, printable

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.SKIP: "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Machine, a row a check, and the sum. Lines of text stay whole."""
    machine = report.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("kvtier", "torch", "transformers", "python"))
    console.print(Text(printable(f"{versions}; CUDA {machine['cuda'] or 'not in this torch'}")), soft_wrap=True)
    console.print(Text(printable(f"{machine['system']}, {machine['cpus']} CPUs")), soft_wrap=True)
    for gpu in machine["gpus"]:
        line = f"{gpu['name']}, compute capability {gpu['capability']}, {size_words(gpu['memory_bytes'])}"
        console.print(Text(printable(line)), soft_wrap=True)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("check", "device", "outcome", "s", ""):
        table.add_column(name, justify="right" if name == "s" else "left", no_wrap=name not in ("check", ""))
    for check in report.checks:
        outcome = Text(check.outcome.value, style=_STYLES[check.outcome])
        found = Text(printable(check.reason or _words(check)))
        table.add_row(check.name, check.device, outcome, f"{check.seconds:.1f}", found)
    print_table(table, console)
    counts = {outcome: sum(check.outcome is outcome for check in report.checks) for outcome in Outcome}
    words = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    console.print(Text(f"{'PASS' if report.is_ok else 'FAIL'}: {words} in {report.seconds:.0f} s"), soft_wrap=True)


def _words(check: Check) -> str:
    figures = check.figures
    words = []
    if "max_difference" in figures:
        words.append(f"off by {figures['max_difference']:.1e}, allowed {figures['tolerance']:.1e}")
    for length, chosen in figures.get("kernels", {}).items():
        words.append(f"{length} tokens: {chosen['kernel']}")
        words += [f"not {way}: {why}" for way, why in chosen["not"].items()]
    if "write_bytes_per_s" in figures:
        rates = (speed_words(figures[f"{way}_bytes_per_s"]) for way in ("write", "read"))
        words.append("{} written, {} read, {}".format(*rates, figures["io"]))
    for rate in figures.get("copies", []):
        kind = "pinned" if rate["pinned"] else "pageable"
        size, speed = size_words(rate["piece_bytes"]), speed_words(rate["bytes_per_s"])
        words.append(f"gpu {rate['gpu']} {rate['direction']}, {kind}, {size}: {speed}")
    return "; ".join(words)
