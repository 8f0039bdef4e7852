"""`kvtier plan`: one page or one document, statuses as the other commands have them, one line for bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvtier import cli
from kvtier.doctor import NoWatch
from kvtier.doctor.compute import DTYPES, measure_compute
from kvtier.doctor.decoding import HEADS, AttentionRate, DecodeSpeed, StepCost
from kvtier.doctor.report import Report
from kvtier.doctor.show import print_report
from kvtier.errors import ConfigError
from kvtier.planner.models import presets
from kvtier.planner.rates import read_rates
from kvtier.types import IoMode
from tests.unit.test_doctor_proposal import cuda, facts, propose

ROOT = Path(__file__).parents[2]
PLAN = ["plan", "--model", "Llama-3.1-8B", "--context", "32k", "--users", "50", "--config", "server-80gb"]
runner = CliRunner()


def with_option(name: str, value: str) -> list[str]:
    return [*PLAN, name, value]


def replaced(name: str, value: str) -> list[str]:
    at = PLAN.index(name)
    return [*PLAN[: at + 1], value, *PLAN[at + 2 :]]


@pytest.fixture(scope="module")
def measured() -> Any:
    """What this machine computes, briefly."""
    return measure_compute(0.0, NoWatch())


@pytest.fixture
def rates(tmp_path: Path, measured: Any) -> Path:
    """A document as the doctor writes it."""
    found = facts(gpus=cuda(), compute=measured)
    file = tmp_path / "rates.json"
    report = Report(found, propose(found, None), "", [], [], True, 1.0)
    file.write_text(json.dumps(report.document()), encoding="utf-8")
    return file


def on_the_host(rates: Path) -> dict[str, Any]:
    """The same machine without its GPU."""
    document: dict[str, Any] = json.loads(rates.read_text(encoding="utf-8"))
    document["rows"] = [row for row in document["rows"] if not row["section"].startswith("gpu")]
    rates.write_text(json.dumps(document), encoding="utf-8")
    return document


def test_the_page_has_the_formula_the_tiers_the_users_and_how_to_get_rates() -> None:
    done = runner.invoke(cli.app, PLAN)
    assert done.exit_code == 0, done.output
    assert "32 full-attention layers x 32,768 tokens x 8 KV heads x (128 + 128) x 2 bytes" in done.stdout
    assert "first count that fails without kvtier: 7 " in done.stdout
    assert "first count that fails with kvtier: 298 (nvme full" in done.stdout
    assert "kvtier doctor --json > rates.json" in done.stdout
    assert "Predicted" not in done.stdout
    assert "…" not in done.stdout  # no cell is cut at 80 columns


def test_without_a_config_the_presets_are_named() -> None:
    """Found by a new user: "Missing option '--config'", where every other refusal says what to do."""
    done = runner.invoke(cli.app, ["plan", "--model", "SmolLM2-135M", "--context", "4k"])
    assert isinstance(done.exception, ConfigError)
    assert "--config: none was given" in str(done.exception) and "laptop" in str(done.exception)


def test_the_document_is_all_that_is_printed_and_the_page_says_the_fields() -> None:
    done = runner.invoke(cli.app, [*PLAN, "--json"])
    assert done.exit_code == 0 and done.stderr == "" and done.stdout.count("\n") == 1
    document = json.loads(done.stdout)
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [field for field in document if f"`{field}" not in text] == []
    for part in ("model", "kv", "gpu"):
        assert [field for field in document[part] if f"`{part}.{field}`" not in text] == []
    assert [field for field in document["rows"][0] if f"`rows[].{field}`" not in text] == []
    assert document["first_failing_users"] == {"without": 7, "with": 298}
    assert document["kv"]["user_bytes"] == 32 * 32768 * 8 * 256 * 2
    assert document["rates"] is None and document["rows"][-1]["predicted_decode"] is None
    for row in document["rows"]:
        blocks = row["users"] * document["kv"]["blocks_per_user"]
        assert sum(row["tier_bytes"].values()) + row["missing_bytes"] == blocks * document["kv"]["block_bytes"]
        assert row["fits_without"] == (row["users"] < 7) and row["fits_with"]


def test_every_count_where_something_changes_is_a_row() -> None:
    done = runner.invoke(cli.app, [*replaced("--users", "300"), "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == document["exit_status"] == 1  # 298 is the first that fails
    assert [row["users"] for row in document["rows"]] == [1, 2, 4, 6, 7, 8, 16, 32, 64, 128, 256, 297, 298, 300]
    assert [row["limit"] for row in document["rows"]] == [None] * 12 + ["nvme full"] * 2
    assert document["first_break"] == "nvme full"


def test_users_that_do_not_fit_are_status_1_and_said_so(rates: Path) -> None:
    done = runner.invoke(cli.app, [*replaced("--users", "300"), "--config", "laptop", "--rates", str(rates)])
    assert done.exit_code == 1
    assert "300 users do not fit: nvme full" in done.stdout
    assert "Predicted" not in done.stdout and "no prediction for 300 users" in done.stdout


def test_with_the_doctors_rates_it_predicts(rates: Path, measured: Any) -> None:
    words = [*replaced("--users", "4"), "--rates", str(rates), "--config", "workstation-24gb"]
    page = runner.invoke(cli.app, words)
    assert page.exit_code == 0, page.output
    assert "Predicted for 4 users: nothing here was run" in page.stdout and "*: predictions" in page.stdout
    assert "…" not in page.stdout
    # A GPU of which only copies were measured: what that leaves out is said.
    assert "not in the prediction of decode, for want of a rate: device memory, compute" in page.stdout
    document = json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)
    decode = document["rows"][-1]["predicted_decode"]
    assert document["device"] == "cuda" and decode["binding"] == "host to device"
    edge = next(edge for edge in decode["edges"] if edge["name"] == "host to device")
    assert decode["ms"] == pytest.approx(edge["amount"] / 2e10 * 1e3)
    assert decode["tokens_per_s"] == pytest.approx(4 * decode["tokens_per_s_per_user"])


def test_on_a_machine_without_cuda_the_processors_rates_count(rates: Path, measured: Any) -> None:
    on_the_host(rates)
    words = ["plan", "--model", "SmolLM2-135M", "--context", "4k", "--config", "laptop", "--dtype", "float32"]
    words += ["--rates", str(rates), "--threads", "1", "--json"]
    document = json.loads(runner.invoke(cli.app, words).stdout)
    decode, first = (document["rows"][-1][f"predicted_{what}"] for what in ("decode", "first_token"))
    one = next(rate for rate in measured if rate.dtype == "float32" and rate.num_threads == 1)
    by_name = {edge["name"]: edge["per_s"] for edge in decode["edges"]}
    assert by_name["device memory"] == pytest.approx(one.read_bytes_per_s)
    assert by_name["compute"] == pytest.approx(one.flop_per_s)
    assert not decode["unmeasured"] and first["ms"] > decode["ms"]


SPEED = DecodeSpeed(
    tuple(AttentionRate(None, 1, "float32", heads, 5e9) for heads in HEADS),
    (StepCost(None, 1, 1e3, 500.0, 10.0),),
    20.0,
)


def test_the_time_that_is_expected_stands_beside_the_bound(tmp_path: Path, measured: Any) -> None:
    found = facts(compute=measured, decoding=SPEED)
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(Report(found, propose(found, None), "", [], [], True, 1.0).document()), encoding="utf-8")
    words = ["plan", "--model", "SmolLM2-135M", "--context", "4k", "--config", "laptop", "--dtype", "float32"]
    words += ["--rates", str(file), "--threads", "1"]
    row = json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)["rows"][-1]
    expected, bound = row["expected_decode"], row["predicted_decode"]
    assert expected["ms"] > bound["ms"] and expected["binding"] == "computing" and not expected["unmeasured"]
    by_name = {term["name"]: term["ms"] for term in expected["terms"]}
    assert by_name["layers"] == pytest.approx(1 + 30 * 0.5)
    assert expected["tokens_per_s_per_user"] == pytest.approx(1e3 / expected["ms"])
    page = runner.invoke(cli.app, words).stdout
    assert f"{expected['ms']:,.4g} ms a round; no run beats the bound of {bound['ms']:,.4g} ms" in page
    assert "…" not in page


def test_rates_of_an_older_doctor_still_have_their_bound(rates: Path) -> None:
    document = on_the_host(rates)
    document["rows"] = [row for row in document["rows"] if "rows of 512" not in row["name"]]
    for row in document["disk"]:
        del row["core_bytes_per_s"]
    rates.write_text(json.dumps(document), encoding="utf-8")
    words = ["plan", "--model", "SmolLM2-135M", "--context", "4k", "--config", "laptop", "--dtype", "float32"]
    words += ["--rates", str(rates), "--threads", "1"]
    found = json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)
    row = found["rows"][-1]
    assert row["predicted_decode"]["ms"] > 0
    assert row["expected_decode"]["ms"] is None and "attention" in row["expected_decode"]["unmeasured"]
    assert any(
        "only the bound is told of decode: the rates have nothing for weights" in note for note in found["notes"]
    )
    page = runner.invoke(cli.app, words)
    assert page.exit_code == 0 and "expected:" not in page.stdout


def test_gathered_has_its_bound_and_says_why_no_more(tmp_path: Path, measured: Any) -> None:
    found = facts(compute=measured, decoding=SPEED)
    rates, config = tmp_path / "rates.json", tmp_path / "gathered.yaml"
    document = Report(found, propose(found, None), "", [], [], True, 1.0).document()
    rates.write_text(json.dumps(document), encoding="utf-8")
    config.write_text("attention: gathered\ntiers: {gpu: {budget: 2GiB}}\n", encoding="utf-8")
    words = ["plan", "--model", "SmolLM2-135M", "--context", "4k", "--config", str(config), "--rates", str(rates)]
    row = json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)["rows"][-1]
    assert row["expected_decode"] is None and row["predicted_decode"]["ms"] > 0
    assert "does not measure how attention: gathered attends" in " ".join(runner.invoke(cli.app, words).stdout.split())


def test_the_doctor_measures_what_decoding_and_prefill_need(measured: Any) -> None:
    assert torch.get_num_threads() == 1  # as tests/conftest.py has it
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert {rate.dtype for rate in measured} == names
    assert all(rate.read_bytes_per_s > 0 and rate.flop_per_s > 0 and rate.narrow_bytes_per_s > 0 for rate in measured)
    out = io.StringIO()
    found = facts(compute=measured)
    print_report(Report(found, propose(found, None), "", [], [], True, 1.0), Console(file=out, width=200), True)
    assert "matrix x vector, bfloat16, one thread" in out.getvalue() and "GFLOP/s" in out.getvalue()


def test_auto_takes_the_faster_way_of_io(rates: Path) -> None:
    found = read_rates(rates)
    direct, mmap, auto = (found.disk_rate("read", io, 400_000) for io in (IoMode.DIRECT, IoMode.MMAP, IoMode.AUTO))
    assert (direct, mmap, auto) == (3e9, 1e9, 3e9)


def test_a_context_longer_than_the_models_is_noted() -> None:
    done = runner.invoke(cli.app, replaced("--context", "256k"))
    assert "131,072 tokens as the longest context" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (replaced("--model", "Llama-3.1-9B"), "Llama-3.1-9B: is neither a preset (did you mean Llama-3.1-8B?) nor"),
        (replaced("--model", "/no/such"), "--model /no/such: is neither a preset"),
        (replaced("--model", str(ROOT / "docs")), "has no config.json. Mend: give the folder of a model, or one of"),
        (replaced("--model", str(ROOT / "README.md")), "README.md: cannot be read as JSON"),
        (replaced("--config", "laptopp"), "no preset is named 'laptopp' (did you mean laptop?)"),
        (replaced("--context", "viel"), "--context viel: is not a number of tokens"),
        (replaced("--users", "0"), "--users 0: must be at least 1"),
        (replaced("--users", "x"), "--users"),
        (with_option("--threads", "0"), "--threads 0: must be at least 1"),
        (with_option("--dtype", "int8"), "--dtype: is not served, got 'int8'"),
        (with_option("--weights", "16"), ""),
        (with_option("--weights", "16XB"), "--weights 16XB: has the unknown unit 'XB'"),
        (with_option("--weights", "10%"), "--weights 10%: must be in bytes"),
        (with_option("--device-memory", "0"), "--device-memory 0: must be in bytes and more than 0"),
        (with_option("--rates", "/no/such.json"), "--rates /no/such.json: cannot be read as JSON (No such file"),
        (PLAN[:3], "--context"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not complaint:
        assert cli.main(words) == 0  # 16 bytes of weights are odd, and not ours to judge
        return
    assert cli.main(words) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and err.count("\n") == 1


def test_an_unknown_model_gets_the_list_of_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(replaced("--model", "gpt-9")) == cli.EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert all(name in err for name in presets())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(format=2), "format: must be 1, got 2"),
        (lambda d: d.update(rows=7), "rows: must be a list of mappings, got 7"),
        (lambda d: d.update(rows=[]), "rows: hold no figure"),
        (lambda d: d.update(disk=[{"bytes_per_s": 1.0, "io": "tape"}]), "disk: io cannot be 'tape'"),
        (lambda d: d["disk"][0].update(bytes_per_s=-1), "disk: bytes_per_s cannot be -1"),
    ],
)  # fmt: skip
def test_rates_that_are_none_are_refused_by_name(
    change: Any, complaint: str, rates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(rates.read_text(encoding="utf-8"))
    change(document)
    rates.write_text(json.dumps(document), encoding="utf-8")
    assert cli.main(with_option("--rates", str(rates))) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and complaint in err and "kvtier doctor --json" in err and err.count("\n") == 1


def test_names_are_printed_with_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(presets()["SmolLM2-135M"]["config"]), encoding="utf-8")
    done = runner.invoke(cli.app, replaced("--model", str(folder)))
    assert done.exit_code == 0 and "\x1b" not in done.stdout and r"a\x1b[31m" in done.stdout


def test_no_figure_of_a_prediction_is_cut_at_80_columns(
    tmp_path: Path, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`10.02 GFL…` and `9,213.5 …` were."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "rates.json"
    found = facts(compute=measured, decoding=SPEED)
    report = Report(found, propose(found, None), "", [], [], True, 1.0)
    document = report.document()
    for row in document["rows"]:
        if row["name"].startswith("matrix x matrix"):
            row["value"] = 123456789.0
    file.write_text(json.dumps(document), encoding="utf-8")
    words = ["plan", "--model", "SmolLM2-135M", "--context", "8k", "--config", "laptop", "--dtype", "float32"]
    words += ["--users", "12", "--rates", str(file), "--threads", "1"]
    page = runner.invoke(cli.app, words).stdout
    row = json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)["rows"][-1]
    assert "…" not in page and f"rates: {file}, of the machine where" in page
    edge = next(edge for edge in row["predicted_first_token"]["edges"] if edge["name"] == "compute")
    lines = [line for line in page.splitlines() if "0.1235 GFLOP/s" in line]
    assert len(lines) == 2 and f"{edge['ms'] / 1e3:,.1f} s" in lines[1]
    assert max(len(line) for line in page[page.index("Tiers of") :].splitlines() if line.startswith(" ")) <= 80


def test_budgets_are_printed_as_yaml_takes_them_and_the_formula_in_gigabytes_too() -> None:
    page = runner.invoke(cli.app, PLAN).stdout
    assert "= 4,294,967,296 bytes (4.3 GB), 4GiB" in page
    (line,) = (line for line in page.splitlines() if line.split()[:1] == ["cpu"])
    assert line.split()[1] == "160GiB"


def test_without_rates_it_says_that_the_device_is_assumed() -> None:
    """A plan on a laptop without CUDA read as if it were that laptop's."""
    page = runner.invoke(cli.app, PLAN).stdout
    assert "device: a CUDA device of 38.96GiB, assumed; not this machine's" in page
    assert "a CUDA device is assumed, and this machine was not looked at" in page and "--rates rates.json" in page
    document = json.loads(runner.invoke(cli.app, [*PLAN, "--json"]).stdout)
    assert (document["device"], document["device_source"], document["device_bytes_source"]) == ("cuda",) + 2 * (
        "assumed",
    )
    assert any("kvtier doctor --json > rates.json" in note for note in document["notes"])
    words = with_option("--device-memory", "80GiB")
    assert "a CUDA device of 80GiB, assumed, its memory by --device-memory" in runner.invoke(cli.app, words).stdout
    assert json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)["device_bytes_source"] == "--device-memory"


def test_with_rates_it_says_whose_the_device_is(rates: Path) -> None:
    on_the_host(rates)
    words = with_option("--rates", str(rates))
    page, document = runner.invoke(cli.app, words).stdout, json.loads(runner.invoke(cli.app, [*words, "--json"]).stdout)
    assert f"device: no CUDA device: host memory of 64GiB, by {rates}" in page and "assumed" not in page
    assert document["device"] == "cpu" and document["device_source"] == document["device_bytes_source"] == str(rates)


def test_the_doctors_tables_are_whole_at_80_columns(measured: Any) -> None:
    out = io.StringIO()
    found = facts(gpus=cuda(), compute=measured, decoding=SPEED)
    report = Report(found, propose(found, None), "", [], [], True, 1.0)
    print_report(report, Console(file=out, width=80), True)
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("│", "┃"))]
    assert len(lines) > 40 and {line[-1] for line in lines} <= {"│", "┃"}, "its right border is there"
    assert "…" not in out.getvalue() and max(map(len, lines)) <= 80
    cells = "".join(line.split("│")[4].strip() + " " for line in lines if line.count("│") == 5)
    assert "on each head of K and V, which are read once" in " ".join(cells.split())
