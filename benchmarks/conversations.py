"""The soak's conversations: who speaks when, and one turn after another through the tiered model."""

from __future__ import annotations

import array
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvtier.benchmarks.arrival import Arrival
from kvtier.benchmarks.documents import SessionPlan, make_session_plan
from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.monitor import LiveView
from kvtier.benchmarks.options import SoakOptions
from kvtier.benchmarks.totals import combine
from kvtier.benchmarks.verify import SessionRecord, TurnRecord, write_logits
from kvtier.errors import ConfigError


@dataclass
class Conversation:
    """One session: its plan, its cache while it is alive, what has been said, and how many turns it is to have."""

    index: int
    plan: SessionPlan
    record: SessionRecord
    turns_to_have: int
    cache: Any = None
    nvme_read_bytes: int = 0
    earlier_nvme_read_bytes: int = 0
    """By caches that went when the run was interrupted."""

    def end(self) -> None:
        """Drop the cache, and keep no more of the words than verification needs: long runs have many sessions."""
        self.cache = None
        self.plan = dataclasses.replace(self.plan, turns=())
        self.record.transcript = array.array("q", self.record.transcript)

    def digest(self) -> str:
        """A checksum of the transcript's ids."""
        return xxhash.xxh3_64_hexdigest(array.array("q", self.record.transcript).tobytes())


@dataclass
class Seat:
    """A place that sessions take one after another: `turns_had` by all of them, the next one due at `ready_s`."""

    number: int
    conversation: Conversation | None = None
    turns_had: int = 0
    ready_s: float = 0.0


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
            self._view.stats = self._run.stats()
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
    conversations: list[Conversation] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    last_seat: int = -1
    next_index: int = 0
    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    generate_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    think_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    earlier_s: float = 0.0
    """Seconds of the run before it was interrupted."""
    earlier_stats: dict[str, Any] | None = None
    _began_s: float | None = None

    @property
    def clock_s(self) -> float:
        """Seconds that the conversations have run."""
        return self.earlier_s + (0.0 if self._began_s is None else time.monotonic() - self._began_s)

    def stop_clock(self) -> None:
        """Count no further."""
        self.earlier_s, self._began_s = self.clock_s, None

    def stats(self) -> dict[str, Any]:
        """`stats()` since the run began, interruptions or not."""
        stats: dict[str, Any] = combine(self.earlier_stats, self.tiered.stats())
        return stats

    def prepare(self) -> None:
        """Plan the first sessions. Belongs before the baseline: it starts the tokenizer's threads."""
        for number in range(self.options.sessions):
            seat = Seat(number)
            self.seats.append(seat)
            self._seat_next(seat)

    def _seat_next(self, seat: Seat) -> Conversation:
        options = self.options
        # In a long run the first sessions end after 1, 2, … turns: sessions then end and begin one at a time.
        early = seat.number % options.turns if options.minutes and seat.turns_had == 0 else 0
        conversation = self.open(self.next_index, options.turns - early)
        self.next_index += 1
        self.conversations.append(conversation)
        seat.conversation = conversation
        return conversation

    def open(self, index: int, turns_to_have: int) -> Conversation:
        """Plan session `index`, with nothing said yet."""
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
        return Conversation(index, plan, SessionRecord(plan.name), turns_to_have)

    def logits_of(self, conversation: Conversation, number: int) -> Path:
        """Where turn `number`'s logits are kept until they are verified."""
        return self.spill / f"{conversation.record.name}-{number}.f32"

    def add_turn(
        self, conversation: Conversation, ids: Sequence[int], answer: tuple[int, ...], *, reread: bool
    ) -> None:
        """Note a turn that was had: `answer` followed `ids`."""
        record, number = conversation.record, len(conversation.record.turns)
        fact = conversation.plan.turns[number].fact
        record.turns.append(TurnRecord(len(ids), answer, self.logits_of(conversation, number), fact, reread))
        record.transcript = [*ids, *answer]

    def go(self, view: LiveView, turn_done: Callable[[], None] = lambda: None) -> None:
        """All turns that are left, each session's next one when it is due; `turn_done` is called after each."""
        options, arrival = self.options, Arrival.parse(self.options.arrival)
        end_s = options.minutes * 60 if options.minutes else float("inf")
        self._began_s = time.monotonic()
        view.tokens = self.tokens
        while (seat := self._next_seat()) is not None:
            self._wait(min(seat.ready_s, end_s), view)
            if self.clock_s >= end_s:
                return
            conversation = seat.conversation or self._seat_next(seat)
            self._turn(conversation, len(conversation.record.turns), view)
            seat.turns_had += 1
            self.last_seat = seat.number
            is_over = len(conversation.record.turns) >= conversation.turns_to_have
            if arrival.mean_s:
                think_s = arrival.think_s(options.seed, conversation.index, len(conversation.record.turns))
                seat.ready_s = self.clock_s + (0.0 if is_over else think_s)
            if is_over:
                seat.conversation = None
                if options.minutes:
                    conversation.end()  # its blocks are free for the next session
            turn_done()

    def _next_seat(self) -> Seat | None:
        """Whoever is due first. Without think times that is rounds of every session once, in an order drawn by lot;
        no session twice in a row if avoidable."""
        seats = [seat for seat in self.seats if seat.conversation or self.options.minutes]
        if not seats:
            return None

        def rank(seat: Seat) -> tuple[float, int, float]:
            # A lot that depends on nothing that came before: a resumed run draws what the whole run would have drawn.
            lot = random.Random(f"order:{self.options.seed}:{seat.turns_had}:{seat.number}").random()
            return seat.ready_s, seat.turns_had, lot

        first, *others = sorted(seats, key=rank)
        again = first.number == self.last_seat
        return others[0] if again and others and others[0].ready_s <= self.clock_s else first

    def _wait(self, until_s: float, view: LiveView) -> None:
        pause_s = until_s - self.clock_s
        if pause_s > 0:
            view.session = "all sessions are thinking"
            time.sleep(pause_s)
            self.think_s += pause_s

    def _turn(self, conversation: Conversation, number: int, view: LiveView) -> None:
        record = conversation.record
        ids = conversation.plan.continued(record.transcript, number)
        is_new = conversation.cache is None
        cache = conversation.cache = self.tiered.new_cache() if is_new else conversation.cache
        held = cache.get_seq_length()
        expected = 0 if is_new else max(len(record.transcript) - 1, 0)
        if held != expected:  # an answer's last token is read with the next prompt
            self.errors.append(f"{record.name} turn {number}: the cache says {held} tokens, not {expected}")
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
        if self.options.verify != "none":
            write_logits(self.logits_of(conversation, number), out.logits)
        self.add_turn(conversation, ids, answer, reread=is_new and number > 0)
        read_bytes = int(cache.stats()["nvme_read_bytes"])
        conversation.nvme_read_bytes = conversation.earlier_nvme_read_bytes + read_bytes
        times_s = stopwatch.token_times_s
        self.decode_tokens += max(len(times_s) - 1, 0)
        self.decode_s += times_s[-1] - times_s[0] if times_s else 0.0
        self.turns += 1
        self.tokens += len(answer)
        self.prompt_tokens += len(ids) - held
        self.generate_s += seconds
        view.tokens = self.tokens
        view.stats = self.stats()
        view.turn_done(record.name, len(ids) - held, len(answer), seconds)
        self.tiered.check_integrity()
