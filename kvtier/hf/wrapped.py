"""A method of a wrapped model, and the process that wrapped it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

from kvtier.errors import UnsupportedError


class WrappedMethod:
    """Stands as an instance attribute in front of a model's own method; `__wrapped__` is that method.

    Refuses to be copied or pickled with the model: the copy would compute with the original's weights.
    """

    def __init__(self, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        self._replacement = replacement
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replacement(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError("a wrapped model cannot be copied: close() its TieredKV first, copy, and wrap again")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("a wrapped model cannot be pickled: close() its TieredKV first")


def check_process(owner_pid: int) -> None:
    """Raise UnsupportedError in a forked child: threads do not survive a fork, and the files belong to the parent."""
    if os.getpid() != owner_pid:
        raise UnsupportedError(f"this TieredKV belongs to process {owner_pid}: wrap the model anew in a forked child")
