"""The interface of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Codec(ABC):
    """Makes one slice smaller, and the same bytes of it again. Any number of threads at once.

    Bytes that get no smaller come back as they are from `encode`: whoever stores them tells the two apart by length,
    which is then the slice's own.
    """

    number: int
    """What the headers on disk call it and all that it must know (docs/nvme-format.md). Never given to another."""

    @abstractmethod
    def encode(self, data: Bytes) -> Bytes:
        """Fewer bytes than `data` (`[slice_bytes]`, contiguous), or `data` itself. Keeps no hold of it."""

    @abstractmethod
    def decode(self, encoded: Bytes, out: Bytes) -> None:
        """Write the slice that `encode` was given into `out`. All of it is written, or ValueError is raised.

        Raises:
            ValueError: `encoded` is not what `encode` makes; `out` then holds garbage.
        """
