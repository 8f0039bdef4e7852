"""The wrapper that most end-to-end tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import TieredKV
from tests.e2e.families import MODES, small_config, tiny
from tests.older_transformers import teach_plain_models

teach_plain_models()


@pytest.fixture(params=MODES)
def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredKV]:
    """A tiny Llama on small tiers, once a mode; its books are checked at the end."""
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, request.param)) as wrapper:
        yield wrapper
        wrapper.check_integrity()
