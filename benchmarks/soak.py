"""The soak: many conversations under small budgets, watched and verified. `kvtier soak`, or this file run as a script.

Each session is a conversation about real text (`documents.py`). In every round each session has one turn, in an order
drawn by lot, so that idle sessions are demoted as far as NVMe, tails too, and come back. Three phases:

1. the run: tiered generation, memory and files sampled five times a second;
2. the leak check: caches dropped, the wrapper closed, blocks, files and threads counted;
3. verification by the plain model (`verify.py`), after everything was measured.

The document (`SoakReport.document`, with `--json`) has: `verdict`, `turns`, `tokens` (generated), `prompt_tokens`
(read), what was verified (the fields of `verify.Verification`), `errors`, `budget_violations`, `leaks`,
`recomputed_blocks`, `tokens_per_s` (generated tokens per second of generation, reading included),
`decode_tokens_per_s` (after each answer's first token), `peak_memory_bytes` (RssAnon + RssShmem),
`memory_growth_bytes` (above the loaded and warmed-up model), `seconds` (the run, without loading and verification),
`total_seconds` (with verification), `tiers`, `bytes_moved`, `sessions`, `io`, `nvme_disk_peak_bytes`,
`nvme_resident_peak_bytes`, `config`, `options`, `machine`, `interrupted`.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvtier.benchmarks.conversations import Run, SoakOptions
from kvtier.benchmarks.documents import Fact, load_text
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.benchmarks.monitor import EDGES, LiveView, Sampler, bar, waiting
from kvtier.benchmarks.report import (
    SoakReport,
    budget_violations,
    machine,
    print_summary,
    tiers_of,
    verdict,
)
from kvtier.benchmarks.verify import SessionRecord, Verification, judge_answer, verify
from kvtier.config import load_config
from kvtier.errors import ConfigError, KVTierError, UnsupportedError
from kvtier.system import io_counters, num_threads, open_fds, process_memory_bytes


def run_soak(options: SoakOptions, console: Console, loaded: LoadedModel | None = None) -> SoakReport:
    """Run the soak; see the module's docstring for its phases and the document's fields.

    Args:
        console: for progress and the summary; a quiet one for silence.
        loaded: use this model instead of loading `options.model`.

    Raises:
        ConfigError, UnsupportedError: bad input, found before or at the first step. Everything is closed again.
        Any other KVTierError while running is a failed soak: it is in the document's `errors`. Ctrl-C ends the run or
        the verification early and still reports.

    Cost: the conversations twice, once tiered and once plain, and the first session twice more.
    """
    options.check()
    config = load_config(options.config)  # before the wait for the model
    text = load_text(options.documents)
    torch.set_num_threads(options.threads)
    loaded = loaded or load_model(options.model, console)
    from kvtier import TieredKV

    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as spill:
        run = Run(options, loaded, text, Path(spill))
        run.prepare(0)
        with waiting(console, "Warming up …"):
            _warm_up(loaded.model, config.prefill_chunk)
        before: dict[str, Any] = {
            "memory": process_memory_bytes(),
            "fds": open_fds(),
            "threads": num_threads(),
            "io": io_counters(),
        }
        cuda_before = _cuda_peak_bytes(reset=True)
        run.tiered = tiered = TieredKV(loaded.model, config)
        interrupted = False
        try:
            folder = tiered.stats()["tiers"]["nvme"].get("folder")
            sampler = Sampler(Path(folder) if folder else None)
            total_turns = None if options.minutes else options.sessions * options.turns
            sampler.start()
            try:
                with LiveView(console, sampler, total_turns) as view:
                    run.go(view)
            except (ConfigError, UnsupportedError):
                raise
            except KVTierError as error:
                run.errors.append(f"{type(error).__name__}: {error}")
            except KeyboardInterrupt:
                interrupted = True
                console.print("interrupted: closing and reporting; no verification", style="yellow")
            finally:
                sampler.stop()
            stats = tiered.stats()
            cuda_growth = _cuda_peak_bytes() - cuda_before
            leaks = _drop(run)
        finally:
            tiered.close()
        is_temporary = config.tiers.nvme is not None and config.tiers.nvme.path is None
        leaks += _left_over(before, Path(folder) if folder and is_temporary else None)
        io = {name: value - before["io"].get(name, 0) for name, value in io_counters().items()}
        seconds = time.monotonic() - begin_s
        result = Verification()
        if not interrupted:
            interrupted = _verify(run, min(config.prefill_chunk, stats["max_chunk"]), result, console)
    violations = budget_violations(
        stats, sampler.peak, before["memory"], loaded.model.device.type == "cpu", cuda_growth
    )
    document = {
        "verdict": verdict(result, run.tokens, run.errors + violations + leaks),
        "turns": run.turns,
        "tokens": run.tokens,
        "prompt_tokens": run.prompt_tokens,
        **dataclasses.asdict(result),
        "errors": run.errors,
        "budget_violations": violations,
        "leaks": leaks,
        "recomputed_blocks": stats["recomputed_blocks"],
        "tokens_per_s": run.tokens / run.generate_s if run.generate_s else 0.0,
        "decode_tokens_per_s": run.decode_tokens / run.decode_s if run.decode_s else 0.0,
        "peak_memory_bytes": sampler.peak["memory_bytes"],
        "memory_growth_bytes": max(0, sampler.peak["memory_bytes"] - before["memory"]),
        "seconds": seconds,
        "total_seconds": time.monotonic() - begin_s,
        "tiers": tiers_of(stats),
        "bytes_moved": {edge: stats["bytes_moved"][edge] for edge in EDGES},
        "nvme_disk_peak_bytes": sampler.peak["nvme_disk_bytes"],
        "nvme_resident_peak_bytes": sampler.peak["nvme_resident_bytes"],
        "io": io,
        "sessions": [
            {
                "name": conversation.record.name,
                "tokens": len(conversation.record.transcript),
                "turns": len(conversation.record.turns),
                "nvme_read_bytes": conversation.nvme_read_bytes,
            }
            for conversation in run.conversations
        ],
        "interrupted": interrupted,
        "model": loaded.name,
        "options": dataclasses.asdict(options) | {"config": str(options.config)},
        "config": config.model_dump(mode="json"),
        "machine": machine(),
    }
    print_summary(console, document)
    return SoakReport(document)


def _warm_up(model: Any, num_tokens: int) -> None:
    """One plain prefill and two tokens, so that threads, buffers and lazily imported code are in the baseline."""
    limit = getattr(model.config, "max_position_embeddings", None) or num_tokens + 2
    ids = torch.zeros(1, max(1, min(num_tokens, limit - 2)), dtype=torch.long, device=model.device)
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    gc.collect()


def _cuda_peak_bytes(*, reset: bool = False) -> int:
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.max_memory_allocated())


def _drop(run: Run) -> list[str]:
    """Drop every cache; name what the runtime still holds then."""
    for conversation in run.conversations:
        conversation.cache = None
    gc.collect()
    try:
        run.tiered.check_integrity()
    except KVTierError as error:
        run.errors.append(f"{type(error).__name__}: {error}")
    stats = run.tiered.stats()
    return [
        f"{stats[name]} {name} left after all caches were dropped" for name in ("blocks", "sequences") if stats[name]
    ]


def _left_over(before: dict[str, Any], folder: Path | None) -> list[str]:
    """Name what is left of a closed runtime: its temporary folder, open files, threads."""
    deadline_s = time.monotonic() + 3.0
    while (open_fds() > before["fds"] or num_threads() > before["threads"]) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # threads that were told to end may need a moment
    found = []
    if folder and folder.exists():
        found.append(f"the temporary nvme folder {folder} is still there")
    if open_fds() > before["fds"]:
        found.append(f"{open_fds() - before['fds']} more open files than before")
    if num_threads() > before["threads"]:
        found.append(f"{num_threads() - before['threads']} more threads than before")
    return found


def _verify(run: Run, chunk: int, result: Verification, console: Console) -> bool:
    """Verify what the options ask for; True if Ctrl-C ended it early."""
    facts = {conversation.plan.name: conversation.plan.facts for conversation in run.conversations}
    all_facts = [fact for own in facts.values() for fact in own]
    records = [conversation.record for conversation in run.conversations if conversation.record.turns]
    chosen = {"all": len(records), "sample": -(-len(records) // 4), "none": 0}[run.options.verify]
    picked = random.Random(run.options.seed).sample(records, chosen)
    checked = [record for record in records if record in picked]
    # The first session is read twice more, for the tolerance.
    total = sum(len(record.transcript) for record in [*checked, *checked[:1] * 2])
    try:
        with bar(console, "Verifying with the plain model", total) as advance:
            verify(
                run.loaded.model,
                checked,
                chunk=chunk,
                tokenizer=run.loaded.tokenizer,
                all_facts=all_facts,
                own_facts=facts.__getitem__,
                result=result,
                advance=advance,
            )
    except KeyboardInterrupt:
        return True
    for record in records:
        if record not in checked:
            _judge_unverified(record, all_facts, facts[record.name], run.loaded.tokenizer, result)
    return False


def _judge_unverified(
    record: SessionRecord, all_facts: list[Fact], own: tuple[Fact, ...], tokenizer: Any, result: Verification
) -> None:
    foreign = [fact.value for fact in all_facts if fact not in own]
    for turn in record.turns:
        if turn.fact:
            judge_answer(result, turn.fact, tokenizer.decode(list(turn.answer)), foreign, None)


if __name__ == "__main__":
    from kvtier.cli import main

    sys.exit(main(["soak", *sys.argv[1:], "--json", "-"]))
