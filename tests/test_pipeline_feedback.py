# SPDX-License-Identifier: Apache-2.0
"""Feedback by a model: what a judge is asked, which pairs come of it, and the road from samples to RL."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_pipeline import feedback

from palestra.errors import UserError
from palestra.pipeline import run_pipeline
from palestra.pipeline_feedback import JudgeStage, PairsStage, judge_rollouts, write_pairs
from palestra.rollout.dump import write_rollouts
from palestra.run.progress import Progress
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

QUIET = Progress(quiet=True)


def group(draw: int, replies: Sequence[str], rewards: Sequence[float] = ()) -> Group:
    task = Task(f"t{draw}", f"question {draw}", "7")

    def episode(member: int, reply: str) -> Episode:
        span = Span(np.array([5, 6], np.int32), Author.MODEL, "assistant", reply, np.zeros(2, np.float32), 0, None)
        turn = Turn(
            (span,), ({"role": "user", "content": task.prompt},), {"role": "assistant", "content": reply}, "eos"
        )
        terms = {"r": RewardTerm(rewards[member], 1.0)} if rewards else {}
        return Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards=terms),), member=member)

    return Group(task, draw, tuple(episode(i, reply) for i, reply in enumerate(replies)))


asked: list[str] = []
failing: set[str] = set()


def judge(messages: Sequence[Mapping[str, Any]]) -> str:
    """Likes long answers; gives up after the fourth question when it is told to."""
    answer = str(messages[-1]["content"]).split("<answer>")[1].split("</answer>")[0].strip()
    asked.append(answer)
    if "judge" in failing and len(asked) > 4:
        raise UserError("the judge is gone")
    return f"Score: {min(10, len(answer))}"


def judged_by_length(rollouts: Path) -> JudgeStage:
    part = {"endpoint": "judge_of_length:judge", "workers": 1}
    return JudgeStage(rollouts=str(rollouts), rewards={"judge": part})


def test_a_judge_is_asked_about_no_episode_twice_although_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("judge_of_length")
    vars(module)["judge"] = judge
    monkeypatch.setitem(sys.modules, "judge_of_length", module)
    asked.clear()
    played = [group(d, [f"{d}a", f"{d} longer"]) for d in range(3)]
    write_rollouts(tmp_path / "played.jsonl.zst", played)
    failing.add("judge")
    out = tmp_path / "judge" / "scored.jsonl.zst"
    with pytest.raises(UserError, match="the judge is gone"):
        judge_rollouts(judged_by_length(tmp_path / "played.jsonl.zst"), out, QUIET)
    failing.clear()
    before = list(asked)
    summary = judge_rollouts(judged_by_length(tmp_path / "played.jsonl.zst"), out, QUIET)
    assert sorted(before[:4]) == ["0 longer", "0a", "1 longer", "1a"]
    assert sorted(asked[len(before) :]) == ["2 longer", "2a"]
    assert (summary["groups"], summary["episodes"], summary["unscored"]) == (3, 6, 0)

    pairs = tmp_path / "pairs.jsonl"
    told = write_pairs(PairsStage(rollouts=str(out)), pairs)
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert told["pairs"] == 3
    assert [row["chosen"][0]["content"] for row in rows] == ["0 longer", "1 longer", "2 longer"]
    assert rows[0]["rejected"][0]["content"] == "0a" and rows[0]["prompt"][0]["content"] == "question 0"


def test_the_road_of_feedback_ends_in_rl_against_the_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("likes_variety")
    vars(module)["liked"] = lambda completions, **_: [float(len({*text})) for text in completions]
    monkeypatch.setitem(sys.modules, "likes_variety", module)
    done = run_pipeline(feedback(tmp_path / "p"), progress=QUIET)["stages"]
    assert done["judge"]["summary"]["episodes"] == 12
    assert 1 <= done["pairs"]["summary"]["pairs"] <= 3
    row = json.loads((tmp_path / "p" / "pairs" / "pairs.jsonl").read_text().splitlines()[0])
    better, worse = (len({*row[side][0]["content"]}) for side in ("chosen", "rejected"))
    assert better > worse
    assert done["rl"]["summary"]["steps"] == 1


def test_half_a_surrogate_pair_is_judged_kept_and_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("judge_of_length")
    vars(module)["judge"] = judge
    monkeypatch.setitem(sys.modules, "judge_of_length", module)
    write_rollouts(tmp_path / "played.jsonl.zst", [group(0, ["\ud83d", "\ud83d longer"])])
    out = tmp_path / "scored.jsonl.zst"
    assert judge_rollouts(judged_by_length(tmp_path / "played.jsonl.zst"), out, QUIET)["unscored"] == 0
    assert write_pairs(PairsStage(rollouts=str(out)), tmp_path / "pairs.jsonl")["pairs"] == 1
    row = json.loads((tmp_path / "pairs.jsonl").read_text(encoding="utf-8"))
    assert row["chosen"][0]["content"] == "\ud83d longer"


def test_a_tie_makes_no_pair(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "s.jsonl.zst", [group(0, ["a", "b"], [0.5, 0.5]), group(1, ["a", "b"], [0.1, 0.9])])
    told = write_pairs(PairsStage(rollouts=str(tmp_path / "s.jsonl.zst")), tmp_path / "pairs.jsonl")
    assert (told["pairs"], told["left_out"]) == (1, {"tie": 1})
