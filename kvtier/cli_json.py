"""`--json` prints to standard output; of `kvtier soak` alone it takes a file. What to type where that was mistaken."""

from __future__ import annotations

import shlex
from itertools import pairwise


def json_mend(words: list[str], message: str) -> str:
    """What to add to the message about wrong options; empty where they were wrong for another reason.

    Args:
        words: the command line, without `kvtier`.
    """
    if words[:1] == ["soak"]:
        return ". Mend: --json FILE, or --json - for standard output" if "'--json' requires" in message else ""
    for number, (word, after) in enumerate(pairwise([*words, "-"])):
        if word.startswith("--json=") and "'--json' does not take" in message:
            file, rest = word.partition("=")[2], words[number + 1 :]
        elif word == "--json" and not after.startswith("-") and "extra argument" in message:
            file, rest = after, words[number + 2 :]
        else:
            continue
        return f". Mend: {shlex.join(['kvtier', *words[:number], *rest, '--json'])} > {shlex.quote(file)}"
    return ""
