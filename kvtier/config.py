"""The configuration: strict, frozen models, presets, and errors that name the key's path, the value and the mend.

Pure Python. Nothing is allocated here; a given nvme path is tried with an empty file that is removed at once.
"""

from __future__ import annotations

import importlib.resources
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from kvtier.config_errors import check_shape, closest, explain_all
from kvtier.errors import ConfigError
from kvtier.size import Size, SizeUnit
from kvtier.types import AttentionMode, Tier


def _more_than_nothing(size: Size) -> Size:
    if not size.amount:
        raise ValueError("must be more than 0: only the gpu tier is mandatory")
    return size


def _later(*words: str) -> BeforeValidator:
    """Refuse by name what a later version will take."""

    def check(value: object) -> object:
        if value in words:
            raise ValueError("comes with a later version of kvtier")
        return value

    return BeforeValidator(check)


def _folder(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("is not a folder's path")
    try:
        return Path(value).expanduser().absolute()  # absolute: a later chdir must not move the tier
    except RuntimeError as error:
        raise ValueError(f"cannot be expanded ({error})") from None


_Budget = Annotated[Size, PlainValidator(Size.parse), PlainSerializer(str)]
_PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$", description="a name or module:Class")]
_Frac = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, description="a fraction above 0, at most 1")]
_SIZE_HELP = "a size such as 512MiB, 8GiB, 20GB, a whole number of bytes, or "


class _Strict(BaseModel):
    # strict: "256" and 256.0 are not 256. Field descriptions end error messages as the mend: "give <description>".
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class _Watermarks(_Strict):
    high: _Frac = 0.95
    """Used fraction of the tier above which demotion starts."""
    low: _Frac = 0.85
    """Used fraction at which it stops."""

    @model_validator(mode="after")
    def _ordered(self) -> _Watermarks:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class GpuTierConfig(_Watermarks):
    """The gpu tier. A percentage is of the device memory that is free once the model is loaded."""

    budget: Annotated[_Budget, AfterValidator(_more_than_nothing)] = Field(
        description=_SIZE_HELP + "30% of the free device memory"
    )


class CpuTierConfig(_Watermarks):
    """The cpu tier. A percentage is of what the process may use (the cgroup limit), not of the host's RAM."""

    budget: _Budget = Field(description=_SIZE_HELP + "30% of the memory that the process may use")


class NvmeTierConfig(_Strict):
    """The nvme tier. A percentage is of the disk space that is free where the folder lies."""

    budget: _Budget = Field(description=_SIZE_HELP + "30% of the free disk space")
    path: Annotated[Path, BeforeValidator(_folder)] | None = Field(
        default=None, description="the path of a folder, or leave it out for a temporary one"
    )
    """A folder whose files persist. None: a temporary folder, removed on close."""
    io: Annotated[Literal["auto", "mmap"], _later("direct")] = Field(default="auto", description="auto or mmap")
    compression: Annotated[Literal["none"], _later("zstd")] = Field(default="none", description="none")
    survives: Annotated[Literal["kill"], _later("power_loss")] = Field(default="kill", description="kill")


class TiersConfig(_Strict):
    """The tiers. An absent tier, or one of budget 0, has no slots."""

    gpu: GpuTierConfig = Field(description="a mapping such as {budget: 1GiB}")
    cpu: CpuTierConfig | None = Field(default=None, description="a mapping such as {budget: 4GiB}")
    nvme: NvmeTierConfig | None = Field(default=None, description="a mapping such as {budget: 64GiB}")

    def budget(self, tier: Tier) -> Size:
        """The tier's budget; 0 bytes for an absent tier."""
        config = (self.gpu, self.cpu, self.nvme)[tier]
        return Size(0) if config is None else config.budget


class EvictionConfig(_Strict):
    """The eviction policy of each tier: a name of the entry point group `kvtier.policies`, or `module:Class`."""

    gpu: _PolicyName = "lru"
    cpu: _PolicyName = "lru"
    nvme: _PolicyName = "lru"

    def policy(self, tier: Tier) -> str:
        """The name of the tier's policy."""
        return (self.gpu, self.cpu, self.nvme)[tier]


class PrefetchConfig(_Strict):
    """Which policy says what to fetch early, and how many layers ahead it may look."""

    policy: _PolicyName = "next_layers"
    depth: int = Field(default=2, ge=0, le=64, description="a number of layers from 0 to 64")


def _default_tiers() -> TiersConfig:
    percent = SizeUnit.PERCENT
    return TiersConfig(
        gpu=GpuTierConfig(budget=Size(60.0, percent)),
        cpu=CpuTierConfig(budget=Size(25.0, percent)),
        nvme=NvmeTierConfig(budget=Size(10.0, percent)),
    )


class KVTierConfig(_Strict):
    """Everything that a runtime is built from. Keyword arguments, or nested mappings as in YAML.

    Raises:
        ConfigError: a key, value or order that cannot be used; one line for each mistake.
    """

    block_tokens: int = Field(
        default=256, ge=16, le=4096, multiple_of=16, description="tokens per block, a multiple of 16 from 16 to 4096"
    )
    prefill_chunk: int = Field(default=512, ge=1, description="new tokens per step, at least 1")
    attention: AttentionMode = Field(default=AttentionMode.BLOCKWISE, strict=False, description="blockwise or gathered")
    tiers: TiersConfig = Field(default_factory=_default_tiers, description="a mapping with at least gpu: {budget: …}")
    eviction: EvictionConfig = Field(default=EvictionConfig(), description="a mapping such as {gpu: lru, cpu: lru}")
    prefetch: PrefetchConfig = Field(default=PrefetchConfig(), description="a mapping such as {policy: next_layers}")
    io_threads: int = Field(default=4, ge=1, le=64, description="a number of threads from 1 to 64")
    io_timeout_s: float = Field(
        default=60.0, gt=0, le=86400, allow_inf_nan=False, description="seconds, more than 0 and at most 86400"
    )

    def __init__(self, **values: Any) -> None:
        check_shape(values)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain_all(error.errors(), KVTierConfig)) from None


def preset_names() -> list[str]:
    """The presets that `load_config` takes by name, sorted."""
    files = importlib.resources.files("kvtier.configs").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


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
    if isinstance(source, KVTierConfig):
        config = source
    elif source is None:
        config = KVTierConfig()
    elif isinstance(source, Mapping):
        config = _build(source, "config")
    elif isinstance(source, str | Path):
        where, text = _read(source)
        config = _build(_parse_yaml(text, where), where)
    else:
        raise ConfigError(f"config: {source!r} is not one. Mend: give a preset's name, a path, a mapping or None")
    if config.tiers.nvme is not None and config.tiers.nvme.path is not None:
        check_nvme_path(config.tiers.nvme.path)
    return config


def check_nvme_path(path: Path) -> None:
    """Try whether files can be made in the folder `path`; leaves nothing behind and does not create the folder.

    Permission bits say nothing for root, nor on a read-only mount, so this makes and removes an empty file.

    Raises:
        ConfigError: the path is (or leads through) a file, or nothing can be written there.
    """
    existing = path
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:  # a name that is too long, say
        raise ConfigError(
            f"tiers.nvme.path: {path} cannot be used ({error.strerror}). Mend: give a shorter one"
        ) from None
    if not existing.is_dir():
        raise ConfigError(f"tiers.nvme.path: {path}: {existing} is not a folder. Mend: give a folder's path")
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".kvtier-probe-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"tiers.nvme.path: {path} cannot be written ({error.strerror}). Mend: give a folder that can be written"
        ) from None


def _read(source: str | Path) -> tuple[str, str]:
    """The source's name for messages, and its text. A preset's name wins over a file of that name."""
    if isinstance(source, str):
        presets = preset_names()
        if source in presets:
            file = importlib.resources.files("kvtier.configs") / f"{source}.yaml"
            return f"preset {source}", file.read_text(encoding="utf-8")
        if os.sep not in source and not source.endswith((".yaml", ".yml")) and not Path(source).is_file():
            hint = closest(source, presets)
            raise ConfigError(f"config: no preset is named {source!r}{hint}. Presets: {', '.join(presets)}")
    try:
        return str(source), Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"config: {source} cannot be read ({reason}). "
            f"Mend: give a YAML file or one of the presets {', '.join(preset_names())}"
        ) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice. Mend: remove one", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, where: str) -> Mapping[str, Any]:
    try:
        # A SafeLoader: it builds plain values only.
        document = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        place = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{place}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: is not YAML: {error}") from None
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{where}: must be a mapping such as `tiers: {{gpu: {{budget: 1GiB}}}}`, got {document!r:.80}"
        )
    return document


def _build(values: Mapping[Any, Any], where: str) -> KVTierConfig:
    try:
        check_shape(values)
        return KVTierConfig(**values)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None
