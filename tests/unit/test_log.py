"""A message that repeats is logged a few times, then counted."""

from __future__ import annotations

import logging

import pytest

from kvtier.log import RateLimit, logger, rate_limit


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kvtier", logging.WARNING, __file__, 1, text, (), None)


def test_repeats_are_kept_back_and_counted_when_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("kvtier.log.time.monotonic", lambda: now_s[0])
    limit = RateLimit(burst=2, window_s=10)
    assert [limit.filter(_record("a")) for _ in range(5)] == [True, True, False, False, False]
    assert limit.filter(_record("b")), "other messages are not held back"
    now_s[0] += 11
    record = _record("a")
    assert limit.filter(record)
    assert record.getMessage() == "a (3 more like this were not logged)"
    assert [limit.filter(_record("a")) for _ in range(2)] == [True, False]


def test_the_librarys_logger_has_it() -> None:
    assert rate_limit in logger.filters
