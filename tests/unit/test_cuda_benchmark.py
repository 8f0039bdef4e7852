"""`benchmarks/cuda.py` without CUDA: it refuses to measure, and its code runs on a tiny model."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from rich.console import Console

from kvtier.benchmarks import cuda
from kvtier.device import HostDevice

TINY = cuda.Size(
    hidden=32, intermediate=32, layers=2, heads=4, kv_heads=2, vocabulary=64, dtype=torch.float32
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and it would be measured")
def test_without_a_device_it_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cuda"])
    with pytest.raises(SystemExit, match="no CUDA device here"):
        cuda.main()


def test_its_code_runs_and_its_rows_say_what_was_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = cuda.copy_rows(HostDevice(), num_bytes=1 << 20)
    assert {row["direction"] for row in rows} == {"to_device", "to_host"}
    assert {row["piece_bytes"] for row in rows} == {64 << 10, 256 << 10, 1 << 20}
    rate = cuda.stream_rate(rows)
    assert rate == next(r["bytes_per_s"] for r in rows if r["piece_bytes"] == 1 << 20 and r["direction"] == "to_device")
    rows += cuda.decode_rows(TINY, torch.device("cpu"), 4096, num_tokens=2, num_pairs=3, copy_bytes_per_s=rate)
    found = {row["case"]: row for row in rows if row["case"] != "copy"}
    assert set(found) == {"dynamic", "all_gpu", "gpu25_cpu75", "gpu25_host75", "hf_offloaded"}
    for case in ("dynamic", "all_gpu", "gpu25_cpu75"):
        assert found[case]["ms_per_token"] > 0 and found[case]["ratio_to_dynamic"] > 0
    assert found["all_gpu"]["slices_read"]["cpu"] == 0, "all of it is on the gpu tier"
    streamed = found["gpu25_cpu75"]["slices_read"]
    assert 0.6 <= streamed["cpu"] / sum(streamed.values()) <= 0.9, streamed
    row = found["gpu25_cpu75"]
    assert row["bound_frac"] == pytest.approx(row["bound_ms"] / row["ms_per_token"])
    console = Console(width=200)
    for table in cuda.tables(rows):
        console.print(table)
    assert "gpu25_cpu75" in capsys.readouterr().out
    json.dumps(rows, allow_nan=False)
