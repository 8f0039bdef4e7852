"""What the soak watches while it runs: samples of this process in a thread, and the live table."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtier.size import size_words
from kvtier.system import allocated_bytes, num_threads, open_fds, process_memory_bytes, resident_file_bytes

SAMPLE_PERIOD_S = 0.2
TIERS = ("gpu", "cpu", "nvme")
EDGES = ("gpu_to_cpu", "cpu_to_gpu", "cpu_to_nvme", "nvme_to_cpu", "gpu_to_nvme", "nvme_to_gpu")


class Ticker:
    """Calls a function at once, then every so often in a thread, and once more at the end."""

    def __init__(self, name: str, period_s: float, function: Callable[[], None]) -> None:
        self._period_s = period_s
        self._function = function
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._function()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after one last call; raise what it died of, if it did."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._period_s):
                self._function()
            self._function()
        except BaseException as error:  # handed to the main thread by `stop`
            self._error = error


class Sampler:
    """Peaks of this process's memory (RssAnon + RssShmem), open files and threads, and of the nvme folder.

    The folder's disk use (as `du`) is a sample like the others; its pages in the page cache cost a walk over all of
    them and are sampled once a second or rarer, so that watching takes at most a twentieth of the time.
    """

    def __init__(self, folder: Path | None) -> None:
        self.now = {"memory_bytes": 0, "nvme_disk_bytes": 0, "nvme_resident_bytes": 0, "open_fds": 0, "threads": 0}
        self.peak = dict(self.now)
        self._recent = dict(self.now)
        self._folder = folder
        self._resident_due_s = 0.0
        self._ticker = Ticker("soak-sampler", SAMPLE_PERIOD_S, self._sample)

    def start(self) -> None:
        self._ticker.start()

    def stop(self) -> None:
        """End the thread after one last sample; raise what it died of, if it did."""
        self._ticker.stop()

    def _sample(self) -> None:
        seen = {"memory_bytes": process_memory_bytes(), "open_fds": open_fds(), "threads": num_threads()}
        if self._folder:
            seen["nvme_disk_bytes"] = allocated_bytes(self._folder)
            start_s = time.monotonic()
            if start_s >= self._resident_due_s:
                seen["nvme_resident_bytes"] = resident_file_bytes(self._folder)
                end_s = time.monotonic()
                self._resident_due_s = end_s + max(1.0, 20 * (end_s - start_s))
        for name, value in seen.items():
            self.now[name] = value
            self.peak[name] = max(self.peak[name], value)
            self._recent[name] = max(self._recent[name], value)

    def take_recent(self) -> dict[str, int]:
        """The peaks since this was called last: a caller that comes rarely misses nothing."""
        recent, self._recent = self._recent, dict(self.now)
        return recent


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """Show a wait of a few seconds: a spinner on a terminal, else a line."""
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(text)
        yield


@contextlib.contextmanager
def bar(console: Console, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a longer wait: a bar on a terminal, else a line for every tenth. Yields what is told of work done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            tenths, done = 10 * done // total, done + amount
            progress.update(task, completed=done)
            if not console.is_terminal and 10 * done // total > tenths:
                console.print(f"{text}: {100 * done // total} %")

        yield advance


class LiveView:
    """The table shown while the soak runs; on anything but a terminal, one line a turn instead.

    The main thread sets `stats`, `turn` and `tokens`; rich's own thread draws. A context manager.
    """

    def __init__(
        self, console: Console, sampler: Sampler, total_turns: int | None, tokens: int = 0, earlier_s: float = 0.0
    ) -> None:
        """`tokens` were generated in `earlier_s` seconds before the run was interrupted."""
        self.stats: dict[str, Any] = {}
        self.turn = 0
        self.session = ""
        self.tokens = tokens
        self._console = console
        self._sampler = sampler
        self._total_turns = total_turns
        self._start_s = time.monotonic() - earlier_s
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def turn_done(self, session: str, new_tokens: int, answer_tokens: int, seconds: float) -> None:
        """Say that a turn is over."""
        if not self._console.is_terminal:
            total = f"/{self._total_turns}" if self._total_turns else ""
            done = f"read {new_tokens} tokens, wrote {answer_tokens} in {seconds:.1f} s"
            self._console.print(f"turn {self.turn}{total} · {session} · {done}")

    def _render(self) -> Group:
        seconds = time.monotonic() - self._start_s
        total = f" of {self._total_turns}" if self._total_turns else ""
        head = Text(
            f"kvtier soak · turn {self.turn}{total} ({self.session}) · {self.tokens} tokens generated · "
            f"{self.tokens / max(seconds, 1e-9):.1f} tokens/s · {seconds:.0f} s"
        )
        now, peak = self._sampler.now, self._sampler.peak
        foot = Text(
            f"memory {size_words(now['memory_bytes'])} (peak {size_words(peak['memory_bytes'])}) · nvme on disk "
            f"{size_words(now['nvme_disk_bytes'])}, in page cache {size_words(now['nvme_resident_bytes'])} · "
            f"{now['open_fds']} open files · {now['threads']} threads"
        )
        if not self.stats:
            return Group(head, foot)
        return Group(head, tier_table(self.stats["tiers"]), Text(moved_line(self.stats["bytes_moved"])), foot)


def tier_table(tiers: dict[str, Any]) -> Table:
    """One row a tier, from the `tiers` of `stats()` or of the report."""
    table = Table("tier", "budget", "used", "peak", "hits")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name in TIERS:
        tier = tiers[name]
        table.add_row(
            name,
            size_words(tier["budget_bytes"]),
            size_words(tier["used_bytes"]),
            size_words(tier["peak_bytes"]),
            f"{tier['hit_frac']:.1%}",
        )
    return table


def moved_line(bytes_moved: dict[str, int]) -> str:
    """The bytes moved over each edge, in one line."""
    return "moved: " + " · ".join(f"{edge.replace('_to_', ' → ')} {size_words(bytes_moved[edge])}" for edge in EDGES)
