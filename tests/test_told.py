# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in rewards, tools and demonstrations is told once, counted, and ends a run where nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from listening import Listening

from palestra.chat import PlainRenderer
from palestra.data.dialogues import Dialogue
from palestra.learn.batch import Rows, rows
from palestra.learn.robust import TrainingError
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.reward.rubric import REWARD_ERRORS, Rubric
from palestra.rollout.dump import from_line, to_line
from palestra.run.health import Monitor
from palestra.run.metrics import check
from palestra.train import setup, sft
from palestra.train.config import ModelConfig, RLConfig, SFTConfig
from palestra.train.groups import RewardErrors
from palestra.train.metrics import rollout_metrics
from palestra.train.plan import describe
from palestra.train.rl import RLTrainer, train_rl
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "?")
DOWN = "RuntimeError: my scorer is down"


def episode(*turns: Mapping[str, Any], value: float | None = 1.0, calls: int = 0, **info: Any) -> Episode:
    """One token a turn; ``turns`` are what stands in their infos."""
    said = Span(np.array([5]), Author.MODEL, "assistant", "x", np.array([-1.0]), 0)
    made = tuple(Turn((said,), (), {"role": "assistant"}, "eos", tool_calls=calls, info=t) for t in turns or ({},))
    paid = {"accuracy": RewardTerm(value)}
    return Episode(TASK, (Trajectory(made, StopReason.ENV_TERMINATED, rewards=paid),), info=info)


def group(*episodes: Episode, draw: int = 0) -> Group:
    return Group(TASK, draw, tuple(replace(e, member=i) for i, e in enumerate(episodes)))


def metrics_of(*groups: Group) -> dict[str, float]:
    found = rollout_metrics(groups, rows(groups), "accuracy", {})
    check(found, strict=True)
    return found


# Rewards that raise ----------------------------------------------------------------------------------------


def on_odd(completions: list[str], **_: Any) -> list[float]:
    if any(c != "x" for c in completions):
        raise RuntimeError("my scorer\nis down")
    return [1.0] * len(completions)


def test_an_episode_carries_what_its_rewards_raised_and_keeps_it_in_a_file() -> None:
    played = group(episode(), episode({}, {}), episode(rewritten=0))
    rubric = Rubric({"odd": (on_odd, 1.0)}, chat=False)
    scored = asyncio.run(rubric.score(played))
    assert [e.info.get(REWARD_ERRORS) for e in scored.episodes] == [None, {"odd": DOWN}, None]
    assert from_line(to_line(scored)).episodes[1].info == {REWARD_ERRORS: {"odd": DOWN}}
    assert metrics_of(scored)["rollout/reward_errors"] == 1 and metrics_of(played)["rollout/reward_errors"] == 0
    mended = asyncio.run(Rubric({"odd": (lambda completions: [1.0] * 3, 1.0)}, chat=False).score(scored))
    assert [dict(e.info) for e in mended.episodes] == [{}, {}, {"rewritten": 0}], "scored anew, nothing of it stays"


def test_an_exception_in_the_place_of_one_score_is_that_episodes() -> None:
    def some(completions: list[str]) -> list[Any]:
        return [1.0, ValueError("no number"), 0.0]

    scored = asyncio.run(Rubric({"some": (some, 1.0)}, chat=False).score(group(episode(), episode(), episode())))
    assert [REWARD_ERRORS in e.info for e in scored.episodes] == [False, True, False]


def failing(line: str, times: int = 2, draw: int = 0) -> Group:
    return group(*(replace(episode(value=None), info={REWARD_ERRORS: {"boom": line}}) for _ in range(times)), draw=draw)


def test_each_message_of_a_reward_is_told_once_and_not_without_end() -> None:
    told: list[str] = []
    heard = RewardErrors(told.append)
    heard.tell([failing(DOWN), failing(DOWN), failing("KeyError: 'a'", 1)], "step 3")
    heard.tell([failing(DOWN)], "step 4")
    assert told == [
        f"reward 'boom' failed in 4 episodes of step 3, which it does not score: {DOWN}",
        "reward 'boom' failed in 1 episode of step 3, which it does not score: KeyError: 'a'",
    ]
    heard.tell([failing("TimeoutError: after 3.1 s")], "step 5")
    heard.tell([failing("TimeoutError: after 4.27 s")], "step 6")
    assert len(told) == 3, "another number is no other message"
    heard.tell([failing(f"ValueError: {word}") for word in "abcdef"], "step 7")
    assert len(told) == RewardErrors.MESSAGES == 5 and told[-1].endswith("further messages are not shown")


def heard_of(heard: RewardErrors, step: int, *groups: Group) -> None:
    heard.hear(step, groups, rows(groups))


def test_three_steps_in_a_row_without_a_score_end_the_run_and_one_with_a_score_begins_anew() -> None:
    heard, whole = RewardErrors(lambda _: None), group(episode(), episode(), draw=1)
    for step, groups in enumerate([[failing(DOWN)], [failing(DOWN)], [failing(DOWN), whole]] + 2 * [[failing(DOWN)]]):
        heard_of(heard, step + 1, *groups)
        heard.check()
    heard_of(heard, 6, failing(DOWN))
    with pytest.raises(TrainingError) as caught:
        heard.check()
    said = str(caught.value)
    assert said.startswith(f"reward 'boom' failed in 2 of the 2 episodes of step 6: {DOWN}; nothing was scored")
    assert "3 steps in a row" in said and "\n" not in said


def test_what_is_missing_for_other_reasons_is_not_put_down_to_rewards() -> None:
    told: list[str] = []
    heard = RewardErrors(told.append)
    broken = Episode(TASK, error="env.step: OSError: gone")
    outage = group(broken, broken, broken, *failing(DOWN, 1).episodes)
    learned = failing(DOWN)  # by what learns from no reward
    for step in range(1, 5):
        heard_of(heard, step, outage)
        heard.hear(step, [learned], rows([learned], unscored=True))
        heard.hear(step, [], Rows(()))
        heard.check()
    told.clear()
    for step in range(5, 9):
        heard_of(heard, step, group(episode(value=None), episode(value=None)))
        heard.check()
    assert told == ["nothing is learned from step 5: every reward is None in 2 of its episodes"]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One narrow layer in the place of the built-in model."""

    def load(config: ModelConfig) -> LoadedModel:
        tokenizer = calculator_tokenizer()
        return LoadedModel(tiny_llama(tokenizer, hidden=16, layers=1, heads=2, intermediate=16), tokenizer, "x", (2,))

    monkeypatch.setattr(setup, "load", load)
    yield


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_whose_reward_always_raises_says_so_and_stops(narrow: None, tmp_path: Path, lag: int) -> None:
    def boom(completions: list[str]) -> list[float]:
        raise RuntimeError("my scorer is down")

    def ready(trainer: RLTrainer) -> None:
        trainer.world = replace(trainer.world, rubric=Rubric({"boom": (boom, 1.0)}, chat=False))
        trainer.run_dir.strict = True

    config = RLConfig.model_validate(
        {
            "model": "builtin:calculator",
            "renderer": "plain",
            "env": {"name": "calculator", "max_steps": 1},
            "data": "arithmetic",
            "sampling": {"max_new_tokens": 2},
            "algorithm": {"group_size": 2, "kl_coef": 0.0},
            "train": {"steps": 9, "tasks_per_step": 2, "learning_rate": 1e-3, "max_staleness": lag},
            "eval": {"size": 0},
            "out": str(tmp_path / "run"),
        }
    )
    progress = Listening()
    with pytest.raises(TrainingError, match=f"reward 'boom' failed in 4 of the 4 episodes of step 3: {DOWN}"):
        train_rl(config, progress=progress, on_ready=ready)
    told = [t for t in progress.told if "boom" in t]
    assert told == [f"reward 'boom' failed in 4 episodes of step 1, which it does not score: {DOWN}"]
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["rollout/reward_errors"], r["rollout/groups_dropped"]) for r in log if r["step"]] == [
        (1, 4, 2), (2, 4, 2), (3, 4, 2)
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("*3")] == ["step_000003"], "the last whole step"


@pytest.mark.parametrize(
    ("dropped", "equal", "rings"), [(0, 0, True), (4, 0, False), (2, 2, False), (2, 1, True), (0, 4, False)]
)
def test_a_step_of_groups_that_cannot_be_used_had_nothing_to_learn(dropped: int, equal: int, rings: bool) -> None:
    monitor, alarms = Monitor({"algorithm": {"group_size": 8}}), []
    row = {"train/updates_skipped": 1.0, "rollout/groups": 4.0}
    row |= {"rollout/groups_dropped": float(dropped), "rollout/groups_zero_variance": float(equal)}
    for step in range(1, 7):
        alarms += [a.rule for a in monitor.observe(step, row, phase="rl")]
    assert ("updates_skipped" in alarms) == rings


def test_one_unusable_step_does_not_silence_four_skipped_ones() -> None:
    monitor, alarms = Monitor({"algorithm": {"group_size": 8}}), []
    for step, dropped in enumerate([0, 0, 4, 0, 0], start=1):
        row = {"train/updates_skipped": 1.0, "rollout/groups": 4.0, "rollout/groups_dropped": float(dropped)}
        row |= {"rollout/groups_zero_variance": 0.0}
        alarms += [a.rule for a in monitor.observe(step, row, phase="rl")]
    assert "updates_skipped" in alarms


# Tools -----------------------------------------------------------------------------------------------------


def test_failed_and_refused_calls_are_means_over_the_episodes_that_did_not_fail() -> None:
    found = metrics_of(
        group(
            episode({"tool_errors": 2}, {"tool_errors": 1}, {}, calls=1, tool_calls_refused=4),
            episode({"tool_errors": 0}, calls=2),
            episode({"tool_errors": "many"}),
            episode({}, rewritten=0),
            Episode(TASK, error="env.step: OSError: gone", info={"tool_calls_refused": 8}),
        )
    )
    assert found["rollout/tool_errors_mean"] == (2 + 1) / 4
    assert found["rollout/tool_calls_refused_mean"] == 4 / 4
    assert found["rollout/tool_calls_mean"] == (3 * 1 + 2) / 4


def test_tools_without_a_failure_are_zero_and_without_tools_there_is_no_number() -> None:
    names = {"rollout/tool_errors_mean", "rollout/tool_calls_refused_mean"}
    found = metrics_of(group(episode(calls=1), episode()))
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0.0)
    assert not (names | {"rollout/rewritten"}) & set(metrics_of(group(episode(rewritten=0), episode())))


def test_rewritten_contexts_are_counted_where_there_are_any() -> None:
    assert metrics_of(group(episode(rewritten=2), episode(rewritten=0), episode(rewritten=3)))["rollout/rewritten"] == 5


# Demonstrations --------------------------------------------------------------------------------------------


def dialogue(question: str, reply: str) -> Dialogue:
    return Dialogue((Message(role="user", content=question), Message(role="assistant", content=reply)))


def test_dialogues_that_are_too_long_are_told() -> None:
    renderer, told = PlainRenderer(calculator_tokenizer()), list[str]()
    short, long, cut = dialogue("1+1\n", "2"), dialogue("1+1\n" * 9, "2"), dialogue("1+1\n", "2" * 30)
    kept = sft.dialogue_samples([short, long, cut, long], renderer, max_length=16, tell=told.append)
    assert len(kept) == 2
    assert told == [
        "kept 2 of 4 dialogues, the others have no assistant token within max_length=16; 1 of those kept is cut there"
    ]
    sft.dialogue_samples([short, short], renderer, max_length=16, tell=told.append)
    assert len(told) == 1, "nothing is told where all fit"


def test_a_supervised_run_and_its_plan_say_how_many_dialogues_are_kept(narrow: None, tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": "1+1\n" * n}, {"role": "assistant", "content": "2"}]}
             for n in (1, 1, 1, 40, 40)]  # fmt: skip
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"data": {"name": "jsonl", "path": str(path)}, "batch_size": 2, "epochs": 1, "max_length": 20}
    config = SFTConfig.model_validate(
        {"model": "builtin:calculator", "renderer": "plain", "out": str(tmp_path / "run"), "sft": given}
    )
    kept = "kept 3 of 5 dialogues, the others have no assistant token within max_length=20"
    plan = describe(config)
    assert "# 3 dialogues, 2 optimiser steps of 2 dialogues" in plan and kept in plan
    progress = Listening()
    summary = sft.train_sft(config, progress=progress)
    assert kept in progress.told and (summary["dialogues"], summary["steps"]) == (3, 2)


# What rewards log -------------------------------------------------------------------------------------------


def test_numbers_that_rewards_log_are_averaged_over_the_episodes_that_have_them() -> None:
    noted = [{"read": "a", "share": 0.5}, {"share": 1.0, "n": 4}, {"n": None}]
    found = metrics_of(group(*(episode(reward_notes=notes) for notes in noted), episode()))
    logged = {name: value for name, value in found.items() if name.startswith("rollout/logged/")}
    assert logged == {"rollout/logged/share": 0.75, "rollout/logged/n": 4.0}
