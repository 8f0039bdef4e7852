"""docs/stats.md names exactly the fields that `stats()` has; every page is in the index, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier import TieredKV
from kvtier.bound import EdgeUse, measured
from tests.e2e.families import tiny

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "stats.md").read_text(encoding="utf-8")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def test_stats_are_documented_field_by_field() -> None:
    tiers = {"gpu": {"budget": "1MiB"}, "cpu": {"budget": "1MiB"}, "nvme": {"budget": "8MiB"}}
    with TieredKV(tiny("llama"), {"block_tokens": 16, "tiers": tiers}) as tiered:
        stats, cache_stats = tiered.stats(), tiered.new_cache().stats()
    words = set(re.findall(r"`[….]*(?:tiers\.[a-z{},]+\.)?([a-z_]+)`", TEXT))
    wanted = (set(stats) - {"tiers", "bytes_moved"}) | set(cache_stats)
    for tier in stats["tiers"].values():
        wanted |= set(tier)
    assert wanted <= words, wanted - words
    assert all(re.fullmatch(r"(gpu|cpu|nvme)_to_(gpu|cpu|nvme)", edge) for edge in stats["bytes_moved"])


def test_the_bound_is_documented_field_by_field() -> None:
    with TieredKV(tiny("llama"), {"block_tokens": 16, "tiers": {"gpu": {"budget": "1MiB"}}}) as tiered:
        bound = tiered.stats()["bound"]
    edge = measured(1.0, {}, {"an edge": EdgeUse(1, 1.0, None)}, {})["edges"]["an edge"]
    fields = {f"bound.{name}" for name in set(bound) - {"edges", "stalls"}} | {"bound.edges.<from>_to_<to>"}
    fields |= {f"bound.stalls.{cause}" for cause in bound["stalls"]} | {f"bound.edges.….{name}" for name in edge}
    table = TEXT.partition("| field of `bound` |")[2]
    words = {word for row in table.splitlines()[2:] for word in re.findall(r"`([^`]+)`", row.split("|")[1])}
    many = {word: re.fullmatch(r"(.*)\{(.+)\}", word) for word in words}
    documented = {word for word, found in many.items() if found is None}
    documented |= {found[1] + name for found in many.values() if found is not None for name in found[2].split(",")}
    assert documented == fields


def test_the_index_has_every_page_and_readme_has_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
    assert "](docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        other = page.parent / target if target else page
        assert other.exists(), link
        assert not anchor or anchor in anchors(other), link
