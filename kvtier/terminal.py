"""What a command does to the outside: the standard streams, which may be closed, full or a pipe that nobody reads, the
signals that end it, and the characters that a terminal would obey.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

_PAGE_WIDTH = 80  # the least: what is narrower wraps the lines itself
_WORD_WIDTH = 16  # longer ones are folded where a column may be squeezed
_ANY_WIDTH = 10_000


class OutputLostError(Exception):
    """Standard output cannot be written. Not an OSError, for which a disk that is being looked at would be blamed."""

    def __init__(self, reason: str, *, is_pipe_closed: bool = False) -> None:
        super().__init__(reason)
        self.is_pipe_closed = is_pipe_closed
        """Its reader has left, as `head` does when it has seen enough."""


class _Output:
    """Standard output. What its encoding lacks is written as an escape."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            return self._failed(text, error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed("", error)

    def _failed(self, text: str, error: OSError) -> int:
        is_pipe_closed = isinstance(error, BrokenPipeError)
        raise OutputLostError(error.strerror or str(error), is_pipe_closed=is_pipe_closed) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Errors(_Output):
    """Standard error. A message that nobody can read is no reason to give up a repair, nor to change the status."""

    def _failed(self, text: str, error: OSError) -> int:
        return len(text)


@contextlib.contextmanager
def guarded_errors() -> Iterator[None]:
    """Within it standard error takes everything, closed or full as it may be."""
    before = sys.stderr
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _fill_closed()
    with open(os.devnull, "w", encoding="utf-8") as null:
        sys.stderr = cast(TextIO, _Errors(before or null))  # None: it was closed when Python started
        try:
            yield
        finally:
            sys.stderr = before


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Within it a standard output that cannot be written raises, at the latest when it ends.

    Raises:
        OutputLostError: it is closed, or something could not be written. That is dropped: the interpreter does not try
            again when it ends.
    """
    before = cast("TextIO | None", sys.stdout)
    if before is None:
        raise OutputLostError("it is closed; where nobody is to read it, give >/dev/null")
    sys.stdout = cast(TextIO, _Output(before))
    try:
        yield
        sys.stdout.flush()
    except OutputLostError:
        _drop_unwritten(before)
        raise
    finally:
        sys.stdout = before


def _fill_closed() -> None:
    """Or a file of the tier's would be opened as number 1 or 2, and get what is written to the streams."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _drop_unwritten(stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # no descriptor: nothing of it is flushed at the end
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextlib.contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: what is open is closed, the cursor comes back, a soak reports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def printable(text: str) -> str:
    """The text with everything that a terminal would obey, or cannot show, as an escape: names may hold anything."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def page_console() -> Console:
    """For what a command prints on standard output."""
    console = Console(highlight=False)
    console.width = max(console.width, _PAGE_WIDTH)
    return console


def print_page(parts: Iterable[RenderableType], console: Console) -> None:
    """Print tables so that nothing of a cell is lost, and everything else as lines that stay whole."""
    for part in parts:
        if isinstance(part, Table):
            print_table(part, console)
        else:
            console.print(part, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print a table that is wider than the console rather than cut: rich would end cells with an ellipsis.

    Columns that are `no_wrap` (figures, names to copy) stay whole in their lines. The others are broken between words,
    and inside of words of more than 16 characters. Sets the columns' widths.
    """
    roomy = console.options.update(width=_ANY_WIDTH)
    needed = Measurement.get(console, roomy, table).maximum
    squeezed: list[tuple[int, int, Column]] = []
    for column in table.columns:
        cells = [*([column.header] if table.show_header else []), *column.cells]
        sizes = [Measurement.get(console, roomy, cell) for cell in cells]
        column.width = max((size.maximum for size in sizes), default=0)
        column.overflow = "fold"
        if not column.no_wrap:
            word = min(_WORD_WIDTH, max((size.minimum for size in sizes), default=0))
            squeezed.append((column.width, word, column))
            needed -= column.width
    room, left = console.width - needed, len(squeezed)
    for widest, word, column in sorted(squeezed, key=lambda each: each[:2]):  # narrow ones first: they leave room
        column.width = max(word, min(widest, room // left))
        needed += column.width
        room, left = room - column.width, left - 1
    before = console.width
    console.width = max(before, needed)
    try:
        console.print(table)
    finally:
        console.width = before
