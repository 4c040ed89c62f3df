# SPDX-License-Identifier: Apache-2.0
"""Two evaluations are paired by task; the page of an evaluation needs nothing but itself."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_eval_summary import said
from typer.testing import CliRunner

from palestra import cli
from palestra.errors import DataError, RunError
from palestra.eval.charts import Bar, bar_chart, histogram
from palestra.eval.compare import EPISODES, compare, compare_runs
from palestra.eval.evaluate import result_of
from palestra.eval.examples import examples_of
from palestra.eval.report import render_comparison, render_markdown, render_page
from palestra.eval.summary import summarise
from palestra.rollout.dump import write_rollouts
from palestra.types import Group, Task


def groups(values: str, *, ask: str = "how many?", text: str = "#### 5") -> list[Group]:
    """One task per character: 1 right, 0 wrong, - not scored."""
    made = []
    for i, value in enumerate(values):
        task = Task(f"t{i}", f"{i}: {ask}", "72")
        parts = {} if value == "-" else {"accuracy": float(value), "format": 0.5}
        made.append(Group(task, i, (said(text, task=task, **parts),)))
    return made


def test_fixed_and_broken_tasks_and_mcnemars_exact_test_by_hand() -> None:
    # 6 fixed, 1 broken of 10: p = 2 (C(7,0) + C(7,1)) / 2^7 = 16/128.
    found = compare(groups("0000001110"), groups("1111110110"), "accuracy")
    assert [c.task for c in found.fixed] == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert [c.task for c in found.broken] == ["t6"]
    assert (found.unchanged_right, found.unchanged_wrong, found.left_out) == (2, 1, 0)
    assert found.p_value == 0.125
    assert (found.before, found.after, found.difference) == (0.3, 0.8, 0.5)
    # Differences: six of +1, one of -1, three of 0: mean 0.5, population variance 0.7 - 0.25.
    half = 1.96 * (0.45 / 10) ** 0.5
    assert found.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-9)
    assert found.verdict.startswith("no change beyond chance: +50.0 points")
    assert found.parts == {"format": (0.5, 0.5)}


def test_many_fixed_and_none_broken_is_better_and_the_other_way_round_worse() -> None:
    assert compare(groups("0" * 8), groups("1" * 8), "accuracy").verdict.startswith("after is better: +100.0 points")
    assert compare(groups("1" * 8), groups("0" * 8), "accuracy").verdict.startswith("after is worse: -100.0 points")
    assert compare(groups("10"), groups("10"), "accuracy").p_value == 1.0


def test_tasks_that_one_run_lacks_or_did_not_score_are_left_out_and_counted() -> None:
    found = compare(groups("01-1"), groups("11111"), "accuracy")
    assert (found.tasks, found.left_out) == (3, 2)


def test_one_id_with_two_questions_or_no_common_task_is_refused() -> None:
    with pytest.raises(DataError, match="asks two different things"):
        compare(groups("01"), groups("01", ask="how long?"), "accuracy")
    with pytest.raises(DataError, match="no task in common"):
        compare(groups("01"), groups("--"), "accuracy")
    with pytest.raises(DataError, match="a task id twice"):
        compare(groups("01") + groups("01"), groups("01"), "accuracy")


def run_of(folder: Path, values: str, metric: str = "accuracy") -> Path:
    write_rollouts(folder / EPISODES, groups(values))
    (folder / "summary.json").write_text(json.dumps({"metric": metric}))
    return folder


def test_the_verb_compares_two_run_directories(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a", "00000001"), run_of(tmp_path / "b", "11111110")
    shown = CliRunner().invoke(
        cli.app, ["compare", str(a), str(b), "--examples", "2", "--html", str(tmp_path / "c.html")]
    )
    assert shown.exit_code == 0, shown.output
    assert "accuracy: 0.125 → 0.875 on 8 tasks" in shown.output
    assert "fixed t0: 0: how many?" in shown.output and "and 5 more fixed" in shown.output
    assert "t7" in (tmp_path / "c.html").read_text(encoding="utf-8")
    plain = CliRunner().invoke(cli.app, ["compare", str(a), str(b), "--json"])
    assert json.loads(plain.output)["p_value"] == pytest.approx(2 * 9 / 256)


def test_what_is_no_evaluation_and_two_metrics_are_told_in_one_line(tmp_path: Path) -> None:
    a, b = run_of(tmp_path / "a", "01"), run_of(tmp_path / "b", "01", metric="env")
    with pytest.raises(DataError, match="different metrics"):
        compare_runs(a, b)
    assert compare_runs(a, b, "accuracy").tasks == 2
    with pytest.raises(RunError, match="holds no evaluation"):
        compare_runs(a, tmp_path)


def page(values: str = "0110", text: str = "48/2 = 25\n#### 25") -> tuple[str, str]:
    played = groups(values, text=text)
    examples = examples_of(played, "accuracy")
    summary = {"model": "m", **result_of(played, "accuracy", seconds=3.0).to_dict(), **summarise(examples)}
    comparison = compare(groups("1" * len(values)), played, "accuracy")
    return render_page("Run", summary, examples, comparison), render_markdown("Run", summary, examples, comparison)


class Page(HTMLParser):
    """Which tags a page is made of, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href")]


def test_the_page_needs_nothing_but_itself_and_shows_numbers_rules_and_changes() -> None:
    html, markdown = page()
    parser = Page()
    parser.feed(html)
    assert parser.fetched == [] and "script" not in parser.tags and "svg" in parser.tags
    assert "http" not in html.replace("http-equiv", "")
    for text in (html, markdown):
        assert "48/2 = 25 is written; it is 24" in text and "50.0%" in text
    assert "0 fixed, 2 broken" in html.replace("\n", " ") and "prefers-color-scheme: dark" in html


def test_what_a_model_wrote_stays_text_on_the_page_and_inside_its_markdown_cell() -> None:
    html, markdown = page(text="<script>alert(1)</script> | a\x1b[2J 48/2 = 25\n#### 25")
    assert "<script>" not in html and "&lt;script&gt;" in html and "\x1b" not in html
    rows = [line for line in markdown.splitlines() if line.startswith("| calculation")]
    assert rows and all(row.replace("\\|", "").count("|") == 7 for row in rows)


def test_a_comparison_has_a_page_of_its_own() -> None:
    html = render_comparison(compare(groups("01"), groups("10"), "accuracy"))
    assert "no change beyond chance" in html and "1 fixed" in html and "1 broken" in html


def test_bars_are_as_long_as_their_values_and_a_histogram_counts_every_value() -> None:
    svg = bar_chart([Bar("a", 1.0, "1"), Bar("b", 0.5, "½", (0.25, 0.75))], title="t", top=1.0, width=382)
    assert 'width="200.0"' in svg and 'width="100.0"' in svg and svg.count("whisker") == 3
    assert ": 2</title>" in histogram([3.0, 3.0, 5.0], title="t") and histogram([3.0], title="t").count("<rect") == 1
