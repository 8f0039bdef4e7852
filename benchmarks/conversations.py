"""The soak's conversations: its options, who speaks when, and one turn after another through the tiered model."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtier.benchmarks.documents import SessionPlan, make_session_plan
from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.monitor import LiveView
from kvtier.benchmarks.verify import SessionRecord, TurnRecord, write_logits
from kvtier.errors import ConfigError


@dataclass(frozen=True)
class SoakOptions:
    """What to run. `contexts` are tokens, dealt to the sessions in turn; `config` is whatever `load_config` takes.

    With `minutes`, sessions that have had their `turns` are replaced by new ones until the time is up.
    `verify`: all, sample (a quarter of the sessions, at least one) or none.
    """

    config: Any = "quickstart"
    model: str | None = None
    documents: str | None = None
    sessions: int = 4
    contexts: tuple[int, ...] = (1500,)
    turns: int = 3
    minutes: float | None = None
    max_new_tokens: int = 24
    seed: int = 0
    verify: str = "all"
    threads: int = 1

    def check(self) -> None:
        """Raise ConfigError for a value that cannot be used."""
        for name in ("sessions", "turns", "max_new_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: give a number of at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"--context {','.join(map(str, self.contexts))}: give token counts of at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: give more than 0")
        if self.verify not in ("all", "sample", "none"):
            raise ConfigError(f"--verify {self.verify}: give all, sample or none")


@dataclass
class Conversation:
    """One session: its plan, its cache while it is alive, and what has been said."""

    plan: SessionPlan
    cache: Any
    record: SessionRecord
    nvme_read_bytes: int = 0


class _Stopwatch:
    """Given to generate as its streamer: told of every token, in the main thread, while the step has committed."""

    def __init__(self, run: Run, view: LiveView) -> None:
        self.token_times_s: list[float] = []
        self._run = run
        self._view = view
        self._is_prompt = True

    def put(self, _: object) -> None:
        if self._is_prompt:  # transformers hands over the prompt first
            self._is_prompt = False
            return
        now_s = time.monotonic()
        if not self.token_times_s or now_s - self.token_times_s[-1] > 0.2 or len(self.token_times_s) % 8 == 0:
            self._view.stats = self._run.tiered.stats()
        self.token_times_s.append(now_s)
        self._view.tokens += 1

    def end(self) -> None:
        pass


@dataclass
class Run:
    """One run: the conversations and the counts that its document is made of. Times are of `generate` calls."""

    options: SoakOptions
    loaded: LoadedModel
    text: str
    spill: Path
    tiered: Any = None
    plans: list[SessionPlan] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    generate_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    def prepare(self, first_index: int) -> None:
        """Plan the next sessions. The first call belongs before the baseline: it starts the tokenizer's threads."""
        self.plans = [self._plan(first_index + i) for i in range(self.options.sessions)]

    def _plan(self, index: int) -> SessionPlan:
        options = self.options
        plan = make_session_plan(
            self.loaded.tokenizer,
            self.text,
            index=index,
            seed=options.seed,
            context_tokens=options.contexts[index % len(options.contexts)],
            num_turns=options.turns,
        )
        most = sum(len(turn.ids) + options.max_new_tokens + len(plan.closing_ids) for turn in plan.turns)
        limit = getattr(self.loaded.model.config, "max_position_embeddings", None)
        if limit and most > limit:
            raise ConfigError(
                f"{plan.name} can grow to {most} tokens, {self.loaded.name} takes {limit}: lower --context or --turns"
            )
        return plan

    def go(self, view: LiveView) -> None:
        """All turns: rounds of every session once, in an order drawn by lot; no session twice in a row if avoidable."""
        options, rng = self.options, random.Random(self.options.seed)
        end_s = time.monotonic() + options.minutes * 60 if options.minutes else None
        last = -1
        for next_index in itertools.count(options.sessions, options.sessions):
            live = [Conversation(plan, self.tiered.new_cache(), SessionRecord(plan.name)) for plan in self.plans]
            self.conversations += live
            for turn in range(options.turns):
                order = rng.sample(range(len(live)), len(live))
                if order[0] == last:
                    order.append(order.pop(0))
                last = order[-1]
                for slot in order:
                    if end_s is not None and time.monotonic() >= end_s:
                        return
                    self._turn(live[slot], turn, view)
            if end_s is None:
                return
            for conversation in live:
                conversation.cache = None  # its blocks are free for the next sessions
            self.prepare(next_index)

    def _turn(self, conversation: Conversation, turn: int, view: LiveView) -> None:
        record, cache = conversation.record, conversation.cache
        ids = conversation.plan.continued(record.transcript, turn)
        held = cache.get_seq_length()
        if held != max(len(record.transcript) - 1, 0):  # an answer's last token is read with the next prompt
            self.errors.append(
                f"{record.name} turn {turn}: the cache says {held} tokens, not {len(record.transcript) - 1}"
            )
        stopwatch = _Stopwatch(self, view)
        view.turn, view.session = self.turns + 1, record.name
        start_s = time.monotonic()
        input_ids = torch.tensor([ids], device=self.loaded.model.device)
        out = self.tiered.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=cache,
            max_new_tokens=self.options.max_new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,  # greedy and nothing else, whatever the model's own generation config asks for
            return_dict_in_generate=True,
            output_logits=True,
            streamer=stopwatch,
        )
        seconds = time.monotonic() - start_s
        answer = tuple(out.sequences[0, len(ids) :].tolist())
        logits = self.spill / f"{record.name}-{turn}.f32"
        if self.options.verify != "none":
            write_logits(logits, out.logits)
        record.turns.append(TurnRecord(len(ids), answer, logits, conversation.plan.turns[turn].fact))
        record.transcript = [*ids, *answer]
        conversation.nvme_read_bytes = int(cache.stats()["nvme_read_bytes"])
        times_s = stopwatch.token_times_s
        self.decode_tokens += max(len(times_s) - 1, 0)
        self.decode_s += times_s[-1] - times_s[0] if times_s else 0.0
        self.turns += 1
        self.tokens += len(answer)
        self.prompt_tokens += len(ids) - held
        self.generate_s += seconds
        view.stats = self.tiered.stats()
        view.turn_done(record.name, len(ids) - held, len(answer), seconds)
        self.tiered.check_integrity()
