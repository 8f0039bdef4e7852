"""A device with queues that is none: everything runs on the CPU, late, and in any order that the waits allow."""

from __future__ import annotations

import enum
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.device import DONE, Copy, Device, Event, StagingPool
from kvtier.errors import IntegrityError

_GARBAGE = 0xFF  # a NaN in every float format


class Wait(enum.Enum):
    """The kinds of waits that keep a device in order."""

    LOAD_FOR_READER = "load for reader"
    """A copy up waits for the kernels that read its destination, or wrote there."""
    STORE_FOR_PRODUCER = "store for producer"
    """A copy down waits for the kernels that made what it copies."""
    COMPUTE_FOR_ARRIVAL = "compute for arrival"
    """Kernels wait for the copy that loads what they read."""
    HOST_FOR_COPY = "host for copy"
    """The host waits before it touches, or reports, what a copy reads or writes."""


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.has_happened = False

    def is_done(self) -> bool:
        self._device.let_pass()
        return self.has_happened

    def synchronize(self) -> None:
        if Wait.HOST_FOR_COPY not in self._device.leaves_out:
            self._device.run_until(lambda: self.has_happened)


@dataclass(slots=True)
class _Kernel:
    run: Callable[[], None]


@dataclass(slots=True)
class _Wait:
    event: _FakeEvent


@dataclass(slots=True)
class _Record:
    event: _FakeEvent


@dataclass(slots=True)
class _CopyCommand:
    copies: list[Copy]
    """Destination and source as bytes."""
    seen: list[torch.Tensor] = field(default_factory=list)
    """The sources as they were when it began."""


_Command = _Kernel | _Wait | _Record | _CopyCommand
_COMPUTE, _UP, _DOWN = range(3)


class FakeDevice(Device):
    """Queues kernels and copies and runs them at random moments, in a random order among the queues.

    Kernels are the torch operations of a thread within `kernels()`: results of floating point are NaN until their turn
    comes. Operations whose answer the host needs (`item`, comparisons, `argmax`, whatever is about bytes or integers)
    wait for all before them, as on CUDA they would, or are not the device's at all.

    A copy takes what its source holds when it begins, and its destination is NaN from then until it arrives. What
    touches either in between is noted in `violations`.

    The schedule is drawn from `seed`: which queue hurries and which one lags, and every step. Two runs that make the
    same calls in the same order have the same schedule; where threads make them, the calls' order is the system's.

    Attributes:
        leaves_out: waits that are not honoured, to see that tests notice.
        violations: a line for each source that changed, and each destination that was written, during a copy.
        num_late: commands that had not run when the host went on.
    """

    is_async = True

    def __init__(self, seed: int, leaves_out: Collection[Wait] = (), hurries: Collection[float] | None = None) -> None:
        """`hurries`: how often compute, copies up and copies down get on by themselves, instead of drawn weights."""
        self.torch_device = torch.device("cpu")
        self.leaves_out = frozenset(leaves_out)
        self.violations: list[str] = []
        self.num_late = 0
        self._random = random.Random(seed)
        self._weights = list(hurries or (self._random.choice((0.02, 0.3, 1.0, 5.0)) for _ in range(3)))
        self._queues: list[deque[_Command]] = [deque(), deque(), deque()]
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._staging = StagingPool(lambda num_bytes: torch.full((num_bytes,), _GARBAGE, dtype=torch.uint8))

    # -- Device -------------------------------------------------------------------------------------------------------

    def record(self) -> Event:
        event = _FakeEvent(self)
        self._queue(_COMPUTE, _Record(event))
        return event

    def compute_waits_for(self, event: Event) -> None:
        if not getattr(self._thread, "is_queueing", False):
            event.synchronize()  # this thread's operations run at once
        elif isinstance(event, _FakeEvent) and Wait.COMPUTE_FOR_ARRIVAL not in self.leaves_out:
            self._queue(_COMPUTE, _Wait(event))

    def copy_up(self, copies: Sequence[Copy], after: Event) -> Event:
        return self._copy(_UP, copies, DONE if Wait.LOAD_FOR_READER in self.leaves_out else after)

    def copy_down(self, copies: Sequence[Copy], after: Event) -> Event:
        return self._copy(_DOWN, copies, DONE if Wait.STORE_FOR_PRODUCER in self.leaves_out else after)

    def _copy(self, queue: int, copies: Sequence[Copy], after: Event) -> Event:
        event = _FakeEvent(self)
        as_bytes = [(_bytes(dest), _bytes(source)) for dest, source in copies]
        with self._lock:  # as one: another thread's copies may come before or behind, not between
            if isinstance(after, _FakeEvent):
                self._queue(queue, _Wait(after))
            self._queue(queue, _CopyCommand(as_bytes))
            self._queue(queue, _Record(event))
        return event

    def staging(self) -> StagingPool:
        return self._staging

    def close(self) -> None:
        self.synchronize()
        self._staging.clear()

    # -- kernels ------------------------------------------------------------------------------------------------------

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """This thread's torch operations are kernels of the device, queued and run later, some behind its end."""
        before = getattr(self._thread, "is_queueing", False)
        self._thread.is_queueing = True
        try:
            with _Kernels(self):
                yield
        finally:
            self._thread.is_queueing = before

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue one torch operation."""
        if getattr(self._thread, "is_running", False):  # it is one whose turn has come
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs.values()) if kwargs else args)
        if not any(tensor.is_floating_point() for tensor in tensors):
            if any(tensor.dtype is torch.uint8 for tensor in tensors):
                self.flush()  # bytes of the device's memory
            return func(*args, **kwargs)
        kept_args, kept_kwargs = _keep(args), {name: _keep(value) for name, value in kwargs.items()}
        if func._schema.is_mutable:
            written = _written(func._schema, args, kwargs)
            if not all(tensor.is_floating_point() for tensor in written):
                self.flush()
                return func(*args, **kwargs)
            self._queue(_COMPUTE, _Kernel(lambda: func(*kept_args, **kept_kwargs)))
            return written[0] if len(written) == 1 else tuple(written)
        result = func(*args, **kwargs)  # for its shapes: what it was made of may not be there yet
        outputs = _tensors((result,))
        if {_memory(output) for output in outputs} & {_memory(tensor) for tensor in tensors}:
            return result  # a view: nothing is computed
        if not outputs or not all(output.is_floating_point() for output in outputs):
            self.flush()
            return func(*args, **kwargs)
        for output in outputs:
            output.fill_(float("nan"))

        def run() -> None:
            values = _tensors((func(*kept_args, **kept_kwargs),))
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value)

        self._queue(_COMPUTE, _Kernel(run))
        return result

    # -- time ---------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Run until no kernel is queued."""
        self.run_until(lambda: not self._queues[_COMPUTE])

    def synchronize(self) -> None:
        """Run until nothing is queued."""
        self.run_until(lambda: not any(self._queues))

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run commands, the queues' turns drawn at random. Raises IntegrityError: each waits for another."""
        with self._lock:
            while not is_reached():
                ready = [number for number in range(3) if self._is_ready(number)]
                if not ready:
                    raise IntegrityError("the fake device's queues wait for each other, or for what nobody queued")
                weights = [self._weights[number] + 1e-9 for number in ready]
                self._run_one(self._random.choices(ready, weights)[0])

    def let_pass(self) -> None:
        """Time goes by: perhaps something is done."""
        with self._lock:
            for _ in range(self._random.choice((0, 1, 1, 4))):
                number = self._random.choices(range(4), [*self._weights, 1.0])[0]
                if number < 3 and self._is_ready(number):
                    self._run_one(number)

    def _queue(self, number: int, command: _Command) -> None:
        with self._lock:
            self._queues[number].append(command)
            self.num_late += len(self._queues[number]) > 1
            self.let_pass()

    def _is_ready(self, number: int) -> bool:
        queue = self._queues[number]
        return bool(queue) and not (isinstance(queue[0], _Wait) and not queue[0].event.has_happened)

    def _run_one(self, number: int) -> None:
        before = getattr(self._thread, "is_running", False)
        self._thread.is_running = True
        try:
            with torch.no_grad():
                command = self._queues[number][0]
                if isinstance(command, _CopyCommand) and not command.seen:
                    self._begin(command)
                    return
                self._queues[number].popleft()
                if isinstance(command, _Kernel):
                    command.run()
                elif isinstance(command, _Record):
                    command.event.has_happened = True
                elif isinstance(command, _CopyCommand):
                    self._arrive(command)
        finally:
            self._thread.is_running = before

    def _begin(self, command: _CopyCommand) -> None:
        command.seen = [source.clone() for _, source in command.copies]
        for dest, _ in command.copies:
            dest.fill_(_GARBAGE)

    def _arrive(self, command: _CopyCommand) -> None:
        for (dest, source), seen in zip(command.copies, command.seen, strict=True):
            if not torch.equal(source, seen):
                self.violations.append("a source changed while it was copied")
            if not bool((dest == _GARBAGE).all()):
                self.violations.append("a destination was written while a copy was on its way there")
            dest.copy_(seen)


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # no types
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.kernel(func, args, kwargs or {})


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise IntegrityError(f"a copy of {tuple(tensor.shape)} with strides {tensor.stride()} is not one of bytes")
    return tensor.view(-1).view(torch.uint8)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | ValuesView):
            found += _tensors(value)
    return found


def _keep(value: Any) -> Any:
    """An argument as it is now: the host's own tensors may change before the kernel's turn."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else value.clone()
    return type(value)(map(_keep, value)) if isinstance(value, list | tuple) else value


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs[argument.name])
    return found
