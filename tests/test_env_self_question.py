# SPDX-License-Identifier: Apache-2.0
"""Self-posed questions: only a problem whose calculation holds is paid for and collected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import run
from typer.testing import CliRunner

from palestra import cli
from palestra.chat import make_renderer
from palestra.data.posed import COPIED, NO_PARTS, NO_STEPS, UNTRACED, fault_of, posed_problem, posed_rows
from palestra.data.source import Cursor, make_source
from palestra.engine.scripted import ScriptedEngine
from palestra.env import SelfQuestionEnv, make_env
from palestra.env.base import Action
from palestra.errors import ConfigError
from palestra.model.testing import ByteTokenizer
from palestra.rollout.dump import write_rollouts
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Episode, Group, Task

EXAMPLE = Task("t", "Tom has 3 pens and buys 4. How many now?", "7", {"full_answer": "<<3+4=7>>7\n#### 7"})
QUESTION = "Ann has 48 clips and half as many pins. How many things does she have in all?"
SOLUTION = "Pins: <<48/2=24>>24.\nIn all <<48+24=72>>72.\n#### 72"
GOOD = f"Question: {QUESTION}\nSolution: {SOLUTION}"


def act(text: str) -> Action:
    return Action({"role": "assistant", "content": text}, text)


def test_what_holds_passes_and_each_fault_has_its_own_word() -> None:
    assert fault_of(QUESTION, SOLUTION, [str(EXAMPLE.prompt)]) == ""
    assert fault_of(QUESTION, SOLUTION.replace("=72>>", "=73>>")) == NO_STEPS  # a wrong calculation
    assert fault_of(QUESTION, SOLUTION.replace("#### 72", "#### 24")) == NO_STEPS  # not its last result
    assert fault_of(QUESTION, "It is 72.\n#### 72") == NO_STEPS  # no calculation at all
    assert fault_of(QUESTION.replace("48", "some"), SOLUTION) == UNTRACED  # a number out of nowhere
    assert fault_of(QUESTION, SOLUTION, [QUESTION.replace("things", "objects")]) == COPIED
    assert fault_of(QUESTION, SOLUTION, [QUESTION.replace("48", "50")]) == COPIED


@pytest.mark.parametrize(
    "text", ["", "Question: 2+2?", "Solution: 4", "Solution: <<2+2=4>>4\n#### 4\nQuestion: 2+2?", "\n" * 50]
)
def test_garbage_poses_nothing(text: str) -> None:
    assert posed_problem(text) is None
    result = SelfQuestionEnv(max_turns=1)
    result.reset(EXAMPLE, seed=0)
    assert result.step(act(text)).reward == {"posed": 0.0}


def test_headings_in_bold_are_read() -> None:
    assert posed_problem(f"Here:\n**Question:** {QUESTION}\n\n**Solution:**\n{SOLUTION}") == (QUESTION, SOLUTION)


def test_the_example_is_shown_with_its_solution_and_a_fault_comes_back_once() -> None:
    env = SelfQuestionEnv(max_turns=2)
    shown = env.reset(EXAMPLE, seed=0).messages[0]["content"]
    assert shown.startswith(f"Question: {EXAMPLE.prompt}\nSolution: <<3+4=7>>7\n#### 7\n\nWrite one new")
    first = env.step(act("I cannot."))
    assert (first.reward, first.terminated) == ({"posed": 0.0}, False)
    assert first.observation.messages == ({"role": "user", "content": NO_PARTS},)
    second = env.step(act(GOOD))
    assert (second.reward, second.terminated) == ({"posed": 1.0}, True)
    assert second.info["posed"] == {"question": QUESTION, "answer": SOLUTION}


def test_the_last_fault_ends_the_episode_as_the_tasks_own_end() -> None:
    env = make_env("self_question", max_turns=1)()
    env.reset(EXAMPLE, seed=0)
    result: Any = env.step(act("Question: 2+2?\nSolution: 4"))
    assert (result.terminated, result.truncated, result.info) == (True, False, {"fault": NO_STEPS})
    with pytest.raises(ConfigError, match="max_turns"):
        SelfQuestionEnv(max_turns=0)


def episode(*replies: str) -> Episode:
    tokenizer = ByteTokenizer()
    return run(
        run_episode(
            EXAMPLE,
            env=SelfQuestionEnv(),
            engine=ScriptedEngine(list(replies), tokenizer),
            renderer=make_renderer("plain", tokenizer),
            limits=Limits(),
            sampling=SamplingConfig(max_new_tokens=400),
            seed=0,
        )
    )


def test_posed_problems_are_collected_once_and_are_data_to_train_on(tmp_path: Path) -> None:
    other = GOOD.replace("48", "60").replace("24", "30").replace("72", "90")
    members = [episode(GOOD), episode("no", GOOD.replace("Ann", "ann")), episode("no", "no"), episode(other)]
    assert [e.trajectories[-1].turns[-1].rewards for e in members] == [{"posed": p} for p in (1.0, 1.0, 0.0, 1.0)]
    group = Group(EXAMPLE, 0, tuple(members))
    assert [row["id"] for row in posed_rows([group])] == ["posed/1", "posed/2"]
    file, out = tmp_path / "rollouts.jsonl.zst", tmp_path / "posed.jsonl"
    write_rollouts(file, [group])
    result = CliRunner().invoke(cli.app, ["data", "posed", str(file), "--out", str(out)])
    assert (result.exit_code, "2 problems" in result.output) == (0, True), result.output
    tasks = make_source("table", path=str(out), split="test").take(Cursor(), 2)[0]
    assert [(t.prompt, t.answer) for t in tasks] == [(QUESTION, "72"), (QUESTION.replace("48", "60"), "90")]
    checked = CliRunner().invoke(cli.app, ["data", "check", str(out), "--json"])
    assert checked.exit_code == 0 and json.loads(checked.output)["findings"] == []


def test_rollouts_without_any_are_told(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl.zst"
    write_rollouts(file, [Group(EXAMPLE, 0, (episode("no", "no"),))])
    result = CliRunner().invoke(cli.app, ["data", "posed", str(file), "--out", str(tmp_path / "x.jsonl")])
    assert (result.exit_code, "self_question" in result.output) == (2, True)
    assert not (tmp_path / "x.jsonl").exists()
