"""Copies the table of faults from the last run of tests/fault that passed to docs/reliability.md: `make docs`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULT = ROOT / ".reliability.json"
BEGIN = "<!-- The table: made by `make docs` from the last run of tests/fault that passed, not by hand. -->\n"
END = "<!-- The table ends here. -->\n"


def table(result: dict[str, Any]) -> str:
    """The section between the marks."""
    columns = list(result["rows"][0])
    lines = [
        "## The table",
        "",
        f"{result['date']}, commit {result['commit']}; {result['machine']}; {result['versions']}.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'|'.join('---' if name in ('fault', 'how it is made') else '---:' for name in columns)}|",
    ]
    for row in result["rows"]:
        cells = (f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["", *lines, "", ""])


def with_table(page: str, section: str) -> str:
    """The page with that section in the place of the one it has."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.relative_to(ROOT)}: the marks around the table are gone")
    return before + begin + section + end + after


def main(page: Path = PAGE, result: Path = RESULT) -> str:
    """What was done, in a line."""
    if not result.exists():
        return f"{page.name} keeps its table: no run of all of tests/fault has left {result.name} here (`make test`)"
    section = table(json.loads(result.read_text(encoding="utf-8")))
    page.write_text(with_table(page.read_text(encoding="utf-8"), section), encoding="utf-8")
    return f"wrote the table of docs/{page.name}"


if __name__ == "__main__":
    sys.stdout.write(main() + "\n")
