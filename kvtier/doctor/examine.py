"""One examination from beginning to end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from kvtier.config import KVTierConfig, read_config
from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.doctor.compute import measure_compute
from kvtier.doctor.decoding import measure_decoding
from kvtier.doctor.disk import FULL, QUICK, measure_disk
from kvtier.doctor.facts import Facts, Place
from kvtier.doctor.gpu import measure_gpus
from kvtier.doctor.host import measure_host
from kvtier.doctor.limits import read_limits
from kvtier.doctor.proposal import propose
from kvtier.doctor.report import Report
from kvtier.doctor.verdict import problems, warnings
from kvtier.doctor.watch import Watch
from kvtier.errors import ConfigError
from kvtier.stores.nvme_layout import RESERVE_FREE_FRAC
from kvtier.system import (
    allocated_bytes,
    cache_folder,
    disk_room_bytes,
    disk_total_bytes,
    existing_folder,
    filesystem_kind,
    free_disk_bytes,
)

_HOST_S, _HOST_QUICK_S = 3.0, 0.6
_COPY_S, _COPY_QUICK_S = 0.2, 0.05


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says. `config` and `path` are None where they were left out."""

    config: str | None = None
    path: Path | None = None
    is_quick: bool = False


def examine(wishes: Wishes, watch: Watch) -> Report:
    """Measure, propose, judge. Leaves nothing behind, also on Ctrl-C.

    Raises:
        ConfigError: the config cannot be read, or the path is not a folder. Nothing was measured then.

    Cost: under 60 s, `is_quick` under 15 s; disk space, bytes written and memory as docs/doctor.md says.
    """
    started_s = time.monotonic()
    config = None if wishes.config is None else read_config(wishes.config)
    path = _path(wishes, config)
    if config is not None and config.tiers.nvme is not None and path is not None:
        tiers = config.tiers.model_copy(update={"nvme": config.tiers.nvme.model_copy(update={"path": path})})
        config = config.model_copy(update={"tiers": tiers})
    watch.phase("limits", 0.5, 2)
    place = _place(path)
    watch.step()
    limits = read_limits()
    watch.step()
    quick = wishes.is_quick
    disk = measure_disk(place.measured_in, QUICK if quick else FULL, watch)
    host = measure_host(_HOST_QUICK_S if quick else _HOST_S, watch)
    gpus = measure_gpus(_COPY_QUICK_S if quick else _COPY_S, watch)
    compute = measure_compute(_COPY_QUICK_S if quick else _COPY_S, watch)
    decoding = measure_decoding(_COPY_QUICK_S if quick else _COPY_S, watch)
    facts = Facts(place, limits, disk, host, gpus, compute, decoding)
    nvme = None if config is None else config.tiers.nvme
    proposal = propose(facts, path, nvme.max_writes if nvme is not None else None)
    found = [] if config is None else problems(config, facts)
    warned = warnings(facts, config or proposal.config)
    return Report(facts, proposal, wishes.config or "", found, warned, quick, time.monotonic() - started_s)


def _path(wishes: Wishes, config: KVTierConfig | None) -> Path | None:
    """The nvme tier's folder where one was named, on the command line or in the config."""
    if wishes.path is not None:
        try:
            path = wishes.path.expanduser().absolute()
            is_folder = path.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"--path {wishes.path} cannot be used ({error})") from None
        if not is_folder:
            raise ConfigError(f"--path {path} is not a folder. Mend: make it, or give one that exists")
        return path
    return config.tiers.nvme.path if config is not None and config.tiers.nvme is not None else None


def _place(path: Path | None) -> Place:
    folder = path if path is not None else cache_folder() / "runs"
    found = attempt(lambda: existing_folder(folder))
    there = folder if isinstance(found, NotMeasured) else found
    return Place(
        folder=folder,
        measured_in=there,
        kind=filesystem_kind(there),
        free_bytes=attempt(lambda: free_disk_bytes(there)),
        total_bytes=attempt(lambda: disk_total_bytes(there)),
        held_bytes=allocated_bytes(folder / "kv"),
        room_bytes=attempt(lambda: disk_room_bytes(there, RESERVE_FREE_FRAC)),
    )
