"""Which sealed blocks are labelled on their way to files that outlive the process, and with what.

A label says whose KV a block is, and may never be wrong: a later process serves the block on its word. So a block is
labelled only when the model was hashed before the first token of its sequence was computed and again after the block
was sealed, and both hashes agree. Where nothing outlives the process, the same names serve to share blocks in it, and
stand for the marks of the model in this process instead of its hash. Pure: what hashes the model is handed in.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from kvtier.identity import block_identity, canonical, digest
from kvtier.log import logger
from kvtier.origin import Fingerprint, Origin, Sealed, Source, namespace_of
from kvtier.types import SlotLabel
from kvtier.workers import Workers

_Seen = tuple[int, bytes | None]
"""A model as this process tells it from others: the mark of its weights, and what its modules are."""

_Run = Callable[..., "Future[tuple[Fingerprint | None, float]]"]


class Labels:
    """Gives labels to blocks of sequences whose KV a later process could compute again. One thread at a time.

    Hashing again takes at most 1 s and 1 % of the time; a block that would need more goes without a label, which costs
    its recomputation after a restart. Blocks that go down because there is no room for them are not waited for: they
    get their label when the model has been hashed beside the steps, which takes a quarter of a percent of the time.
    """

    MAX_TIME_FRAC = 0.01
    BURST_S = 1.0
    BESIDE_TIME_FRAC = 0.0025
    """What proofs beside the steps may take of it: they are for what nobody waits for."""
    _MAX_REMEMBERED = 16
    _MAX_ORIGINS = 4096

    def __init__(
        self,
        source: Source,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        outlives: bool = True,
        beside: _Run | None = None,
    ) -> None:
        """Args:
        outlives: whether labelled blocks outlive the process. If not, nothing is hashed, no move is labelled.
        beside: what runs a proof beside the steps; a thread of its own by default.
        """
        self._source, self._clock_s, self.outlives = source, clock_s, outlives
        self._process = os.urandom(32)
        self._remembered: dict[_Seen, Fingerprint | None] = {}
        """By what was seen of the model, latest last."""
        self._origins: dict[tuple[_Seen, bytes], Origin] = {}
        """Those that batches begin with, by that and the salt."""
        self._alive: weakref.WeakSet[Origin] = weakref.WeakSet()
        """All that a batch or a sealed block still has."""
        self._num_sealed = 0
        self._started_s = clock_s()
        self._spent_s = self._spent_beside_s = 0.0
        """In proofs that were waited for, and in those beside the steps."""
        self._workers = Workers(1, "kvtier-hash")
        self._beside = self._workers.submit if beside is None else beside
        self._proof: _Proof | None = None
        """Under way."""

    def origin(self, mark: int, modules: bytes | None = None, salt: bytes = b"") -> Origin | None:
        """What a batch that begins now is computed with; None if nobody can say.

        Args:
            mark: the number of the model's weights in this process. A model with the mark of one hashed before is not
                hashed again here: if the mark has missed a change, `label` finds it.
            modules: what its modules are and what is set on them, which the mark does not see.
            salt: whose KV it is to be.
        """
        seen = mark, modules
        if seen not in self._remembered:
            self._remembered[seen] = self._hash(self._source.fingerprint) if self.outlives else self._of_process(seen)
            while len(self._remembered) > self._MAX_REMEMBERED:
                oldest = next(iter(self._remembered))
                del self._remembered[oldest]
                self._origins = {key: origin for key, origin in self._origins.items() if key[0] != oldest}
        fingerprint = self._remembered[seen]
        if fingerprint is None:
            return None
        while len(self._origins) > self._MAX_ORIGINS:
            self._origins.pop(next(iter(self._origins)))
        origin = self._origins.setdefault((seen, salt), Origin(fingerprint.salted(salt), salt))
        self._alive.add(origin)
        return origin

    def _of_process(self, seen: _Seen) -> Fingerprint | None:
        structure = self._source.structure()
        if structure is None:
            return None
        fields = [("process", self._process), ("seen", canonical(list(seen))), ("structure", structure)]
        weights = digest("process", fields)
        return Fingerprint(weights, namespace_of(weights, b"", b""))

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        """As `Source.is_plain`."""
        return self._source.is_plain(arguments)

    def seal(self, origin: Origin, parent: Sealed | None, content: bytes, *, is_first: bool) -> Sealed | None:
        """What a block's label will be; None if the one before it has none, or is another model's."""
        before = None
        if parent is not None:
            if parent.origin is not origin and parent.origin.fingerprint != origin.fingerprint:
                return None
            before = parent.label.identity
        elif not is_first:
            return None
        sealed = Sealed(self.name(origin, before, content), before, origin, self._num_sealed)
        self._num_sealed += 1
        return sealed

    def reseal(self, sealed: Sealed | None) -> Sealed | None:
        """The label of a block that was computed again, by a model that was not seen to change. To be proven anew."""
        if sealed is None or sealed.origin.is_stale:
            return None
        again = replace(sealed, number=self._num_sealed)
        self._num_sealed += 1
        return again

    @staticmethod
    def name(origin: Origin, parent: bytes | None, content: bytes) -> SlotLabel:
        """What a block of these tokens is called behind the block of that identity; `content` as `token_content`."""
        namespace = origin.fingerprint.namespace
        return SlotLabel(namespace, block_identity(namespace, parent, content), content)

    def label(self, sealed: Sealed | None) -> SlotLabel | None:
        """The label under which a block may be kept now, or None: it must not be found by a later process.

        Hashes the model if it has not been since the block was sealed.
        """
        if sealed is None or not self.outlives:
            return None
        origin = sealed.origin
        self._settle(wait=self._proof is not None and origin.num_proven <= sealed.number < self._proof.num_sealed)
        if sealed.number >= origin.num_proven and not origin.is_stale and self._may_hash_now():
            self._verify(origin)
        return sealed.label if sealed.number < origin.num_proven else None

    def label_if_proven(self, sealed: Sealed | None) -> SlotLabel | None:
        """As `label`, and waits for nothing: a block that is not proven gets none, and may later (`prove_beside`)."""
        if sealed is None or not self.outlives:
            return None
        self._settle(wait=False)
        return sealed.label if sealed.number < sealed.origin.num_proven else None

    def prove_beside(self, sealed: Sealed) -> None:
        """Hash the model on a thread, for this block's sake and that of all sealed so far, if there is time for it."""
        self._settle(wait=False)
        if self._proof is None and not sealed.origin.is_stale and self._may_hash_beside():
            self._proof = self._begin(sealed.origin, self._beside, is_beside=True)

    def prove(self) -> None:
        """Hash the model now, whatever that costs, so that what was sealed with it so far can be labelled."""
        self._settle(wait=True)
        current = [origin for origin in self._origins.values() if not origin.is_stale]
        if self.outlives and any(origin.num_proven < self._num_sealed for origin in current):
            self._verify(current[-1])

    def close(self, timeout_s: float) -> None:
        """Wait so long for a proof that is under way; one that takes longer is nobody's. Idempotent."""
        has_ended = self._proof is None or not wait([self._proof.result], timeout_s).not_done
        self._settle(wait=has_ended)
        self._workers.close(wait=has_ended)

    def _may_hash_now(self) -> bool:
        return self._spent_s <= self.BURST_S + self.MAX_TIME_FRAC * (self._clock_s() - self._started_s)

    def _may_hash_beside(self) -> bool:
        """No burst: the first proof comes as soon as there is something to prove, the next when the last is paid."""
        return self._spent_beside_s <= self.BESIDE_TIME_FRAC * (self._clock_s() - self._started_s)

    def _verify(self, origin: Origin) -> None:
        self._settle(wait=True)
        self._proof = self._begin(origin, at_once)
        self._settle(wait=True)

    def _begin(self, origin: Origin, run: _Run, *, is_beside: bool = False) -> _Proof:
        """Hash the model. What it is made of is read now; its tensors are by whoever runs the rest.

        A tensor that is written meanwhile, after it was read, had not been written before: the proof is of now.
        """
        started_s = self._clock_s()
        try:
            finish = self._source.begin_fingerprint()
        except Exception as error:  # as `_hash`
            finish = functools.partial(_raise, error)
        begun_s = self._clock_s() - started_s
        fresh = tuple(each for each in {*self._alive, origin} if not each.is_stale)
        return _Proof(self._num_sealed, fresh, run(self._finish, finish, begun_s), is_beside)

    def _finish(self, finish: Callable[[], Fingerprint | None], begun_s: float) -> tuple[Fingerprint | None, float]:
        started_s = self._clock_s()
        return self._hash(finish), begun_s + self._clock_s() - started_s

    def _settle(self, *, wait: bool) -> None:
        """Take up what a proof has shown, if it has ended."""
        proof = self._proof
        if proof is None or not (wait or proof.result.done()):
            return
        now, took_s = proof.result.result()
        self._proof = None
        if proof.is_beside:
            self._spent_beside_s += took_s
        else:
            self._spent_s += took_s
        for each in proof.fresh:
            if now is not None and each.fingerprint.weights == now.weights:
                each.num_proven = max(each.num_proven, proof.num_sealed)
            else:
                each.is_stale = True
        if any(each.is_stale for each in proof.fresh):
            # Whatever the marks say: they may have missed it. Batches that begin from here on are hashed for.
            self._remembered.clear()
            self._origins.clear()
            logger.info("the model has changed since KV was computed with it: blocks sealed meanwhile get no label")

    @staticmethod
    def _hash(fingerprint: Callable[[], Fingerprint | None]) -> Fingerprint | None:
        try:
            return fingerprint()
        except Exception as error:  # whatever it is: a label is a convenience, and the move it is for must go on
            logger.warning("the model could not be hashed (%s): its KV will not survive a restart", error)
            return None


@dataclass(frozen=True, slots=True)
class _Proof:
    """That the model is what it was, for all that had been sealed when it was begun."""

    num_sealed: int
    fresh: tuple[Origin, ...]
    """Those it is about."""
    result: Future[tuple[Fingerprint | None, float]]
    """The model's hash, and the seconds that it took."""
    is_beside: bool


def at_once(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call it here; what it returns, in a future."""
    future: Future[Any] = Future()
    future.set_result(function(*arguments))
    return future


def _raise(error: Exception) -> Fingerprint | None:
    raise error
