"""SIGKILL at any moment of sessions' lives: the next process goes on from a state that was, as the plain model would.

`KVTIER_TEST_KILLS=100` kills as often as that.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtier import TieredKV
from kvtier.session import Session
from kvtier.session_keeper import SessionKeeper
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.nvme import NvmeStore
from kvtier.system import allocated_bytes
from tests.e2e.families import BLOCK, CHUNK, assert_same, small_config, tiny, tokens
from tests.fault.starter import Starter, say, starter

NUM_KILLS = int(os.environ.get("KVTIER_TEST_KILLS", "20"))
NAMES = ("alice", "bob", "carol")
BUDGET_BYTES = 2 << 20
HOW: dict[str, Any] = {
    "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip


def plain(ids: torch.Tensor) -> Any:
    return tiny().generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=CHUNK, **HOW)


# -- the worker -------------------------------------------------------------------------------------------------------


def converse(folder: str, seed: int, slow: bool, num_turns: int) -> None:
    """In the child: say what is resumed, compare its continuation with the plain model, then talk on until killed."""
    chance = random.Random(seed)
    model = tiny()
    tiered = TieredKV(model, small_config(model, Path(folder), prefix_cache=True, nvme=BUDGET_BYTES))
    _say_more(tiered, slow)
    chats = {name: tiered.session(name) for name in NAMES}
    for name, chat in chats.items():
        held = chat.token_ids
        say("resumed", name, *held)
        tiered.check_integrity()
        _turn(name, chat, [*held, *tokens(5 + chance.randrange(20), chance.randrange(1 << 30))[0].tolist()], True)
    tiered.check_integrity()
    say("compared")
    for _ in range(num_turns):
        name = chance.choice(NAMES)
        held = chats[name].token_ids
        if name == "carol" and chance.random() < 0.2:
            say("deleting", name)
            chats[name].delete()
            say("held", name)
            chats[name], held = tiered.session(name), []
        elif len(held) > 150 or chance.random() < 0.2:
            held = held[: chance.randrange(len(held) + 1)]  # edited, or begun again
        said = tokens(3 + chance.randrange(30), chance.randrange(1 << 30))[0].tolist()
        _turn(name, chats[name], [*held, *said], False)
    tiered.check_integrity()
    tiered.close()


def _turn(name: str, chat: Session, ids: list[int], compares: bool) -> None:
    say("turn", name, *ids)
    given = torch.tensor([ids])
    out = chat.generate(given, **HOW)
    say("held", name, *chat.cache.token_ids)
    if compares:
        assert_same(out, plain(given), "blockwise")


def _say_more(tiered: TieredKV, slow: bool) -> None:
    """Tell of steps and saves, not by a hook, under which no KV is labelled; and a disk that takes its time."""
    executor = tiered._runtime.executor
    commit, save, write, replace = executor.commit, SessionKeeper.save, NvmeStore.write, OwnedFolder.replace_file

    def committed(opened: Any) -> None:
        commit(opened)
        say("step")

    def saving(*arguments: Any) -> Any:
        say("saving")
        saved = save(*arguments)
        say("saved")
        return saved

    def slow_write(*arguments: Any, **more: Any) -> None:
        time.sleep(0.002)
        write(*arguments, **more)

    def slow_replace(*arguments: Any, **more: Any) -> None:
        time.sleep(0.004)
        replace(*arguments, **more)
        time.sleep(0.004)

    executor.commit = committed  # type: ignore[method-assign]
    SessionKeeper.save = saving  # type: ignore[method-assign]
    if slow:
        NvmeStore.write = slow_write  # type: ignore[method-assign]
        OwnedFolder.replace_file = slow_replace  # type: ignore[method-assign]


# -- the parent -------------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What a session may be, as far as its workers said."""

    state: list[int] = field(default_factory=list)
    """When its last turn had ended."""
    given: list[int] | None = None
    """The transcript of a turn that is under way."""
    is_deleting: bool = False

    def explain(self, resumed: list[int]) -> list[int] | None:
        """The shortest state that `resumed` is the beginning of."""
        states = [self.state]
        if self.given is not None:  # that turn's end: the last token is not held
            states.append(plain(torch.tensor([self.given])).sequences[0].tolist()[:-1])
        found = [state for state in states if resumed and resumed == state[: len(resumed)]]
        return min(found, key=len, default=None)


@dataclass
class Toll:
    """What all kills came to."""

    phases: list[str] = field(default_factory=list)
    equal: int = 0
    shorter: int = 0
    lost_tokens: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)


def one_life(
    starting: Starter, folder: Path, known: dict[str, Known], chance: random.Random, toll: Toll, *, kill: bool = True
) -> None:
    """A worker from its beginning to its end."""
    wanted = chance.choice(["step", "step", "saving", "saving", "held", "turn", "deleting"])
    wanted_count, delay_s = 4 + chance.randrange(12), chance.random() * 0.012
    slow, phase, pid, status, count, is_killed = chance.random() < 0.6, "opening", 0, "", 0, False
    with tempfile.NamedTemporaryFile() as errors:
        arguments = {"folder": str(folder), "seed": chance.randrange(1 << 30), "slow": slow, "stderr": errors.name}
        num_turns = 200 if kill else 3
        lines = starting.start("tests.fault.test_session_kill:converse", **arguments, num_turns=num_turns)
        for line in lines:
            word, *rest = line.split()
            name, ids = (rest[0], [int(each) for each in rest[1:]]) if rest and rest[0] in NAMES else ("", [])
            if word == "pid":
                pid = int(rest[0])
            elif word == "resumed":
                _resumed(name, ids, known[name], toll)
            elif word == "compared":
                toll.compared += 1
            elif word == "turn":
                known[name].given, known[name].is_deleting, phase = ids, False, "turn"
            elif word == "deleting":
                known[name].is_deleting, phase = True, "deleting"
            elif word == "held":
                known[name] = Known(ids, is_deleting=known[name].is_deleting)
                phase = "between"
            elif word == "saving":
                phase = "saving"
            elif word == "saved":
                phase = "between"
            elif word == "died":
                status = rest[0]
            count += word == wanted or (wanted == "deleting" and word == "turn")
            if kill and not is_killed and count >= wanted_count:
                time.sleep(delay_s)
                os.kill(pid, signal.SIGKILL)  # it ends by this alone, so the pid is still its own
                is_killed = True
        text = Path(errors.name).read_text(encoding="utf-8", errors="replace")
    if status != str(-signal.SIGKILL if kill else 0) or "Traceback" in text:
        toll.problems.append(f"ended with {status}: {text}")
    toll.phases.append(phase)


def _resumed(name: str, ids: list[int], known: Known, toll: Toll) -> None:
    state = known.explain(ids)
    if not ids and (known.is_deleting or len(known.state) < BLOCK):
        state = []
    if state is None:
        toll.problems.append(f"{name} was resumed to {len(ids)} tokens that it never was: {ids} of {known}")
        return
    if len(ids) < len(state) // BLOCK * BLOCK:
        toll.problems.append(f"{name}: {len(ids)} of {len(state)} tokens are resumed")
    toll.equal += len(ids) == len(state)
    toll.shorter += len(ids) < len(state)
    toll.lost_tokens += len(state) - len(ids)
    known.state, known.given = ids, None


def test_kills_at_any_moment_leave_sessions_in_a_state_that_they_were_in(tmp_path: Path) -> None:
    chance, toll = random.Random(int(os.environ.get("KVTIER_TEST_SEED", "5"))), Toll()
    known = {name: Known() for name in NAMES}
    with starter(0) as one, starter(12345) as other:
        for number in range(NUM_KILLS):
            one_life((one, other)[number % 2], tmp_path, known, chance, toll)
            assert not toll.problems, toll
            assert allocated_bytes(tmp_path / "nvme" / "kv") <= BUDGET_BYTES
        one_life(one, tmp_path, known, chance, toll, kill=False)
    assert not toll.problems, toll
    killed = toll.phases[:-1]
    counts = {phase: killed.count(phase) for phase in sorted(set(killed))}
    print(
        f"{len(killed)} kills: {counts}; resumed {toll.equal} whole, {toll.shorter} shorter by {toll.lost_tokens} "
        f"tokens; {toll.compared} lives compared with the plain model"
    )
    assert 2 * (counts.get("turn", 0) + counts.get("saving", 0)) >= len(killed), counts
    assert counts.get("saving", 0) >= max(1, len(killed) // 20), counts
    assert toll.compared >= len(killed) // 2 and toll.equal > toll.shorter
