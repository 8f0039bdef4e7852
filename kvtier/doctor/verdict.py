"""What is wrong: with this machine for any config (warnings), and with a given config on it (problems)."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.config import KVTierConfig
from kvtier.config_files import check_nvme_path
from kvtier.copy_length import LONG_BYTES, long_block_tokens
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.facts import CUDA_LAYER_TOKEN_BYTES, Facts
from kvtier.doctor.limits import UNLIMITED
from kvtier.doctor.proposal import reach
from kvtier.errors import ConfigError
from kvtier.policy import load_eviction, load_prefetch
from kvtier.rate import Rate
from kvtier.size import size_words, speed_words
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder_check import check_folder_usable
from kvtier.stores.nvme_layout import BOOKKEEPING_BYTES
from kvtier.types import IoMode, Tier

# What a disk is held against. Bytes of KV a token, and tokens a second that a common machine prefills.
EXAMPLE_CUDA = ("an 8B model in 16 bits", 131_072, 5_000)
EXAMPLE_CPU = ("SmolLM2-135M in fp32", 46_080, 200)
_FILES_OF_ITS_OWN = 256
_SEGMENT_BYTES = 1 << 30
_LEAST_MOVE_BYTES = 2 * PAGE_BYTES + BOOKKEEPING_BYTES  # of the smallest block: a page, and one of its header


def example(facts: Facts) -> tuple[str, int, int]:
    """The model that loading is compared on: its name, bytes of KV a token, tokens a second of prefill."""
    return EXAMPLE_CUDA if facts.cuda else EXAMPLE_CPU


def warnings(facts: Facts, config: KVTierConfig | None) -> list[str]:
    """What is not as it should be, in plain words; `config` is the given one, else the proposal."""
    return [
        *_disk_warnings(facts), *_limit_warnings(facts, config), *_write_warnings(facts, config),
        *_room_warnings(facts, config), *_copy_warnings(facts, config),
    ]  # fmt: skip


def _disk_warnings(facts: Facts) -> Iterator[str]:
    place, disk = facts.place, facts.disk
    if place.is_memory:
        yield (
            f"{place.folder} is on {place.kind}: files there are memory and count against the cpu budget. Give a "
            "path on a disk"
        )
    elif place.is_remote:
        yield (
            f"{place.folder} is on a network file system ({place.kind}): slower than a local disk, and it may hang or "
            "vanish. Give a path on a local disk"
        )
    elif place.kind == "overlay":
        yield f"{place.folder} is on a container's overlay: it may be slow and small. Give a path on a volume"
    rate = facts.disk_rate()
    if isinstance(rate, NotMeasured):
        yield f"the disk of {place.folder} could not be measured: {rate.why}"
        return
    name, token_bytes, prefill = example(facts)
    if not place.is_memory and rate < token_bytes * prefill:
        yield (
            f"this disk is too slow: it reads {speed_words(rate)}, which brings back {rate / token_bytes:,.0f} "
            f"tokens/s of {name}, and a machine that prefills {prefill:,} tokens/s recomputes them sooner. Leave the "
            "nvme tier out, or give a path on a faster disk"
        )
    if isinstance(disk.takes_direct, NotMeasured) and not place.is_memory:
        yield f"{place.kind} does not take O_DIRECT there: `io: direct` is refused, and reads go through the page cache"
    if disk.preallocates is False:
        yield f"{place.kind} cannot preallocate: each file of up to 1GiB is written with zeros first, which takes time"


def _limit_warnings(facts: Facts, config: KVTierConfig | None) -> Iterator[str]:
    limits = facts.limits
    if config is None:
        return
    cpu = config.tiers.budget(Tier.CPU).resolve(limits.may_use_bytes)
    if facts.cuda and limits.memlock_bytes < cpu and isinstance(limits.locked_probe_bytes, NotMeasured):
        yield (
            f"RLIMIT_MEMLOCK is {size_words(limits.memlock_bytes)}, and the cpu tier of {size_words(cpu)} is to be "
            "pinned: if the driver keeps to that limit, copies to the GPU are slower. Raise it (`ulimit -l unlimited`, "
            "or memlock in limits.conf)"
        )
    place = facts.place
    if isinstance(place.free_bytes, NotMeasured):
        return
    nvme = config.tiers.budget(Tier.NVME).resolve(place.free_bytes)
    files = -(-nvme // _SEGMENT_BYTES) + _FILES_OF_ITS_OWN
    if nvme and limits.num_files != UNLIMITED and limits.num_files < files:
        yield (
            f"RLIMIT_NOFILE is {limits.num_files}, and an nvme tier of {size_words(nvme)} may open {files} files: "
            f"raise it (`ulimit -n {files}`)"
        )


def _write_warnings(facts: Facts, config: KVTierConfig | None) -> Iterator[str]:
    nvme = None if config is None else config.tiers.nvme
    if config is None or nvme is None or nvme.max_writes is None or not nvme.budget.amount:
        return
    name, token_bytes, _ = example(facts)
    block_bytes = config.block_tokens * token_bytes
    if nvme.max_writes.num_bytes < block_bytes:
        yield (
            f"tiers.nvme.max_writes is {nvme.max_writes}, and one block of {config.block_tokens} tokens of {name} "
            f"takes {size_words(block_bytes)}: with less than a block of your model, wrapping it is refused. Raise it"
        )


def _room_warnings(facts: Facts, config: KVTierConfig | None) -> Iterator[str]:
    """As at wrapping, which goes on with what there is."""
    nvme, place = None if config is None else config.tiers.nvme, facts.place
    if nvme is None or not nvme.budget.amount:
        return
    if isinstance(place.room_bytes, NotMeasured) or isinstance(place.free_bytes, NotMeasured) or place.is_memory:
        return
    budget = nvme.budget.resolve(place.free_bytes)
    room = place.room_bytes + place.held_bytes
    if budget > room:
        yield (
            f"tiers.nvme.budget is {size_words(budget)}, and {size_words(room)} may be taken in "
            f"{place.folder} while 5 % of the disk stays free: kvtier would go on with that. Lower the budget, or free "
            "space"
        )


def _copy_warnings(facts: Facts, config: KVTierConfig | None) -> Iterator[str]:
    if config is None or not facts.cuda or not any(config.tiers.budget(tier).amount for tier in (Tier.CPU, Tier.NVME)):
        return
    slice_bytes = config.block_tokens * CUDA_LAYER_TOKEN_BYTES
    least = long_block_tokens(CUDA_LAYER_TOKEN_BYTES, None)
    if slice_bytes < LONG_BYTES:
        yield (
            f"block_tokens is {config.block_tokens}: slices of {EXAMPLE_CUDA[0]} are {size_words(slice_bytes)}, short "
            f"for copies to the device{reach(facts, slice_bytes)}. Give {least} or more (what lies in tiers.nvme.path "
            "is then not found any more); `kvtier plan --model` says how many for your model"
        )


def problems(config: KVTierConfig, facts: Facts) -> list[str]:
    """Why this config cannot be what it says on this machine now; empty: it can, as far as one sees without a model."""
    return [*_policy_problems(config), *_memory_problems(config, facts), *_nvme_problems(config, facts)]


def _policy_problems(config: KVTierConfig) -> Iterator[str]:
    for tier in Tier:
        try:
            load_eviction(config.eviction.policy(tier), f"eviction.{tier.label}")
        except ConfigError as error:
            yield str(error)
    try:
        depth = config.prefetch.depth if "depth" in config.prefetch.model_fields_set else None
        load_prefetch(config.prefetch.policy, depth, "prefetch.policy")
    except ConfigError as error:
        yield str(error)


def _memory_problems(config: KVTierConfig, facts: Facts) -> Iterator[str]:
    limits, tiers = facts.limits, config.tiers
    available = limits.available_bytes
    host = {"tiers.cpu.budget": tiers.budget(Tier.CPU).resolve(limits.may_use_bytes)}
    if facts.cuda:
        free = max(gpu.free_bytes for gpu in facts.cuda)
        gpu_bytes = tiers.gpu.budget.resolve(free)
        if gpu_bytes > free:
            yield (
                f"tiers.gpu.budget is {size_words(gpu_bytes)}, and {size_words(free)} of device memory are free, "
                "before the model is loaded: lower it, or free the device"
            )
    else:
        # A percentage is of what the process may use less what it uses, whatever others have taken of that.
        host["tiers.gpu.budget"] = tiers.gpu.budget.resolve(limits.may_use_bytes)
    if tiers.nvme is not None and tiers.nvme.budget.amount and not facts.place.is_memory:
        host["tiers.nvme.page_cache"] = tiers.nvme.page_cache.resolve(limits.may_use_bytes)
    total = sum(host.values())
    if total > available:
        terms = " + ".join(f"{key} {size_words(num)}" for key, num in host.items() if num)
        yield (
            f"{terms}: {size_words(total)} of host memory, and of the {size_words(limits.may_use_bytes)} that the "
            f"process may use {size_words(available)} are available now: lower the budgets, or free memory"
        )


def _nvme_problems(config: KVTierConfig, facts: Facts) -> Iterator[str]:
    nvme = config.tiers.nvme
    if nvme is None or not nvme.budget.amount:
        return
    if nvme.path is not None:
        try:
            check_nvme_path(nvme.path)
            check_folder_usable(nvme.path / "kv")
        except ConfigError as error:
            yield str(error)
            return
    least = Rate(_LEAST_MOVE_BYTES, nvme.max_writes.period_s) if nvme.max_writes else None
    if nvme.max_writes and least and nvme.max_writes.num_bytes < least.num_bytes:
        yield f"tiers.nvme.max_writes is {nvme.max_writes}, less than a block of any model takes, {least}: raise it"
    refused = facts.disk.takes_direct
    if nvme.io is IoMode.DIRECT and isinstance(refused, NotMeasured):
        yield f"tiers.nvme.io is direct, and {refused.why}: set it to auto or mmap, or give another folder"
