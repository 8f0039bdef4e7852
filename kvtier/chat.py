"""One conversation with a person, in a named session: a turn is a text in, a text out, and what it cost.

Prints nothing and reads nothing: `cli_chat` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.chat_template import chat_parts, closed, encode
from kvtier.errors import UnsupportedError
from kvtier.hf import TieredCache
from kvtier.model import TieredKV


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost."""

    prompt_tokens: int
    """The whole conversation and what was asked."""
    reused: dict[str, int]
    """Of them those that were not computed, by the fastest tier that held them when the turn began."""
    computed: int
    """Of them the others, as counted in the model's steps."""
    new_tokens: int
    first_token_s: float
    """From the question to the first token of the answer."""
    total_s: float
    is_cut: bool
    """Whether the answer was ended by a limit or a person, not by the model."""


class Chat:
    """A conversation that goes on where the session of that name ended, in whichever process.

    What was said is kept as token ids. A turn's own text alone is tokenised, so all before it is reused.
    """

    def __init__(self, tiered: TieredKV, tokenizer: Any, name: str, *, salt: str = "", max_new_tokens: int = 256):
        """Raises UnsupportedError: no such name can be."""
        self._tiered, self._tokenizer, self._salt = tiered, tokenizer, salt
        self._max_new_tokens = max_new_tokens
        self._parts = chat_parts(tokenizer)
        self._closing = encode(tokenizer, self._parts.closing)
        self._session = tiered.session(name, salt=salt)
        self._ids = self._session.token_ids  # all but the token that ended the last answer, which `closed` puts there
        self._ends = _end_ids(tiered.model, tokenizer)

    @property
    def name(self) -> str:
        """The session's."""
        return self._session.name

    @property
    def num_tokens(self) -> int:
        """Of the conversation so far."""
        return len(self._ids)

    def history(self) -> str:
        """The conversation so far, as text, with what the template puts around it."""
        return str(self._tokenizer.decode(self._ids))

    def ask(self, text: str, show: Callable[[str], None], stop: Callable[[], bool] = lambda: False) -> Turn:
        """Answer, piece by piece.

        Args:
            show: called after each token with what is to be shown of it, which may be nothing yet.
            stop: asked after each token; the answer ends there when it says so.

        Raises:
            UnsupportedError: the conversation would be longer than the model's limit.
            Whatever `generate` raises, a KeyboardInterrupt too. The conversation is then what it was before the turn.
        """
        head = self._parts.next_head if self._ids else self._parts.head
        asked = encode(self._tokenizer, f"{head}{text}{self._parts.ask}", first=not self._ids)
        ids = [*(closed(self._ids, self._closing) if self._ids else ()), *asked]
        self._check_length(len(ids))
        cache = self._session.cache
        before = _reused(cache)
        watch = _Watch(self._tokenizer, self._tiered, show, self._ends)
        out = self._session.generate(
            torch.tensor([ids], device=self._tiered.device),
            max_new_tokens=self._max_new_tokens,
            streamer=watch,
            stopping_criteria=[lambda seen, scores, **_: torch.full((1,), stop(), device=seen.device)],
        )
        reused = {tier: count - before[tier] for tier, count in _reused(cache).items()}
        self._ids = out[0].tolist()
        total_s = time.monotonic() - watch.started_s
        num_new, is_cut = len(self._ids) - len(ids), self._ids[-1] not in self._ends
        if is_cut:
            self._settle()
        computed = watch.prompt_computed
        reused = _attributed(len(ids) - computed, reused)
        first_token_s = watch.first_s - watch.started_s
        return Turn(len(ids), reused, computed, num_new, first_token_s, total_s, is_cut)

    def _check_length(self, num_tokens: int) -> None:
        limit = getattr(self._tiered.model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and num_tokens + self._max_new_tokens + len(self._closing) > limit:
            raise UnsupportedError(
                f"the conversation would have {num_tokens} tokens, with an answer up to "
                f"{num_tokens + self._max_new_tokens}, and the model's limit is {limit}: /reset begins anew"
            )

    def _settle(self) -> None:
        """Have the session hold the whole of an answer that was cut: the last token's KV is not computed yet.

        The token that this generates is dropped: all but the last is what a session holds.
        """
        whole = closed(self._ids, self._closing)
        self._session.generate(torch.tensor([whole], device=self._tiered.device), max_new_tokens=1, do_sample=False)
        self._ids = whole

    def reset(self) -> None:
        """Delete the session and begin anew under its name. Raises StoreError: some of it is still on disk."""
        name = self._session.name
        self._session.delete()
        self._session = self._tiered.session(name, salt=self._salt)
        self._ids = []


class _Watch:
    """A streamer, as `generate` knows them: shows text as soon as it is whole characters, and notes the first token."""

    def __init__(self, tokenizer: Any, tiered: TieredKV, show: Callable[[str], None], ends: frozenset[int]) -> None:
        self._tokenizer, self._tiered, self._show, self._ends = tokenizer, tiered, show, ends
        self._has_prompt = False
        self._ids: list[int] = []
        self._shown = 0
        self._before = self._num_computed()
        self.prompt_computed = 0
        self.started_s = self.first_s = time.monotonic()

    def _num_computed(self) -> int:
        return int(self._tiered.stats()["tokens"])

    def put(self, value: torch.Tensor) -> None:
        """The prompt at first, then each token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        if not self._ids:
            self.first_s = time.monotonic()
            self.prompt_computed = self._num_computed() - self._before
        self._ids += value.reshape(-1).tolist()
        self._flush(is_over=False)

    def end(self) -> None:
        """There is no more."""
        self._flush(is_over=True)

    def _flush(self, *, is_over: bool) -> None:
        text = str(self._tokenizer.decode([each for each in self._ids if each not in self._ends]))
        if text.endswith("\ufffd") and not is_over:  # a character of which some bytes are still to come
            text = text[: self._shown]
        self._show(text[self._shown :])
        self._shown = len(text)


def _reused(cache: TieredCache) -> dict[str, int]:
    """Tokens of its prompts that it held, or that were found of other conversations, by tier."""
    counts = cache.stats()["reused_tokens"]
    assert isinstance(counts, dict)
    return {str(tier): int(count) for tier, count in counts.items()}


def _attributed(num_reused: int, held: dict[str, int]) -> dict[str, int]:
    """Whence tokens came that were not computed: fewer than were held, where some of those were lost meanwhile."""
    reused = {}
    for tier, num_tokens in held.items():
        reused[tier] = min(num_tokens, num_reused)
        num_reused -= reused[tier]
    return reused


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens with which the model ends an answer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(each for each in (*listed, getattr(tokenizer, "eos_token_id", None)) if each is not None)
