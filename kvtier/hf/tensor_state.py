"""What memory a model's tensors have, and what little of it can be looked at before each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_NUM_SAMPLES = 16
_FIRST_FEW = (slice(None, 4),)

# Methods of C themselves: a Python frame for each parameter would double the cost.
_expired = torch.UntypedStorage._expired
_version: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__


class TensorState:
    """What memory a model's tensors had at one time, and how often each had been written."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # Addresses, not weak references to the tensors: with one, torch.utils.swap_tensors refuses a tensor.
        self._addresses = [*map(torch.Tensor.data_ptr, tensors)]
        try:
            self._versions = [*map(_version, tensors)]
        except RuntimeError:  # inference tensors count nothing
            self._versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        self._storages: list[StorageWeakRef] = []
        self._watched: list[int] = []
        self._read_samples: Callable[[], list[bytes]] = list
        self._bits: list[bytes] = []

    def watch(self, tensors: list[torch.Tensor], adapters: list[torch.Tensor]) -> None:
        """Notice, too, what leaves addresses and counters as they are.

        That is memory that was freed and given out again, and a whole model or adapter written through `.data`, as in
        `p.data.copy_(q)` over all parameters, or in PEFT's hotswap: a few values of tensors from all over it tell.
        """
        self._storages = [_storage(tensor) for tensor in tensors]
        self._watched = [storage.cdata for storage in self._storages]
        self._read_samples = _reader([_few(tensor.detach()) for tensor in _spread(tensors) + _spread(adapters)])
        self._bits = self._read_samples()

    def any_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of these lies where one of the model's does."""
        return not {*self._addresses}.isdisjoint(map(torch.Tensor.data_ptr, tensors))

    def is_same(self, now: TensorState) -> bool:
        """Whether nothing was replaced, moved or written since."""
        return (
            self._addresses == now._addresses
            and self._versions == now._versions
            and not any(map(_expired, self._watched))
            and self._bits == self._read_samples()
        )


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types here


def _spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Some that have values to look at, from all over."""
    usable = _usable(tensors)
    # An odd stride: an adapter's tensors come in pairs, of which one may be frozen.
    return usable[:: len(usable) // _NUM_SAMPLES | 1]


def _usable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    usable = [t for t in tensors if t.is_floating_point() and t.ndim and t.numel() and not t.is_meta]
    return [tensor for tensor in usable if tensor.device == usable[0].device]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its values, as a view."""
    return tensor[(-1,) * (tensor.ndim - 1) + _FIRST_FEW]


def _reader(samples: list[torch.Tensor]) -> Callable[[], list[bytes]]:
    """What reads their bits: as such, a NaN is equal to itself."""
    if any(sample.is_neg() or not sample.is_cpu for sample in samples):
        return lambda: [torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes()]
    # Not by torch: behind a forward, its code for this alone takes longer to come from memory than the values. And not
    # by `Tensor.numpy`, after which nobody could resize the memory of the user's tensors.
    integers = [sample.view(getattr(torch, f"int{8 * sample.itemsize}")) for sample in samples]  # numpy has no bfloat16
    views = [np.from_dlpack(each).data for each in integers]
    return lambda: [*map(memoryview.tobytes, views)]


@torch.no_grad()
def some_values(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A few of each, as bits. Copies: a view would keep the memory of what is replaced."""
    chosen = [_few(tensor) for tensor in _usable(tensors)]
    return torch.cat(chosen).view(torch.uint8) if chosen else torch.empty(0, dtype=torch.uint8)
