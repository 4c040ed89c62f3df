# SPDX-License-Identifier: Apache-2.0
"""The report page and the terminal viewer: everything is there, and nothing a model wrote can act."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from palestra.errors import DataError, RunError
from palestra.run.charts import line_chart, ticks
from palestra.run.report import balanced, pieces, render_report, timeline, total, write_report
from palestra.run.text import visible
from palestra.run.view import read_groups, rollouts_of, show_group

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e &amp; {{ 7*7 }} \ud800"


def span(author: str, role: str, text: str, logprobs: list[float] | None = None) -> dict[str, Any]:
    version = None if logprobs is None else 4
    tokens = list(text.encode("utf-8", "replace"))
    return {"author": author, "role": role, "text": text, "tokens": tokens, "logprobs": logprobs, "version": version}


def episode(member: int, said: str, accuracy: float | None, advantage: float | None) -> dict[str, Any]:
    logprobs = [-0.01, -1.0, -3.0] + [-0.01] * (len(said.encode("utf-8", "replace")) - 3)
    turn = {
        "finish_reason": "stop",
        "rewards": {"env": 0.5},
        "tool_calls": 1,
        "spans": [span("env", "tool", "<obs>57</obs>"), span("model", "assistant", said, logprobs)],
    }
    rewards = {"accuracy": {"value": accuracy, "weight": 1.0}, "format": {"value": 1.0, "weight": 0.2}}
    view = {"agent": "agent", "stop": "max_turns", "rewards": rewards, "advantage": advantage, "turns": [turn]}
    return {"member": member, "error": None, "trajectories": [view]}


def group(*episodes: dict[str, Any], prompt: Any = "(12+7)*3=") -> dict[str, Any]:
    task = {"id": "t1", "prompt": prompt, "answer": 57, "meta": {}}
    return {"format": 1, "draw": 0, "task": task, "episodes": list(episodes)}


GROUP = group(episode(0, "boxed 57", 1.0, 0.71), episode(1, HOSTILE, None, None))
ROWS = [
    {"step": 10, "phase": "sft", "time": 0.0, "sft/loss": 2.0, "eval/accuracy": 0.1},
    {"step": 20, "phase": "sft", "time": 0.0, "sft/loss": 1.0},
    {"step": 1, "phase": "rl", "time": 0.0, "train/reward": 0.5, "reward/format": 0.75, "train/kl": 0.0},
    {"step": 2, "phase": "rl", "time": 0.0, "train/reward": 0.6, "train/kl": 0.01, "eval/accuracy": 0.625},
]
SUMMARY = {"format": 1, "accuracy_before": 0.58, "accuracy_after": 0.98, "steps": 2, "seconds": 243.2, "seed": 3}


def page(**changes: Any) -> str:
    inputs: dict[str, Any] = {"title": "A run", "summary": SUMMARY, "metrics": ROWS, "groups": [GROUP]}
    return render_report(**(inputs | changes))


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that tags nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "br", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_but_itself_and_nests_properly() -> None:
    read = Reader(page())
    assert read.open == [] and read.links == []
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert "url(" not in page() and "@import" not in page()


def test_what_a_model_wrote_stays_text() -> None:
    for decode in (None, lambda ids: bytes(ids).decode("utf-8", "replace")):
        source = page(decode=decode)
        assert "<script>" not in source and "\x1b" not in source and "\u202e" not in source
        read = Reader(source)
        assert "<script>alert(1)</script>␛[2J<U+202E> &amp; {{ 7*7 }}" in read.text
        source.encode("utf-8")


def test_before_and_after_are_one_tile_with_the_change() -> None:
    text = " ".join(Reader(page()).text.split())
    assert "accuracy 0.980 before: 0.580 (+0.400)" in text
    assert "seed 3 · steps 2 · time 4:03" in text


def test_an_episode_shows_authors_parts_weights_advantage_stop_and_what_is_trained() -> None:
    text = " ".join(Reader(page()).text.split())
    # 1.0 x 1 + 1.0 x 0.2 = 1.2; "boxed 57" has 8 of 21 bytes.
    for said in ("reward 1.200", "advantage 0.710", "ended: max turns", "8 of 21 tokens trained"):
        assert said in text, said
    assert "accuracy 1 × 1" in text and "format 1 × 0.2" in text and "paid: env 0.500" in text
    assert "env · tool" in text and "model · assistant" in text and "<obs>57</obs>" in text


def test_a_part_that_was_never_scored_is_not_shown_as_zero() -> None:
    text = " ".join(Reader(page()).text.split())
    assert "accuracy not scored × 1" in text and "advantage none" in text


def test_an_excluded_episode_says_why() -> None:
    failed = {"member": 2, "error": "RuntimeError: <down>", "trajectories": []}
    text = " ".join(Reader(page(groups=[group(failed)])).text.split())
    assert "excluded: RuntimeError: <down>" in text and "reward not scored" in text


def test_each_token_of_the_model_tells_its_log_probability() -> None:
    source = page(decode=lambda ids: bytes(ids).decode("utf-8", "replace"), groups=[group(GROUP["episodes"][0])])
    assert f'title="token 111: log-prob -1.000 (p = {math.exp(-1):.3f}), policy version 4">o</span>' in source
    assert re.search(r'class="tok rare" title="token 120[^"]*">x<', source)  # exp(-3) = 0.05
    assert page().count("token 111: log-prob -1.000") == 1  # without decode: on the strip below the text


def test_a_character_of_several_tokens_is_one_piece_and_nothing_is_lost() -> None:
    text = "a€b\ufffd"
    tokens = [*"a€b".encode(), 0xE2]
    found = pieces(tokens, lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert "".join(t for _, _, t in found) == text
    assert [(a, b) for a, b, _ in found] == [(0, 1), (1, 4), (4, 5), (5, 6)]


def test_phases_lie_end_to_end_and_late_rows_are_put_in_order() -> None:
    series, phases = timeline([*ROWS, {"step": 1, "phase": "rl", "train/kl": 0.5}])
    assert phases == [("sft", 0, 20), ("rl", 20, 22)]
    assert series["eval/accuracy"] == [(10, 0.1), (22, 0.625)]
    assert [x for x, _ in series["train/kl"]] == [21, 21, 22]


def test_evaluations_lie_over_the_phase_that_trains() -> None:
    measured = [{"step": s, "phase": "eval", "eval/accuracy": a, "time/eval_s": 1.0} for s, a in ((0, 0.5), (2, 0.9))]
    series, phases = timeline([ROWS[0], measured[0], ROWS[2], ROWS[3], measured[1]])
    assert phases == [("sft", 0, 10), ("rl", 10, 12)]
    assert series["eval/accuracy"] == [(10, 0.1), (10, 0.5), (12, 0.625), (12, 0.9)]


def test_a_phases_width_is_the_root_of_its_steps() -> None:
    placed, phases = balanced({"a": [(900, 0.0), (1000, 1.0)]}, [("sft", 0, 900), ("rl", 900, 1000)])
    assert placed["a"][0][0] == pytest.approx(30 / 40) and placed["a"][1][0] == pytest.approx(1.0)
    assert phases[1] == ("rl, 100 steps", pytest.approx(0.75), 1.0)


def test_the_learning_curve_has_accuracy_reward_and_parts() -> None:
    source = page()
    chart = ElementTree.fromstring(source[source.index("<svg") : source.index("</svg>") + 6])
    names = " ".join("".join(t.itertext()) for t in chart.iter("text"))
    for name in ("eval accuracy 0.625", "reward 0.6", "format 0.75", "sft, 20 steps", "rl, 2 steps"):
        assert name in names


def test_lines_differ_by_dashes_as_well_as_by_colour() -> None:
    style = page()
    dashes = {
        m[1]: m[2] for m in re.finditer(r"\.line\.c(\d) \{ stroke: [^;]+;(?: stroke-dasharray: ([^;]+);)? \}", style)
    }
    assert len({dashes[str(i)] for i in range(6)}) == 6


@pytest.mark.parametrize("rows", [[], [{"step": 0, "phase": "eval", "eval/accuracy": 0.5}], ROWS[:1]])
def test_few_or_no_numbers_make_a_page_too(rows: list[dict[str, Any]]) -> None:
    assert Reader(page(metrics=rows, groups=[], summary={})).open == []


def test_names_at_the_line_ends_do_not_overlap() -> None:
    chart = line_chart({f"s{i}": [(0, 0.0), (1, 0.5)] for i in range(6)}, title="x", height=300)
    ys = sorted(float(y) for y in re.findall(r'class="label" x="\d+" y="([\d.]+)"', chart))
    assert len(ys) == 6 and all(b - a >= 14.9 for a, b in itertools.pairwise(ys)) and ys[-1] < 300


def test_a_series_name_is_escaped_in_a_chart() -> None:
    chart = line_chart({"<b>": [(0, 0.0), (1, 0.5)], "ok": [(0, 1.0)]}, title='a"b')
    ElementTree.fromstring(chart)
    assert "<b>" not in chart


@pytest.mark.parametrize(("low", "high", "about", "expected"), [(0, 10, 5, 6), (-1, 1, 4, 5), (3, 3, 5, 1)])
def test_ticks_are_few_and_inside(low: float, high: float, about: int, expected: int) -> None:
    found = ticks(low, high, about=about)
    assert len(found) == expected and all(low - 1e-9 <= t <= high + 1e-9 for t in found)


def test_more_groups_than_fit_are_counted_not_dropped_in_silence(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", title="x", summary={}, metrics=[], groups=[GROUP] * 3, max_groups=2)
    source = (tmp_path / "r.html").read_text()
    assert "2 of 3 groups." in source and source.count('class="card group"') == 2


def test_a_reward_that_was_never_scored_counts_neither_as_zero_nor_in_the_sum() -> None:
    assert total({"rewards": {"a": {"value": None, "weight": 1.0}}}) is None
    assert total({"rewards": {"a": {"value": 0.5, "weight": 2.0}, "b": {"value": None, "weight": 1.0}}}) == 1.0


def shown(value: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(show_group(value))
    return out.getvalue()


def test_the_terminal_view_shows_question_mask_tool_result_parts_and_advantage() -> None:
    text = shown(GROUP)
    assert text.startswith("(12+7)*3=\ntask t1, draw 0, answer 57\n")
    assert "reward 1.200 (accuracy 1 x 1, format 1 x 0.2); advantage 0.710; ended: max turns" in text
    assert re.search(r"^  env tool +<obs>57</obs>", text, re.M)
    assert re.search(r"^\+ model assistant boxed 57", text, re.M)


def test_the_terminal_view_lets_no_model_steer_the_terminal() -> None:
    text = shown(group(episode(0, HOSTILE + "[bold]", 1.0, 1.0)))
    assert "\x1b" not in text and "␛[2J" in text and "[bold]" in text


def test_a_chat_prompt_shows_its_last_question() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert shown(group(prompt=prompt)).startswith("2+2?\n")


def test_visible_keeps_text_and_names_the_rest() -> None:
    assert visible("ü 数\n\tx") == "ü 数\n\tx"
    assert visible("\x00\x9b\u2066\ud800") == "␀<U+009B><U+2066>\ufffd"


def write_rollouts(path: Path, *groups: Any, compressed: bool = True) -> Path:
    data = "".join(json.dumps(g) + "\n" for g in groups).encode()
    if compressed:
        import zstandard

        data = zstandard.ZstdCompressor().compress(data)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_rollouts_are_read_plain_and_compressed(tmp_path: Path, name: str) -> None:
    file = write_rollouts(tmp_path / name, GROUP, GROUP, compressed=name.endswith("zst"))
    assert list(read_groups(file)) == [GROUP, GROUP]


@pytest.mark.parametrize(
    ("line", "said"),
    [({"a": 1}, ":2: not a line of a rollouts file"), ({**GROUP, "format": 2}, ":2: format 2 is not known here")],
)
def test_a_line_that_is_no_group_or_of_another_format_is_named(tmp_path: Path, line: Any, said: str) -> None:
    file = write_rollouts(tmp_path / "a.jsonl.zst", GROUP, line)
    with pytest.raises(DataError, match=said):
        list(read_groups(file))


def test_files_that_are_no_rollouts_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"not compressed")
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "a.bin").write_bytes(b"\xff\xff\xff")
    for name, said in [("a.zst", "not zstandard"), ("a.txt", "not JSON"), ("a.bin", "not UTF-8"), ("no", "not exist")]:
        with pytest.raises(DataError, match=said):
            list(read_groups(tmp_path / name))


def test_the_last_rollouts_of_a_run_are_the_default_and_a_step_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no rollouts; there are: none"):
        rollouts_of(tmp_path)
    for name in ("step_000009", "step_000010", "eval_000020"):
        write_rollouts(tmp_path / "rollouts" / f"{name}.jsonl.zst", GROUP)
    assert rollouts_of(tmp_path).name == "step_000010.jsonl.zst"
    assert rollouts_of(tmp_path, 9).name == "step_000009.jsonl.zst"
    assert rollouts_of(tmp_path, 20).name == "eval_000020.jsonl.zst"
    with pytest.raises(RunError, match="of step 5; there are: eval_000020, step_000009, step_000010"):
        rollouts_of(tmp_path, 5)
