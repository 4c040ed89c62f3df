# SPDX-License-Identifier: Apache-2.0
"""``palestra eval`` from a config to its run directory, on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from http_server import JsonServer
from test_eval_endpoint import chat

from palestra.config import load
from palestra.errors import ConfigError, DataError
from palestra.eval.compare import compare_runs
from palestra.run.progress import Progress
from palestra.train.config import EvalConfig
from palestra.train.evaluation import run_eval
from palestra.train.plan import describe

BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": "calculator",
    "data": {"name": "arithmetic", "max_operand": 9},
    "rewards": {"accuracy": {"function": "calculator_accuracy"}, "format": {"function": "calculator_format"}},
    "sampling": {"max_new_tokens": 4},
    "limits": {"max_turns": 2},
}


def careful(messages: list[dict[str, str]]) -> str:
    return "Score: 10" if "<question>" in messages[1]["content"] else "no"


def played(out: Path, *overrides: str) -> dict[str, Any]:
    config = load(BASE, [f"out={out}", "eval.size=2", *overrides], EvalConfig)
    return run_eval(config, progress=Progress(quiet=True))


def test_a_run_leaves_numbers_examples_pages_and_a_comparison(tmp_path: Path) -> None:
    judge = f"eval.judge={{endpoint: '{__name__}:careful'}}"
    found = played(tmp_path / "a", "eval.samples=2", "eval.temperature=1", judge)
    assert (found["examples"], found["samples"], found["errors"]) == (2, 2, 0)
    assert found["rewards"]["reasoning"] == 1.0, "judged beside the reward, not in it"
    stored = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert stored.keys() == {"format", *found} and stored["pass_at_k"].keys() == {"1", "2"}
    lines = [json.loads(line) for line in (tmp_path / "a" / "examples.jsonl").read_text().splitlines()]
    assert [(e["task"][-1], e["member"]) for e in lines] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert {e["kind"] for e in lines} == {"format"}, "an untrained model gives no answer"
    for name in ("report.html", "report.md"):
        assert "2 tasks × 2 samples" in (tmp_path / "a" / name).read_text(encoding="utf-8")

    played(tmp_path / "b", f"eval.baseline={tmp_path / 'a'}")
    told = json.loads((tmp_path / "b" / "comparison.json").read_text())
    assert (told["tasks"], told["p_value"], told["names"]) == (2, 1.0, ["a", "b"])
    assert compare_runs(tmp_path / "a", tmp_path / "b").tasks == 2


def test_a_model_as_baseline_plays_the_same_tasks_first(tmp_path: Path) -> None:
    played(tmp_path / "a", "eval.baseline=builtin:calculator", "eval.size=1")
    told = json.loads((tmp_path / "a" / "comparison.json").read_text())
    assert (told["tasks"], told["difference"]) == (1, 0.0)
    assert (tmp_path / "a" / "rollouts" / "baseline.jsonl.zst").is_file()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("eval.samples=4", r"eval\.temperature=0\.7"),
        ("eval.pass_k=[0]", "greater than or equal to 1"),
        ("endpoint={url: 'http://127.0.0.1:9/v1', api: text}", "'chat' or 'completions'"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        played(tmp_path / "a", override)


def test_options_that_an_endpoint_does_not_read_and_no_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"renderer\.tools does nothing with endpoint\.api=chat"):
        played(tmp_path / "a", "endpoint=http://127.0.0.1:9/v1", "renderer={name: chat, tools: system}")
    with pytest.raises(DataError, match=r"eval\.size is 0"):
        played(tmp_path / "b", "eval.size=0")


def test_a_model_behind_a_server_is_evaluated_without_a_model_here(tmp_path: Path) -> None:
    def worked_out(body: dict[str, Any]) -> dict[str, Any]:
        return chat(rf"<answer>\boxed{{{eval(body['messages'][0]['content'])}}}</answer>", tokens=9)

    with JsonServer(worked_out) as server:
        found = played(tmp_path / "a", f"endpoint={server.url}", "model=some-model", "sampling.max_new_tokens=40")
    assert {r["model"] for r in server.requests} == {"some-model"}
    assert (found["accuracy"], found["format_rate"], found["sampled_tokens_mean"]) == (1.0, 1.0, 9.0)
    assert found["endpoint"] == {"url": server.url, "requests": 2, "prompt_tokens": 10, "completion_tokens": 18}


def test_without_a_part_for_the_form_the_format_rate_is_the_share_of_answers_that_could_be_read(tmp_path: Path) -> None:
    def replies(body: dict[str, Any]) -> dict[str, Any]:
        first = body["messages"][0]["content"].startswith("(")
        return chat(r"<answer>\boxed{1}</answer>" if first else "I do not know.", tokens=9)

    alone = "rewards={accuracy: {function: calculator_accuracy}}"
    with JsonServer(replies) as server:
        given = (f"endpoint={server.url}", "model=m", "eval.size=8", "limits.max_turns=1", alone)
        found = played(tmp_path / "a", *given)
    lines = [json.loads(line) for line in (tmp_path / "a" / "examples.jsonl").read_text().splitlines()]
    assert found["format_rate"] == sum(line["prediction"] is not None for line in lines) / 8
    assert 0 < found["format_rate"] < 1
    assert "| format |" in (tmp_path / "a" / "report.md").read_text()


def test_half_a_surrogate_pair_in_a_reply_does_not_end_the_evaluation(tmp_path: Path) -> None:
    """JSON can escape half of an emoji, and a server that cuts inside one does."""
    with JsonServer(lambda body: chat("\ud83d 1")) as server:
        found = played(tmp_path / "a", f"endpoint={server.url}", "model=m", "sampling.max_new_tokens=40")
    assert found["accuracy"] == 0.0
    rows = [json.loads(line) for line in (tmp_path / "a" / "examples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert "\ud83d 1" in rows[0]["text"]  # as it was, and the page shows the escape
    assert (tmp_path / "a" / "report.html").read_text(encoding="utf-8")


def test_a_plan_names_the_player_and_writes_nothing(tmp_path: Path) -> None:
    given = ["endpoint=http://127.0.0.1:9/v1", "model=m", "eval.samples=4", "eval.temperature=1", "eval.baseline=base"]
    plan = describe(load(BASE, [f"out={tmp_path / 'a'}", *given], EvalConfig))
    assert "# model: m behind http://127.0.0.1:9/v1, as text" in plan
    assert "# 200 held-out tasks × 4 samples, temperature 1, accuracy by 'accuracy'" in plan
    assert "# compared with base" in plan and not (tmp_path / "a").exists()
