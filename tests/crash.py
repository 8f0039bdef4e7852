"""SIGKILL of a process that writes to an nvme folder, again and again: `make crash`.

Each round a worker opens the folder, reports what it finds there, and writes new blocks on two threads, reporting by
pipe each write that begins and each that has ended. The parent counts, and kills it at a random moment. The last line
printed is the verdict; exit status 1 unless it passes.

A worker is forked by a starter that has imported the store, which would take longer than all else; every ten rounds
there is a new starter, with another PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvtier.errors import NoSpaceError, StoreError
from kvtier.slots import SlotPool
from kvtier.stores.nvme import NvmeStore
from kvtier.system import allocated_bytes
from kvtier.types import BlockShape, Compression, Slot, SlotLabel

ROOT = Path(__file__).parents[1]
SHAPE = BlockShape(num_layers=8, kv_heads=4, block_tokens=64, key_dim=64, value_dim=64, element_bytes=2)  # 512 KiB
BUDGET_BYTES = 48 << 20
NUM_THREADS = 2
ROUNDS_A_STARTER = 10
MIN_NEW_BLOCKS = 20  # a round
NAMESPACE = hashlib.sha256(b"crash").digest()

_NOISE = np.random.default_rng(1).integers(0, 256, SHAPE.block_bytes, dtype=np.uint8)
_NOISE[1::2] = 0x38 + _NOISE[1::2] % 4  # as the exponents of KV: half of the bytes can be compressed


def block(number: int) -> torch.Tensor:
    """Bytes that depend on the number alone, in every slice and page."""
    mixed = int.from_bytes(hashlib.sha256(b"bytes of %d" % number).digest()[:8], "little") & 0x00FF00FF00FF00FF
    mixed_noise = _NOISE.view(np.int64) ^ np.int64(mixed)  # not torch's: its threads do not survive a fork
    return torch.from_numpy(mixed_noise.view(np.uint8))


def label(number: int) -> SlotLabel:
    return SlotLabel(NAMESPACE, hashlib.sha256(b"block %d" % number).digest(), b"%d" % number)


# -- the worker --------------------------------------------------------------------------------------------------------


class Worker:
    """One process: opens, reports what it finds, writes until it is killed."""

    def __init__(self, folder: Path, compression: Compression) -> None:
        self.say("pid", os.getpid())
        started_s = time.monotonic()
        self.store = NvmeStore(
            SHAPE, BUDGET_BYTES, folder, persistent=True, reserve_free_frac=0.0, compression=compression
        )
        self.say("opened", time.monotonic() - started_s, self.store.num_quarantined)

    def say(self, word: str, *numbers: float) -> None:
        line = " ".join([word, *(f"{number:g}" if isinstance(number, float) else str(number) for number in numbers)])
        os.write(1, f"{line}\n".encode())  # at once and whole, from any thread: a line is shorter than PIPE_BUF

    def report_found(self) -> None:
        out = torch.empty(SHAPE.block_bytes, dtype=torch.uint8)
        for slot in self.store.found():
            held = self.store.label(Slot(slot))
            if held is None:
                continue
            number = int(held.content)
            if self.store.find(label(number)) != slot:
                continue
            try:
                self.store.read(Slot(slot), out)
            except StoreError:
                self.say("refused", number)
                continue
            self.say("found" if torch.equal(out, block(number)) else "wrong", number)
        self.store.check_integrity()
        self.say("checked")

    def write(self, first_number: int) -> None:
        pool = SlotPool(self.store.num_slots)
        pool.hold_back(self.store.held_back())
        lock, numbers, taken = threading.Lock(), iter(range(first_number, 1 << 60)), deque[Slot]()

        def work() -> None:
            while True:
                with lock:
                    number, slot = next(numbers), pool.take()
                    if slot is None:
                        pool.give_back(taken.popleft())
                        slot = pool.take()
                    assert slot is not None
                self.say("begun", slot, number)
                try:
                    self.store.write(slot, block(number), label(number))
                except NoSpaceError as error:  # compressed: more slots than the budget has bytes for
                    self.say("failed", slot, number)
                    with lock:
                        pool.lower_ceiling(error.available_slots)
                        (pool.retire if error.retires_slot else pool.give_back)(slot)
                    continue
                self.say("ended", slot, number)
                with lock:
                    taken.append(slot)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            running = [threads.submit(work) for _ in range(NUM_THREADS)]
            for failed in wait(running, return_when=FIRST_EXCEPTION).done:
                traceback.print_exception(failed.exception())
                os._exit(1)  # the others would write on and on


def serve() -> None:
    """Fork a worker for each line of stdin, one after the other: folder, compression, first number, what to do."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, compression, number, writes = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                worker = Worker(Path(folder), Compression(compression))
                worker.report_found()
                if writes == "writes":
                    worker.write(int(number))
                worker.store.close()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"died {os.waitstatus_to_exitcode(status)}\n".encode())  # behind all that it had said


# -- the parent --------------------------------------------------------------------------------------------------------


@dataclass
class Crash:
    """What all rounds came to."""

    num_kills: int = 0
    num_during_write: int = 0
    num_committed: int = 0
    fewest_new_blocks: int = 1 << 30
    num_looked_for: int = 0
    num_found: int = 0
    num_wrong: int = 0
    num_refused: int = 0
    num_quarantined: int = 0
    slowest_open_s: float = 0.0
    disk_bytes: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    """By slot, the block that must be found."""

    def problems(self) -> list[str]:
        """Why it does not pass."""
        half = len(self.disk_bytes) // 2
        first, second = max(self.disk_bytes[:half], default=0), max(self.disk_bytes[half:], default=0)
        checks = {
            f"only {self.num_during_write} of {self.num_kills} kills during a write": (
                2 * self.num_during_write < self.num_kills
            ),
            f"a round with only {self.fewest_new_blocks} new blocks": self.fewest_new_blocks < MIN_NEW_BLOCKS,
            f"{self.num_looked_for - self.num_found} of {self.num_looked_for} lost": (
                self.num_found < 0.99 * self.num_looked_for
            ),
            "nothing was looked for": self.num_looked_for == 0,
            f"{self.num_wrong} served wrong": self.num_wrong > 0,
            f"reopening took {self.slowest_open_s:.2f} s": self.slowest_open_s >= 2,
            f"the folder grew from {first} to {second} bytes": second > first,
            f"the folder took {second} of {BUDGET_BYTES} bytes": max(first, second) > BUDGET_BYTES,
        }
        return [problem for problem, is_so in checks.items() if is_so]

    def verdict(self) -> str:
        problems = self.problems()
        grew = "grew" if any("grew" in problem for problem in problems) else "did not grow"
        counts = (
            f"{self.num_kills} kills, {self.num_during_write} during a write; {self.num_committed} blocks committed, "
            f"at least {self.fewest_new_blocks} a round; {self.num_found} of {self.num_looked_for} found again, "
            f"{self.num_wrong} served wrong, {self.num_refused} refused, {self.num_quarantined} slots quarantined; "
            f"slowest reopening {self.slowest_open_s:.3f} s; the folder took {max(self.disk_bytes, default=0)} of "
            f"{BUDGET_BYTES} bytes and {grew}"
        )
        return f"{'FAIL (' + '; '.join(problems) + ')' if problems else 'pass'}: {counts}"


def run(
    folder: Path,
    num_rounds: int,
    seed: int,
    say: Callable[[str], None],
    compression: Compression = Compression.NONE,
) -> Crash:
    """`num_rounds` kills, and a last opening that is not killed."""
    chance, crash = random.Random(seed), Crash()
    for start in range(0, num_rounds, ROUNDS_A_STARTER):
        end = min(num_rounds, start + ROUNDS_A_STARTER)
        with _starter(chance) as starter:
            for _ in range(start, end):
                _round(starter, folder, compression, chance, crash)
                crash.disk_bytes.append(allocated_bytes(folder))
            if end == num_rounds:
                _round(starter, folder, compression, chance, crash, kill=False)
        say(f"{end} of {num_rounds}: {crash.num_found} of {crash.num_looked_for} found again")
    return crash


@contextmanager
def _starter(chance: random.Random) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONHASHSEED": str(chance.randrange(1 << 32)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.crash", "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as starter:
        yield starter


def _round(
    starter: subprocess.Popen[str],
    folder: Path,
    compression: Compression,
    chance: random.Random,
    crash: Crash,
    *,
    kill: bool = True,
) -> None:
    wanted = MIN_NEW_BLOCKS + chance.randrange(30)
    assert starter.stdin is not None and starter.stdout is not None
    what = "writes" if kill else "looks"
    starter.stdin.write(f"{folder}\t{compression.value}\t{crash.num_committed * 1000}\t{what}\n")
    starter.stdin.flush()
    begun: set[int] = set()
    found: set[int] = set()
    num_new, killed, pid, status = 0, False, 0, None
    while status is None:  # to its end: what was in the pipe when the worker died counts
        word, *rest = starter.stdout.readline().split() or ["gone"]
        if word == "pid":
            pid = int(rest[0])
        elif word == "died":
            status = int(rest[0])
        elif word == "gone":
            raise SystemExit("the starter of workers died")
        elif word == "opened":
            crash.slowest_open_s = max(crash.slowest_open_s, float(rest[0]))
            crash.num_quarantined += int(rest[1])
        elif word == "found":
            found.add(int(rest[0]))
        elif word == "wrong":
            crash.num_wrong += 1
        elif word == "refused":
            crash.num_refused += 1
        elif word == "checked":
            _compare(crash, found)
        elif word == "begun":
            slot, number = int(rest[0]), int(rest[1])
            crash.held.pop(slot, None)
            begun.add(number)
        elif word == "failed":
            begun.remove(int(rest[1]))
        elif word == "ended":
            slot, number = int(rest[0]), int(rest[1])
            crash.held[slot] = number
            begun.remove(number)
            num_new += 1
        if kill and not killed and num_new >= wanted:
            time.sleep(chance.random() * 0.004)
            os.kill(pid, signal.SIGKILL)  # it ends by this alone, so the pid is still its own
            killed = True
    if status != (-signal.SIGKILL if kill else 0):
        raise SystemExit(f"the worker ended with status {status}, its own doing")
    if kill:
        crash.num_kills += 1
        crash.num_during_write += bool(begun)
        crash.num_committed += num_new
        crash.fewest_new_blocks = min(crash.fewest_new_blocks, num_new)


def _compare(crash: Crash, found: set[int]) -> None:
    crash.num_looked_for += len(crash.held)
    lost = set(crash.held.values()) - found
    crash.num_found += len(crash.held) - len(lost)
    crash.held = {slot: number for slot, number in crash.held.items() if number not in lost}


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL writers of an nvme folder; see what is found again.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compression", type=Compression, choices=list(Compression), default=Compression.NONE)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as name:
        folder = Path(name) / "kv"
        crash = run(folder, options.rounds, options.seed, lambda line: print(line, flush=True), options.compression)
    print(crash.verdict())
    return 1 if crash.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
