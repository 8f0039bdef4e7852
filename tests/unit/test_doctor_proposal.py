"""What the doctor proposes and what it warns of, on machines made up."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvtier.config import load_config, read_config
from kvtier.doctor import verdict
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.disk_rates import DEPTHS, MODES, REQUEST_BYTES, Access, DiskRate, DiskSpeed
from kvtier.doctor.facts import Facts, Place
from kvtier.doctor.gpu import PIECE_BYTES, CopyRate, Gpu
from kvtier.doctor.host import HostSpeed
from kvtier.doctor.limits import UNLIMITED, Limits
from kvtier.doctor.proposal import Proposal, propose
from kvtier.doctor.report import Report
from kvtier.doctor.show import print_report
from kvtier.rate import Rate
from kvtier.types import IoMode, Tier

MIB, GIB = 1 << 20, 1 << 30
NONE = NotMeasured("for a reason")


def facts(**changes: Any) -> Facts:
    """A good machine: a disk that reads 3 GB/s directly and 1 GB/s through the page cache, 64 GiB, no CUDA."""
    speed = changes.pop("speed", lambda mode, size, depth: 3e9 if mode is IoMode.DIRECT else 1e9)
    cells = ((m, a, s, d) for m in MODES for a in Access for s in REQUEST_BYTES for d in DEPTHS)
    rates = tuple(DiskRate(m, a, s, d, speed(m, s, d), 1.0) for m, a, s, d in cells)
    place = Place(Path("/data"), Path("/data"), changes.pop("kind", "ext4"), 400 * GIB, 1000 * GIB, 350 * GIB, 0)
    place = dataclasses.replace(place, **changes.pop("place", {}))
    limits = Limits(64 * GIB, 64 * GIB, 60 * GIB, NONE, NONE, 8 * MIB, NONE, 1024)
    limits = dataclasses.replace(limits, **changes.pop("limits", {}))
    return Facts(
        place=place,
        limits=limits,
        disk=DiskSpeed(rates, changes.pop("takes_direct", True), changes.pop("preallocates", True), 0, 0),
        host=HostSpeed(8, 9e9, 20e9, 9e9, 1e9, 1e9, 0.8),
        gpus=changes.pop("gpus", NotMeasured("no CUDA device")),
        **changes,
    )


def cuda(free_bytes: int = 20 * GIB) -> tuple[Gpu, ...]:
    copies = tuple(CopyRate(p, t, s, 2e10) for p in (True, False) for t in (True, False) for s in PIECE_BYTES)
    return (Gpu(0, "a GPU", free_bytes, 24 * GIB, copies),)


NEEDS_DEPTH: Callable[[IoMode, int, int], float] = lambda mode, size, depth: 1e8 * depth  # noqa: E731
MACHINES: dict[str, dict[str, Any]] = {
    "good": {},
    "cuda": {"gpus": cuda()},
    "small": {"limits": {"may_use_bytes": 512 * MIB, "available_bytes": 100 * MIB}},
    "tiny": {"limits": {"may_use_bytes": 64 * MIB, "available_bytes": 40 * MIB}},
    "tmpfs": {"kind": "tmpfs"},
    "nfs": {"kind": "nfs4"},
    "no disk": {"speed": lambda *_: NONE, "takes_direct": NONE, "preallocates": NONE},
    "full disk": {"place": {"room_bytes": 10 * MIB}},
    "unknown disk": {"place": {"room_bytes": NONE, "free_bytes": NONE, "total_bytes": NONE}},
    "no direct": {"speed": lambda mode, *_: 1e9 if mode is IoMode.MMAP else NONE, "takes_direct": NONE},
    "only direct": {"speed": lambda mode, *_: 1e9 if mode is IoMode.DIRECT else NONE},
    "mmap": {"speed": lambda mode, *_: 2e9 if mode is IoMode.MMAP else 1e9},
    "needs depth": {"speed": NEEDS_DEPTH},
    "needs length": {"speed": lambda mode, size, depth: size * 1e3},
    "slow": {"speed": lambda *_: 1e6},
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("path", [None, Path("/tmp")], ids=["no path", "a path"])
def test_every_proposal_loads_gives_reasons_and_fits(name: str, path: Path | None) -> None:
    machine = facts(**MACHINES[name])
    proposal = propose(machine, path)
    assert load_config(yaml.safe_load(proposal.yaml)) == proposal.config
    for line in proposal.yaml.splitlines():
        assert re.search(r"# \S", line) or line.endswith(":"), line
    assert verdict.problems(proposal.config, machine) == []
    printed = io.StringIO()
    report = Report(machine, proposal, "", [], verdict.warnings(machine, proposal.config), False, 1.0)
    for verbose in (False, True):
        print_report(report, Console(file=printed, width=200), verbose)
        assert printed.getvalue().count(proposal.yaml) == 1 + verbose
        assert ("This machine" in printed.getvalue()) == verbose
    json.dumps(report.document(), allow_nan=False)


def nvme_of(proposal: Proposal) -> Any:
    return proposal.values["tiers"].get("nvme")


def test_budgets_come_from_what_is_free() -> None:
    plain, with_cuda = propose(facts(), None).config.tiers, propose(facts(gpus=cuda()), None).config.tiers
    assert 0.9 < plain.gpu.budget.resolve(0) / (0.4 * 60 * GIB) <= 1
    assert 0.9 < plain.budget(Tier.CPU).resolve(0) / (0.1 * 60 * GIB) <= 1
    assert str(with_cuda.gpu.budget) == "60%"
    assert with_cuda.budget(Tier.CPU).resolve(0) == 30 * GIB
    assert with_cuda.budget(Tier.NVME).resolve(0) == 175 * GIB


@pytest.mark.parametrize(
    ("name", "io"),
    [("good", "direct"), ("mmap", "mmap"), ("no direct", "mmap"), ("only direct", "direct"), ("needs depth", "direct")],
)
def test_io_is_the_faster_one(name: str, io: str) -> None:
    proposal = propose(facts(**MACHINES[name]), None)
    assert nvme_of(proposal)["io"] == io


@pytest.mark.parametrize("name", ["tmpfs", "no disk", "full disk", "unknown disk"])
def test_no_nvme_tier_where_there_is_no_disk_for_it(name: str) -> None:
    proposal = propose(facts(**MACHINES[name]), None)
    assert nvme_of(proposal) is None
    assert "# no nvme tier: " in proposal.yaml


def test_bandwidths_set_block_size_and_read_ahead() -> None:
    names = ("good", "needs length", "needs depth")
    good, long, deep = (propose(facts(**MACHINES[name]), None).values for name in names)
    assert (good["block_tokens"], long["block_tokens"]) == (128, 512)
    assert (good["prefetch"]["depth"], good["io_threads"]) == (2, 4)
    assert (deep["prefetch"]["depth"], deep["io_threads"]) == (4, 16)


def test_on_cuda_blocks_are_no_shorter_than_copies_to_the_device_want() -> None:
    proposal = propose(facts(gpus=cuda()), None)
    assert proposal.values["block_tokens"] == 256  # 128 where there is no CUDA device
    assert "slices of an 8B model in 16 bits are 1 MiB" in proposal.yaml and "of 20.00 GB/s" in proposal.yaml
    assert "kvtier plan --model" in proposal.yaml
    assert propose(facts(gpus=cuda(), speed=lambda mode, size, depth: size * 1e3), None).values["block_tokens"] == 512


def test_a_config_with_short_slices_is_warned_of_on_cuda_alone() -> None:
    short = load_config({"block_tokens": 64, "tiers": {"gpu": {"budget": "1GiB"}, "cpu": {"budget": "1GiB"}}})
    alone = load_config({"block_tokens": 64, "tiers": {"gpu": {"budget": "1GiB"}}})
    *_, warned = verdict.warnings(facts(gpus=cuda()), short)
    assert "block_tokens is 64: slices of an 8B model in 16 bits are 256KiB" in warned and "Give 256 or more" in warned
    assert "they reach about 20.00 GB/s of 20.00 GB/s" in warned
    assert verdict.warnings(facts(), short) == verdict.warnings(facts(gpus=cuda()), alone) == []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"kind": "tmpfs"}, "files there are memory"),
        ({"kind": "nfs4"}, "network file system"),
        ({"kind": "overlay"}, "overlay"),
        ({"speed": lambda *_: 1e6}, "too slow"),
        ({"speed": lambda *_: NONE}, "could not be measured: for a reason"),
        ({"takes_direct": NONE}, "does not take O_DIRECT"),
        ({"preallocates": False}, "cannot preallocate"),
        ({"gpus": cuda()}, "RLIMIT_MEMLOCK is 8MiB"),
        ({"limits": {"num_files": 64}}, "RLIMIT_NOFILE is 64"),
    ],
)
def test_warnings_in_plain_words(machine: dict[str, Any], words: str) -> None:
    found = facts(**machine)
    warnings = verdict.warnings(found, propose(found, None).config)
    assert len([warning for warning in warnings if words in warning]) == 1, warnings


@pytest.mark.parametrize("limits", [{"memlock_bytes": UNLIMITED}, {"locked_probe_bytes": 64 * MIB}])
def test_no_warnings_about_a_good_machine(limits: dict[str, int]) -> None:
    for machine in (facts(), facts(gpus=cuda(), limits=limits)):
        assert verdict.warnings(machine, propose(machine, None).config) == []


def test_the_disk_is_held_against_the_stated_prefill() -> None:
    _, token_bytes, prefill = verdict.EXAMPLE_CUDA
    bound = token_bytes * prefill
    at, below = (facts(gpus=cuda(), speed=lambda *_, rate=rate: rate) for rate in (float(bound), bound - 1.0))
    assert not [text for text in verdict.warnings(at, None) if "too slow" in text]
    (text,) = [text for text in verdict.warnings(below, None) if "too slow" in text]
    assert f"{prefill:,} tokens/s" in text


@pytest.mark.parametrize(
    ("tiers", "machine", "words"),
    [
        ({"gpu": {"budget": "30GiB"}}, {"gpus": cuda()}, "device memory are free"),
        ({"gpu": {"budget": "61GiB"}}, {}, "tiers.gpu.budget 61GiB: 61GiB of host memory"),
        ({"gpu": {"budget": "50%"}}, {"limits": {"available_bytes": 30 * GIB}}, "tiers.gpu.budget 32GiB"),
        ({"gpu": {"budget": "1GiB"}, "cpu": {"budget": "61GiB"}}, {"gpus": cuda()}, "tiers.cpu.budget 61GiB"),
        (
            {"gpu": {"budget": "1GiB"}, "nvme": {"budget": "1GiB", "io": "direct"}},
            {"takes_direct": NONE},
            "io is direct",
        ),
        (
            {"gpu": {"budget": "1GiB"}, "nvme": {"budget": "1GiB", "max_writes": "19KiB/day"}},
            {},
            "max_writes is 19KiB/day, less than a block of any model takes, 20KiB/day",
        ),
    ],
)
def test_what_speaks_against_a_config(tiers: dict[str, Any], machine: dict[str, Any], words: str) -> None:
    (problem,) = verdict.problems(read_config({"tiers": tiers}), facts(**machine))
    assert words in problem


@pytest.mark.parametrize(("budget", "number"), [("350GiB", 0), ("351GiB", 1)])
def test_a_budget_beyond_the_disk_is_a_warning_as_at_wrapping(budget: str, number: int) -> None:
    """Found by a new user: doctor said of the README's own file that it cannot work here, and that kvtier goes on."""
    config = read_config({"tiers": {"gpu": {"budget": "1GiB"}, "nvme": {"budget": budget}}})
    assert verdict.problems(config, facts()) == []
    found = [text for text in verdict.warnings(facts(), config) if "350GiB may be taken" in text]
    assert len(found) == number


def test_writes_below_a_block_of_a_common_model_are_a_warning() -> None:
    block_bytes = 256 * 46_080
    for limit_bytes, number in ((block_bytes - 1, 1), (block_bytes, 0)):
        tiers = {"gpu": {"budget": "1GiB"}, "nvme": {"budget": "1GiB", "max_writes": f"{limit_bytes}/h"}}
        config = read_config({"tiers": tiers})
        assert verdict.problems(config, facts()) == []
        found = [text for text in verdict.warnings(facts(), config) if "max_writes" in text]
        assert len(found) == number and all("11.25MiB: with less than a block" in text for text in found)


def test_a_folder_that_the_tier_would_refuse(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    nvme = {"budget": "1GiB", "path": str(tmp_path)}
    config = read_config({"tiers": {"gpu": {"budget": "1GiB"}, "nvme": nvme}})
    assert verdict.problems(config, facts()) == [] and not kv.exists()
    kv.mkdir(mode=0o755)
    (kv / "notes.txt").touch()
    (problem,) = verdict.problems(config, facts())
    assert "tiers.nvme.path" in problem and "notes.txt in it is not kvtier's" in problem
    assert kv.stat().st_mode & 0o777 == 0o755 and [each.name for each in kv.iterdir()] == ["notes.txt"]
    kv.rename(tmp_path / "elsewhere")
    kv.symlink_to(tmp_path / "elsewhere")
    (problem,) = verdict.problems(config, facts())
    assert "tiers.nvme.path" in problem and "kv is a symlink, which is not followed" in problem


def test_a_limit_of_writes_is_kept() -> None:
    nvme = propose(facts(), Path("/tmp"), Rate.parse("330GB/day")).config.tiers.nvme
    assert nvme is not None and str(nvme.max_writes) == "330GB/day"


def test_what_the_tier_has_on_the_disk_already_is_its_own() -> None:
    config = read_config({"tiers": {"gpu": {"budget": "1GiB"}, "nvme": {"budget": "360GiB"}}})
    less, enough = (facts(place={"held_bytes": held * GIB}) for held in (9, 10))
    assert [text for text in verdict.warnings(less, config) if "may be taken" in text]
    assert not [text for text in verdict.warnings(enough, config) if "may be taken" in text]


def test_percentages_and_small_budgets_fit() -> None:
    assert verdict.problems(read_config(None), facts()) == []
    assert verdict.problems(read_config({"tiers": {"gpu": {"budget": "20GiB"}}}), facts(gpus=cuda())) == []
