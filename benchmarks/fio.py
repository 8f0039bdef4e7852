"""fio as the yardstick of a disk: one short run with O_DIRECT."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path

from kvtier.errors import ConfigError

ENGINES = ("io_uring", "psync")


def fio_version() -> str:
    """What `fio --version` says. Raises ConfigError where there is none."""
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed. Mend: apt-get install fio")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def fio_rate(
    path: Path, file_bytes: int, access: str, engine: str, request_bytes: int, depth: int, run_s: float
) -> float:
    """Bytes a second of random requests on a file that is there.

    Args:
        access: `randread` or `randwrite`.
        engine: `io_uring`, one thread with `depth` requests in flight, or `psync`, `depth` threads with one each.

    Raises:
        RuntimeError: fio failed; with its message.
    """
    command = [
        "fio", "--name=kvtier", f"--filename={path}", f"--size={file_bytes}", f"--rw={access}", f"--bs={request_bytes}",
        f"--ioengine={engine}", "--direct=1", "--time_based", f"--runtime={round(run_s * 1000)}ms", "--norandommap",
        "--randrepeat=0", "--thread", "--group_reporting", "--output-format=json",
        f"--iodepth={depth}" if engine == "io_uring" else f"--numjobs={depth}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * run_s, check=False)
    if done.returncode:
        raise RuntimeError(f"fio ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read" if access == "randread" else "write"]["bw_bytes"])


class ReadPeak:
    """What the disk gives at most, asked for again and again during a run: random reads of 1 MiB, 16 in flight."""

    REQUEST_BYTES, DEPTH = 1 << 20, 16

    def __init__(self, folder: Path, run_s: float, file_bytes: int = 256 << 20) -> None:
        """Write the file to read. Raises ConfigError: there is no fio."""
        self.version = fio_version()
        self._path, self._run_s, self._file_bytes = folder / "fio", run_s, file_bytes
        self.rates: list[float] = []
        """Of each time, the faster engine's, in bytes a second."""
        with self._path.open("wb", buffering=0) as file:
            for _ in range(file_bytes >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())

    def measure(self) -> None:
        """Ask once more."""
        rates = (
            fio_rate(self._path, self._file_bytes, "randread", engine, self.REQUEST_BYTES, self.DEPTH, self._run_s)
            for engine in ENGINES
        )
        self.rates.append(max(rates))

    @property
    def bytes_per_s(self) -> float:
        """The median of the times so far."""
        return statistics.median(self.rates)
