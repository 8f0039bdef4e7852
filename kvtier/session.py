"""Named conversations: the whole transcript goes in, what it shares with the last one is not computed again."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.duration import Duration
from kvtier.errors import ClosedError, UnsupportedError
from kvtier.hf import CACHE_NAMES, TieredCache, check_one_adapter
from kvtier.inputs import check_token_ids
from kvtier.reuse import PLAIN_TENSORS
from kvtier.session_info import SessionInfo
from kvtier.session_registry import Sessions
from kvtier.session_transfer import export_session, export_session_async

__all__ = ["Session", "SessionInfo", "Sessions", "seconds"]


class Session:
    """One conversation that the wrapper keeps under a name. From `tiered.session(name)`.

    Ids only: it never sees text, so nothing is tokenised again behind the caller's back. Leaving a `with` closes it.
    """

    def __init__(self, name: str, key: bytes, sessions: Sessions) -> None:
        self.name = name
        self._key, self._sessions = key, sessions
        self._closed = False

    @property
    def cache(self) -> TieredCache:
        """The conversation's cache, of one row. Raises ClosedError after `close` or `delete`."""
        self._check_open()
        return self._sessions.cache(self._key, self.name)

    def _check_open(self) -> None:
        self._sessions.runtime.check_open()
        if self._closed:
            raise ClosedError(
                f"this handle of session {self.name!r} was closed or deleted: tiered.session({self.name!r}) opens it, "
                "or a new one"
            )

    @property
    def token_ids(self) -> list[int]:
        """The ids of the last transcript and answer, oldest first, all but the last token.

        After a restart also those whose blocks were not found: the next `generate` computes them.
        """
        self._check_open()
        return self._sessions.token_ids(self._key, self.name)

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """`tiered.generate` on the whole transcript; computes only what comes after the part that the session holds.

        The transcript may have been edited anywhere: the session first goes back to the longest common prefix. With
        beams or several return sequences it keeps the row of the first sequence returned. Every id counts: without an
        attention_mask one of ones is passed, so that no id is taken for padding.

        Args:
            input_ids: `[1, length]`, all of the conversation.
            kwargs: what `generate` takes, but for a cache.

        Raises:
            UnsupportedError: another shape, padding, or a cache given. Nothing has changed.
            Whatever `tiered.generate` raises: the session then holds the common prefix and what was computed since.
        """
        cache = self.cache
        cache.state.check_between_steps("session.generate")
        check_one_adapter(kwargs)
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[0] != 1:
            shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise UnsupportedError(
                f"session.generate: input_ids is {shape}: a session is one conversation, pass its whole transcript, "
                "[1, tokens]; a session for each row, or tiered.generate for a batch"
            )
        check_token_ids(input_ids, "session.generate")
        if input_ids.shape[1] == 0:
            raise UnsupportedError("session.generate: the transcript is empty")
        for name in (*CACHE_NAMES, "inputs", "inputs_embeds"):
            if kwargs.get(name) is not None:
                raise UnsupportedError(
                    f"session.generate({name}=…): a session has its own cache, and takes input_ids only"
                )
        others = [
            name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in PLAIN_TENSORS
        ]
        if others:
            raise UnsupportedError(
                f"session.generate({others[0]}=…): a session compares token ids alone, and could serve what was "
                "computed with another; use tiered.new_cache()"
            )
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and (tuple(mask.shape) != tuple(input_ids.shape) or not bool((mask != 0).all())):
            raise UnsupportedError("session.generate: padding is of no use in one row: pass the transcript without it")
        return self._sessions.generate(
            self._key, self.name, input_ids, kwargs | {"attention_mask": torch.ones_like(input_ids)}
        )

    def fork(self, name: str = "") -> Session:
        """A session of its own with the same tokens, whose blocks are shared until either side changes them.

        It is kept as any session is, so it needs a name; `chat.cache.fork()` has none.

        Raises:
            UnsupportedError: no name; nothing changed.
            SessionExistsError: there is one of that name; nothing changed.
        """
        if name == "":  # a cache's fork, which is not kept, takes none
            raise UnsupportedError(
                f"session.fork: the new session needs a name of its own, any printable text, such as "
                f"fork({self.name + '-2'!r}); for a copy without one, kept by nobody, session.cache.fork()"
            )
        self.cache.state.check_between_steps("session.fork")
        return Session(name, self._sessions.fork(self._key, self.name, name), self._sessions)

    @property
    def info(self) -> SessionInfo:
        """Tokens, bytes per tier, times: as `tiered.sessions()` has it. Raises ClosedError as `cache`."""
        self._check_open()
        return self._sessions.info(self._key, self.name)

    def pin(self) -> None:
        """Keep the conversation whatever its time to live, and its blocks whoever else wants the room.

        Raises StoreError: that could not be noted in the nvme folder; nothing changed.
        """
        self._check_open()
        self._sessions.change(self._key, self.name, pinned=True)

    def unpin(self) -> None:
        """Take `pin` back. Raises StoreError as `pin`."""
        self._check_open()
        self._sessions.change(self._key, self.name, pinned=False)

    def set_ttl(self, ttl: str | float | None) -> None:
        """Delete the conversation when nobody has used it for so long: `7d`, `90min`, seconds; None: never.

        Raises UnsupportedError: no such time. StoreError as `pin`.
        """
        self._check_open()
        self._sessions.change(self._key, self.name, ttl_s=math.inf if ttl is None else seconds(ttl))

    def export(self, path: str | Path, *, overwrite: bool = False) -> int:
        """Write the conversation to a file of its own, mode 0600; how many bytes it has. docs/session-archive.md.

        It holds token ids and KV, which reveal the text: whoever reads it, reads the conversation.

        Raises:
            ArchiveError: the file cannot be written, or is there already. `path` is what it was before.
            UnsupportedError: the session is empty, in use, or was computed under hooks, as embeddings, or in part by
                layers that are not tiered.
            BlockLostError: a block cannot be read; the next `generate` computes it again.
        """
        self._check_open()
        return export_session(self._sessions, self._key, self.name, Path(path), overwrite)

    async def export_async(self, path: str | Path, *, overwrite: bool = False) -> int:
        """As `export`, without keeping the event loop waiting."""
        self._check_open()
        return await export_session_async(self._sessions, self._key, self.name, Path(path), overwrite)

    def close(self) -> None:
        """Let go of this handle. The conversation stays: `tiered.session(name)` goes on with it. Idempotent."""
        self._closed = True

    def delete(self) -> None:
        """Forget the conversation: its blocks are free on every tier, and erased in files, unless others share them.

        Idempotent. Raises StoreError: some of it is still in the nvme folder; `delete` again tries again.
        """
        self._sessions.delete(self._key)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.name!r}{', closed' if self._closed else ''})"


def seconds(ttl: str | float) -> float:
    """A time to live in seconds. Raises UnsupportedError."""
    try:
        return float(Duration.parse(ttl).seconds)
    except ValueError as error:
        raise UnsupportedError(f"a session's ttl {ttl!r:.40} {error}: give 7d, 36h, 90min, 30s or seconds") from None
