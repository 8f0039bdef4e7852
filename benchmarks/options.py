"""What a soak is asked to do, and the command line that asks for it."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from kvtier.benchmarks.arrival import Arrival
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class SoakOptions:
    """What to run. `contexts` are tokens, dealt to the sessions in turn; `config` is whatever `load_config` takes.

    With `minutes`, sessions that have had their `turns` are ended and new ones begun until the time is up.
    `arrival`: think times between a session's turns, as `Arrival.parse` reads them.
    `verify`: all, sample (a quarter of the sessions, at least one) or none.
    `faults`: whatever `load_faults` takes; None: no fault is injected.
    """

    config: Any = "quickstart"
    model: str | None = None
    documents: str | None = None
    sessions: int = 4
    contexts: tuple[int, ...] = (1500,)
    turns: int = 3
    minutes: float | None = None
    arrival: str = "none"
    max_new_tokens: int = 24
    seed: int = 0
    verify: str = "all"
    threads: int = 1
    faults: Any = None

    def check(self) -> None:
        """Raise ConfigError for a value that cannot be used."""
        for name in ("sessions", "turns", "max_new_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)} {getattr(self, name)}: give a number of at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"--context {shown('contexts', self.contexts)}: give token counts of at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: give more than 0")
        Arrival.parse(self.arrival)
        if self.verify not in ("all", "sample", "none"):
            raise ConfigError(f"--verify {self.verify}: give all, sample or none")

    def command(self) -> str:
        """The command line that runs the same again; a config that is no file or preset becomes `config.yaml`,
        and faults that are no file `faults.yaml`."""
        words = ["kvtier", "soak"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "config":
                value = value if isinstance(value, str) else "config.yaml"
            elif value == field.default:
                continue
            elif field.name == "faults":
                value = value if isinstance(value, str) else "faults.yaml"
            words += [option(field.name), shown(field.name, value)]
        return shlex.join(words)


def option(name: str) -> str:
    """The command line's word for a field of SoakOptions."""
    return "--context" if name == "contexts" else f"--{name.replace('_', '-')}"


def shown(name: str, value: Any) -> str:
    """A field's value as the command line takes it."""
    if name == "contexts":
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
