# SPDX-License-Identifier: Apache-2.0
"""The bench's arithmetic: medians, ratios, bars, computed limits, and a file that a cut run goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.benches.sampling import sampling_bar, spread_lengths
from bench.lab import Lab, Settings
from bench.limits import Ceilings, Limit, Shape
from bench.rows import Bar, Check, Results, Row
from bench.table import advice, page_text, said, table, write_page
from palestra.errors import DataError
from palestra.model import kernels

SMOLLM2 = Shape(body=106_168_320, head=28_311_552, keys=11_520)
ZEN4 = Ceilings({"float32": 175e9, "bfloat16": 400e9}, 32e9)
"""What was measured once on two cores of a Zen 4 EPYC; the limits below were computed from it by other means."""


def row(**changes: Any) -> Row:
    given: dict[str, Any] = {"work": "w", "dtype": "float32", "unit": "tokens/s", "runs": {"ours": [1.0]}}
    return Row(**(given | changes))


def test_medians_are_compared_and_the_ratio_says_how_many_times_better_ours_is() -> None:
    record = row(runs={"ours": [90.0, 300.0, 110.0], "hf": [50.0, 55.0, 40.0]}, limit=200.0).record()
    assert record["ours"] == 110.0
    assert record["peers"] == {"hf": 50.0}
    assert record["ratio"] == {"hf": 2.2}
    assert record["limit_share"] == 0.55
    assert record["spread"] == {"ours": pytest.approx(210 / 110), "hf": 0.3}


def test_where_less_is_better_the_ratio_is_turned_round() -> None:
    record = row(unit="s", better="lower", runs={"ours": [20.0], "trl": [60.0]}, limit=15.0).record()
    assert record["ratio"] == {"trl": 3.0}
    assert record["limit_share"] == 0.75


@pytest.mark.parametrize(
    ("ratio", "met"),
    [
        ({"hf": 2.5, "vllm": 1.4}, True),
        ({"hf": 2.49, "vllm": 9.0}, False),
        ({"hf": 3.0}, None),  # vLLM was not measured, so nobody knows
        ({"vllm": 1.0}, False),  # but a bar that is missed is missed
    ],
)
def test_a_bar_is_met_when_every_peer_it_names_is_beaten(ratio: dict[str, float], met: bool | None) -> None:
    assert Bar({"hf": 2.5, "vllm": 1.4}).met(100.0, ratio) is met


def test_a_bar_on_the_value_itself_and_no_bar() -> None:
    assert Bar(at_most=0.3).met(0.3, {}) is True
    assert Bar(at_most=0.3).met(0.31, {}) is False
    assert Bar().met(1.0, {"hf": 9.0}) is None
    assert Bar({"hf": 1.0}).met(None, {}) is None


def test_the_further_aim_counts_ratios_and_the_share_of_the_limit() -> None:
    assert Bar(stretch={"limit": 0.7}).stretched({}, 0.7) is True
    assert Bar(stretch={"trl": 6.0}).stretched({"trl": 5.9}, None) is False
    assert Bar(stretch={"trl": 6.0}).stretched({}, None) is None
    assert Bar().stretched({}, 0.9) is None


def test_speed_bought_with_wrong_gradients_does_not_count() -> None:
    fast = row(runs={"ours": [9.0], "trl": [1.0]}, bar=Bar({"trl": 3.5}))
    assert fast.record()["met"] is True
    for error, met in ((1e-6, True), (1e-4, False)):
        checked = row(runs=fast.runs, bar=fast.bar, checks={"gradient error": Check(error, at_most=1e-5)}).record()
        assert checked["met"] is met
        assert checked["checks"]["gradient error"]["value"] == error


def test_a_row_begins_with_the_fields_that_readers_look_for() -> None:
    names = ["work", "dtype", "ours", "peers", "ratio", "limit_share", "bar", "met"]
    assert list(row().record())[: len(names)] == names


def test_who_was_not_measured_has_no_ratio() -> None:
    record = row(runs={"ours": [], "trl": []}, absent={"trl": "not installed: pip …"}).record()
    assert (record["ours"], record["peers"], record["ratio"], record["met"]) == (None, {}, {}, None)


def test_the_bars_of_sampling() -> None:
    assert sampling_bar(8, "float32").text() == "≥ 2.5 × hf, ≥ 1.4 × vllm, ≥ 1.4 × vllm shared"
    assert sampling_bar(8, "bfloat16").text() == "≥ 4 × hf, ≥ 1.4 × vllm, ≥ 1.4 × vllm shared"
    assert sampling_bar(1, "bfloat16").text() == "≥ 1.7 × hf, ≥ 1 × vllm, ≥ 1 × vllm shared"


def test_ragged_lengths_are_all_there_and_mixed() -> None:
    lengths = spread_lengths(64, 8, 128)
    assert (min(lengths), max(lengths), sum(lengths) / 64) == (8, 128, 68.0)
    assert lengths != sorted(lengths)


# Limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rows", "tokens_per_s"),
    [("float32", 1, 59), ("float32", 8, 437), ("float32", 32, 650), ("bfloat16", 1, 118), ("bfloat16", 32, 1487)],
)
def test_decoding_is_bound_by_memory_with_few_rows_and_by_arithmetic_with_many(
    dtype: str, rows: int, tokens_per_s: float
) -> None:
    assert rows / Limit(SMOLLM2, ZEN4, dtype).decode_s(rows, 132) == pytest.approx(tokens_per_s, rel=0.01)


def test_what_is_multiplied_in_bfloat16_can_be_multiplied_in_float32() -> None:
    """A processor without products in bfloat16 widens the weights: half the bytes, the arithmetic as ever."""
    without = Ceilings({"float32": 175e9, "bfloat16": 20e9}, 32e9)
    narrow, wide = (Limit(SMOLLM2, without, dtype) for dtype in ("bfloat16", "float32"))
    assert narrow.decode_s(64, 132) == wide.decode_s(64, 132)
    assert narrow.decode_s(1, 132) == wide.decode_s(1, 132) / 2


@pytest.mark.parametrize(
    ("dtype", "prompts", "tokens_per_s"),
    [("float32", 32, 291), ("float32", 4, 563), ("bfloat16", 32, 666), ("bfloat16", 4, 1288)],
)
def test_a_shared_prompt_doubles_the_limit_of_sampling(dtype: str, prompts: int, tokens_per_s: float) -> None:
    seconds = Limit(SMOLLM2, ZEN4, dtype).sampling_s(prompts, 100, [64] * 32)
    assert 32 * 64 / seconds == pytest.approx(tokens_per_s, rel=0.01)


def test_training_takes_three_forward_passes() -> None:
    limit = Limit(SMOLLM2, ZEN4, "float32")
    assert 2048 / limit.update_s(2048, 2048) == pytest.approx(217, rel=0.01)
    # 4 prompts once and 32 × 64 new tokens, logits for those alone: 3 · 2 · (106.2 M · 2448 + 28.3 M · 2048) FLOP
    assert limit.update_s(2448, 2048) == pytest.approx(10.90, rel=0.01)


def test_rows_that_end_early_leave_the_limit() -> None:
    limit = Limit(Shape(10, 0, 0), Ceilings({"float32": 20.0}, 1e9), "float32")
    assert limit.decodes_s([1, 3], 5) == 2 + 1 + 1  # a second for each row and pass


def test_a_later_turn_costs_what_is_new() -> None:
    limit = Limit(Shape(10, 0, 0), Ceilings({"float32": 20.0}, 1e9), "float32")
    # 2 prompts of 5 tokens, 3 samples each: 10 s; 6 rows × 4 new; then 6 × (2 added + 4 new)
    assert limit.episodes_s(2, 3, 5, [(0, 4), (2, 4)]) == 10 + 24 + 12 + 24


# The file --------------------------------------------------------------------------------------------------


def lab(tmp_path: Path, *, resume: bool, **changes: Any) -> Lab:
    settings = Settings(**({"models": tmp_path, "logs": tmp_path, "against": ("hf", "trl")} | changes))
    return Lab(settings, Results(tmp_path / "rows.json", resume=resume), resume=resume, tell=lambda _: None)


def test_a_cut_run_goes_on_with_the_rows_it_lacks(tmp_path: Path) -> None:
    lab(tmp_path, resume=False).file(row(work="first"))
    again = lab(tmp_path, resume=True)
    assert not again.wants("first", "float32")
    assert again.wants("first", "bfloat16")
    assert again.wants("second", "float32")
    again.file(row(work="second"))
    assert [r["work"] for r in json.loads((tmp_path / "rows.json").read_text())] == ["first", "second"]


def test_without_resume_everything_is_measured_again(tmp_path: Path) -> None:
    lab(tmp_path, resume=False).file(row(work="first"))
    again = lab(tmp_path, resume=False)
    assert again.wants("first", "float32")
    assert again.results.rows == []


def test_other_settings_measure_again_and_replace_the_row(tmp_path: Path) -> None:
    lab(tmp_path, resume=False).file(row(work="first"))
    more = lab(tmp_path, resume=True, repeats=5)
    assert more.wants("first", "float32")
    more.file(row(work="first", runs={"ours": [7.0]}))
    assert [r["ours"] for r in more.results.rows] == [7.0]


def test_a_row_is_measured_again_once_its_missing_peer_is_installed(tmp_path: Path) -> None:
    lab(tmp_path, resume=False).file(row(absent={"trl": "not installed: …"}))
    assert not lab(tmp_path, resume=True).wants("w", "float32")
    python = tmp_path / "peers" / "trl" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert lab(tmp_path, resume=True, peers=tmp_path / "peers").wants("w", "float32")
    assert not lab(tmp_path, resume=True, peers=tmp_path / "peers", against=("hf",)).wants("w", "float32")


def test_bfloat16_is_left_out_where_the_cores_have_none(tmp_path: Path) -> None:
    told: list[str] = []
    one = lab(tmp_path, resume=False)
    one.tell = told.append
    one.ceilings = Ceilings({"float32": 77e9, "bfloat16": 2e9}, 1e9)
    assert not one.wants("w", "bfloat16")
    assert "slower than in float32" in told[0]
    assert one.wants("w", "bfloat16", samples=True) == (kernels.library() is not None)
    one.ceilings = ZEN4
    assert one.wants("w", "bfloat16")


@pytest.mark.parametrize("content", ["{", "[1]", '[{"work": "w"}]'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=r"rows\.json is no file of bench rows"):
        lab(tmp_path, resume=True)


# The table -------------------------------------------------------------------------------------------------


def test_the_table_shows_value_spread_ratio_bar_and_what_is_missing() -> None:
    one = row(
        runs={"ours": [100.0, 110.0, 120.0], "hf": [44.0]},
        limit=200.0,
        bar=Bar({"hf": 2.5}),
        absent={"vllm": "not installed: python3.11 -m venv …"},
    )
    cells = [cell.strip() for cell in table([one.record()]).splitlines()[-1].strip("|").split("|")]
    assert cells[:3] == ["w", "float32", "110 tokens/s ± 9%"]
    assert cells[3] == "hf 44 tokens/s<br>vllm not installed"
    assert cells[4:] == ["2.50 × hf", "55%", "≥ 2.5 × hf", "yes"]


def test_a_terminal_shows_a_row_as_one_line_and_each_reason_once() -> None:
    missing = {"trl": "not installed: python3.11 …", "vllm": "not asked for"}
    rows = [row(runs={"ours": [2.0], "hf": [1.0]}, bar=Bar({"hf": 2.5}), absent=missing).record()] * 2
    assert said(rows[0]) == "  w float32: 2 tokens/s; hf 1 (2.00 ×); NOT met; without trl"
    assert advice(rows) == ["trl: not installed: python3.11 …"]


def test_a_failed_check_is_said_beside_the_verdict() -> None:
    one = row(bar=Bar(at_most=2.0), checks={"accuracy": Check(0.9, at_least=0.95)})
    assert table([one.record()]).endswith("| **no** (accuracy 0.9) |")


def test_the_table_goes_between_the_marks_of_its_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    record = row().record() | {"measured_at": "2026-01-02 03:04", "versions": {"trl float32": {"trl": "1.16.0"}}}
    write_page(page, page_text([record], "python -m bench full"))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert all(part in text for part in ("    python -m bench full", "2026-01-02 03:04", "- trl: trl 1.16.0", "| w |"))
    page.write_text("no marks")
    with pytest.raises(DataError, match="bench: begin"):
        write_page(page, "x")
