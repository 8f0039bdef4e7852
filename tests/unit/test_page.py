"""The soak's page: whole, self-contained, and in words that follow from the figures."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvtier.benchmarks import page, words
from kvtier.benchmarks.timeline import COUNTERS, GAUGES, Timeline
from kvtier.bound import EdgeUse, measured
from kvtier.cli import main
from kvtier.size import size_words

MIB = 1 << 20
VOID = {"meta", "br", "hr", "img", "link", "input"}


BOUND = measured(
    400.0,
    {
        "decode": {"steps": 96, "took_s": 90.0, "compute_s": 80.0},
        "prefill": {"steps": 20, "took_s": 310.0, "compute_s": 220.0},
    },
    {"nvme_to_gpu": EdgeUse(320 * 10**9, 350.0, 1e9), "gpu_to_cpu": EdgeUse(10 * MIB, 0.5, None)},
    {"stream_nvme": 25.0, "room": 5.0, "tail": 0.0},
)


def document(**changes: Any) -> dict[str, Any]:
    """A run of ten minutes that passed."""
    timeline = Timeline()
    for t_s in range(0, 600, 5):
        row = dict.fromkeys((*GAUGES, *COUNTERS), 5.0 * t_s)
        timeline.add({**row, "t_s": t_s, "gpu_used_bytes": 40 * MIB, "memory_allowed_bytes": 900 * MIB})
    tier = {"budget_bytes": 48 * MIB, "used_bytes": 40 * MIB, "peak_bytes": 47 * MIB, "hit_frac": 0.5}
    tiers = {"gpu": tier, "cpu": tier, "nvme": {**tier, "budget_bytes": 1 << 30, "only_copy_peak_bytes": 25 * MIB}}
    edges = ("gpu_to_cpu", "cpu_to_gpu", "cpu_to_nvme", "nvme_to_cpu", "gpu_to_nvme", "nvme_to_gpu")
    counts = {"verified_tokens": 96, "differing_tokens": 0, "near_ties": 0, "max_logit_diff": 2e-5,
              "steps_over_tolerance": 0, "non_finite_steps": 0, "tolerance": 3e-3, "wrong_facts": 0, "facts_asked": 4,
              "facts_right": 3}  # fmt: skip
    session = {"name": "session-0", "turns": 4, "tokens": 900, "generated_tokens": 96, "nvme_read_bytes": 3 * MIB}
    return {
        "verdict": "pass",
        "interrupted": False,
        "turns": 4,
        "tokens": 96,
        "prompt_tokens": 1234,
        **counts,
        "plain_chunk_diff": 1e-5,
        "errors": [],
        "budget_violations": [],
        "leaks": [],
        "growth": [],
        "flatness": {"seconds": 0.0, "series": []},
        "faults": None,
        "recomputed_blocks": 0,
        "tokens_per_s": 5.0,
        "decode_tokens_per_s": 11.0,
        "memory_growth_bytes": 100 * MIB,
        "memory_allowed_growth_bytes": 246 * MIB,
        "seconds": 600.0,
        "generate_s": 500.0,
        "decode_s": 100.0,
        "think_s": 50.0,
        "stall_s": 30.0,
        "bound": BOUND,
        "total_seconds": 900.0,
        "tiers": tiers,
        "bytes_moved": {edge: 10 * MIB for edge in edges},
        "nvme_disk_peak_bytes": 500 * MIB,
        "sessions": [{**session, **counts}],
        "checkpoint": None,
        "model": "tiny",
        "options": {"sessions": 1},
        "command": "kvtier soak --seed 3",
        "config": {"block_tokens": 64, "tiers": {"gpu": {"budget": "48MiB"}}},
        "machine": {"processor": "a processor", "memory_bytes": 1 << 34, "kvtier": "0.1.0", "torch": "2.13"},
        "timeline": timeline.as_json(),
        **changes,
    }


class Reader(HTMLParser):
    """Fails on tags that do not match; collects text, ids and every address."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += " ".join(data.split()) + " "


@pytest.fixture(scope="module")
def html() -> str:
    return page.render(document())


def test_the_bound_its_edges_and_what_was_waited_for_are_told(html: str) -> None:
    text = Reader(html).text
    assert "no less than 320.00 s was possible (nvme → gpu binds): 80% of the bound" in text
    assert "80%; nvme to gpu binds" in text and "Waited for: stream nvme 25.00 s · room 5.00 s." in text
    assert "nvme → gpu 320GB 350.00 s 1.00 GB/s 320.00 s" in text, "bytes, busy, peak, at peak"
    empty = measured(
        0.0, dict.fromkeys(("decode", "prefill"), dict.fromkeys(("steps", "took_s", "compute_s"), 0)), {}, {}
    )
    text = Reader(page.render(document(bound=empty))).text
    assert "Bound: no step was taken." in text and "Waited for: nothing." in text


def test_every_section_is_there_and_the_page_is_well_formed(html: str) -> None:
    reader = Reader(html)
    for section in ("verdict", "figures", "verification", "timeline", "machine", "config", "command"):
        assert section in reader.ids
    plots = {name for name in reader.ids if re.fullmatch(r"plot-[\w-]+", name)}
    names = ("gpu-tier", "cpu-tier", "nvme-tier", "memory", "tokens", "reading", "hits", "edges", "stall", "files")
    assert plots == {f"plot-{name}" for name in names}
    assert len(reader.ids) == len(set(reader.ids)), "two pictures must not share an id"
    for words_of in ("Pass", "session-0", "96 of 96", "a processor", "16GiB", "block_tokens: 64", "soak --seed 3",
                     "budget 48 MiB", "allowed 900 MiB", "MiB/s", "minutes", "tokens/s"):  # fmt: skip
        assert words_of in reader.text, words_of


def test_nothing_comes_from_outside_and_nothing_runs(html: str) -> None:
    reader = Reader(html)
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert reader.addresses and all(address.startswith("#") for address in reader.addresses)
    assert {address[1:] for address in reader.addresses} <= set(reader.ids), "a picture's parts are in the page"
    assert set(re.findall(r"url\(#([^)]*)\)", html)) <= set(reader.ids)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.benchmarks.plots.make_plots", lambda document: [])


@pytest.mark.usefixtures("without_plots")
def test_what_users_name_is_escaped() -> None:
    bad = "<script>alert(1)</script>"
    html = page.render(document(model=bad, command=bad, errors=[bad], verdict="fail", config={bad: bad}))
    assert "<script" not in html and html.count("&lt;script&gt;") >= 4


def test_a_run_without_samples_still_has_a_page() -> None:
    reader = Reader(page.render(document(timeline=Timeline().as_json(), seconds=0.0, tokens=0, sessions=[])))
    assert "too short for a plot" in reader.text


@pytest.mark.usefixtures("without_plots")
def test_sessions_with_a_problem_come_first_and_long_tables_are_cut() -> None:
    (fine,) = document()["sessions"]
    sessions = [{**fine, "name": f"session-{i}", "differing_tokens": int(i == 99)} for i in range(100)]
    text = Reader(page.render(document(sessions=sessions))).text
    assert text.index("session-99") < text.index("session-0") and "And 40 more sessions" in text
    assert "session-58" in text and "session-59" not in text


# -- words ------------------------------------------------------------------------------------------------------------


def test_the_paragraph_of_a_pass() -> None:
    text = words.paragraph(document())
    for part in (
        "tiny had 4 turns in 1 session, 1 at a time, in 10 min 00 s: it read 1,234 prompt tokens and generated 96",
        "gpu 48MiB, cpu 48MiB, nvme 1GiB",
        "20MiB of KV were written to NVMe and 20MiB read back; at most 25MiB lay there",
        "Every one of the 96 generated tokens equals the plain cache's choice",
        "stayed within their budgets. The run was too short to say",
        "Nothing was left behind",
        "The slowest part was reading prompts: 6 min 40 s (67% of the time). Steps waited 30 s",
    ):
        assert part in text, part
    assert words.headline(document()) == "Pass" and words.problems(document()) == []


@pytest.mark.parametrize(
    ("changes", "headline", "said", "unsaid"),
    [
        ({"verdict": "fail", "differing_tokens": 2}, "Fail", "2 are wrong", "equals"),
        ({"verdict": "fail", "steps_over_tolerance": 3}, "Fail", "3 are wrong", "equals"),
        ({"verdict": "unverified", "verified_tokens": 0}, "Not fully verified", "No token was verified", "equals"),
        ({"verdict": "unverified", "verified_tokens": 40}, "Not fully verified", "Only 40 of the 96", "Every one"),
        ({"verdict": "fail", "budget_violations": ["x"]}, "Fail", "A budget was exceeded", "within their budgets"),
        ({"verdict": "fail", "errors": ["x"]}, "Fail", "An error came up: see below", "x"),
        ({"verdict": "fail", "growth": ["x"]}, "Fail", "Something grew", "flat."),
        ({"verdict": "fail", "leaks": ["x"]}, "Fail", "Something was left behind", "Nothing was left"),
        ({"verdict": "unverified", "interrupted": True}, "Interrupted", "interrupted before its end", "x"),
        ({"verdict": "fail", "interrupted": True}, "Fail, interrupted", "interrupted before its end", "x"),
        ({"near_ties": 5}, "Pass", "choice, 5 of them near ties", "x"),
        ({"think_s": 450.0, "generate_s": 100.0}, "Pass", "slowest part was waiting for sessions that think", "x"),
    ],
)
def test_the_paragraph_follows_the_figures(changes: dict[str, Any], headline: str, said: str, unsaid: str) -> None:
    changed = document(**changes)
    text = words.paragraph(changed)
    assert words.headline(changed) == headline and said in text and (unsaid == "x" or unsaid not in text), text


def test_a_run_that_needs_no_nvme_says_so() -> None:
    tiers = document()["tiers"]
    assert "Nothing had to live on NVMe" in words.paragraph(
        document(tiers=tiers | {"nvme": tiers["nvme"] | {"only_copy_peak_bytes": 0}})
    )


def test_flatness_is_told_with_its_tolerance() -> None:
    series = [
        {"name": name, "growth": growth, "tolerance": tolerance, "unit": "", "is_flat": True}
        for name, growth, tolerance in (("memory", 3 * MIB, 16 * MIB), ("files", 0.1, 2), ("disk", 0, 20 * MIB))
    ]
    text = words.paragraph(document(flatness={"seconds": 300.0, "series": series}))
    assert "Over the last 5 min 00 s memory changed by 3MiB (allowed: growth of 16MiB)" in text and "flat." in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (2048, "2KiB"), (1.5 * MIB, "1.5MiB"), (-3 * MIB, "-3MiB"), (1 << 40, "1TiB")],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size_words(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(8.04, "8.0 s"), (59.6, "1 min 00 s"), (3725, "1 h 02 min")])
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


# -- before the run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    assert main(["soak", "--report", str(tmp_path / "soak.html")]) == 2
    assert "pip install 'kvtier[report]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--report", "--json", "--checkpoint"])
def test_an_unwritable_path_is_told_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    for path in (tmp_path, tmp_path / "no" / "file"):
        assert main(["soak", option, str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"kvtier: {option} {path}: ")
