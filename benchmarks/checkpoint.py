"""A soak on disk: enough to go on where an interrupted one stopped. One small JSON file and a folder of logits.

The file has no prompt: prompts are made again from the seed and the documents, and the answers are in it. Each
session's transcript must then have the checksum that the file says, or the run is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from kvtier.benchmarks.conversations import Conversation, Run, Seat
from kvtier.benchmarks.faults import load_faults
from kvtier.benchmarks.files import write_whole
from kvtier.benchmarks.options import SoakOptions, option, shown
from kvtier.benchmarks.verify import Verification, Verified
from kvtier.config import load_config
from kvtier.errors import ConfigError

COUNTS = ("turns", "tokens", "prompt_tokens", "generate_s", "decode_tokens", "decode_s", "think_s")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SavedTurn(_Strict):
    """One turn; its prompt is planned again."""

    answer: tuple[int, ...]
    reread: bool


class SavedConversation(_Strict):
    """One session; `digest` is of its transcript."""

    index: int
    turns_to_have: int
    turns: tuple[SavedTurn, ...]
    digest: str
    nvme_read_bytes: int


class SavedSeat(_Strict):
    """One seat: the index of the session that has it, and the seconds that it still thinks."""

    conversation: int | None
    turns_had: int
    wait_s: float


class Checkpoint(_Strict):
    """A run after a turn, or after a session that was verified. `config` is whole; `options.config` is its name."""

    format: Literal[1] = 1
    options: SoakOptions
    config: dict[str, Any]
    identity: dict[str, str]
    """What must be the same when the run goes on: versions, checksums of the model and of the documents."""
    clock_s: float
    total_s: float
    """With loading excluded and verification included."""
    counts: dict[str, int | float]
    conversations: tuple[SavedConversation, ...]
    seats: tuple[SavedSeat, ...]
    last_seat: int
    next_index: int
    errors: tuple[str, ...]
    budget_violations: tuple[str, ...]
    leaks: tuple[str, ...]
    stats: dict[str, Any]
    peak: dict[str, int]
    memory_growth_bytes: int
    io: dict[str, int]
    timeline: dict[str, Any]
    verified: dict[str, Any]
    faults: dict[str, Any] | None = None
    """Settings and counts, as `Injection.document`; None: none are injected."""

    def soak_options(self, given: Mapping[str, Any]) -> SoakOptions:
        """The options of the run, which those that are `given` again may not contradict.

        Raises:
            ConfigError: one does, by name.
        """
        options = self.options
        for name, value in given.items():
            began = getattr(options, name)
            if name == "config":  # a file may have another name now, or other contents
                same = load_config(value).model_dump(mode="json") == self.config
            elif name == "faults":
                same = bool(self.faults) and load_faults(value).model_dump(mode="json") == self.faults["settings"]
            else:
                same = value == began
            if not same:
                raise ConfigError(
                    f"{option(name)} {shown(name, value)} contradicts the checkpoint, whose run was begun with "
                    f"{shown(name, began)}: leave {option(name)} out, or start a new run"
                )
        return options


class CheckpointFile:
    """Where a run is saved: `path`, and the folder `path` + `.logits` beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logits = path.with_name(path.name + ".logits")

    def check_new(self) -> None:
        """Raise ConfigError if an interrupted run would be overwritten."""
        if self.path.exists():
            raise ConfigError(
                f"{self.path} is the checkpoint of an interrupted run: go on with --resume-from {self.path}, "
                "or remove it"
            )

    @contextlib.contextmanager
    def logits_folder(self) -> Iterator[Path]:
        """The folder beside the file, made if need be; goes again if nothing was put there."""
        with contextlib.suppress(FileExistsError):
            self.logits.mkdir(mode=0o700)
        try:
            yield self.logits
        finally:
            with contextlib.suppress(OSError):
                self.logits.rmdir()

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the file at once: a killed process leaves the checkpoint before this one."""
        write_whole(self.path, checkpoint.model_dump_json() + "\n", "--checkpoint")

    def load(self) -> Checkpoint:
        """Read what `save` wrote.

        Raises:
            ConfigError: there is none, or it is no checkpoint of this version.
        """
        try:
            return Checkpoint.model_validate_json(self.path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"--resume-from {self.path}: {error.strerror}; give the checkpoint of an interrupted run"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(
                f"--resume-from {self.path}: not a checkpoint that this version reads ({where}: {first['msg']}); "
                "start a new run"
            ) from error

    def remove(self) -> None:
        """The run is over: nothing is left to go on with."""
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self.logits, ignore_errors=True)


def saved_conversations(run: Run) -> tuple[SavedConversation, ...]:
    """Every session that has said something, or has a seat."""
    return tuple(
        SavedConversation(
            index=one.index,
            turns_to_have=one.turns_to_have,
            turns=tuple(SavedTurn(answer=turn.answer, reread=turn.reread) for turn in one.record.turns),
            digest=one.digest(),
            nvme_read_bytes=one.nvme_read_bytes,
        )
        for one in run.conversations
    )


def saved_seats(run: Run) -> tuple[SavedSeat, ...]:
    """Who sits where."""
    return tuple(
        SavedSeat(
            conversation=seat.conversation.index if seat.conversation else None,
            turns_had=seat.turns_had,
            wait_s=max(0.0, seat.ready_s - run.clock_s),
        )
        for seat in run.seats
    )


def restore(run: Run, saved: Checkpoint, path: Path) -> None:
    """Put a run where the checkpoint left it. Caches are empty: each session's next turn reads its transcript again.

    Raises:
        ConfigError: the documents or the tokenizer give other prompts than before, or logits are missing.
    """
    for one in saved.conversations:
        conversation = run.open(one.index, one.turns_to_have)
        for turn in one.turns:
            number = len(conversation.record.turns)
            ids = conversation.plan.continued(conversation.record.transcript, number)
            run.add_turn(conversation, ids, turn.answer, reread=turn.reread)
        if conversation.digest() != one.digest:
            raise ConfigError(
                f"--resume-from {path}: {conversation.record.name} reads otherwise than when the run was begun; "
                "the documents or the tokenizer changed: start a new run"
            )
        if run.options.verify != "none":
            for record in conversation.record.turns:
                if not record.logits.exists():
                    raise ConfigError(f"--resume-from {path}: {record.logits} is missing: start a new run")
        conversation.nvme_read_bytes = conversation.earlier_nvme_read_bytes = one.nvme_read_bytes
        run.conversations.append(conversation)
    by_index = {conversation.index: conversation for conversation in run.conversations}
    for number, seat in enumerate(saved.seats):
        sitting = None if seat.conversation is None else by_index[seat.conversation]
        run.seats.append(Seat(number, sitting, seat.turns_had, saved.clock_s + seat.wait_s if seat.wait_s else 0.0))
    _end_those_without_a_seat(run.conversations, run.seats)
    for name in COUNTS:
        setattr(run, name, saved.counts[name])
    run.last_seat, run.next_index = saved.last_seat, saved.next_index
    run.errors += saved.errors
    run.earlier_s, run.earlier_stats = saved.clock_s, saved.stats


def _end_those_without_a_seat(conversations: Collection[Conversation], seats: Collection[Seat]) -> None:
    sitting = [seat.conversation for seat in seats]
    for conversation in conversations:
        if not any(conversation is one for one in sitting):
            conversation.end()


def verified_as_json(verified: Verified) -> dict[str, Any]:
    """Only sessions that were compared whole: the others are compared again."""
    sessions = {name: vars(verified.sessions[name]) for name in verified.finished}
    return {"plain_chunk_diff": verified.plain_chunk_diff, "sessions": sessions}


def verified_from_json(document: Mapping[str, Any]) -> Verified:
    """What `verified_as_json` gave."""
    sessions = {name: Verification(**one) for name, one in document["sessions"].items()}
    return Verified(document["plain_chunk_diff"], sessions, list(sessions))


def with_named_config(options: SoakOptions) -> SoakOptions:
    """For a checkpoint: a config that is no name or path stands only in the checkpoint's own `config`."""
    return options if isinstance(options.config, str) else dataclasses.replace(options, config="config.yaml")


def checksum_of_model(model: Any) -> str:
    """A checksum of every parameter's name, shape, type and first values: not proof, but another model has another."""
    digest = xxhash.xxh3_64()
    for name, parameter in model.state_dict().items():
        head = parameter.flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + head)
    return digest.hexdigest()
