"""The soak: many conversations under small budgets, watched and verified. `kvtier soak`, or this file run as a script.

Each session is a conversation about real text (`documents.py`). In every round each session has one turn, in an order
drawn by lot, so that idle sessions are demoted as far as NVMe, tails too, and come back; with think times, whoever is
due speaks. Three phases:

1. the run: tiered generation, memory and files sampled five times a second, a timeline once a second;
2. the leak check: caches dropped, the wrapper closed, blocks, files and threads counted;
3. verification by the plain model (`verify.py`), after everything was measured.

The document (`SoakReport.document`, with `--json`) is described in docs/soak.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console

from kvtier.benchmarks import checkpoint as checkpoints
from kvtier.benchmarks.checkpoint import Checkpoint, CheckpointFile
from kvtier.benchmarks.conversations import Run
from kvtier.benchmarks.documents import load_text
from kvtier.benchmarks.faults import Injection, load_faults
from kvtier.benchmarks.flatness import check_flatness
from kvtier.benchmarks.leftovers import drop, left_over
from kvtier.benchmarks.machine import machine, versions
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.benchmarks.monitor import EDGES, LiveView, waiting
from kvtier.benchmarks.options import SoakOptions
from kvtier.benchmarks.proof import prove
from kvtier.benchmarks.report import SoakReport, print_summary, session_row, tiers_of, verdict
from kvtier.benchmarks.timeline import Recorder, Row, Timeline, row_of
from kvtier.benchmarks.verify import Verified
from kvtier.benchmarks.watch import Watch, warm_up
from kvtier.config import load_config
from kvtier.config_files import names_source, source_name
from kvtier.errors import ConfigError, KVTierError, UnsupportedError
from kvtier.terminal import sigterm_is_ctrl_c


def run_soak(
    options: SoakOptions,
    console: Console,
    loaded: LoadedModel | None = None,
    *,
    file: CheckpointFile | None = None,
    saved: Checkpoint | None = None,
) -> SoakReport:
    """Run the soak; see the module's docstring for its phases.

    Args:
        console: for progress and the summary; a quiet one for silence.
        loaded: use this model instead of loading `options.model`.
        file: save the run there after each turn. Stays when the run is over: `file.remove()` once the result is kept.
        saved: go on from there; `options` are then `saved.soak_options(…)`, and `file` is where it came from.

    Raises:
        ConfigError, UnsupportedError: bad input, found before or at the first step. Everything is closed again.
        Any other KVTierError while running is a failed soak: it is in the document's `errors`. Ctrl-C and SIGTERM end
        the run or the verification early and still report.

    Cost: the conversations twice, once tiered and once plain, and the first session twice more.
    """
    options.check()
    with sigterm_is_ctrl_c(), contextlib.ExitStack() as stack:
        if file is None:
            spill = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-soak-")))
        else:
            spill = stack.enter_context(file.logits_folder())
        soak = _Soak(options, console, loaded, spill, file, saved)
        soak.converse()
        soak.verify()
    document = soak.document()
    print_summary(console, document)
    return SoakReport(document)


class _Soak:
    """One soak's parts and what was found; the phases are its methods, in order."""

    def __init__(
        self,
        options: SoakOptions,
        console: Console,
        loaded: LoadedModel | None,
        spill: Path,
        file: CheckpointFile | None,
        saved: Checkpoint | None,
    ) -> None:
        self.options, self.console, self.file = options, console, file
        self.config = load_config(saved.config if saved else options.config)  # before the wait for the model
        self.config_name = "" if saved else source_name(options.config)
        faults = (saved.faults or {}).get("settings") if saved else options.faults
        self.fault_settings = None if faults is None else load_faults(faults, self.config)
        self.injection: Injection | None = None
        text = load_text(options.documents)
        torch.set_num_threads(options.threads)
        self.loaded = loaded = loaded or load_model(options.model, console)
        self.run = Run(options, loaded, text, spill)
        self.timeline = Timeline()
        self.verified = Verified()
        self.problems: dict[str, list[str]] = {"budget_violations": [], "leaks": []}
        self.interrupted = False
        self.earlier = saved
        self.identity = {
            **versions(),
            "model": checkpoints.checksum_of_model(loaded.model) if file else "",
            "documents": xxhash.xxh3_64_hexdigest(text.encode()),
        }
        if saved is None:
            self.run.prepare()
        else:
            self._resume(saved)
        self.last_saved: Checkpoint | None = saved

    def _resume(self, saved: Checkpoint) -> None:
        path = self.file.path if self.file else Path("checkpoint")
        for name, began in saved.identity.items():
            if self.identity.get(name) != began:
                what = f"{name} is {self.identity.get(name)!r}, and was {began!r} when the run was begun"
                raise ConfigError(f"--resume-from {path}: {what}: put it back, or start a new run")
        try:
            checkpoints.restore(self.run, saved, path)
            self.timeline = Timeline.from_json(saved.timeline)
            self.verified = checkpoints.verified_from_json(saved.verified)
        except (LookupError, TypeError, AttributeError) as error:  # a file that was changed by hand
            raise ConfigError(f"--resume-from {path}: contradicts itself ({error!r}): start a new run") from error
        self.timeline.mark_resumed(saved.clock_s)

    # -- the run and the leak check -----------------------------------------------------------------------------------

    def converse(self) -> None:
        """Have every turn, then close the wrapper and count what is left."""
        from kvtier import TieredKV

        self.begin_s = time.monotonic()
        with waiting(self.console, "Warming up …"):
            warm_up(self.loaded.model, self.config.prefill_chunk)
        self.watch = Watch(self.loaded.model.device.type == "cpu", self.earlier)
        with names_source(self.config_name):
            self.run.tiered = tiered = TieredKV(self.loaded.model, self.config)
        try:
            if self.fault_settings:
                self.injection = Injection(self.fault_settings, tiered, self.earlier and self.earlier.faults)
            self.stats = self.run.stats()
            folder = self.stats["tiers"]["nvme"].get("folder")
            self._watched(folder)
            self.stats = self.run.stats()
            self.problems["budget_violations"] = self.watch.violations(self.stats)
            leaks = drop(self.run)
        finally:
            if self.injection:
                self.injection.release()
            tiered.close()
        is_temporary = self.config.tiers.nvme is not None and self.config.tiers.nvme.path is None
        leaks += left_over(self.watch.fds, self.watch.threads, Path(folder) if folder and is_temporary else None)
        self.problems["leaks"] = [*(self.earlier.leaks if self.earlier else ()), *leaks]
        self._save_again()

    def _watched(self, folder: str | None) -> None:
        options, run = self.options, self.run
        total_turns = None if options.minutes else options.sessions * options.turns
        self.recorder = Recorder(self.timeline, self._sample)
        self.watch.begin(folder)
        self.view = LiveView(self.console, self.watch.sampler, total_turns, run.tokens, run.clock_s)
        try:
            self.recorder.start()
            with self.view:
                run.go(self.view, self._turn_done)
        except (ConfigError, UnsupportedError):
            raise
        except KVTierError as error:
            run.errors.append(f"{type(error).__name__}: {error}")
        except KeyboardInterrupt:
            self.interrupted = True
            self.console.print("interrupted: closing and reporting; no verification", style="yellow")
        finally:
            run.stop_clock()
            try:
                self.recorder.stop()
            except KVTierError as error:
                run.errors.append(f"{type(error).__name__}: {error}")
            self.watch.sampler.stop()

    def _sample(self) -> Row:
        clock_s, tokens = self.run.clock_s, self.view.tokens
        stats = self.run.stats()
        return row_of(clock_s, stats, self.watch.seen(stats), tokens)

    @property
    def total_s(self) -> float:
        """Seconds without loading, with verification, since the run began."""
        return time.monotonic() - self.begin_s + (self.earlier.total_s if self.earlier else 0.0)

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def _turn_done(self) -> None:
        if self.file is None:
            return
        self.recorder.now()
        self.stats = self.run.stats()
        saved = Checkpoint(
            options=checkpoints.with_named_config(self.options),
            config=self.config.model_dump(mode="json"),
            identity=self.identity,
            clock_s=self.run.clock_s,
            total_s=self.total_s,
            counts={name: getattr(self.run, name) for name in checkpoints.COUNTS},
            conversations=checkpoints.saved_conversations(self.run),
            seats=checkpoints.saved_seats(self.run),
            last_seat=self.run.last_seat,
            next_index=self.run.next_index,
            errors=tuple(self.run.errors),
            budget_violations=tuple(self.watch.violations(self.stats)),
            leaks=self.earlier.leaks if self.earlier else (),
            stats=self.stats,
            peak=self.watch.peak,
            memory_growth_bytes=self.watch.memory_growth_bytes,
            io=self.watch.io,
            timeline=self.timeline.as_json(),
            verified=checkpoints.verified_as_json(self.verified),
            faults=self.injection and self.injection.document(),
        )
        self.file.save(saved)
        self.last_saved = saved

    def _save_again(self) -> None:
        """Save what was found since the last turn. That turn's state stays: an interrupted turn is had again."""
        if self.file and self.last_saved:
            changes = {
                "total_s": self.total_s,
                "errors": tuple(self.run.errors),
                "leaks": tuple(self.problems["leaks"]),
                "verified": checkpoints.verified_as_json(self.verified),
            }
            self.last_saved = self.last_saved.model_copy(update=changes)
            self.file.save(self.last_saved)

    # -- verification -------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Verify what the options ask for, unless the run was interrupted; Ctrl-C ends it early."""
        if not self.interrupted:
            chunk = min(self.config.prefill_chunk, self.stats["max_chunk"])
            self.interrupted = prove(self.run, chunk, self.verified, self.console, self._save_again)

    # -- the result ---------------------------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """Everything that was found, as plain values."""
        run, stats, result = self.run, self.stats, self.verified.total
        timeline = self.timeline.as_json()
        flat = check_flatness(timeline["columns"], timeline["resumed_at_s"], stats["tiers"]["nvme"]["budget_bytes"])
        problems = {"errors": run.errors, **self.problems, "growth": flat.problems}
        return {
            "verdict": verdict(result, run.tokens, [one for found in problems.values() for one in found]),
            "turns": run.turns,
            "tokens": run.tokens,
            "prompt_tokens": run.prompt_tokens,
            **dataclasses.asdict(result),
            **problems,
            "flatness": flat.as_json(),
            "faults": self.injection and self.injection.document(),
            "recomputed_blocks": stats["recomputed_blocks"],
            "tokens_per_s": run.tokens / run.generate_s if run.generate_s else 0.0,
            "decode_tokens_per_s": run.decode_tokens / run.decode_s if run.decode_s else 0.0,
            "peak_memory_bytes": self.watch.peak["memory_bytes"],
            "memory_growth_bytes": max(0, self.watch.memory_growth_bytes),
            "memory_allowed_growth_bytes": self.watch.allowed_growth_bytes(stats),
            "seconds": run.clock_s,
            "generate_s": run.generate_s,
            "decode_s": run.decode_s,
            "think_s": run.think_s,
            "stall_s": stats["stall_s"],
            "bound": stats["bound"],
            "total_seconds": self.total_s,
            "tiers": tiers_of(stats),
            "bytes_moved": {edge: stats["bytes_moved"][edge] for edge in EDGES},
            "nvme_disk_peak_bytes": self.watch.peak["nvme_disk_bytes"],
            "nvme_resident_peak_bytes": self.watch.peak["nvme_resident_bytes"],
            "io": self.watch.io,
            "sessions": [session_row(one, self.verified, self.options.contexts) for one in run.conversations],
            "interrupted": self.interrupted,
            "checkpoint": str(self.file.path) if self.file else None,
            "model": self.loaded.name,
            "options": dataclasses.asdict(self.options) | {"config": str(self.options.config)},
            "command": self.options.command(),
            "config": self.config.model_dump(mode="json"),
            "machine": machine(),
            "timeline": timeline,
        }


if __name__ == "__main__":
    from kvtier.cli import main

    sys.exit(main(["soak", *sys.argv[1:], "--json", "-"]))
