"""Results of benchmarks kept in files, and the page that shows the last of each. Pure: knows JSON documents only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Document = dict[str, Any]

# What of a row is worth a column. Benchmarks that are not named here get all that fits in a cell.
COLUMNS: dict[str, tuple[str, ...]] = {
    "decode": (
        "case", "context", "ms_per_token", "ratio_to_dynamic", "spread", "ratio_to_static", "ratio_to_all_gpu",
        "ratio_to_naive_lru", "ratio_to_naive_lru_block", "bound_ms", "bound_by", "bound_frac", "stall_ms",
        "read_bytes_per_token", "max_logit_diff", "is_valid",
    ),
    "prefill": (
        "case", "context", "seconds", "tokens_per_s", "ratio_to_chunked", "ratio_to_chunked_spread",
        "ratio_to_one_call", "peak_bytes", "placement", "max_logit_diff", "is_valid",
    ),
    "overlap": (
        "device", "link_gb_s", "load", "method", "step_ms", "bound_ms", "binding", "ratio", "ratio_spread",
        "target_ratio", "compute_ms", "transfer_ms", "stall_ms", "stall_by_cause", "is_exact",
    ),
    "lookup": (
        "case", "context", "greedy_ms_per_token", "ms_per_token", "ratio_to_greedy", "spread", "tokens_per_forward",
        "accepted_frac", "greedy_read_bytes_per_token", "read_bytes_per_token", "same_tokens", "is_valid",
    ),
    "resume": (
        "case", "seconds", "spread", "ratio_to_prefill", "cpu_ratio_to_prefill", "disk_frac", "same_as_plain",
        "is_valid",
    ),
    "prefix": (
        "way", "first_call_s", "seconds", "first_token_s", "ratio_to_plain", "first_token_ratio_to_plain",
        "same_answers", "calls",
    ),
    "worst_case": (
        "case", "pairs", "full_pairs", "without_s", "cost_frac", "cost_quartiles", "cpu_cost_frac", "cost_full_frac",
        "nvme_written_bytes", "same_answers", "is_valid",
    ),
    "predict": (
        "case", "context", "bound_ms", "predicted_ms", "predicted_by", "ms_per_token", "ms_spread",
        "measured_to_predicted", "within_30", "is_valid",
    ),
    "storage": (
        "access", "io", "depth", "bytes_per_s", "fio_io_uring_bytes_per_s", "fio_psync_bytes_per_s", "ratio_to_fio",
        "ratio_spread", "target", "disk_frac", "is_valid",
    ),
}  # fmt: skip
# Rows of different kinds in one list: a table for each kind, of the rows that have its key.
_KINDS = {"scale": {"operations": "operation", "metadata": "block_bytes", "contexts": "context"}}
_SHARES = ("placement", "shares")
_FITS = (str, int, float, bool, type(None))
_HEAD = """# Results

Written by `make bench`: the last whole run of each benchmark, or the last `--quick` one where there is no other. All
runs are in `results/`, a line each. What is compared with what is said in each benchmark's own words
(`python -m kvtier.benchmarks.NAME --help`). A row that is not valid says nothing: its run did not prove what it should.
"""


def append(document: Document, folder: Path) -> None:
    """One more line in the file of the document's benchmark; older lines stay."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{document['benchmark']}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(document) + "\n")


def latest(folder: Path, names: Sequence[str]) -> dict[str, Document]:
    """The last document of each benchmark that has one: of those that were not quick, if there are any.

    Those of `names` first, in that order, then others by name. A line that was cut short by a crash is passed over.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.jsonl"))}
    found: dict[str, Document] = {}
    for name in [*(name for name in names if name in files), *(name for name in files if name not in names)]:
        documents = list(_documents(files[name]))
        whole = [document for document in documents if not document.get("quick")]
        if documents:
            found[name] = (whole or documents)[-1]
    return found


def _documents(file: Path) -> Iterator[Document]:
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            yield document


def page(documents: dict[str, Document], plots: dict[str, Sequence[str]]) -> str:
    """The page, in Markdown. `plots`: the pictures of each benchmark, by their paths from the page."""
    parts = [_HEAD]
    for name, document in documents.items():
        parts.append(f"## {name}\n\n{_origin(document)}\n")
        for title, rows in tables(document):
            parts.append((f"### {title}\n\n" if title else "") + _table(name, rows))
        pictures = plots.get(name, ())
        if pictures:
            parts.append("\n".join(f"![{name}: {Path(path).stem}]({path})" for path in pictures) + "\n")
    return "\n".join(parts)


def tables(document: Document) -> list[tuple[str, list[Document]]]:
    """Titles and rows: the document's own rows, by their kinds, and those of its parts that have some."""
    rows = document.get("rows", [])
    kinds = _KINDS.get(document["benchmark"])
    if kinds is None:
        found = [("", rows)]
    else:
        found = [(kind, [row for row in rows if row.get(key) is not None]) for kind, key in kinds.items()]
        found.append(("others", [row for row in rows if all(row.get(key) is None for key in kinds.values())]))
    found += [(part, value["rows"]) for part, value in document.items() if isinstance(value, dict) and "rows" in value]
    return [(title, each) for title, each in found if each]


def _origin(document: Document) -> str:
    machine = document.get("machine", {})
    words = [
        document.get("date", "no date"),
        "**quick run**" if document.get("quick") else "",
        f"commit `{machine['commit']}`" if machine.get("commit") else "no commit",
        str(document.get("model", "")),
        f"{machine.get('processor', '?')}, {machine.get('cpus', '?')} cpus, {machine.get('gpu', 'no gpu')}",
        *(f"{package} {machine[package]}" for package in ("torch", "transformers") if package in machine),
        f"{document['threads']} thread(s)" if "threads" in document else "",
        f"load {document['load'][0]} to {document['load'][1]}" if document.get("load") else "",
        f"`{' '.join(document['arguments'])}`" if document.get("arguments") else "",
    ]
    return "; ".join(word for word in words if word) + "."


def _table(name: str, rows: Sequence[Document]) -> str:
    named = COLUMNS.get(name) or tuple(dict.fromkeys(key for row in rows for key in row))
    columns = [
        key
        for key in named
        if any(row.get(key) is not None for row in rows) and any(_fits(row.get(key)) for row in rows)
    ]
    lines = [
        "| " + " | ".join(_words(key) for key in columns) + " |",
        "|" + "|".join("---" if isinstance(rows[0].get(key), str) else "---:" for key in columns) + "|",
    ]
    lines += ["| " + " | ".join(cell(key, row.get(key)) for key in columns) + " |" for row in rows]
    missing = [f"- {row.get('case')}: {row['unavailable']}" for row in rows if row.get("unavailable")]
    return "\n".join([*lines, *(["", *missing] if missing else [])]) + "\n"


def _fits(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    named = isinstance(value, dict) and all(isinstance(each, int | float) for each in value.values())
    return isinstance(value, _FITS) or pair or named


def _words(key: str) -> str:
    units = {"bytes_per_s": "rate", "_gb_s": ", GB/s", "_per_s": "/s", "_frac": "", "_ms": ", ms", "_s": ", s"}
    for suffix, unit in {**units, "_us": ", us"}.items():
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " ") + unit
    return key.replace("_", " ")


def cell(key: str, value: Any) -> str:
    """A value as its key's unit wants it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return " … ".join(cell(key, each) for each in value)
    if isinstance(value, dict):
        shown = {name: f"{each:.0%}" if key in _SHARES else cell(key, each) for name, each in value.items() if each}
        return ", ".join(f"{name} {each}" for name, each in shown.items())
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if "_bytes" in key:
        return f"{value / 1e6:,.1f} MB" if abs(value) >= 1e5 else f"{value:,.4g} B"
    if key.endswith("_frac") or "cost" in key:
        return f"{value:.1%}"
    if "diff" in key:
        return f"{value:.0e}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if "ms_" in key or key.endswith("_ms") or abs(value) >= 100 else f"{value:.2f}"
