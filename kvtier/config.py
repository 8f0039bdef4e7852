"""The configuration: strict, frozen models, and errors that name the key's path, the value and the mend.

Pure Python. Nothing is allocated here. The keys' docstrings are docs/configuration.md: after a change, `make docs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from kvtier.config_errors import check_shape, explain_all
from kvtier.config_files import check_nvme_path, names_source, read_source, source_name
from kvtier.config_tiers import (
    Budget,
    CpuTierConfig,
    GpuTierConfig,
    NvmeTierConfig,
    Strict,
    TiersConfig,
    in_bytes,
)
from kvtier.config_yaml import parse_yaml
from kvtier.errors import ConfigError
from kvtier.size import Size, SizeUnit
from kvtier.types import AttentionMode, HostAttention, Tier

_PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$", title="a name or module:Class")]


class EvictionConfig(Strict):
    """The eviction policy of each tier: a name of the entry point group `kvtier.policies`, or `module:Class`."""

    gpu: _PolicyName = "lru"
    """The gpu tier's policy."""
    cpu: _PolicyName = "lru"
    """The cpu tier's policy. It names what goes down to the nvme tier and, on the last tier, which cached blocks
    of prompts go."""
    nvme: _PolicyName = "lru"
    """The nvme tier's policy. It names which cached blocks of prompts go when it is full; beside them go copies of
    blocks that a faster tier has too."""

    def policy(self, tier: Tier) -> str:
        """The name of the tier's policy."""
        return (self.gpu, self.cpu, self.nvme)[tier]


class PrefetchConfig(Strict):
    """Which policy says what to fetch early, and how many layers ahead it may look."""

    policy: _PolicyName = "next_layers"
    """Which layers may be read ahead of attention."""
    depth: int = Field(default=3, ge=0, le=64, title="a number of layers from 0 to 64")
    """Layers ahead. More hides slower disks, as far as the ring has room (about an eighth of the gpu budget, at
    most 256 MiB); 0 reads each layer when it runs. Left out, the policy's own default is used. `no_prefetch` takes
    only 0."""


def _default_tiers() -> TiersConfig:
    percent = SizeUnit.PERCENT
    return TiersConfig(
        gpu=GpuTierConfig(budget=Size(60.0, percent)),
        cpu=CpuTierConfig(budget=Size(25.0, percent)),
        nvme=NvmeTierConfig(budget=Size(10.0, percent)),
    )


class KVTierConfig(Strict):
    """Everything that a runtime is built from. Keyword arguments, or nested mappings as in YAML.

    Raises:
        ConfigError: a key, value or order that cannot be used; one line for each mistake.
    """

    block_tokens: int = Field(
        default=256, ge=16, le=4096, multiple_of=16, title="tokens per block, a multiple of 16 from 16 to 4096"
    )
    """Tokens in a block, the unit that is kept, moved and given up. `block_bytes` in `stats()` is its size: 2 ×
    layers × KV heads × head dimension × bytes of the dtype × `block_tokens`. Larger blocks mean fewer, longer reads;
    smaller ones waste less (each conversation's last block takes a whole one) and fit smaller budgets. With a CUDA
    device one layer's part should be 1 MiB or more (256 tokens of an 8B model in 16 bits): `kvtier plan` says how many
    tokens that is. Blocks of another length that lie in `tiers.nvme.path` are not found."""
    prefill_chunk: int = Field(default=512, ge=1, title="new tokens per step, at least 1")
    """The most new tokens in one step; a longer prompt is cut. More means fewer steps and more memory for activations,
    which no budget counts. A step needs gpu slots for all of its new tokens. What the gpu budget has no scratch for
    is cut shorter (`max_chunk` in `stats()`); in gathered mode, whose bits depend on the chunk, it is a
    `BudgetError`."""
    attention: AttentionMode = Field(default=AttentionMode.BLOCKWISE, strict=False, title="blockwise or gathered")
    """`blockwise` attends to blocks where they lie and merges the parts. It differs from the plain cache by rounding
    alone: less than 1e-4 in every logit of the small fp32 models of docs/matrix.md, and on larger ones no more than
    the plain model does from itself between two chunk sizes. `gathered` assembles one layer at a time and calls the
    model's own attention: bit-identical to `model.generate(prefill_chunk_size=...)` with sdpa and the same chunk. It
    takes half of the gpu budget for that layer, and a context too long for it is a `BudgetError`."""
    tiers: TiersConfig = Field(default_factory=_default_tiers, title="a mapping with at least gpu: {budget: …}")
    """What each tier may take. Left out altogether: gpu 60 %, cpu 25 %, nvme 10 %. Given: a tier that is not named is
    absent."""
    eviction: EvictionConfig = Field(default=EvictionConfig(), title="a mapping such as {gpu: lru, cpu: lru}")
    """Which blocks a tier gives up first. Blocks of idle conversations go before those of running ones, whatever the
    policy says, and only between steps."""
    prefetch: PrefetchConfig = Field(default=PrefetchConfig(), title="a mapping such as {policy: next_layers}")
    """What is read early from slower tiers while a layer computes."""
    host_attention: HostAttention = Field(default=HostAttention.AUTO, strict=False, title="never, always or auto")
    """Who attends to blocks of the cpu tier. `never`: they are streamed to the gpu tier's device, as those of the nvme
    tier are. `always`: the CPU attends to them where they lie, beside the device's own share; queries and results cross
    the link, K and V do not. `auto`: always where the model itself runs on the CPU, where it costs no copy at all; with
    a CUDA device the share that makes both end at the same time, by their measured rates. `gathered` on a CUDA
    device streams whatever this says."""
    prefix_cache: bool = Field(default=True, title="true or false")
    """Whether `generate` begins with the blocks that it finds of a prompt, instead of computing them: those of any
    earlier call under the same salt, with a persistent nvme folder those of earlier processes too. They stay, on all
    tiers, until something else needs the room. Left out, `gathered` does without: found blocks were computed with other
    chunks, and promise tolerance, not bits. Models with layers that are not tiered (windows, linear attention) find
    nothing."""
    salt_quota: Annotated[Budget, AfterValidator(in_bytes)] | None = Field(
        default=None, title="a size such as 2GiB, or leave it out for no limit"
    )
    """The most that one tenant's salt keeps, so that one cannot take the room of all: of cached blocks on all tiers
    together, and of blocks in files of `tiers.nvme.path`. At the limit its own oldest blocks that nobody uses go first;
    those of its running conversations are served as ever, and not kept. Calls without a salt are not limited."""
    on_block_loss: Literal["recompute", "raise"] = Field(default="recompute", title="recompute or raise")
    """What happens when a block cannot be read from its tier: a wrong checksum, an I/O error, a short read, a disk that
    does not answer within `io_timeout_s`. `recompute` computes it again from its tokens and repeats the step, with one
    warning and a count in `recomputed_blocks` of `stats()`; `raise` raises `BlockLostError`, for whoever would rather
    look at the disk first. No token is made from such a block either way. With `recompute` idle conversations also
    lose blocks when no tier has room (`dropped_blocks`), and get them back in the same way; with `raise` that is a
    `CapacityError`."""
    io_threads: int = Field(default=4, ge=1, le=64, title="a number of threads from 1 to 64")
    """Threads that move whole blocks to and from nvme, and as many more that stream slices from there (with direct I/O
    and a kernel without asynchronous I/O up to 32, as far as the ring has room); as many again for copies within
    memory. Raise it for disks that are fast only with many requests at a time."""
    io_timeout_s: float = Field(
        default=60.0, gt=0, le=86400, allow_inf_nan=False, title="seconds, more than 0 and at most 86400"
    )
    """Seconds that a step waits for reads and writes of the nvme tier. From then on the tier counts as hanging, until
    what is late has ended: it is not used, blocks that lie only there are recomputed (see `on_block_loss`), and
    generation goes on with the other tiers. Also how long `close()` waits for transfers. Raise it for slow or shared
    disks: a pause that is shorter costs no recomputation."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts are looked up: as `prefix_cache` says, and left out where bits are promised."""
        asked = "prefix_cache" in self.model_fields_set
        return self.prefix_cache and (asked or self.attention is not AttentionMode.GATHERED)

    def __init__(self, **values: Any) -> None:
        check_shape(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*explain_all(error.errors(), KVTierConfig)) from None


def load_config(source: str | Path | Mapping[str, Any] | KVTierConfig | None) -> KVTierConfig:
    """Read and check a configuration.

    Args:
        source: a preset's name; the path of a YAML file (a Path, or text with a separator or ending in .yaml or .yml,
            or naming a file that exists); a mapping as YAML would give; a config; or None for the defaults: gpu 60 %
            of the device memory free after the model is loaded, cpu 25 % of what the process may use, nvme 10 % of
            the free disk where temporary files go.

    Raises:
        ConfigError: with the key's path, the value and the mend. Nothing was opened or allocated.
    """
    config = read_config(source)
    if config.tiers.nvme is not None and config.tiers.nvme.path is not None:
        with names_source(source_name(source)):
            check_nvme_path(config.tiers.nvme.path)
    return config


def read_config(source: str | Path | Mapping[str, Any] | KVTierConfig | None) -> KVTierConfig:
    """As `load_config`, without a look at the nvme folder: whether it can be had is another question."""
    if isinstance(source, KVTierConfig):
        return source
    if source is None:
        return KVTierConfig()
    if isinstance(source, Mapping):
        return _build(source, "config")
    if isinstance(source, str | Path):
        where, text = read_source(source)
        return _build(parse_yaml(text, where), where)
    raise ConfigError(f"config: {source!r} is not one. Mend: give a preset's name, a path, a mapping or None")


def _build(values: Mapping[Any, Any], where: str) -> KVTierConfig:
    try:
        check_shape(values)
        return KVTierConfig(**values)
    except ConfigError as error:
        error.name_source(where)
        raise
