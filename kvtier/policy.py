"""Finding a policy by the name in a config: an entry point of the group `kvtier.policies`, or `module:Class`."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Container, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from kvtier.config_errors import closest
from kvtier.errors import ConfigError
from kvtier.log import logger
from kvtier.types import BlockId, EvictionPolicy, PrefetchPolicy, SequenceId

GROUP = "kvtier.policies"
_OWN = "; or name your own as module:Class"
_WORDS: dict[type, str] = {EvictionPolicy: "eviction", PrefetchPolicy: "prefetch"}


def load_eviction(name: str, key: str) -> EvictionPolicy:
    """A new instance of the eviction policy that `name` names. `key` is the config key, for messages.

    Raises:
        ConfigError: no such policy, it cannot be imported or built, or it is not an eviction policy.
    """
    cls = _find(name, key, EvictionPolicy)
    return cast(EvictionPolicy, _of_kind(_build(cls, name, key), name, key, EvictionPolicy))


def load_prefetch(name: str, depth: int | None, key: str) -> PrefetchPolicy:
    """A new instance of the prefetch policy that `name` names, with its own depth unless one is given.

    Raises as `load_eviction`.
    """
    cls = _find(name, key, PrefetchPolicy)
    if inspect.isclass(cls) and issubclass(cls, EvictionPolicy):  # or it would be told of its arguments
        _of_kind(cls, name, key, PrefetchPolicy)
    policy = _build(cls, name, key, **({} if depth is None else {"depth": depth}))
    return cast(PrefetchPolicy, _of_kind(policy, name, key, PrefetchPolicy))


def _find(name: str, key: str, kind: type) -> Callable[..., Any]:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{key}: {name} cannot be imported: {error}; is its folder on PYTHONPATH?") from error
        return _callable(found, name, key)
    if name not in _entry_points():
        _entry_points.cache_clear()  # it may have been installed since
    known = _entry_points()
    if name not in known:
        names = _known(kind)
        raise ConfigError(
            f"{key}: there is no {_WORDS[kind]} policy {name!r}{closest(name, names)}; known: {_listed(names)}{_OWN}"
        )
    try:
        return _callable(known[name].load(), name, key)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: {name} cannot be imported: {error}") from error


def _of_kind(policy: object, name: str, key: str, kind: type) -> object:
    missing = _missing(policy, kind)
    if missing:
        raise ConfigError(
            f"{key}: {name} is no {_WORDS[kind]} policy: it lacks {missing}; known: {_listed(_known(kind))}{_OWN}"
        )
    return policy


def _known(kind: type) -> list[str]:
    """Names of the installed policies of a kind."""
    found = []
    for name, point in _entry_points().items():
        try:
            cls = point.load()
        except Exception:  # somebody else's package: it is not what was asked for
            continue
        if not _missing(cls, kind):
            found.append(name)
    return sorted(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none (is kvtier installed?)"


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    """By name. The metadata of everything that is installed is read for it, four times a wrapper without the cache."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _callable(found: Any, name: str, key: str) -> Callable[..., Any]:
    if not inspect.isclass(found):
        raise ConfigError(f"{key}: {name} is {found!r}, not a class")
    return found


def _build(cls: Callable[..., Any], name: str, key: str, **arguments: Any) -> Any:
    try:
        return cls(**arguments)
    except Exception as error:  # a user's class may raise anything; nothing is allocated yet
        raise ConfigError(f"{key}: {name} cannot be built with {arguments or 'no arguments'}: {error}") from error


def _missing(policy: object, protocol: type) -> str:
    wanted = [name for name in vars(protocol) if not name.startswith("_") and callable(getattr(protocol, name))]
    return ", ".join(name for name in wanted if not callable(getattr(policy, name, None)))


class GuardedPolicy(EvictionPolicy):
    """A policy that may be a user's: what it raises is logged, once a method, and costs its advice, never a block."""

    def __init__(self, policy: EvictionPolicy, tier_label: str) -> None:
        self._policy, self._tier = policy, tier_label
        self._logged: set[str] = set()

    def untold(self) -> GuardedPolicy:
        """Another one of the same policy, which was told nothing yet.

        Raises ConfigError: it cannot be copied.
        """
        try:
            return GuardedPolicy(copy.deepcopy(self._policy), self._tier)
        except Exception as error:  # a user's class may raise anything; nothing is allocated yet
            raise ConfigError(
                f"eviction.{self._tier}: {type(self._policy).__name__} cannot be copied: {error}; cached blocks have a "
                "policy of their own, a copy made before it is told anything: define __deepcopy__"
            ) from error

    def _log(self, method: str) -> None:
        if method not in self._logged:
            self._logged.add(method)
            logger.exception("the %s eviction policy's %s raised; going on without it", self._tier, method)

    # A user's own code may raise whatever it likes. Four times the same: a context manager costs more than the call.

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        try:
            self._policy.inserted(block, sequence, index)
        except Exception:  # a user's own code
            self._log("inserted")

    def touched(self, blocks: Iterable[BlockId]) -> None:
        try:
            self._policy.touched(iter(blocks))  # not the block table's own list
        except Exception:  # a user's own code
            self._log("touched")

    def removed(self, block: BlockId) -> None:
        try:
            self._policy.removed(block)
        except Exception:  # a user's own code
            self._log("removed")

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        try:
            names = list(self._policy.victims(num_blocks, evictable))
            if len(names) > num_blocks or len(set(names)) < len(names):
                names = list(dict.fromkeys(names))[:num_blocks]
            return names
        except Exception:  # a user's own code
            self._log("victims")
            return []
