"""Opening a folder that an earlier process left: what stays, what is read, what has to go."""

from __future__ import annotations

import logging

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.namespaces import Age, Namespaces
from kvtier.stores.nvme_layout import segment_budget_bytes, segment_bytes, sparse_overhead_bytes
from kvtier.stores.nvme_space import SegmentSpace
from kvtier.stores.nvme_sparse import Pages, SparseSpace, give_back_holes, sparse_pages
from kvtier.stores.other_files import FoundFiles, OtherFile
from kvtier.stores.slot_format import Geometry, Verdict
from kvtier.stores.slot_index import SlotIndex
from kvtier.stores.slot_scan import FoundSegment, examine_segments
from kvtier.stores.space_limits import SpaceLimits
from kvtier.stores.superblock import SegmentKind

_log = logging.getLogger("kvtier")


def open_space(
    folder: OwnedFolder,
    geometry: Geometry,
    limits: SpaceLimits,
    namespaces: Namespaces,
    index: SlotIndex,
    *,
    sync: bool,
) -> SegmentSpace:
    """Take over the segments that are there, and fill the index with what verifies in them.

    Whole files are removed, oldest first, until the rest fits the budget. A file that cannot be taken over is left as
    one of others. Raises OSError where the folder itself cannot be read or changed.
    """
    files = [(_age(each, namespaces), each) for each in examine_segments(folder, geometry, limits.budget_bytes)]
    _remove_beyond_budget(folder, geometry, limits, files)
    found = FoundFiles([], [])
    pages: list[Pages] = []
    headers = []
    for age, each in files:
        if each.geometry == geometry and each.headers is not None and each.num_slots:
            try:
                num_bytes = segment_bytes(each.num_slots, geometry.slot_bytes)
                segment = folder.adopt(each.file.name, num_bytes, sparse=limits.is_sparse)
                if limits.is_sparse:
                    needed = sparse_pages(each.headers, geometry)
                    give_back_holes(segment, geometry, needed)
                    pages.append(needed)
            except OSError as error:
                _log.info("nvme folder %s: %s cannot be used: %s", folder.path, each.file.name, error)
            else:
                found.segments.append((segment, each.num_slots))
                headers.append(each.headers)
                continue
        found.others.append(OtherFile(each.file.name, each.file.allocated_bytes, age))
    namespaces.keep_only({namespace for _, each in files for namespace in each.namespaces})
    space = (
        SparseSpace(folder, geometry, limits, found, pages, sync=sync)
        if limits.is_sparse
        else SegmentSpace(folder, geometry, limits, found, sync=sync)
    )
    for (first_slot, _), each_headers in zip(space.ranges(), headers, strict=True):
        index.load(first_slot, each_headers)
        if limits.is_sparse:  # they have become holes
            for row in each_headers.where(Verdict.BAD, Verdict.FUTURE).tolist():
                index.header_gone(first_slot + row)
    if index.num_quarantined:
        _log.info("nvme folder %s: %d slots are not trusted", folder.path, index.num_quarantined)
    return space


def held_back(space: SegmentSpace, namespaces: Namespaces, index: SlotIndex) -> list[int]:
    """The slots to hand out last, in that order: see NvmeStore. O(slots)."""
    by_namespace: dict[bytes, list[tuple[int, int]]] = {}
    for slot, found in index.found().items():
        by_namespace.setdefault(found.namespace, []).append((found.generation, slot))
    groups = [
        (namespaces.age([namespace]), [slot for _, slot in sorted(slots)]) for namespace, slots in by_namespace.items()
    ]
    groups += [(age, list(slots)) for age, slots in space.slots_for_others()]
    groups.sort(key=lambda group: group[0])
    return [slot for age, slots in groups if not namespaces.is_expired(age) for slot in slots]


def _age(found: FoundSegment, namespaces: Namespaces) -> Age:
    if found.kind is SegmentKind.FUTURE:  # its headers are not read: the file's own time has to do
        return namespaces.age_of(found.file.changed_s)
    return namespaces.age(found.namespaces)


def _remove_beyond_budget(
    folder: OwnedFolder, geometry: Geometry, limits: SpaceLimits, files: list[tuple[Age, FoundSegment]]
) -> None:
    def num_bytes(each: FoundSegment) -> int:
        if each.geometry != geometry or not each.num_slots:
            return each.file.allocated_bytes
        if limits.is_sparse and each.headers is not None:
            num_pages = int(sparse_pages(each.headers, geometry).sum())
            return num_pages * PAGE_BYTES + sparse_overhead_bytes(each.num_slots)
        # As it will be once its holes are allocated and each of its slots is an extent.
        return max(segment_budget_bytes(each.num_slots, geometry.slot_bytes), each.file.allocated_bytes)

    left_bytes = limits.budget_bytes - limits.kept_bytes - sum(num_bytes(each) for _, each in files)
    # Of one age the last name first: the files are by name, and a sort keeps the order among equals.
    for age, each in sorted(reversed(files), key=lambda file: file[0]):
        if left_bytes >= 0:
            return
        folder.unlink(each.file.name)
        _log.info("nvme folder %s: %s is beyond the budget and was removed", folder.path, each.file.name)
        left_bytes += num_bytes(each)
        files.remove((age, each))
