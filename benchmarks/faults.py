"""`kvtier soak --faults FILE`: which faults the nvme tier meets, how often, and the injector between it and its files.

The injector is `kvtier.testing.FaultyStore`. Nothing in the files is damaged; what is read from them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.config import KVTierConfig
from kvtier.config_errors import check_shape, explain_all
from kvtier.config_yaml import parse_yaml, read_text
from kvtier.errors import ConfigError
from kvtier.stores.base import Store
from kvtier.testing import Fault, FaultyStore
from kvtier.types import Tier

_Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, title="a chance per call from 0 to 1, such as 0.001")]
_Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False, title="seconds, above 0 and at most 3600")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class FaultRates(_Strict):
    """For each `Fault`, the chance that a call of the nvme store which it can spoil is spoilt."""

    bit_flip: _Rate = 0.0
    silent_bit_flip: _Rate = 0.0
    short_read: _Rate = 0.0
    eio: _Rate = 0.0
    delay: _Rate = 0.0
    no_space: _Rate = 0.0
    torn_write: _Rate = 0.0
    hang: _Rate = 0.0

    @model_validator(mode="after")
    def _some(self) -> FaultRates:
        if not any(self.by_fault().values()):
            raise ValueError("no fault has a rate above 0, so none would be injected")
        return self

    def by_fault(self) -> dict[Fault, float]:
        """As `FaultyStore` takes them."""
        return {fault: getattr(self, fault.value) for fault in Fault}


class FaultSettings(_Strict):
    """A file of faults. The same seed injects the same faults where the calls of the store are the same."""

    seed: int = Field(default=0, title="a whole number")
    rates: FaultRates = Field(title="a mapping such as {bit_flip: 0.001, eio: 0.001}")
    delay_s: _Seconds = 0.01
    hang_s: _Seconds = 1.0

    def check_config(self, config: KVTierConfig) -> None:
        """Raise ConfigError for a config in which these faults could not be injected, or would do harm."""
        nvme = config.tiers.nvme
        if nvme is None or not nvme.budget.amount:
            raise ConfigError(
                "the config has no nvme tier to inject faults into. Mend: give one with tiers.nvme, such as "
                "--config quickstart, or leave --faults out"
            )
        if self.rates.silent_bit_flip and nvme.path is not None:
            raise ConfigError(
                f"rates.silent_bit_flip is {self.rates.silent_bit_flip:g}, and what is computed from such a "
                f"block would stay in tiers.nvme.path ({nvme.path}). Mend: leave tiers.nvme.path out, so that the "
                "files go with the run"
            )


class Injection:
    """Faults in the nvme tier of a `TieredKV`, from here on. `earlier`: `document()` before the run was interrupted."""

    def __init__(self, settings: FaultSettings, tiered: Any, earlier: Mapping[str, Any] | None) -> None:
        self.settings = settings
        self._before: Mapping[str, int] = earlier["injected"] if earlier else {}
        tiered._runtime.interpose(Tier.NVME, self._wrap)

    def _wrap(self, store: Store) -> Store:
        settings = self.settings
        rates = settings.rates.by_fault()
        self._store = FaultyStore(store, settings.seed, rates, delay_s=settings.delay_s, hang_s=settings.hang_s)
        return self._store

    def release(self) -> None:
        """End what hangs on purpose: closing need not wait for it."""
        self._store.release()

    def document(self) -> dict[str, Any]:
        """What was asked for, and how often each fault was injected since the run began."""
        now = self._store.counts()
        injected = {fault.value: now.get(fault, 0) + self._before.get(fault.value, 0) for fault in Fault}
        return {"settings": self.settings.model_dump(mode="json"), "injected": injected}


def load_faults(source: str | Path | Mapping[str, Any], config: KVTierConfig | None = None) -> FaultSettings:
    """Read and check a YAML file of faults, or a mapping as YAML would give; with `config`, for that one.

    Raises:
        ConfigError: one line for each mistake: the key's path, the value and the mend.
    """
    where, values = "--faults", source
    if isinstance(source, str | Path):
        where = f"--faults {source}"
        try:
            text = read_text(Path(source).expanduser())
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"{where}: cannot be read ({error}). Mend: give a YAML file of faults") from None
        values = parse_yaml(text, where, example="rates: {bit_flip: 0.001}")
    try:
        check_shape(values)
        settings = FaultSettings.model_validate(values)
        if config is not None:
            settings.check_config(config)
        return settings
    except ValidationError as error:
        problems = explain_all(error.errors(), FaultSettings)
    except ConfigError as error:
        problems = list(error.mistakes)
    raise ConfigError(*(f"{where}: {problem}" for problem in problems))
