"""A soak's document in words: the verdict, one paragraph, and the key figures."""

from __future__ import annotations

from typing import Any

from kvtier.benchmarks.flatness import MIN_SECONDS
from kvtier.benchmarks.monitor import EDGES, TIERS
from kvtier.benchmarks.report import PROBLEMS, faults_line, num_injected
from kvtier.size import size_words

Document = dict[str, Any]


def duration(seconds: float) -> str:
    """Seconds for people: `8 s`, `2 min 05 s`, `1 h 02 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(number: int, thing: str) -> str:
    """`1 turn`, `1,200 turns`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def headline(document: Document) -> str:
    """Two words or three: pass, fail, …"""
    if document["interrupted"]:
        return "Fail, interrupted" if document["verdict"] == "fail" else "Interrupted"
    return {"pass": "Pass", "fail": "Fail", "unverified": "Not fully verified"}[str(document["verdict"])]


def paragraph(document: Document) -> str:
    """What ran, what went through NVMe, whether every token is right, whether it stayed in bounds, what was slow."""
    faults = [faults_line(document)] if document["faults"] else []
    parts = [_what_ran(document), _nvme(document), *faults, _tokens(document), _bounds(document), _slowest(document)]
    return " ".join(parts)


def problems(document: Document) -> list[str]:
    """Every reason to fail, as a sentence."""
    found = [problem for kind in PROBLEMS for problem in document[kind]]
    for count, words in (
        ("differing_tokens", "generated tokens are not what the plain model chooses"),
        ("steps_over_tolerance", "tokens have logits further from the plain model's than the tolerance"),
        ("non_finite_steps", "tokens have logits that cannot be compared, as they are not numbers"),
        ("wrong_facts", "answers are wrong where the plain model's are right, or hold another session's fact"),
    ):
        if document[count]:
            found.append(f"{document[count]:,} {words}")
    return found


def key_figures(document: Document) -> list[tuple[str, str]]:
    """Names and values for a small table."""
    tiers, faults = document["tiers"], document["faults"]
    return [
        ("Turns, sessions", f"{counted(document['turns'], 'turn')} of {counted(_num_sessions(document), 'session')}"),
        ("Tokens generated", f"{document['tokens']:,}"),
        ("Prompt tokens read", f"{document['prompt_tokens']:,}"),
        ("Tokens verified", f"{document['verified_tokens']:,} of {document['tokens']:,}"),
        ("Different tokens", f"{document['differing_tokens']:,} (near ties: {document['near_ties']:,})"),
        ("Largest logit difference", f"{document['max_logit_diff']:.1e} (allowed: {document['tolerance']:.1e})"),
        ("Planted facts answered", f"{document['facts_right']:,} of {document['facts_asked']:,}; "
                                   f"wrong by kvtier: {document['wrong_facts']:,}"),
        ("Tokens/s while generating", f"{document['tokens_per_s']:.1f} with reading, "
                                      f"{document['decode_tokens_per_s']:.1f} after each first token"),
        ("Duration", f"{duration(document['seconds'])}, {duration(document['total_seconds'])} with verification"),
        ("Waited for KV (stall)", f"{duration(document['stall_s'])} ({_share(document, 'stall_s')})"),
        ("Share of the bound", _reached(document["bound"])),
        ("Memory above the loaded model", f"{size_words(document['memory_growth_bytes'])} of "
                                          f"{size_words(document['memory_allowed_growth_bytes'])}"),
        ("Only on NVMe at most", size_words(tiers["nvme"].get("only_copy_peak_bytes", 0))),
        ("NVMe folder at most (du)", f"{size_words(document['nvme_disk_peak_bytes'])} of "
                                     f"{size_words(_budget(document, 'nvme'))}"),
        *([("Faults injected", f"{num_injected(document):,}")] if faults else []),
        ("Blocks recomputed", f"{document['recomputed_blocks']:,}"),
    ]  # fmt: skip


def _reached(bound: dict[str, Any]) -> str:
    if not bound["steps"]:
        return "no step was taken"
    return f"{bound['bound_frac']:.0%}; {bound['binding'].replace('_to_', ' to ')} binds"


def _num_sessions(document: Document) -> int:
    return sum(1 for session in document["sessions"] if session["turns"])


def _budget(document: Document, tier: str) -> int:
    return int(document["tiers"][tier]["budget_bytes"])


def _share(document: Document, name: str) -> str:
    return f"{document[name] / document['seconds']:.0%} of the time" if document["seconds"] else "no time"


def _what_ran(document: Document) -> str:
    budgets = ", ".join(f"{tier} {size_words(_budget(document, tier))}" for tier in TIERS if _budget(document, tier))
    turns, sessions = counted(document["turns"], "turn"), counted(_num_sessions(document), "session")
    text = (
        f"{document['model']} had {turns} in {sessions}, {document['options']['sessions']} at a time, in "
        f"{duration(document['seconds'])}: it read {document['prompt_tokens']:,} prompt tokens and generated "
        f"{document['tokens']:,}, with a KV cache of {budgets}."
    )
    resumed = len(document["timeline"]["resumed_at_s"])
    if resumed:
        text += f" The run was interrupted and resumed {'once' if resumed == 1 else f'{resumed} times'}."
    if document["errors"]:
        text += " An error came up: see below."
    if document["interrupted"]:
        text += " It was interrupted before its end, so this report covers what was done until then."
    return text


def _nvme(document: Document) -> str:
    if not _budget(document, "nvme"):
        return "There is no NVMe tier in this config."
    moved = document["bytes_moved"]
    written = sum(moved[edge] for edge in EDGES if edge.endswith("to_nvme"))
    read = sum(moved[edge] for edge in EDGES if edge.startswith("nvme_to"))
    only = document["tiers"]["nvme"].get("only_copy_peak_bytes", 0)
    if not only:
        return "Nothing had to live on NVMe: these conversations fit the budgets, so this run says little about it."
    return (
        f"{size_words(written)} of KV were written to NVMe and {size_words(read)} read back; at most "
        f"{size_words(only)} lay there and nowhere else."
    )


def _tokens(document: Document) -> str:
    verified, tokens, differing = (document[name] for name in ("verified_tokens", "tokens", "differing_tokens"))
    if not verified:
        return "No token was verified."
    every = f"Every one of the {tokens:,} generated tokens" if verified == tokens else (
        f"Only {verified:,} of the {tokens:,} generated tokens were verified. Each of those"
    )  # fmt: skip
    if differing or document["steps_over_tolerance"] or document["non_finite_steps"]:
        wrong = max(differing, document["steps_over_tolerance"] + document["non_finite_steps"])
        return f"Of {verified:,} tokens compared with the plain cache, {wrong:,} are wrong: see below."
    ties = document["near_ties"]
    tie_words = f", {ties:,} of them near ties" if ties else ""
    return (
        f"{every} equals the plain cache's choice{tie_words}; the largest difference of a logit is "
        f"{document['max_logit_diff']:.1e}, where {document['tolerance']:.1e} is allowed."
    )


def _bounds(document: Document) -> str:
    if document["budget_violations"]:
        text = "A budget was exceeded: see below."
    else:
        text = (
            f"Every tier, memory ({size_words(document['memory_growth_bytes'])} above the loaded model at most, "
            f"{size_words(document['memory_allowed_growth_bytes'])} allowed) and the NVMe folder stayed within their "
            "budgets."
        )
    series, half_s = document["flatness"]["series"], document["flatness"]["seconds"]
    if document["growth"]:
        text += " Something grew over the second half of the run: see below."
    elif series:
        memory, files, disk = series
        text += (
            f" Over the last {duration(half_s)} memory changed by {size_words(memory['growth'])} (allowed: growth of "
            f"{size_words(memory['tolerance'])}), open files by {round(files['growth']):+d} "
            f"({files['tolerance']:.0f}) and the NVMe folder by "
            f"{size_words(disk['growth'])} ({size_words(disk['tolerance'])}): flat."
        )
    else:
        text += f" The run was too short to say whether they stay flat: that takes {MIN_SECONDS / 60:.0f} minutes."
    if document["leaks"]:
        return text + " Something was left behind when it was closed: see below."
    return text + " Nothing was left behind when it was closed."


def _slowest(document: Document) -> str:
    seconds, generate_s = document["seconds"], document["generate_s"]
    if not seconds:
        return ""
    parts = {
        "reading prompts": generate_s - document["decode_s"],
        "generating token by token": document["decode_s"],
        "waiting for sessions that think": document["think_s"],
        "everything between turns (planning, checkpoints, checks)": seconds - generate_s - document["think_s"],
    }
    name, slowest_s = max(parts.items(), key=lambda part: part[1])
    stall = f"Steps waited {duration(document['stall_s'])} for KV from lower tiers ({_share(document, 'stall_s')})."
    return f"The slowest part was {name}: {duration(slowest_s)} ({slowest_s / seconds:.0%} of the time). {stall}"
