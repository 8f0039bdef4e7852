"""Time to the first token of a conversation that is resumed, against computing all of it again.

A first turn of `--context` tokens is computed once, in a session. Then it goes on with 8 new tokens, and 8 are
generated. Rows:

- `gpu`, `cpu`, `nvme`: the session's blocks lie on that tier and on no faster one (nvme: page cache dropped), in the
  process that has used it before;
- `nvme_restart_cold`: a new process, page cache dropped. Wrapping the model, which opens the store, is part of the
  time; loading the model and hashing its weights are told apart;
- `prefill`: the plain model computes the whole transcript, in the fastest of several ways: in one forward, or in chunks
  (DynamicCache, sdpa). All are tried on a quarter of the transcript, the two fastest on the whole, the faster of them
  twice; the least time of all counts.

`cpu_seconds` beside each are those of all threads of the process, which other work on the machine disturbs less.

Rows of kvtier are medians of `--rounds` rounds, in which the cases take turns. A row from disk whose `/proc/self/io`
shows less than 95 % of the conversation's bytes is invalid. Every answer is compared with that of an uninterrupted run
(the same session, never closed) and with the plain model's. Run as `python -m kvtier.benchmarks.resume`.
Cost: about 10 minutes and 2 GB of disk at 8,000 tokens (one thread, SmolLM2); `--quick`, 2,000 tokens, about 3.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.cold import drop_cache, is_cold
from kvtier.benchmarks.command import encode, fill, finish, in_a_new_process, parse
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.benchmarks.residence import put_on
from kvtier.benchmarks.spent import Spent, spent
from kvtier.hf import describe
from kvtier.session import Session
from kvtier.types import Tier

SESSION = "alice"
NUM_ASKED = 8
"""New tokens that the resumed turn computes before its first answer."""
NUM_ANSWERED = 8
PREFILLS: dict[str, dict[str, int]] = {
    "unchunked": {},
    **{f"chunks of {size}": {"prefill_chunk_size": size} for size in (512, 1024, 2048)},
}
TARGETS = {"gpu": 150.0, "nvme_restart_cold": 40.0}
TARGET_CONTEXT = 8000


Restart = Callable[[dict[str, Any], Path], dict[str, Any]]
_RESTART: Restart = functools.partial(in_a_new_process, "resume_child")


def config_for(model: Any, num_tokens: int, folder: Path, **values: Any) -> dict[str, Any]:
    """Budgets that hold the whole conversation on each tier."""
    num_bytes = num_tokens * describe(model, 256).shape.token_bytes
    return {
        "block_tokens": 256,
        "prefill_chunk": 512,
        "tiers": {
            "gpu": {"budget": 2 * num_bytes + (256 << 20)},
            "cpu": {"budget": num_bytes + (64 << 20)},
            "nvme": {"budget": 2 * num_bytes + (2 << 30), "path": str(folder)},
        },
        **values,
    }


def measure_prefill(model: Any, transcript: torch.Tensor) -> dict[str, Any]:
    """The plain model's row: the least time to the first token.

    Ways are compared by CPU seconds: with one thread these are what the clock would say on an idle machine.
    """
    short = transcript[:, : transcript.shape[1] // 4]
    tried = {way: spent(model.generate, short, 1, **how) for way, how in PREFILLS.items()}
    finalists = sorted(tried, key=lambda way: tried[way].first_token_cpu_s)[:2]
    turns = {way: [spent(model.generate, transcript, NUM_ANSWERED, **PREFILLS[way])] for way in finalists}
    best = min(finalists, key=lambda way: turns[way][0].first_token_cpu_s)
    turns[best].append(spent(model.generate, transcript, NUM_ANSWERED, **PREFILLS[best]))
    everything = [turn for each in turns.values() for turn in each]
    times = sorted(turn.first_token_s for turn in everything)
    return {
        "case": "prefill",
        "seconds": times[0],
        "cpu_seconds": min(turn.first_token_cpu_s for turn in everything),
        "spread": [times[0], times[-1]],
        "way": best,
        "ways": {way: [turn.first_token_s for turn in each] for way, each in turns.items()},
        "ways_of_a_quarter": {way: turn.first_token_s for way, turn in tried.items()},
        "sequences": [list(turn.sequence) for turn in everything],
    }


class _Rounds:
    """The cases of kvtier, each measured once a round."""

    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace, restart: Restart) -> None:
        self._folder, self._config, self._options, self._restart = folder, config, options, restart
        self.turns: dict[str, list[dict[str, Any]]] = {}

    def here(self, tiered: TieredKV, chat: Session, transcript: torch.Tensor, tier: Tier) -> None:
        """A turn in this process from one tier; the session is as before afterwards."""
        num_held = len(chat.token_ids)
        put_on(tiered, chat, tier)
        if tier is Tier.NVME:
            drop_cache(Path(self._config["tiers"]["nvme"]["path"]))
        before = tiered.stats()["tokens"]
        turn = spent(chat.generate, transcript, NUM_ANSWERED)
        self._add(tier.label, _of(turn, tokens=tiered.stats()["tokens"] - before))
        chat.cache.crop(num_held - len(chat.token_ids))

    def after_restart(self, kept: Path, transcript: torch.Tensor) -> None:
        """A turn in a process of its own, on a copy of what the first turn left."""
        copy = self._folder / "copy"
        shutil.copytree(kept, copy)
        tiers = self._config["tiers"]
        config = {**self._config, "tiers": {**tiers, "nvme": {**tiers["nvme"], "path": str(copy)}}}
        given = {
            "model": self._options.model,
            "threads": self._options.threads,
            "config": config,
            "session": SESSION,
            "transcript": transcript[0].tolist(),
            "num_new": NUM_ANSWERED,
        }
        self._add("nvme_restart_cold", self._restart(given, self._folder))
        shutil.rmtree(copy)

    def _add(self, case: str, turn: dict[str, Any]) -> None:
        self.turns.setdefault(case, []).append(turn)


def _of(turn: Spent, *, tokens: int) -> dict[str, Any]:
    return {
        "seconds": turn.first_token_s,
        "cpu_seconds": turn.first_token_cpu_s,
        "read_bytes": turn.first_token_read_bytes,
        "sequence": list(turn.sequence),
        "tokens": tokens,
    }


def to_row(
    case: str, turns: list[dict[str, Any]], *, prefill: dict[str, Any], payload_bytes: int, expected: list[int]
) -> dict[str, Any]:
    """One case's row: medians over its turns, and what of them is proven.

    Args:
        payload_bytes: KV of the conversation; a case from disk is valid if that much was read from there every time.
        expected: prompt and answer of the uninterrupted run.
    """
    times = sorted(turn["seconds"] for turn in turns)
    disk_frac = min(turn["read_bytes"] for turn in turns) / payload_bytes
    seconds = statistics.median(times)
    cpu_seconds = statistics.median(turn["cpu_seconds"] for turn in turns)
    row = {
        "case": case,
        "seconds": seconds,
        "ratio_to_prefill": prefill["seconds"] / seconds,
        "cpu_seconds": cpu_seconds,
        "cpu_ratio_to_prefill": prefill["cpu_seconds"] / cpu_seconds,
        "spread": [times[0], times[-1]],
        "disk_frac": disk_frac,
        "is_valid": not case.startswith("nvme") or is_cold(min(turn["read_bytes"] for turn in turns), payload_bytes),
        "tokens_computed": max(turn["tokens"] for turn in turns),
        "same_as_uninterrupted": all(turn["sequence"] == expected for turn in turns),
        "same_as_plain": all(turn["sequence"] in prefill["sequences"] for turn in turns),
        "target_ratio": TARGETS.get(case),
    }
    apart = [name for name in ("open_s", "hash_s", "load_s") if name in turns[0]]
    return row | {name: statistics.median(turn[name] for turn in turns) for name in apart}


def run(
    loaded: LoadedModel,
    options: argparse.Namespace,
    folder: Path,
    console: Console,
    restart: Restart = _RESTART,
) -> dict[str, Any]:
    """Everything measured, as the JSON document has it.

    Args:
        options: `context`, `rounds`, `threads` and `model`, as on the command line.
        folder: an empty one on a disk.
    """
    model, num_held = loaded.model, options.context
    ids = encode(loaded, num_held + NUM_ASKED)
    config = config_for(model, num_held + NUM_ASKED + NUM_ANSWERED, folder / "first")
    with TieredKV(model, config) as tiered:
        chat = tiered.session(SESSION)
        with console.status("the first turn"):
            started_s = time.perf_counter()
            out = chat.generate(ids[:, :num_held], max_new_tokens=1, do_sample=False)
            first_turn_s = time.perf_counter() - started_s
        # Its answer is one token, and not held: it is the first of the new ones.
        transcript = torch.cat([out, ids[:, num_held : num_held + NUM_ASKED - 1]], dim=1)
        twin = chat.fork("uninterrupted")
        expected = list(spent(twin.generate, transcript, NUM_ANSWERED).sequence)
        twin.delete()
        payload_bytes = num_held * tiered.stats()["block_bytes"] // tiered.stats()["block_tokens"]
    with console.status("plain prefill"):
        prefill = measure_prefill(model, transcript)
    kept = folder / "kept"
    shutil.copytree(folder / "first", kept)
    rounds = _Rounds(folder, config, options, restart)
    with TieredKV(model, config) as tiered:
        chat = tiered.session(SESSION)
        for number in range(options.rounds):
            with console.status(f"round {number + 1} of {options.rounds}"):
                for tier in Tier:
                    rounds.here(tiered, chat, transcript, tier)
                rounds.after_restart(kept, transcript)
        io = tiered.stats()["tiers"]["nvme"]["io_reason"]
    rows = [
        to_row(case, turns, prefill=prefill, payload_bytes=payload_bytes, expected=expected)
        for case, turns in rounds.turns.items()
    ]
    for row in rows if num_held < TARGET_CONTEXT else ():
        row["target_ratio"] = None
    sequences = prefill.pop("sequences")
    prefill |= {"ratio_to_prefill": 1.0, "cpu_ratio_to_prefill": 1.0}
    prefill |= {"is_valid": True, "same_as_uninterrupted": expected in sequences}
    return {
        "benchmark": "resume",
        "model": loaded.name,
        "context": num_held,
        "new_tokens": NUM_ASKED,
        "payload_bytes": payload_bytes,
        "first_turn_s": first_turn_s,
        "io": io,
        "rows": [*rows, prefill],
    }


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    title = f"{document['model']}: {document['context']:,} tokens resumed with {document['new_tokens']} new ones"
    rows = []
    for row in document["rows"]:
        missed = row["ratio_to_prefill"] < (row.get("target_ratio") or 0)
        notes = [] if row["is_valid"] else ["INVALID: not cold"]
        notes += [] if row["same_as_uninterrupted"] else ["OTHER TOKENS than uninterrupted"]
        notes += [] if row.get("same_as_plain", True) else ["other tokens than plain"]
        notes += [row["way"]] if "way" in row else []
        notes += [f"{row[name]:.2f} s {what}" for name, what in _APART.items() if name in row]
        rows.append((
            row["case"], f"{row['seconds']:.3f}", "{:.3f} … {:.3f}".format(*row["spread"]),
            f"{row['ratio_to_prefill']:.0f}" + (" <" if missed else ""),
            f"{row['cpu_seconds']:.3f}", f"{row['cpu_ratio_to_prefill']:.0f}",
            _percent(row.get("disk_frac")), "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "s to 1st token", "spread", "times faster", "cpu s", "cpu times", "from disk", "")
    return fill(Table(title=title), columns, rows)


_APART = {"open_s": "of it opening", "hash_s": "hashing, apart", "load_s": "loading, apart"}


def _percent(frac: float | None) -> str:
    return "" if frac is None else f"{frac:.0%}"


def main() -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8000, help="tokens held when the conversation is resumed")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--quick", action="store_true", help="2,000 tokens")
    options = parse(parser)
    if options.quick:
        options.context = 2000
    if options.rounds < 5:
        parser.error("--rounds: a median of fewer than 5 is noise")
    load_before = os.getloadavg()[0]
    console = Console(stderr=True)
    loaded = load_model(options.model, console)
    with tempfile.TemporaryDirectory(prefix="kvtier-resume-", dir=options.folder) as name:
        document = run(loaded, options, Path(name), console)
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
