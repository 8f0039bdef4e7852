"""Teacher-forced verification: would the plain model have computed the logits that the tiered run computed?

The plain model reads each session's transcript, answers included, with a `DynamicCache`: every turn's new tokens in the
same prefill chunks, counted from the turn's first new token, then the answer token by token, as `generate` does. Each
step's logits are compared with those that the tiered run recorded. Because the transcript is given, one different
token does not make all later ones incomparable.

The tolerance is twice the plain model's own difference between two prefill chunk sizes, measured in the same run on
the first session; in fp32 at least 1e-4 of the step's largest logit. A step beyond it is a failure even if the token
agrees.

Memory: the tiered run writes its logits to files (`write_logits`), and verification starts when that run has been
measured and closed, so neither recorded logits nor plain caches are ever counted as kvtier's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier.benchmarks.documents import Fact

FP32_FLOOR_FRAC = 1e-4


@dataclass(frozen=True)
class TurnRecord:
    """One finished turn: `answer` was generated after `prompt_tokens` tokens; `logits` holds one fp32 row a token.

    `reread`: the cache was empty, as the run had been interrupted; the whole transcript was read again.
    """

    prompt_tokens: int
    answer: tuple[int, ...]
    logits: Path
    fact: Fact | None
    reread: bool = False


@dataclass
class SessionRecord:
    """One session of the tiered run: all its tokens, answers included, and its turns in order."""

    name: str
    transcript: Sequence[int] = ()
    turns: list[TurnRecord] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(len(turn.answer) for turn in self.turns)


@dataclass
class Verification:
    """What was compared. Differences are of logits; `tolerance` is the largest that any step was allowed.

    A `near_ties` token differs from the plain model's first choice by no more than the tolerance; `differing_tokens`
    differ by more. `steps_over_tolerance` are tokens whose logits are off, the token itself agreeing or not, and
    `non_finite_steps` those where the comparison is not a number.

    `wrong_facts` counts answers that kvtier, not the model, got wrong: (a) the answer holds another session's planted
    value and the plain model's does not; or (b) the plain model's answer holds the right value and this one does not.
    The plain model's answer is its first choice at each step of the same transcript, near ties going the tiered run's
    way. A question that the plain model gets wrong as well is nobody's fault here; `facts_right` of `facts_asked` says
    how often the answers were right.
    """

    verified_tokens: int = 0
    differing_tokens: int = 0
    near_ties: int = 0
    max_logit_diff: float = 0.0
    steps_over_tolerance: int = 0
    non_finite_steps: int = 0
    tolerance: float = 0.0
    plain_chunk_diff: float = 0.0
    wrong_facts: int = 0
    facts_asked: int = 0
    facts_right: int = 0

    @property
    def failed(self) -> bool:
        return bool(self.differing_tokens or self.steps_over_tolerance or self.non_finite_steps or self.wrong_facts)


_LARGEST = ("max_logit_diff", "tolerance", "plain_chunk_diff")


@dataclass
class Verified:
    """What was compared so far, session by session; `finished` are those that were compared whole."""

    plain_chunk_diff: float | None = None
    sessions: dict[str, Verification] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)

    @property
    def total(self) -> Verification:
        """All sessions together."""
        total = Verification(plain_chunk_diff=self.plain_chunk_diff or 0.0)
        for one in self.sessions.values():
            for name, value in vars(one).items():
                so_far = getattr(total, name)
                setattr(total, name, max(so_far, value) if name in _LARGEST else so_far + value)
        return total


def write_logits(path: Path, logits: Sequence[torch.Tensor]) -> None:
    """Write generate's `output_logits` (per token `[1, vocab]`) to `path` as fp32 rows, one at a time."""
    with path.open("wb") as file:  # a turn that was interrupted is had again
        for row in logits:
            row[0].float().cpu().numpy().tofile(file)


def read_logits(turn: TurnRecord, step: int, vocab: int) -> torch.Tensor:
    """The recorded logits of one token of a turn, `[vocab]` fp32."""
    offset = step * vocab * np.dtype(np.float32).itemsize
    return torch.from_numpy(np.fromfile(turn.logits, dtype=np.float32, count=vocab, offset=offset))


def replay(
    model: Any, record: SessionRecord, chunk: int, advance: Callable[[int], None] = lambda tokens: None
) -> Iterator[tuple[TurnRecord, int, torch.Tensor]]:
    """Run the plain model over a transcript; yield (turn, step, logits `[vocab]` fp32) for every answer token.

    Args:
        model: the unwrapped model.
        chunk: most tokens of one prefill forward, counted from each turn's first new token, or from the transcript's
            where the tiered run had to read it all again.
        advance: told how many tokens each forward read.

    Cost: what the same conversation costs without kvtier. Holds one plain cache.
    """
    from transformers import DynamicCache

    parameters = inspect.signature(model.forward).parameters
    cache_name = "past_key_values" if "past_key_values" in parameters else "cache"  # renamed in transformers 5.24
    extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(record.transcript)], device=model.device)
    position = 0

    def forward(end: int) -> torch.Tensor:
        nonlocal position
        with torch.inference_mode():
            out = model(input_ids=ids[:, position:end], use_cache=True, **{cache_name: cache}, **extra)
        advance(end - position)
        position = end
        logits: torch.Tensor = out.logits[0, -1]
        return logits.float().cpu()

    for turn in record.turns:
        if turn.reread:
            cache, position = DynamicCache(config=model.config), 0
        while position < turn.prompt_tokens:
            logits = forward(min(position + chunk, turn.prompt_tokens))
        for step in range(len(turn.answer)):
            yield turn, step, logits
            if step + 1 < len(turn.answer):  # the last token of an answer is read with the next turn's prompt
                logits = forward(position + 1)


def replay_tokens(record: SessionRecord) -> int:
    """How many tokens `replay` reads: some twice where the tiered run read them twice, and no last token at all."""
    total = position = 0
    for turn in record.turns:
        begin = 0 if turn.reread else position
        position = turn.prompt_tokens + max(len(turn.answer) - 1, 0)
        total += position - begin
    return total


def chunk_difference(model: Any, record: SessionRecord, chunk: int, advance: Callable[[int], None]) -> float:
    """The plain model's largest logit difference between prefill chunks of `chunk` and of half that."""
    both = zip(replay(model, record, chunk, advance), replay(model, record, max(1, chunk // 2), advance), strict=True)
    return max((float((one - other).abs().max()) for (_, _, one), (_, _, other) in both), default=0.0)


def verify(
    model: Any,
    records: Sequence[SessionRecord],
    *,
    chunk: int,
    tokenizer: Any,
    all_facts: Collection[Fact],
    own_facts: Callable[[str], Collection[Fact]],
    result: Verified,
    advance: Callable[[int], None] = lambda tokens: None,
    finished: Callable[[], None] = lambda: None,
) -> None:
    """Compare every step of `records` with the plain model, one session at a time, adding to `result` as it goes.

    `result` is the caller's, so that an interrupted verification still reports what it has compared; sessions that are
    `finished` there are passed over. The function `finished` is called after each session.
    """
    is_fp32 = next(model.parameters()).dtype == torch.float32
    measured = next((record for record in records if record.turns), None)
    if measured and result.plain_chunk_diff is None:
        result.plain_chunk_diff = chunk_difference(model, measured, chunk, advance)
    chunk_diff = result.plain_chunk_diff or 0.0
    for record in records:
        if record.name in result.finished:
            continue
        own = result.sessions[record.name] = Verification()
        foreign = [fact.value for fact in all_facts if fact not in own_facts(record.name)]
        plain_answer: list[int] = []
        for turn, step, plain in replay(model, record, chunk, advance):
            if step == 0:
                plain_answer = []
            tiered = read_logits(turn, step, len(plain))
            floor = FP32_FLOOR_FRAC * float(plain.abs().max()) if is_fp32 else 0.0
            tolerance = max(2 * chunk_diff, floor)
            plain_answer.append(_compare(own, plain, tiered, turn.answer[step], tolerance))
            if step + 1 == len(turn.answer) and turn.fact:
                judge_answer(own, turn.fact, tokenizer.decode(list(turn.answer)), foreign,
                             tokenizer.decode(plain_answer))  # fmt: skip
        result.finished.append(record.name)
        finished()


def _compare(result: Verification, plain: torch.Tensor, tiered: torch.Tensor, token: int, tolerance: float) -> int:
    """Count one step; return the plain model's token, or the tiered run's at a near tie."""
    # A vocabulary's unused entries may be -inf on both sides: equal, though their difference is not a number.
    diff = float(torch.where(plain == tiered, 0.0, (plain - tiered).abs()).max())
    result.verified_tokens += 1
    result.tolerance = max(result.tolerance, tolerance)
    if math.isfinite(diff):
        result.max_logit_diff = max(result.max_logit_diff, diff)
        result.steps_over_tolerance += diff > tolerance
    else:
        result.non_finite_steps += 1
    choice = int(plain.argmax())
    if choice == token:
        return choice
    if float(plain[choice] - plain[token]) <= tolerance:
        result.near_ties += 1
        return token
    result.differing_tokens += 1
    return choice


def judge_answer(
    result: Verification, fact: Fact, answer: str, foreign: Collection[str], plain_answer: str | None
) -> None:
    """Count one answer about a planted fact, as `Verification` defines it; None: the plain model was not asked."""
    result.facts_asked += 1
    result.facts_right += fact.value in answer
    leaked = any(value in answer and value not in (plain_answer or "") for value in foreign)
    lost = plain_answer is not None and fact.value in plain_answer and fact.value not in answer
    result.wrong_facts += leaked or lost
