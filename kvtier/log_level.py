"""Which messages of the library KVTIER_LOG asks for.

Apart from log.py, which looks at the variable when it is imported: the command line refuses a wrong value before that,
and says so once.
"""

from __future__ import annotations

import logging

VARIABLE = "KVTIER_LOG"
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


def parse_level(name: str) -> int:
    """The level of the `logging` module that a value of KVTIER_LOG names, in any case.

    Raises:
        ValueError: another value; the message names the variable, the value and the mend.
    """
    level = _LEVELS.get(name.strip().lower())
    if level is None:
        raise ValueError(f"{VARIABLE}={name}: give {', '.join(_LEVELS)}, or leave it unset")
    return int(level)
