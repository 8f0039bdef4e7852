"""`kvtier doctor`: a proposal that loads, limits that hold, nothing left behind, and reasons in place of tracebacks."""

from __future__ import annotations

import dataclasses
import errno
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from kvtier import cli
from kvtier.config import load_config
from kvtier.doctor import NoWatch, Wishes, decoding, disk, examine, gpu
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.disk import DiskPlan, measure_disk
from kvtier.doctor.disk_rates import DEPTHS, MODES, NO_READS, REQUEST_BYTES, Access, DiskRate, DiskSpeed
from kvtier.doctor.gpu import PIECE_BYTES, copy_rates
from kvtier.doctor.show import Bars
from kvtier.stores.direct_io import DirectIo
from kvtier.system import filesystem_kind, is_memory_backed
from kvtier.types import IoMode

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
NUM_RATES = len(MODES) * len(Access) * len(REQUEST_BYTES) * len(DEPTHS)
# Room for every cell (32 requests of 1 MiB); each round ends with the requests under way.
TINY = DiskPlan(34 * MIB, 34 * MIB, read_s=0.001, write_s=0.001, fill_s=20.0, most_s=60.0, estimate_s=1.0)


# -- on this machine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["kvtier.doctor.examine"]
    monkeypatch.setattr(module, "QUICK", TINY)
    monkeypatch.setattr(module, "_HOST_QUICK_S", 0.01)
    monkeypatch.setattr(module, "_COPY_QUICK_S", 0.0)
    monkeypatch.setattr(decoding, "usable_cores", lambda: 1)  # two threads wait for each other where tests run beside


def scratch_files(folder: Path) -> list[os.stat_result]:
    """What this process has open below the folder, names or not."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(str(folder)):
                found.append(os.stat(link))
        except FileNotFoundError:
            continue
    return found


class Spy(NoWatch):
    """Looks at the folder after each step; may do something at one of them."""

    def __init__(self, folder: Path, at: int = -1, then: Callable[[], None] = lambda: None) -> None:
        self.folder, self.at, self.then = folder, at, then
        self.num_steps = self.peak_bytes = 0
        self.names: set[str] = set()

    def step(self) -> None:
        self.num_steps += 1
        self.names |= set(os.listdir(self.folder))
        files = {status.st_ino: status.st_blocks * 512 for status in scratch_files(self.folder)}
        self.peak_bytes = max(self.peak_bytes, sum(files.values()))
        if self.num_steps == self.at:
            self.then()


class Pwrite:
    """`os.pwrite`, counting what it wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real, self.num_bytes = os.pwrite, 0
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        written = self.real(fd, data, offset)
        self.num_bytes += written
        return written


def left_behind(folder: Path) -> list[Any]:
    gc.collect()  # descriptors close with their owners, which a traceback may have held
    return [*folder.iterdir(), *scratch_files(folder)]


def measured(speed: DiskSpeed) -> list[DiskRate]:
    return [row for row in speed.rates if not isinstance(row.bytes_per_s, NotMeasured)]


def reasons(speed: DiskSpeed) -> set[str]:
    return {row.bytes_per_s.why for row in speed.rates if isinstance(row.bytes_per_s, NotMeasured)}


def failing(code: int, after: int = 0) -> Callable[..., Any]:
    """A call that fails from the so-manieth on."""
    calls = iter(range(1 << 30))

    def fail(*_: object, **__: object) -> None:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))

    return fail


def test_what_is_written_and_taken_stays_within_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, spy = Pwrite(monkeypatch), Spy(tmp_path)
    speed = measure_disk(tmp_path, TINY, spy)
    assert len(speed.rates) == NUM_RATES
    assert len(measured(speed)) == NUM_RATES, reasons(speed)
    assert all(isinstance(row.bytes_per_s, float) and row.bytes_per_s > 0 for row in speed.rates)
    assert TINY.scratch_bytes < writes.num_bytes == speed.written_bytes <= TINY.most_written_bytes
    assert 32 * MIB < spy.peak_bytes <= TINY.scratch_bytes + MIB  # the file system's own index beside it
    assert spy.names == set()
    assert not left_behind(tmp_path)


def test_reads_are_cold(tmp_path: Path) -> None:
    if is_memory_backed(filesystem_kind(tmp_path)):
        pytest.skip("files here are always in memory")
    speed = measure_disk(tmp_path, TINY, NoWatch())
    fracs = [row.disk_frac for row in speed.rates if row.access is Access.READ and row.mode is IoMode.DIRECT]
    assert all(isinstance(frac, float) and frac >= 0.95 for frac in fracs), fracs


def test_the_processors_time_is_told_of_reads_alone(tmp_path: Path) -> None:
    for row in measured(measure_disk(tmp_path, TINY, NoWatch())):
        of_core = row.core_bytes_per_s
        assert isinstance(of_core, float) and of_core > 0 if row.access is Access.READ else of_core == NO_READS


def test_when_all_that_may_be_written_is_written_the_rest_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Pwrite(monkeypatch)
    plan = dataclasses.replace(TINY, cell_write_bytes=2 * MIB)
    speed = measure_disk(tmp_path, plan, NoWatch())
    assert plan.scratch_bytes < writes.num_bytes <= plan.most_written_bytes
    assert reasons(speed) == {f"the {plan.most_written_bytes // MIB} MiB that may be written are"}
    assert {row.access for row in speed.rates if isinstance(row.bytes_per_s, NotMeasured)} == {Access.WRITE}


def test_time_that_is_up_ends_it(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path, dataclasses.replace(TINY, most_s=0.0), NoWatch())
    assert not measured(speed)
    assert all("time was up" in why for why in reasons(speed))
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("room", [0, 3 * MIB])
def test_the_reserve_of_the_disk_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    writes = Pwrite(monkeypatch)
    total = 1000 * MIB
    monkeypatch.setattr("kvtier.system.disk_total_bytes", lambda _: total)
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda _: total // 20 + room)
    speed = measure_disk(tmp_path, TINY, NoWatch())
    assert writes.num_bytes == 0
    assert all("5 %" in why for why in reasons(speed)) and not measured(speed)


def test_little_room_is_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(tmp_path)
    monkeypatch.setattr(disk, "disk_room_bytes", lambda *_: 8 * MIB + 5)
    speed = measure_disk(tmp_path, TINY, spy)
    assert 8 * MIB <= spy.peak_bytes <= 9 * MIB
    assert {row.depth for row in measured(speed)} == {1, 4, 32}
    assert reasons(speed) == {"the scratch file of 8 MiB is too small for so many at a time"}


def test_without_unnamed_files_the_name_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "scratch_file", failing(errno.EOPNOTSUPP))
    spy = Spy(tmp_path)
    assert len(measured(measure_disk(tmp_path, TINY, spy))) == NUM_RATES
    assert spy.names == set() and spy.peak_bytes > 32 * MIB
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("at", [1, 2, 40, 70])
def test_ctrl_c_leaves_nothing(tmp_path: Path, at: int) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    spy = Spy(tmp_path, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_disk(tmp_path, TINY, spy)
    assert spy.peak_bytes > 32 * MIB
    assert not left_behind(tmp_path)


def test_a_real_ctrl_c_in_the_middle_of_the_command(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from kvtier.cli import main; "
    command = [sys.executable, "-c", code + "sys.exit(main())", "doctor", "--path", str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        fds = Path(f"/proc/{child.pid}/fd")
        until_s = time.monotonic() + 60
        while child.poll() is None and not any(link_to(fd).startswith(str(tmp_path)) for fd in fds.iterdir()):
            assert time.monotonic() < until_s, "no scratch file was ever opened"
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, out, err) == (cli.EXIT_INTERRUPTED, "", "kvtier: interrupted\n")
    assert not list(tmp_path.iterdir())


def link_to(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_an_error_in_one_rate_is_that_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DirectIo.read

    def read(self: DirectIo, file: Any, offset: int, out: Any) -> None:
        if out.nbytes == 64 << 10:
            raise OSError(errno.EIO, "Input/output error")
        real(self, file, offset, out)

    monkeypatch.setattr(DirectIo, "read", read)
    speed = measure_disk(tmp_path, TINY, NoWatch())
    assert reasons(speed) == {"Input/output error (EIO)"}
    failed = [row for row in speed.rates if isinstance(row.bytes_per_s, NotMeasured)]
    assert {(row.mode, row.access, row.request_bytes) for row in failed} == {(IoMode.DIRECT, Access.READ, 64 << 10)}
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("name", "code"), [("posix_fallocate", errno.ENOSPC), ("fdatasync", errno.EIO), ("open", errno.EACCES)]
)
def test_an_error_with_the_file_itself_is_every_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(code))
        speed = measure_disk(tmp_path, TINY, NoWatch())
    assert not measured(speed)
    assert all(errno.errorcode[code] in why and str(tmp_path) in why for why in reasons(speed))
    assert not left_behind(tmp_path)


def test_o_direct_refused_leaves_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectIo, "prepare", failing(errno.EINVAL))
    speed = measure_disk(tmp_path, TINY, NoWatch())
    assert {row.mode for row in measured(speed)} == {IoMode.MMAP}
    assert isinstance(speed.takes_direct, NotMeasured)
    assert "refuses O_DIRECT" in speed.takes_direct.why and "EINVAL" in speed.takes_direct.why
    assert len(measured(speed)) == NUM_RATES // 2


def test_a_file_system_that_cannot_preallocate_is_not_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "can_preallocate", lambda _: False)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO))  # glibc would write zeros
    speed = measure_disk(tmp_path, TINY, NoWatch())
    assert speed.preallocates is False and len(measured(speed)) == NUM_RATES


UNPRIVILEGED = """
    import json, os, resource, sys
    from pathlib import Path
    from kvtier.doctor import NoWatch
    from kvtier.doctor.answer import NotMeasured
    from kvtier.doctor.disk import QUICK, measure_disk
    from kvtier.doctor.limits import read_limits

    os.chmod(sys.argv[1], 0o500)
    if os.geteuid() == 0:
        os.seteuid(65534)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    speed, limits = measure_disk(Path(sys.argv[1]), QUICK, NoWatch()), read_limits()
    assert isinstance(limits.locked_probe_bytes, NotMeasured), limits
    assert limits.memlock_bytes == 65536
    rates = [row.bytes_per_s for row in speed.rates]
    assert all(isinstance(rate, NotMeasured) for rate in rates), rates
    print(json.dumps([rates[0].why, limits.locked_probe_bytes.why]))
"""


def test_a_folder_and_memory_that_are_not_ours_to_have(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(UNPRIVILEGED), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    folder, locked = json.loads(done.stdout)
    assert "EACCES" in folder
    assert "ENOMEM" in locked or "EPERM" in locked
    os.chmod(tmp_path, 0o700)
    assert not left_behind(tmp_path)


def test_a_small_tmpfs(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=20m,mode=700 kvtier "$0"'
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount, str(tmp_path)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces here; the proposal's test has a made-up tmpfs")
    prefix = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path)]
    command = [*prefix, sys.executable, "-m", "kvtier.cli", "doctor", "--quick", "--json", "--path", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    values = {row["name"]: row["value"] for row in document["rows"]}
    assert values["file system"] == "tmpfs"
    assert 0 < values["scratch file"] <= 19 * MIB
    assert "nvme" not in document["proposal"]["config"]["tiers"]
    assert any("tmpfs" in warning and "memory" in warning for warning in document["warnings"])


# -- the command -------------------------------------------------------------------------------------------------------

runner = CliRunner()


def run_doctor(*arguments: str) -> Any:
    return runner.invoke(cli.app, ["doctor", "--quick", *arguments], catch_exceptions=False)


def test_json_is_one_document_with_the_documented_fields(tmp_path: Path, quick: None) -> None:
    result = run_doctor("--json", "--path", str(tmp_path))
    assert result.exit_code == 0 and result.stderr == ""
    document = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = page.split("## The JSON document")[1]
    documented = set(re.findall(r"^\| `([\w.\[\]]+)` \|", table, re.MULTILINE))
    fields = {key for key in document if key not in ("rows", "disk", "proposal")}
    for name in ("rows", "disk"):
        fields |= {f"{name}[].{key}" for row in document[name] for key in row}
    fields |= {f"proposal.{key}" for key in document["proposal"]}
    assert fields == documented
    assert len(document["disk"]) == NUM_RATES
    units = set(re.findall(r"`(\w+)`", next(line for line in page.splitlines() if "| `rows[].unit`" in line)))
    assert {row["unit"] for row in document["rows"]} <= units
    for row in [*document["rows"], *document["disk"]]:
        value = row["value"] if "value" in row else row["bytes_per_s"]
        assert (value is None) == bool(row["not_measured"]), row
    assert load_config(document["proposal"]["config"]) == load_config(yaml.safe_load(document["proposal"]["yaml"]))
    assert not left_behind(tmp_path)


def test_what_people_see_has_a_config_that_loads_and_passes_itself(tmp_path: Path, quick: None) -> None:
    result = run_doctor("--path", str(tmp_path))
    assert result.exit_code == 0 and result.stderr == ""  # not a terminal: no progress
    before, text = result.stdout.split("Proposed config:\n")
    assert before.count("\n") <= 3 and "--verbose" in before, "the proposal is what one sees first"
    proposal = text[: text.index("io_threads")] + text[text.index("io_threads") :].split("\n")[0]
    (tmp_path / "proposed.yaml").write_text(proposal)
    config = load_config(tmp_path / "proposed.yaml")
    assert config.tiers.nvme is not None and config.tiers.nvme.path == tmp_path
    again = run_doctor("--config", str(tmp_path / "proposed.yaml"))
    assert again.exit_code == 0 and "nothing speaks against it" in again.stdout


def test_a_config_that_cannot_work_says_why_with_status_1(tmp_path: Path, quick: None) -> None:
    nvme = {"budget": "9999TiB", "path": str(tmp_path / "kv")}
    tiers = {"gpu": {"budget": "400GiB"}, "cpu": {"budget": "800GiB"}, "nvme": nvme}
    values = {"tiers": tiers, "eviction": {"cpu": "no_such"}}
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(values))
    result = run_doctor("--json", "--config", str(tmp_path / "large.yaml"))
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_status"] == 1
    text = "\n".join(document["problems"])
    assert len(document["problems"]) == 2
    assert "eviction.cpu" in text and "tiers.cpu.budget 800GiB + tiers.gpu.budget 400GiB" in text
    assert any("tiers.nvme.budget is 9999TiB" in each and "stays free" in each for each in document["warnings"])
    assert document["proposal"]["config"]["tiers"]["nvme"]["path"] == str(tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_a_path_that_cannot_be_written_is_status_1_not_bad_input(quick: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    values = {"tiers": {"gpu": {"budget": "1MiB"}, "nvme": {"budget": "1MiB", "path": str(tmp_path / "file" / "kv")}}}
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(values))
    result = run_doctor("--config", str(tmp_path / "here.yaml"))
    assert result.exit_code == 1
    assert "is not a folder" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "lapptop"], "no preset is named"),
        (["--config", "/no/such.yaml"], "cannot be read"),
        (["--path", "/no/such/folder"], "is not a folder"),
        (["--path", __file__], "is not a folder"),
        (["--pfad", "x"], "--pfad"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kvtier.doctor.examine"], "measure_disk", None)  # not reached
    assert cli.main(["doctor", *arguments]) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_a_terminal_gets_a_bar_with_an_estimate_for_each_phase(tmp_path: Path, quick: None) -> None:
    terminal, plain = io.StringIO(), io.StringIO()
    with Bars(Console(file=terminal, force_terminal=True, width=100)) as bars:
        report = examine(Wishes(path=tmp_path, is_quick=True), bars)
    for phase in ("limits", "disk", "processor"):
        assert re.search(rf"{phase} \(about \d+ s\)", terminal.getvalue())
    with Bars(Console(file=plain)) as bars:
        bars.phase("disk", 5.0, 2)
        bars.step()
    assert plain.getvalue() == ""
    assert report.elapsed_s > 0


# -- copies, which need a device: here between two pieces of host memory -----------------------------------------------


def test_copies_go_both_ways_in_pieces() -> None:
    host, there = (torch.zeros(2 * max(PIECE_BYTES), dtype=torch.uint8) for _ in range(2))
    host[-1] = 7
    calls: list[int] = []
    rates = copy_rates(host, there, True, 0.0, lambda: calls.append(1), NoWatch())
    wanted = {(to, size) for to in (True, False) for size in PIECE_BYTES}
    assert {(rate.to_device, rate.piece_bytes) for rate in rates} == wanted
    assert all(isinstance(rate.bytes_per_s, float) and rate.bytes_per_s > 0 for rate in rates)
    assert there[-1] == 7 and len(calls) >= 2 * 3 * len(rates)


def test_without_cuda_and_with_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = gpu.measure_gpus(0.0, NoWatch())
    assert isinstance(found, NotMeasured) and "no CUDA device" in found.why

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: initialization error\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert gpu.measure_gpus(0.0, NoWatch()) == NotMeasured("CUDA error: initialization error")
