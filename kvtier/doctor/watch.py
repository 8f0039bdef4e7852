"""How far an examination has come, for whoever shows it."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Told of each phase as it begins and of each step as it ends, on the examining thread."""

    def phase(self, name: str, estimate_s: float, num_steps: int) -> None:
        """A phase begins, which should take about so long in so many steps; the one before has ended."""

    def step(self) -> None:
        """One step of the phase has ended."""


class NoWatch:
    """Looks away."""

    def phase(self, name: str, estimate_s: float, num_steps: int) -> None:
        pass

    def step(self) -> None:
        pass
