"""What is done to a cache while a call works with it, and what a call that was interrupted leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import kvtier.generate
from kvtier import TieredKV
from kvtier.errors import SessionExistsError, UnsupportedError
from kvtier.hf.state import CacheState
from tests.e2e.families import CHUNK, GREEDY, assert_same, small_config, tiny, tokens

IDS = tokens(50)
ANSWER = {**GREEDY, "max_new_tokens": 8}
ACT_AT = IDS.shape[1] + 3  # columns at which the callback does what it should not


def plain(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    """What the model answers to the whole transcript with nothing held."""
    cache = DynamicCache(config=model.config)
    kwargs = {**ANSWER, **kwargs}
    return model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, prefill_chunk_size=CHUNK, **kwargs)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[TieredKV]:
    """A tiny Llama with room for three rows."""
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, rows=3)) as wrapper:
        yield wrapper
        wrapper.check_integrity()


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises when another thread does it."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert results, "the thread hangs"
    value, error = results[0]
    if error is not None:
        raise error
    return value


class Act:
    """Does one thing once, inside generate, and keeps what came of it.

    Args:
        how: from a stopping criterion, a logits "processor", or on a "thread" beside it.
    """

    def __init__(self, how: str, act: Callable[[torch.Tensor], Any]) -> None:
        self._how, self._act = how, torch.no_grad()(act)
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def come_to(self, ids: torch.Tensor) -> None:
        if ids.shape[1] < ACT_AT or self.done:
            return
        self.done = True
        try:
            self.value = on_a_thread(lambda: self._act(ids)) if self._how == "thread" else self._act(ids)
        except UnsupportedError as error:
            self.error = error

    @property
    def argument(self) -> dict[str, Any]:
        if self._how == "processor":
            return {"logits_processor": LogitsProcessorList([_Processor(self)])}
        return {"stopping_criteria": [_Criterion(self)]}


class _Criterion(StoppingCriteria):
    def __init__(self, act: Act) -> None:
        self._act = act

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self._act.come_to(input_ids)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class _Processor(LogitsProcessor):  # type: ignore[no-untyped-call]  # transformers has no types here
    def __init__(self, act: Act) -> None:
        self._act = act

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self._act.come_to(input_ids)
        return scores


def _nested(tiered: TieredKV, cache: Any, ids: torch.Tensor) -> Any:
    return tiered.generate(torch.cat([ids, tokens(3, 4)], dim=1), cache=cache, max_new_tokens=2)


CHANGES: dict[str, Callable[[TieredKV, Any, torch.Tensor], Any]] = {
    "reset": lambda tiered, cache, ids: cache.reset(),
    "crop": lambda tiered, cache, ids: cache.crop(-5),
    "rows": lambda tiered, cache, ids: cache.batch_repeat_interleave(2),
    "generate": _nested,
    "session.generate": lambda tiered, cache, ids: tiered.session("x").generate(tokens(38, 50), max_new_tokens=5),
    "session.delete": lambda tiered, cache, ids: tiered.session("x").delete(),
}


def _use(tiered: TieredKV, in_session: bool) -> tuple[Any, Callable[..., Any]]:
    """A cache, and the call that generates with it."""
    if in_session:
        session = tiered.session("x")
        return session.cache, session.generate
    cache = tiered.new_cache()
    return cache, lambda ids, **kwargs: tiered.generate(ids, cache=cache, **kwargs)


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["criterion", "processor", "thread"])
@pytest.mark.parametrize(
    ("change", "in_session"),
    [(name, in_session) for name in sorted(CHANGES) for in_session in (False, True)
     if in_session or not name.startswith("session")],
)  # fmt: skip
def test_a_cache_that_generate_works_with_is_not_changed(
    change: str, in_session: bool, how: str, tiered: TieredKV
) -> None:
    cache, generate = _use(tiered, in_session)
    act = Act(how, lambda ids: CHANGES[change](tiered, cache, ids))
    out = generate(IDS, **ANSWER, **act.argument)
    assert_same(out, plain(tiered.model, IDS), "blockwise")
    assert act.done and act.error is not None
    # And afterwards it may.
    cache.crop(-3)
    on_a_thread(cache.reset)
    assert_same(generate(IDS, **ANSWER), plain(tiered.model, IDS), "blockwise")


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["criterion", "processor", "thread"])
@pytest.mark.parametrize("in_session", [False, True], ids=["cache", "session"])
def test_a_forward_with_the_cache_that_generate_works_with(in_session: bool, how: str, tiered: TieredKV) -> None:
    """From a thread it is refused; from a callback generate stops by name when it goes on."""
    cache, generate = _use(tiered, in_session)
    act = Act(how, lambda ids: tiered(tokens(3, 4), cache=cache))
    try:
        out = generate(IDS, **ANSWER, **act.argument)
    except UnsupportedError as error:
        assert how != "thread" and "inside generate" in str(error)
        cache.reset()
    else:
        assert act.error is not None
        assert_same(out, plain(tiered.model, IDS), "blockwise")
    full = torch.cat([plain(tiered.model, IDS).sequences, tokens(5, 5)], dim=1)
    assert_same(generate(full, **ANSWER), plain(tiered.model, full), "blockwise")


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["criterion", "processor", "thread"])
@pytest.mark.parametrize("in_session", [False, True], ids=["cache", "session"])
def test_fork_and_stats_are_free_while_generate_runs(in_session: bool, how: str, tiered: TieredKV) -> None:
    cache, generate = _use(tiered, in_session)
    act = Act(how, lambda ids: (ids, cache.fork(), tiered.stats(), cache.stats()))
    assert_same(generate(IDS, **ANSWER, **act.argument), plain(tiered.model, IDS), "blockwise")
    ids, twin, _, _ = act.value
    full = torch.cat([ids, tokens(6, 6)], dim=1)
    assert_same(tiered.generate(full, cache=twin, **ANSWER), plain(tiered.model, full), "blockwise")


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("in_session", [False, True], ids=["cache", "session"])
def test_transformers_own_crops_and_reorders_go_on(in_session: bool, family: str, tmp_path: Path) -> None:
    model, ids = tiny(family), tokens(12).repeat(1, 4)
    with TieredKV(model, small_config(model, tmp_path, rows=3)) as tiered:
        cache, generate = _use(tiered, in_session)
        for how in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 3}):
            assert torch.equal(generate(ids, **ANSWER, **how).sequences, plain(model, ids, **how).sequences), how
            if in_session:
                assert cache.batch_size == 1
            else:
                cache.reset()
        tiered.check_integrity()


def test_beams_beside_prompt_lookup_answer_as_beams(tiered: TieredKV) -> None:
    """transformers ignores the lookup then, and cuts the prompt itself."""
    full = torch.cat([IDS, tokens(60, 5)], dim=1)
    how = {"num_beams": 2, "prompt_lookup_num_tokens": 3}
    expected = plain(tiered.model, full, num_beams=2)
    session, cache = tiered.session("x"), tiered.new_cache()
    session.generate(IDS, max_new_tokens=1, do_sample=False)
    assert torch.equal(session.generate(full, **ANSWER, **how).sequences, expected.sequences)
    tiered.generate(IDS, cache=cache, max_new_tokens=1, do_sample=False)
    cache.batch_repeat_interleave(2)
    assert torch.equal(tiered.generate(full, cache=cache, **ANSWER, **how).sequences, expected.sequences)


def test_positions_of_the_callers_own(tiered: TieredKV) -> None:
    """They are no sign of a cache that was changed: as plain, or refused by their own name."""
    full, held = torch.cat([IDS, tokens(5, 8)], dim=1), DynamicCache(config=tiered.model.config)
    cache = tiered.new_cache()
    tiered.generate(IDS, cache=cache, max_new_tokens=1, do_sample=False)
    tiered.model.generate(IDS, cache=held, max_new_tokens=1, do_sample=False)
    positions = (torch.arange(full.shape[1]) * 2)[None]
    expected = tiered.model.generate(full, cache=held, position_ids=positions, **ANSWER)
    try:
        out = tiered.generate(full, cache=cache, position_ids=positions, **ANSWER)
    except UnsupportedError as error:
        assert "position_ids" in str(error)
    else:
        assert_same(out, expected, "blockwise")


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_generate_checks_its_prompt(tiered: TieredKV, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered.new_cache()
    tiered.generate(IDS, cache=cache, max_new_tokens=1, do_sample=False)
    check_prompt = kvtier.generate.check_prompt

    def interrupted(*args: Any, **kwargs: Any) -> None:
        check_prompt(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    full = torch.cat([IDS, tokens(10, 3)], dim=1)
    with monkeypatch.context() as patch:
        patch.setattr(kvtier.generate, "check_prompt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiered.generate(full, cache=cache, prompt_lookup_num_tokens=3, **ANSWER)
    held = cache.fork()
    # A direct call begins with the very ids that are held, and none of them is skipped.
    with torch.no_grad():
        logits = tiered(full, cache=held).logits
        twice = DynamicCache(config=tiered.model.config)
        tiered.model(IDS, cache=twice)
        expected = tiered.model(full, cache=twice).logits
    assert logits.shape == expected.shape and (logits - expected).abs().max() < 1e-4
    assert_same(
        on_a_thread(lambda: tiered.generate(full, cache=cache, **ANSWER)), plain(tiered.model, full), "blockwise"
    )


class Holder(StoppingCriteria):
    """Ends a generate while another thread has the turn, and sends Ctrl-C whenever the main thread waits for it."""

    def __init__(self, tiered: TieredKV, num_signals: int) -> None:
        self._turn, self._num_signals = tiered._runtime.turn, num_signals
        self._has_turn = threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self.sent = 0

    def _hold(self) -> None:
        with self._turn:
            self._has_turn.set()
            wait: object = None
            for _ in range(self._num_signals):
                wait = self._next_wait(wait)
                os.kill(os.getpid(), signal.SIGINT)
                self.sent += 1
            self._next_wait(wait)

    def _next_wait(self, last: object) -> object:
        """The main thread's wait for the turn, another one than the last; None if none comes."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for wait in list(self._turn._waiting):
                if wait is not last:
                    return wait
            time.sleep(0.001)
        return None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        ends = input_ids.shape[1] >= ACT_AT
        if ends and not self._thread.is_alive():
            self._thread.start()
            assert self._has_turn.wait(10)
        return torch.full((input_ids.shape[0],), ends, dtype=torch.bool)

    def join(self) -> None:
        self._thread.join(20)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize(("beams", "num_signals"), [(1, 1), (1, 2), (3, 1), (3, 2), (3, 3)])  # one row waits twice
def test_ctrl_c_while_a_session_waits_for_its_turn(beams: int, num_signals: int, tiered: TieredKV) -> None:
    session, holder = tiered.session("x"), Holder(tiered, num_signals)
    session.generate(IDS[:, :40], max_new_tokens=2, do_sample=False)
    with pytest.raises(KeyboardInterrupt):
        session.generate(IDS, **ANSWER, num_beams=beams, stopping_criteria=[holder])
    holder.join()
    assert holder.sent == num_signals
    full = torch.cat([IDS, tokens(5, 1)], dim=1)
    expected = plain(tiered.model, full)
    assert_same(on_a_thread(lambda: session.generate(full, **ANSWER)), expected, "blockwise")
    assert session.cache.batch_size == 1
    on_a_thread(lambda: session.cache.crop(-2))
    assert_same(session.generate(full, **ANSWER), expected, "blockwise")


# -- races -------------------------------------------------------------------------------------------------------------


def _at_once(tiered: TieredKV, works: list[Callable[[], Any]]) -> list[Any]:
    """What each returned or raised; all have asked for the turn before one gets it."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    turn = tiered._runtime.turn
    with turn:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 2
        while len(turn._waiting) < len(works) and time.monotonic() < end:
            time.sleep(0.001)
    for thread in threads:
        thread.join(20)
    return results


def test_two_threads_that_open_one_name_get_one_session(tiered: TieredKV) -> None:
    first, second = _at_once(tiered, [lambda: tiered.session("x").cache] * 2)
    assert first is second and tiered.session("x").cache is first


def test_two_threads_that_fork_to_one_name_get_one_session(tiered: TieredKV) -> None:
    sessions = [tiered.session(name) for name in "ab"]
    prompts = [tokens(40, number) for number in range(2)]
    for session, ids in zip(sessions, prompts, strict=True):
        session.generate(ids, max_new_tokens=1, do_sample=False)
    results = _at_once(tiered, [lambda s=session: s.fork("new") for session in sessions])  # type: ignore[misc]
    lost = [isinstance(result, SessionExistsError) for result in results]
    assert sorted(lost) == [False, True], results
    assert tiered.session("new").token_ids == prompts[lost.index(False)][0].tolist()


def test_a_ctrl_c_at_the_first_instruction_of_leaving_does_not_keep_the_cache(
    tiered: TieredKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, leave, left = tiered.new_cache(), CacheState._leave, [1]

    def interrupted(self: CacheState, depth: int) -> None:
        if left:
            left.pop()
            raise KeyboardInterrupt
        leave(self, depth)

    monkeypatch.setattr(CacheState, "_leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiered.generate(IDS, cache=cache, **ANSWER)
    assert cache.state.user is None and cache.state.may_change is None
    cache.reset()
    assert_same(tiered.generate(IDS, cache=cache, **ANSWER), plain(tiered.model, IDS), "blockwise")
