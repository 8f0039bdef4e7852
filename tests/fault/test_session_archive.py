"""Exported sessions when disks, processes and people get in the way: whole or not at all, and what was there stays."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ArchiveError, StoreError
from kvtier.new_file import NewFile
from kvtier.session_archive import ArchiveReader, AsyncArchiveReader, write_archive, write_archive_async
from kvtier.system import open_fds
from kvtier.types import Compression
from tests.archives import READ, WRITE, block, blocks, header, read, write_in_loop
from tests.fault.sweep import Calls, Fault, failing

ROOT = Path(__file__).parents[2]
CALLS: list[tuple[Any, str]] = [
    (os, "open"), (os, "write"), (os, "fsync"), (os, "stat"), (os, "fstat"), (os, "listdir"), (os, "unlink"),
    (os, "link"), (os, "rename"), (os, "close"), (fcntl, "flock"),
]  # fmt: skip
OLD, NEW = header(name="old"), header(name="new")
writers = pytest.mark.parametrize("write", WRITE.values(), ids=WRITE)


def old_file(folder: Path) -> Path:
    path = folder / "alice.kvsession"
    write_archive(path, OLD, blocks(OLD))
    return path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# -- each call to the system -------------------------------------------------------------------------------------------


def interrupt_before(real: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    raise KeyboardInterrupt


def interrupt_after(real: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    try:
        real(*arguments, **keywords)
    finally:
        raise KeyboardInterrupt


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "fault", [failing(errno.EIO), failing(errno.ENOSPC), failing(errno.EACCES), interrupt_before, interrupt_after]
)
def test_whatever_call_fails_the_file_is_whole_or_as_before(tmp_path: Path, overwrite: bool, fault: Fault) -> None:
    is_interrupt = fault in (interrupt_before, interrupt_after)
    before = OLD if overwrite else None
    index, met, num_failed = 0, set(), 0
    while True:
        folder = tmp_path / str(index)
        folder.mkdir()
        path = old_file(folder) if overwrite else folder / "alice.kvsession"
        fds = open_fds()
        with Calls(fault, index, CALLS) as calls:
            error: BaseException | None = None
            try:
                write_archive(path, NEW, blocks(NEW), overwrite=overwrite)
            except (ArchiveError, KeyboardInterrupt) as caught:
                error = caught
        if calls.met is None:
            break
        met.add(calls.met)
        if not is_interrupt:
            assert open_fds() == fds
        now = read(path)[0] if path.exists() else None
        if error is None:  # of what is not needed: the file must be there
            assert now == NEW and calls.met in ("flock", "fstat", "unlink", "close", "link")
        elif not is_interrupt and "is written" not in str(error):
            assert now == before and str(path) in str(error) and "Mend: " in str(error)
            num_failed += 1
        else:  # an interrupt, or the folder's flush: whole, the one or the other
            assert now in (before, NEW)
        others = [name for name in names(folder) if name != path.name]
        assert not others or calls.met in ("unlink", "close")  # it could not be cleaned up
        write_archive(path, NEW, blocks(NEW), overwrite=True)
        assert read(path) == (NEW, blocks(NEW))
        assert names(folder) == [path.name]
        index += 1
    assert met == {"open", "write", "fsync", "stat", "fstat", "listdir", "unlink", "close", "flock"} | (
        {"rename"} if overwrite else {"link"}
    )
    assert is_interrupt or num_failed >= 12


def test_writes_that_are_done_in_part_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr("os.write", lambda fd, data: real(fd, data[:7]))
    write_archive(tmp_path / "a", NEW, blocks(NEW))
    monkeypatch.undo()
    assert read(tmp_path / "a") == (NEW, blocks(NEW))


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_written_by_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.link", no_links)
    path = tmp_path / "a"
    write_archive(path, NEW, blocks(NEW))
    with pytest.raises(ArchiveError, match="is there already"):
        write_archive(path, OLD, blocks(OLD))
    assert read(path)[0] == NEW and names(tmp_path) == ["a"]


@writers
@pytest.mark.parametrize("has_old", [False, True])
def test_a_file_size_limit_leaves_what_was_there(tmp_path: Path, write: Any, has_old: bool) -> None:
    """A real one: the kernel writes in part first, then fails."""
    path = old_file(tmp_path) if has_old else tmp_path / "alice.kvsession"
    large = header(block_bytes=1 << 16)
    whole_bytes = write_archive(tmp_path / "whole", large, blocks(large))
    (tmp_path / "whole").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fds = open_fds()
    try:
        for limit_bytes in (0, 100, 1000, 3 << 15, whole_bytes - 10):  # at last within the last piece of all
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
            with pytest.raises(ArchiveError, match="make room there") as caught:
                write(path, large, blocks(large), overwrite=True)
            assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ([path.name] if has_old else [])
    assert not has_old or read(path) == (OLD, blocks(OLD))
    assert has_old is path.exists() and open_fds() <= fds + 3  # asyncio's own


@writers
@pytest.mark.parametrize("error", [StoreError(5, "a block cannot be read"), KeyboardInterrupt(), RuntimeError("other")])
@pytest.mark.parametrize("at", [0, 2])
def test_what_the_blocks_raise_goes_through_and_nothing_is_left(
    tmp_path: Path, write: Any, error: BaseException, at: int
) -> None:
    path = old_file(tmp_path)

    def failing_blocks() -> Iterator[bytes]:
        yield from blocks(NEW)[:at]
        raise error

    with pytest.raises(type(error)) as caught:
        write(path, NEW, failing_blocks(), overwrite=True)
    assert caught.value is error or isinstance(error, KeyboardInterrupt)
    assert names(tmp_path) == [path.name] and read(path)[0] == OLD


# -- the place ---------------------------------------------------------------------------------------------------------


@writers
def test_a_place_that_is_taken_is_refused_by_name(tmp_path: Path, write: Any) -> None:
    path = old_file(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    before = names(tmp_path)
    cases: list[tuple[Path, bool, str]] = [
        (path, False, "is there already.*overwrite=True"),
        *((tmp_path / "folder", overwrite, "is a folder. Mend: ") for overwrite in (False, True)),
        *((tmp_path / "link", overwrite, "is a symbolic link.*Mend: ") for overwrite in (False, True)),
        *((tmp_path / "dangling", overwrite, "is a symbolic link.*Mend: ") for overwrite in (False, True)),
        *((tmp_path / "fifo", overwrite, "no regular file. Mend: ") for overwrite in (False, True)),
        (Path("/dev/null"), True, "no regular file. Mend: "),
        (Path("/"), True, "is a folder. Mend: "),
        (tmp_path / "folder" / "..", True, "is a folder. Mend: "),
        (tmp_path / "nowhere" / "a", False, "Mend: make the folder .*nowhere, or"),
        (path / "a", True, "Mend: make the folder .*alice.kvsession, or"),
        (tmp_path / ("x" * 256), False, "Mend: give it a shorter name"),
        (tmp_path / "a\0b", False, "zero byte"),
    ]
    for place, overwrite, message in cases:
        with pytest.raises(ArchiveError, match=message) as caught:
            write(place, NEW, blocks(NEW), overwrite=overwrite)
        assert str(place) in str(caught.value) or "\0" in str(place)
    assert names(tmp_path) == before and read(path)[0] == OLD
    assert stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode) and (tmp_path / "link").is_symlink()


def test_the_longest_name_a_relative_path_and_one_that_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("x" * 255), Path("-{}%s"), Path("🐇")):
        write_archive(path, OLD, blocks(OLD))
        path.chmod(0o644)
        write_archive(path, NEW, blocks(NEW), overwrite=True)
        assert read(tmp_path / path)[0] == NEW and path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def with_another() -> Iterator[bytes]:
        yield from blocks(NEW)
        write_archive(path, OLD, blocks(OLD))

    with pytest.raises(ArchiveError, match="is there already"):
        write_archive(path, NEW, with_another())
    assert read(path)[0] == OLD and names(tmp_path) == ["a"]


@writers
def test_a_link_or_folder_that_came_meanwhile_is_not_replaced(tmp_path: Path, write: Any) -> None:
    (tmp_path / "precious").write_bytes(b"precious")

    def with_link(path: Path) -> Iterator[bytes]:
        yield from blocks(NEW)
        path.symlink_to(tmp_path / "precious")

    def with_folder(path: Path) -> Iterator[bytes]:
        yield from blocks(NEW)
        path.mkdir()

    for overwrite in (False, True):
        path = tmp_path / f"link-{overwrite}"
        with pytest.raises(ArchiveError, match=r"is a symbolic link.*\. Mend: "):
            write(path, NEW, with_link(path), overwrite=overwrite)
        assert path.is_symlink() and path.read_bytes() == b"precious"
        path = tmp_path / f"folder-{overwrite}"
        with pytest.raises(ArchiveError, match=r"is a folder\. Mend: "):
            write(path, NEW, with_folder(path), overwrite=overwrite)
        assert path.is_dir()
    assert names(tmp_path) == ["folder-False", "folder-True", "link-False", "link-True", "precious"]


def test_of_many_writers_one_makes_the_file(tmp_path: Path) -> None:
    path, lock, won = tmp_path / "a", threading.Lock(), []
    headers = [header(name=f"writer {number}") for number in range(8)]
    start = threading.Barrier(len(headers))

    def writing(of: Any) -> None:
        start.wait()
        try:
            write_archive(path, of, blocks(of))
        except ArchiveError as error:
            assert "is there already" in str(error)
        else:
            with lock:
                won.append(of)

    threads = [threading.Thread(target=writing, args=(of,)) for of in headers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [read(path)[0]] and names(tmp_path) == ["a"]


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_old", [False, True])
def test_a_killed_writer_leaves_the_old_file_and_no_trouble_for_the_next(tmp_path: Path, has_old: bool) -> None:
    path = old_file(tmp_path) if has_old else tmp_path / "alice.kvsession"
    code = f"""
        import sys
        from pathlib import Path
        from kvtier.session_archive import write_archive
        from tests.archives import blocks, header
        def slowly():
            for number, data in enumerate(blocks(header())):
                print(number, flush=True)
                if number == 2:
                    sys.stdin.read()  # killed here
                yield data
        write_archive(Path({str(path)!r}), header(), slowly(), overwrite=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        (other,) = set(names(tmp_path)) - {path.name}
        assert (tmp_path / other).stat().st_mode & 0o777 == 0o600
        # While it lives nobody takes its file for a leftover.
        write_archive(path, OLD, blocks(OLD), overwrite=True)
        assert other in names(tmp_path)
        if not has_old:
            path.unlink()
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert path.exists() is has_old
    assert not has_old or read(path) == (OLD, blocks(OLD))
    assert other in names(tmp_path)
    write_archive(tmp_path / "another", NEW, blocks(NEW))  # another path's leftovers are not its own to remove
    assert other in names(tmp_path)
    write_archive(path, NEW, blocks(NEW), overwrite=has_old)
    assert read(path) == (NEW, blocks(NEW)) and names(tmp_path) == sorted([path.name, "another"])


def test_what_is_not_a_leftover_of_ours_stays_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with NewFile(path, overwrite=False) as file:
        (name,) = names(tmp_path)
        (tmp_path / f"{name}-copy").write_bytes(b"as a killed writer leaves it")
        prefix = name[: name.rindex("-") + 1]
        (tmp_path / f"{prefix}link").symlink_to(tmp_path / "precious")
        (tmp_path / f"{prefix}folder").mkdir()
        os.mkfifo(tmp_path / f"{prefix}fifo")
        (tmp_path / "precious").write_bytes(b"")
        before = names(tmp_path)
        monkeypatch.setattr("os.geteuid", lambda: 12345)  # somebody else's folder
        write_archive(path, NEW, blocks(NEW))
        assert names(tmp_path) == sorted([*before, "a"])
        monkeypatch.undo()
        write_archive(path, NEW, blocks(NEW), overwrite=True)
        assert set(before) - set(names(tmp_path)) == {f"{name}-copy"}
        file.write(b"still its own")


def test_bytes_are_on_the_medium_before_the_file_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noted(*arguments: Any, **keywords: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            order.append(f"{name} folder" if is_folder else name)
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, name, noted)

    for name in ("write", "fsync", "link", "rename", "unlink"):
        note(name)
    for overwrite, put in ((False, "link"), (True, "rename")):
        for write in WRITE.values():
            order.clear()
            write(tmp_path / f"{write.__name__}", NEW, blocks(NEW), overwrite=overwrite)
            assert [each for each in order if each != "write"] == ["fsync", put, "fsync folder", "unlink"]
            assert "write" not in order[order.index("fsync") :]


def test_a_writer_whose_new_file_is_taken_for_a_leftover_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock: by one that holds it still, and by one that has removed it."""
    real, taken = fcntl.flock, []

    def racing(fd: int, operation: int) -> None:
        if len(taken) < 2:
            taken.append(fd)
            (name,) = names(tmp_path)
            (tmp_path / name).unlink()
            if len(taken) == 1:
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        real(fd, operation)

    monkeypatch.setattr("fcntl.flock", racing)
    with NewFile(tmp_path / "a", overwrite=False) as file:
        file.write(b"whole")
        file.publish()
    assert len(taken) == 2
    assert (tmp_path / "a").read_bytes() == b"whole" and names(tmp_path) == ["a"]


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reading", READ)
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, reading: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        fds = open_fds()
        for path in (tmp_path / "fifo", tmp_path / "s", tmp_path, Path("/dev/zero"), Path("/proc/self/mem")):
            with pytest.raises(ArchiveError) as caught:
                READ[reading](path)
            assert str(path) in str(caught.value) and "Mend: " in str(caught.value)
            if path not in (tmp_path / "s", Path("/proc/self/mem")):  # a socket cannot be opened; that is a regular one
                assert "is no regular file" in str(caught.value)
    for path, code in ((tmp_path / "none", errno.ENOENT), (tmp_path / "none" / "a", errno.ENOENT)):
        with pytest.raises(ArchiveError, match=r"cannot be read: No such file.*\. Mend: ") as caught:
            READ[reading](path)
        assert caught.value.errno == code
    with pytest.raises(ArchiveError, match="zero byte"):
        READ[reading](Path("a\0b"))
    assert open_fds() <= fds + 3  # asyncio's own


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_each_call_that_fails_while_reading_is_an_archive_error(tmp_path: Path, code: int) -> None:
    path = old_file(tmp_path)
    fds, index, met = open_fds(), 0, set()
    while True:
        with Calls(failing(code), index, [(os, "open"), (os, "fstat"), (os, "preadv"), (os, "close")]) as calls:
            got: list[bytes] = []
            error: ArchiveError | None = None
            try:
                with ArchiveReader(path) as reader:
                    got.extend(bytes(data) for data in reader.blocks())
            except ArchiveError as caught:
                error = caught
        if calls.met is None:
            break
        met.add(calls.met)
        assert got == blocks(OLD)[: len(got)]
        assert (error is None and got == blocks(OLD)) if calls.met == "close" else (error and error.errno == code)
        assert open_fds() == fds
        index += 1
    assert met == {"open", "fstat", "preadv", "close"}


@pytest.mark.parametrize("reading", READ)
def test_a_file_that_is_cut_while_it_is_read_gives_out_no_more(tmp_path: Path, reading: str) -> None:
    path = old_file(tmp_path)
    got: list[bytes] = []
    size = path.stat().st_size

    def cut(data: memoryview) -> None:
        got.append(bytes(data))
        os.truncate(path, size - 48 - 10)

    async def reads() -> None:
        async with AsyncArchiveReader(path) as reader:
            async for data in reader.blocks():
                cut(data)

    with pytest.raises(ArchiveError, match=r"was cut off while it was read\. Mend: "):
        if reading == "sync":
            with ArchiveReader(path) as reader:
                for data in reader.blocks():
                    cut(data)
        else:
            asyncio.run(reads())
    assert got == blocks(OLD)[:2]


@pytest.mark.parametrize("reading", READ)
def test_a_damaged_block_is_not_given_out(tmp_path: Path, reading: str) -> None:
    path = old_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-50] ^= 1  # the last byte of the last block
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match="block 2 of 3 is not what was written"):
        READ[reading](path)


# -- cancelled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_a_cancelled_writer_leaves_nothing(tmp_path: Path, num_blocks: int) -> None:
    path = old_file(tmp_path)

    async def endless() -> AsyncIterator[bytes]:
        for data in blocks(NEW)[:num_blocks]:
            yield data
        reached.set()
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(write_archive_async(path, NEW, endless(), overwrite=True))
        await reached.wait()
        assert len(names(tmp_path)) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    reached = asyncio.Event()
    asyncio.run(cancelled())
    assert names(tmp_path) == [path.name] and read(path)[0] == OLD


@pytest.mark.parametrize("call", ["open", "flock", "fsync", "link", "unlink"])
def test_one_cancelled_in_the_middle_of_a_call_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The thread has the file until then. What came to its place by then is whole."""
    path, inside, go_on, ended = tmp_path / "a", threading.Event(), threading.Event(), threading.Event()
    module = fcntl if call == "flock" else os
    real = getattr(module, call)

    def held_up(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not inside.is_set():
            inside.set()
            assert go_on.wait(20)
            done = real(*arguments, **keywords)
            ended.set()
            return done
        return real(*arguments, **keywords)

    async def cancelled() -> None:
        task = asyncio.create_task(write_archive_async(path, NEW, blocks(NEW)))
        await asyncio.to_thread(inside.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    monkeypatch.setattr(module, call, held_up)
    asyncio.run(cancelled())
    monkeypatch.undo()
    assert names(tmp_path) == (["a"] if call in ("fsync", "link", "unlink") else [])
    assert not path.exists() or read(path) == (NEW, blocks(NEW))


def test_a_cancelled_reader_lets_go_of_the_file(tmp_path: Path) -> None:
    path = old_file(tmp_path)

    async def reading(started: asyncio.Event) -> None:
        async with AsyncArchiveReader(path) as reader:
            async for _ in reader.blocks():
                started.set()
                await asyncio.Event().wait()

    async def cancelled() -> None:
        started = asyncio.Event()
        fds = open_fds()
        task = asyncio.create_task(reading(started))
        await started.wait()
        assert open_fds() > fds
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert open_fds() == fds

    asyncio.run(cancelled())


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("way", WRITE)
def test_an_archive_of_200_mb_takes_the_memory_of_a_few_blocks(
    tmp_path: Path, way: str, compression: Compression
) -> None:
    block_bytes, num_blocks = 4 << 20, 50
    of = header(block_bytes=block_bytes, token_ids=array("i", range(4 * num_blocks)))
    pattern = block(1, block_bytes)
    rest = memoryview(pattern)[1:]
    path = tmp_path / "large"

    def each() -> Iterator[bytearray]:
        for number in range(num_blocks):
            data = bytearray(pattern)
            data[0] = number
            yield data
            del data

    def read_all() -> list[int]:
        with ArchiveReader(path) as reader:
            return [data[0] for data in reader.blocks() if data[1:] == rest]

    async def read_all_async() -> list[int]:
        async with AsyncArchiveReader(path) as reader:
            return [data[0] async for data in reader.blocks() if data[1:] == rest]

    tracemalloc.start()
    try:
        if way == "sync":
            write_archive(path, of, each(), compression=compression)
        else:
            write_in_loop(path, of, each(), compression=compression)
        wrote = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found = read_all() if way == "sync" else asyncio.run(read_all_async())
        took = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == list(range(num_blocks))
    size = path.stat().st_size
    path.unlink()
    assert size > (200 << 20 if compression is Compression.NONE else 100 << 20)
    to_write, to_read = (2, 3) if compression is Compression.NONE else (4, 5)
    more = 3 if way == "async" else 0  # threads let go of what they were given a little after they are done
    assert wrote < (to_write + more) * block_bytes and took < (to_read + more) * block_bytes, (wrote, took)
