"""The configuration's tiers: how much each may take, and how it is had.

Pure Python. The keys' docstrings are docs/configuration.md: after a change, `make docs`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from kvtier.duration import Duration
from kvtier.rate import Rate
from kvtier.size import Size, SizeUnit
from kvtier.types import Compression, IoMode, Survives, Tier

MIN_PAGE_CACHE_BYTES = 4 << 20  # what the nvme store needs to have one read or write under way (stores/page_cache.py)


def _more_than_nothing(size: Size) -> Size:
    if not size.amount:
        raise ValueError("must be more than 0: only the gpu tier is mandatory")
    return size


def in_bytes(size: Size) -> Size:
    """Raise ValueError for a percentage, and for nothing."""
    if size.unit is not SizeUnit.BYTES or not size.amount:
        raise ValueError("must be more than 0, and not a percentage")
    return size


def _at_least(num_bytes: int) -> Callable[[Size], Size]:
    def check(size: Size) -> Size:
        if (size.unit is SizeUnit.BYTES and size.amount < num_bytes) or not size.amount:
            raise ValueError(f"must be at least {Size(num_bytes)}")
        return size

    return check


def _folder(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("is not a folder's path")
    try:
        return Path(value).expanduser().absolute()  # absolute: a later chdir must not move the tier
    except RuntimeError as error:
        raise ValueError(f"cannot be expanded ({error})") from None


Budget = Annotated[Size, PlainValidator(Size.parse), PlainSerializer(str)]
_Rate = Annotated[Rate, PlainValidator(Rate.parse), PlainSerializer(str)]
_Duration = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str)]
_Frac = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, title="a fraction above 0, at most 1")]
_SIZE_HELP = "a size such as 512MiB, 8GiB, 20GB, a whole number of bytes, or "


class Strict(BaseModel):
    # strict: "256" and 256.0 are not 256. A key's title ends error messages as the mend: "give <title>". Its docstring
    # becomes its description, which only docs/generate.py reads.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


class _Watermarks(Strict):
    high: _Frac = 0.95
    """Used fraction of the tier's slots above which blocks go to the next slower tier, between steps and in the
    background. Lower it when steps have to wait until room is made for their new tokens. Without a slower tier it does
    nothing."""
    low: _Frac = 0.85
    """Used fraction at which that stops. It is also the fraction up to which a running conversation's blocks are
    brought back into the tier and, for the cpu tier, finished blocks are copied down early. Must be below `high`; the
    further below, the more moves at a time."""

    @model_validator(mode="after")
    def _ordered(self) -> _Watermarks:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class GpuTierConfig(_Watermarks):
    """The gpu tier. A percentage is of the device memory that is free once the model is loaded."""

    budget: Annotated[Budget, AfterValidator(_more_than_nothing)] = Field(
        title=_SIZE_HELP + "30% of the free device memory"
    )
    """Device memory for KV; ordinary memory where the model is not on a CUDA device. Blocks come out of it, and the
    ring that slower tiers are streamed through, attention's scratch and, in gathered mode, the assembled layer.
    Weights, activations and logits do not. A percentage is of the device memory that is free when the model is
    wrapped; without CUDA, of the memory that the process may use and does not use yet. Must be more than 0; less than
    two blocks, the smallest ring and the scratch of one token is refused with that sum when the model is wrapped."""

    untiered_frac: Annotated[float, Field(ge=0.05, le=0.9, title="a fraction from 0.05 to 0.9, such as 0.25")] = 0.25
    """Share of the budget for layers that are not tiered: sliding windows and linear attention keep transformers' own
    cache on the device, of a window's length or a fixed size per row. Models of full attention alone spend nothing on
    it. A step that would need more, over all live caches together, is refused with the sum: raise it or the budget for
    many conversations at once."""


class CpuTierConfig(_Watermarks):
    """The cpu tier. A percentage is of what the process may use (the cgroup limit), not of the host's RAM."""

    budget: Budget = Field(title=_SIZE_HELP + "30% of the memory that the process may use")
    """Host memory for KV, page-locked where the model is on a CUDA device: all of it is then taken at once. A
    percentage is of the memory that the process may use (its cgroup limit, else the RAM), whether free or not. 0
    means no cpu tier; less than one block is refused when the model is wrapped; more than the process may use, a gpu
    tier in ordinary memory included, is one warning. With a CUDA device and an nvme tier the staging between the two
    comes out of it (`staging_budget_bytes` in `stats()`): a block and a slice for each of `io_threads`, or up to 32
    slices with direct I/O."""


class NvmeTierConfig(Strict):
    """The nvme tier. A percentage is of the disk space that is free where the folder lies."""

    budget: Budget = Field(title=_SIZE_HELP + "30% of the free disk space")
    """The most that the folder may take on disk, as `du` counts. Space is taken in files of at most 1 GiB when it is
    first needed, and kept until close. A percentage is of the disk space that is free when the model is wrapped. 5 %
    of the disk always stays free: a budget that does not fit beside them is one warning and a lower ceiling. 0 means
    no nvme tier; less than one block and about 64 KiB is refused when the model is wrapped. Where files are memory
    (tmpfs), the tier gets at most half of the cpu budget, and that is taken off the cpu tier. With a `path`, a 64th is
    kept for the files of sessions (64 KiB where it is 1 MiB or more)."""
    path: Annotated[Path, BeforeValidator(_folder)] | None = Field(
        default=None, title="the path of a folder, or leave it out for a temporary one"
    )
    """Where the files lie: in a folder `kv` in this one, made with mode 0700 and owned by one process at a time. `~`
    is expanded; a relative path starts at the current folder. The files stay after close: a later process finds
    prompts and sessions in them (`prefix_cache`), and whoever can read them can read your prompts. Left out: a
    temporary folder in `~/.cache/kvtier/runs` (or below `$XDG_CACHE_HOME`), removed on close. Give a path to choose the
    disk; the fastest local one is right, a network folder is one warning."""
    io: IoMode = Field(default=IoMode.AUTO, strict=False, title="auto, mmap or direct")
    """How files are read and written. `mmap` is through the page cache, `direct` past it (O_DIRECT) and refused where
    the file system does not take it. `auto` reads a scratch file of 32 MiB both ways when the model is wrapped, for
    less than a second, and takes the faster; with less than 1 GiB of room, on tmpfs and where `direct` would be refused
    it takes `mmap`. `stats()` says what it took and why. `direct` reads up to 4 MiB of slices at once on a thread, by
    the kernel's asynchronous I/O, or where there is none of it slice by slice on up to 32 threads."""
    page_cache: Annotated[Budget, AfterValidator(_at_least(MIN_PAGE_CACHE_BYTES))] = Field(
        default=Size(256 << 20), title="a size of at least 4MiB, or 1% of the memory that the process may use"
    )
    """The most host memory for the files beside the tiers, at least 4 MiB: page cache with `mmap`, which is written
    back and dropped beyond it, and aligned buffers with `direct` (of those at most 64 MiB). What the page cache holds
    the faster tiers hold or held too, so that it only has to bridge bursts: the default is what the ring can run ahead
    at most. More helps with `mmap` where the cpu tier is small. On tmpfs, where files are memory, it does nothing. What
    moving threads hold comes out of it: without CUDA a slice or 1 MiB for each of `io_threads`, whichever is more (less
    for smaller blocks); with a CUDA device and no cpu tier the staging that `tiers.cpu.budget` tells of. Less than that
    and 4 MiB is refused when the model is wrapped."""
    compression: Compression = Field(default=Compression.NONE, strict=False, title="none or zstd")
    """`none` keeps blocks as they are. `zstd` stores them smaller and gives the same bytes back: 0.69 of them for
    SmolLM2 in bf16, 0.85 in fp32 and 0.86 in fp16, so the same budget holds 1.4 or 1.2 times as many blocks. It costs
    about 2 seconds of a core for each GB written and 1 for each GB read (`python -m kvtier.benchmarks.compression`
    measures it), so it pays where the disk is small, slow or worn out by writing, and not where it is fast. Blocks of
    elements of 2 or 4 bytes only, on a file system that can give parts of files back (ext4, xfs, btrfs, tmpfs); others
    are refused when the model is wrapped. Blocks written with either are read with both."""
    max_writes: _Rate | None = Field(default=None, title="a size a day or an hour such as 2TB/day or 40GB/h")
    """The most that is written to the files in any day or hour, by all processes that had the `path` one after the
    other; a temporary folder counts its own process alone. What counts are the bytes handed to the disk, in whole pages
    and after compression. From half of it on blocks are moved down only when there is no room for new ones. When it is
    used up the nvme tier takes no blocks until older writes are out of that time: `state` in `stats()` is `limited`,
    and idle conversations are recomputed instead (`dropped_blocks`). `io: auto` takes `mmap` unmeasured where the 32
    MiB that measuring writes are more than a 64th of it. Less than one block is refused when the model is wrapped. Left
    out: no limit. Choose it by what the disk is rated for: 600 TB over 5 years are 330GB/day."""
    survives: Survives = Field(default=Survives.KILL, strict=False, title="kill or power_loss")
    """After what every labelled block whose copy down had ended can still be found. `kill` is the death of the process:
    the order of writes is enough, and nothing is flushed. `power_loss` is the death of the machine: each block waits
    for the disk twice, which makes copies down slower. Whatever is lost, a block that is not whole is never served: it
    has a checksum. Labelled are full blocks of token ids, but for [some](namespaces.md#when-a-block-gets-a-label), and
    tails of sessions. Without a `path` it does nothing."""
    namespace_ttl: _Duration = Field(default=Duration(14 * 86400), title="a duration such as 14d, 36h or seconds")
    """Blocks of a model, adapter or setting that nobody opened for this long are overwritten before the folder grows;
    younger ones only when the budget is used up, those opened longest ago first. A number is seconds; the units are
    `s`, `min`, `h` and `d`. Raise it for models that run once a month."""
    on_locked: Literal["error", "subfolder"] = Field(default="error", title="error or subfolder")
    """What happens when another process, or another model in this one, owns the folder at `path`. `error` is a
    `FolderInUseError`. `subfolder` gives this one a folder of its own in `shares` beside it, which goes when it closes
    (or is swept by the next one, if it is killed) and in which no later process finds anything. Each share has the
    whole `budget`: with three processes the path may take three times as much."""


class TiersConfig(Strict):
    """The tiers. An absent tier, or one of budget 0, has no slots."""

    gpu: GpuTierConfig = Field(title="a mapping such as {budget: 1GiB}")
    """Where steps compute: every new token is written here. The one tier that must be there if `tiers` is given."""
    cpu: CpuTierConfig | None = Field(default=None, title="a mapping such as {budget: 4GiB}")
    """Host memory: what the gpu tier gives up. Left out: no such tier."""
    nvme: NvmeTierConfig | None = Field(default=None, title="a mapping such as {budget: 64GiB}")
    """Files: what the faster tiers give up. Left out: no such tier."""

    def budget(self, tier: Tier) -> Size:
        """The tier's budget; 0 bytes for an absent tier."""
        config = (self.gpu, self.cpu, self.nvme)[tier]
        return Size(0) if config is None else config.budget
