"""How long a session thinks between an answer and its next question."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from kvtier.errors import ConfigError

_MEND = "give none, a number of seconds such as 5, or exponential:MEAN such as exponential:5"


@dataclass(frozen=True)
class Arrival:
    """Think times in seconds: always `mean_s`, or drawn from an exponential distribution of that mean.

    With a mean of 0 nobody thinks: every session always has its next question ready.
    """

    mean_s: float = 0.0
    is_exponential: bool = False

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """Read `none`, `5`, `0.5` or `exponential:5`.

        Raises:
            ConfigError: anything else; the message names the value and the mend.
        """
        if text == "none":
            return cls()
        kind, colon, number = text.rpartition(":")
        try:
            mean_s = float(number)
        except ValueError:
            mean_s = math.nan
        if (kind, colon) not in (("", ""), ("exponential", ":")) or not math.isfinite(mean_s) or mean_s < 0:
            raise ConfigError(f"--arrival {text}: {_MEND}")
        return cls(mean_s, bool(colon))

    def think_s(self, seed: int, session: int, turn: int) -> float:
        """Seconds before turn `turn` (from 1) of a session: the same for the same arguments, in any order of calls."""
        if not self.is_exponential or not self.mean_s:
            return self.mean_s
        return random.Random(f"think:{seed}:{session}:{turn}").expovariate(1 / self.mean_s)
