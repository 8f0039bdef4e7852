"""A soak's document as one HTML page with nothing from outside: no script, no font, no address."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from kvtier.benchmarks import reached, words
from kvtier.errors import ConfigError
from kvtier.size import size_words

MAX_SESSION_ROWS = 60  # of the table; all are in the JSON document


def check_installed() -> None:
    """Raise ConfigError if what draws the page is missing: before a long run, not after it."""
    for package in ("jinja2", "matplotlib"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"--report needs {package}, which cannot be imported ({error}): pip install 'kvtier[report]'"
            ) from error


def render(document: dict[str, Any]) -> str:
    """The page of a soak's document. Cost: about two seconds, most of it drawing."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from kvtier.benchmarks.plots import make_plots

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["size"] = size_words
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    sessions = sorted(document["sessions"], key=_is_fine)  # stable: those with a problem first
    return template.render(
        document=document,
        headline=words.headline(document),
        paragraph=words.paragraph(document),
        problems=words.problems(document),
        figures=words.key_figures(document),
        bound_words=reached.bound_line(document["bound"]).capitalize(),
        stall_words=reached.stalls_line(document["bound"]).capitalize(),
        edge_columns=reached.COLUMNS,
        edges=reached.edge_rows(document["bound"]),
        sessions=sessions[:MAX_SESSION_ROWS],
        num_more=max(0, len(sessions) - MAX_SESSION_ROWS),
        plots=[(plot, Markup(plot.svg)) for plot in make_plots(document)],
        config=yaml.safe_dump(document["config"], sort_keys=False, width=60),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _is_fine(session: dict[str, Any]) -> bool:
    bad = ("differing_tokens", "steps_over_tolerance", "non_finite_steps", "wrong_facts")
    return not any(session[name] for name in bad)
