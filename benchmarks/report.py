"""The soak's result: one JSON document, its verdict and exit status, and the summary for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.conversations import Conversation
from kvtier.benchmarks.monitor import moved_line, tier_table
from kvtier.benchmarks.reached import COLUMNS, bound_line, edge_rows, stalls_line
from kvtier.benchmarks.verify import Verification, Verified
from kvtier.size import size_words
from kvtier.terminal import print_table

MEMORY_SLACK_BYTES = 150 << 20
"""What a run may take beyond its gpu and cpu budgets: activations, logits of one answer, heap that was not returned."""
PROBLEMS = ("errors", "budget_violations", "leaks", "growth")
"""The document's lists of sentences that each make the verdict `fail`."""
EXIT_PASS, EXIT_FAIL, EXIT_UNVERIFIED, EXIT_INTERRUPTED = 0, 1, 3, 130


@dataclass(frozen=True)
class SoakReport:
    """`document` is the JSON document; see `run_soak` for its fields."""

    document: dict[str, Any]

    @property
    def exit_status(self) -> int:
        """0 pass; 1 a token differs, a budget is exceeded, something leaks or fails; 3 unverified; 130 interrupted."""
        if self.document["interrupted"]:
            return EXIT_INTERRUPTED
        return {"pass": EXIT_PASS, "fail": EXIT_FAIL, "unverified": EXIT_UNVERIFIED}[self.document["verdict"]]


def verdict(verification: Verification, tokens: int, problems: list[str]) -> str:
    """`fail` for any difference or problem; `pass` needs every generated token verified, and at least one."""
    if verification.failed or problems:
        return "fail"
    return "pass" if tokens and verification.verified_tokens == tokens else "unverified"


def tiers_of(stats: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tiers' part of `TieredKV.stats()`, without what is no plain JSON."""
    return {
        name: {key: value for key, value in tier.items() if isinstance(value, int | float | str)}
        for name, tier in stats["tiers"].items()
    }


def memory_allowed_bytes(stats: dict[str, Any], gpu_tier_in_memory: bool) -> int:
    """What memory may grow by: the budgets that lie in it, and the slack."""
    tiers = stats["tiers"]
    gpu_bytes: int = tiers["gpu"]["budget_bytes"] if gpu_tier_in_memory else 0
    cpu_bytes: int = tiers["cpu"]["budget_bytes"]
    return gpu_bytes + cpu_bytes + MEMORY_SLACK_BYTES


def session_row(conversation: Conversation, verified: Verified, contexts: tuple[int, ...]) -> dict[str, Any]:
    """What one session had, and what of it was verified."""
    name = conversation.record.name
    own = verified.sessions.get(name, Verification())
    return {
        "name": name,
        "context": contexts[conversation.index % len(contexts)],
        "tokens": len(conversation.record.transcript),
        "turns": len(conversation.record.turns),
        "generated_tokens": conversation.record.num_steps,
        "nvme_read_bytes": conversation.nvme_read_bytes,
        **{field: value for field, value in vars(own).items() if field != "plain_chunk_diff"},
    }


def budget_violations(
    stats: dict[str, Any], peak: dict[str, int], baseline_bytes: int, gpu_tier_in_memory: bool, cuda_growth_bytes: int
) -> list[str]:
    """Every budget that was exceeded, as sentences; empty when all held.

    Args:
        stats: `TieredKV.stats()` at the end of the run; `peak_bytes` is the most that a tier ever used.
        peak: the sampler's peaks.
        baseline_bytes: RssAnon + RssShmem of the loaded model after a warm-up.
        gpu_tier_in_memory: whether the gpu tier lies in host memory (no CUDA device), and so counts there.
        cuda_growth_bytes: the most that CUDA's allocator held above its warm-up; 0 without CUDA.
    """
    tiers = stats["tiers"]
    found = [
        f"{name} tier used {max(tier['used_bytes'], tier['peak_bytes'])} bytes of a budget of {tier['budget_bytes']}"
        for name, tier in tiers.items()
        if max(tier["used_bytes"], tier["peak_bytes"]) > tier["budget_bytes"]
    ]
    limit = memory_allowed_bytes(stats, gpu_tier_in_memory)
    growth = peak["memory_bytes"] - baseline_bytes
    if growth > limit:
        found.append(f"memory grew by {growth} bytes, {limit} allowed (budgets + {size_words(MEMORY_SLACK_BYTES)})")
    if cuda_growth_bytes > tiers["gpu"]["budget_bytes"] + MEMORY_SLACK_BYTES:
        found.append(f"CUDA memory grew by {cuda_growth_bytes} bytes, budget {tiers['gpu']['budget_bytes']} + slack")
    if peak["nvme_disk_bytes"] > tiers["nvme"]["budget_bytes"]:
        found.append(
            f"the nvme folder took {peak['nvme_disk_bytes']} bytes, budget {tiers['nvme']['budget_bytes']} bytes"
        )
    return found


def num_injected(document: dict[str, Any]) -> int:
    """Faults that were injected, of all kinds; of a run with `--faults`."""
    return sum(document["faults"]["injected"].values())


def faults_line(document: dict[str, Any]) -> str:
    """What was injected into a run with `--faults`, and what came of it."""
    injected = {name: count for name, count in document["faults"]["injected"].items() if count}
    kinds = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in injected.items())
    wrong = max(document["differing_tokens"], document["steps_over_tolerance"] + document["non_finite_steps"])
    line = (
        f"{num_injected(document):,} faults were injected into the nvme tier{f' ({kinds})' if kinds else ''}, "
        f"{document['recomputed_blocks']:,} blocks recomputed, {wrong:,} wrong tokens of "
        f"{document['verified_tokens']:,} verified."
    )
    if "silent_bit_flip" in injected:
        line += " Silent bit flips are the negative control: nothing can notice them but the verification, which must."
    return line


def print_summary(console: Console, document: dict[str, Any]) -> None:
    """The report for people: the tiers, what moved, the bound, what was verified, and every problem."""
    print_table(tier_table(document["tiers"]), console)
    console.print(moved_line(document["bytes_moved"]))
    _print_bound(console, document["bound"])
    console.print(
        f"{document['turns']} turns, {document['tokens']} tokens generated at {document['tokens_per_s']:.1f} tokens/s, "
        f"{document['recomputed_blocks']} blocks recomputed, {document['seconds']:.0f} s in all"
    )
    if document["faults"]:
        console.print(faults_line(document))
    console.print(
        f"memory: {size_words(document['peak_memory_bytes'])} at most, "
        f"{size_words(document['memory_growth_bytes'])} above the loaded model; "
        f"{size_words(document['tiers']['nvme']['only_copy_peak_bytes'])} lay on nvme alone at most"
    )
    console.print(
        f"verified {document['verified_tokens']} of {document['tokens']} tokens: {document['differing_tokens']} "
        f"differ, {document['near_ties']} near ties, largest logit difference {document['max_logit_diff']:.2e} "
        f"(tolerance {document['tolerance']:.2e}); facts: {document['facts_right']} of {document['facts_asked']} "
        f"right, {document['wrong_facts']} wrong by kvtier"
    )
    if not document["tiers"]["nvme"]["only_copy_peak_bytes"]:
        console.print(
            "nothing lay on nvme alone: the budgets were large enough for these conversations. Give more or longer "
            "ones (--sessions, --context), or a config with smaller budgets",
            style="yellow",
        )
    if document["faults"] and not num_injected(document):
        console.print(
            "no fault was injected: the rates are too low for so few reads and writes. Raise them, or give more turns",
            style="yellow",
        )
    for kind in PROBLEMS:
        for problem in document[kind]:
            console.print(f"{kind.replace('_', ' ')}: {problem}", style="red", markup=False)
    style = {"pass": "bold green", "fail": "bold red", "unverified": "bold yellow"}[document["verdict"]]
    note = " (interrupted)" if document["interrupted"] else ""
    console.print(f"verdict: {document['verdict']}{note}", style=style)


def _print_bound(console: Console, bound: dict[str, Any]) -> None:
    if rows := edge_rows(bound):
        table = Table(*COLUMNS)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(bound_line(bound))
    console.print(stalls_line(bound))
