"""Everything that one examination found out, and the few figures that both the proposal and the verdict start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.compute import ComputeRate
from kvtier.doctor.decoding import DecodeSpeed
from kvtier.doctor.disk_rates import DEPTHS, Access, DiskSpeed
from kvtier.doctor.gpu import Gpu
from kvtier.doctor.host import HostSpeed
from kvtier.doctor.limits import Limits
from kvtier.system import is_memory_backed, is_network
from kvtier.types import IoMode

CUDA_LAYER_TOKEN_BYTES = 4096
"""K and V of one token in one layer of an 8B model in 16 bits (8 KV heads of 128): 256 tokens are 1 MiB."""
SLICE_BYTES = 384 << 10
"""A slice of SmolLM2-135M in fp32, 256 tokens; the size that the proposal goes by."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the nvme tier's files would lie."""

    folder: Path
    measured_in: Path
    """`folder`, or the nearest folder above it that exists."""
    kind: str
    free_bytes: int | NotMeasured
    total_bytes: int | NotMeasured
    room_bytes: int | NotMeasured
    """What may be taken while 5 % of the disk stays free."""
    held_bytes: int
    """What files of the nvme tier in `folder` take already: a budget counts them too."""

    @property
    def is_memory(self) -> bool:
        """Files there are memory."""
        return is_memory_backed(self.kind)

    @property
    def is_remote(self) -> bool:
        """Files there lie on another machine, or behind FUSE."""
        return is_network(self.kind)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found."""

    place: Place
    limits: Limits
    disk: DiskSpeed
    host: HostSpeed
    gpus: tuple[Gpu, ...] | NotMeasured
    compute: tuple[ComputeRate, ...] = ()
    decoding: DecodeSpeed | None = None

    @property
    def cuda(self) -> tuple[Gpu, ...]:
        """The CUDA devices; none is not an error."""
        return () if isinstance(self.gpus, NotMeasured) else self.gpus

    def copies_up(self) -> dict[int, float]:
        """Bytes a second from pinned host memory to the slowest CUDA device, by bytes of a copy; those measured."""
        found: dict[int, float] = {}
        for copy in (copy for gpu in self.cuda for copy in gpu.copies if copy.is_pinned and copy.to_device):
            if not isinstance(copy.bytes_per_s, NotMeasured):
                found[copy.piece_bytes] = min(copy.bytes_per_s, found.get(copy.piece_bytes, copy.bytes_per_s))
        return found

    def read_rate(self, mode: IoMode, request_bytes: int = SLICE_BYTES) -> float | NotMeasured:
        """The best of the depths."""
        return self._best(mode, Access.READ, request_bytes)[0]

    def best_depth(self, mode: IoMode, request_bytes: int = SLICE_BYTES) -> int:
        """The least depth within a tenth of the best read rate; the largest where nothing was measured."""
        best, rates = self._best(mode, Access.READ, request_bytes)
        if isinstance(best, NotMeasured):
            return max(DEPTHS)
        return min(depth for depth, rate in rates.items() if rate >= 0.9 * best)

    def disk_rate(self) -> float | NotMeasured:
        """What the faster way reads."""
        rates = [self.read_rate(mode) for mode in (IoMode.DIRECT, IoMode.MMAP)]
        measured = [rate for rate in rates if not isinstance(rate, NotMeasured)]
        return max(measured) if measured else rates[-1]

    def _best(self, mode: IoMode, access: Access, size: int) -> tuple[float | NotMeasured, dict[int, float]]:
        found = {depth: self.disk.row(mode, access, size, depth).bytes_per_s for depth in DEPTHS}
        measured = {depth: rate for depth, rate in found.items() if not isinstance(rate, NotMeasured)}
        if not measured:
            return found[max(DEPTHS)], {}
        return max(measured.values()), measured
