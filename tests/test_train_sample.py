# SPDX-License-Identifier: Apache-2.0
"""``palestra sample``: which episodes become data, that training reads them, and that an interrupted run goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.config import dump, load
from palestra.data.dialogues import make_dialogues
from palestra.data.preferences import Comparison, make_preferences
from palestra.engine.scripted import ScriptedEngine
from palestra.errors import ConfigError, RunError
from palestra.rollout.dump import read_rollouts
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.plan import describe
from palestra.train.sample import run_sample
from palestra.train.sample_config import DialogueSettings, PairSelection, SampleConfig
from palestra.train.selection import Count, best_episodes, pairs
from palestra.train.sft import dialogue_samples
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t", "2+2?", 4)
ASK = {"role": "user", "content": "2+2?"}


def episode(
    member: int, reward: float | None, text: str = "", *, ended: str = "eos", prompt: str = "2+2?", views: int = 1
) -> Episode:
    """One turn that says ``text`` (its member's number by default)."""
    text = text or f"it is {member}"
    said = Span(np.array([5]), Author.MODEL, "assistant", text, np.array([-1.0]), 0)
    shown = ({**ASK, "content": prompt},)
    turn = Turn((said,), shown, {"role": "assistant", "content": text}, ended)  # type: ignore[arg-type]
    view = Trajectory((turn,), StopReason.ENV_TERMINATED, rewards={"accuracy": RewardTerm(reward)})
    return Episode(TASK, (view,) * views, member=member)


def group(*episodes: Episode) -> Group:
    return Group(TASK, 0, episodes)


def chosen(given: Group, **settings: Any) -> tuple[list[int], Counter[str]]:
    count = Count()
    kept = [e.member for e in best_episodes(given, DialogueSettings(**settings), count)]
    assert count.kept == len(kept) and count.kept + count.left_out.total() == len(given.episodes)
    return kept, count.left_out


def paired(given: Group, **settings: Any) -> tuple[list[tuple[int, int]], Counter[str]]:
    count = Count()
    made = [(a.member, b.member) for a, b in pairs(given, PairSelection(**settings), count)]
    assert count.kept == len(made)
    return made, count.left_out


# The best --------------------------------------------------------------------------------------------------


def test_the_best_come_first_and_equals_in_the_order_of_members() -> None:
    many = group(episode(0, 0.5), episode(1, 1.0), episode(2, 0.0), episode(3, 1.0))
    assert chosen(many) == ([1], Counter(not_best=3))
    assert chosen(many, keep=3) == ([1, 3, 0], Counter(not_best=1))
    assert chosen(many, keep=9) == ([1, 3, 0, 2], Counter())
    assert chosen(many, keep=9, threshold=0.5) == ([1, 3, 0], Counter(below_threshold=1))
    assert chosen(many, threshold=2.0) == ([], Counter(below_threshold=4))


def test_what_cannot_be_imitated_is_left_out_and_counted_by_reason() -> None:
    failed = Episode(TASK, error="env.step: OSError", member=0)
    odd = group(failed, episode(1, None), episode(2, 1.0, views=2), episode(3, 1.0, ended="length"), episode(4, 0.1))
    assert chosen(odd) == ([4], Counter(failed=1, unscored=1, rewritten=1, cut_off=1))


def test_saying_the_same_again_takes_no_place() -> None:
    alike = group(episode(0, 1.0, "four"), episode(1, 1.0, "four"), episode(2, 0.5, "4"))
    assert chosen(alike, keep=2) == ([0, 2], Counter(repeated=1))


# Pairs -----------------------------------------------------------------------------------------------------


def test_the_best_meets_the_worst_and_the_second_best_the_second_worst() -> None:
    many = group(episode(0, 0.2), episode(1, 1.0), episode(2, 0.0), episode(3, 0.8))
    assert paired(many) == ([(1, 2)], Counter())
    assert paired(many, per_task=5) == ([(1, 2), (3, 0)], Counter())
    assert paired(many, per_task=2, margin=0.7) == ([(1, 2)], Counter(margin=1))


def test_ties_make_no_pair_and_neither_do_other_prompts_or_the_same_words() -> None:
    assert paired(group(episode(0, 0.1 + 0.2), episode(1, 0.3))) == ([], Counter(tie=1))
    assert paired(group(episode(0, 1.0), episode(1, 0.0, prompt="3+3?"))) == ([], Counter(other_prompt=1))
    assert paired(group(episode(0, 1.0, "4"), episode(1, 0.0, "4"))) == ([], Counter(same_reply=1))
    assert paired(group(episode(0, 1.0), episode(1, None))) == ([], Counter(too_few=1))
    assert paired(group(episode(0, 1.0), episode(1, 0.0), episode(2, 1.0))) == ([(0, 1)], Counter())


# The verb --------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "rewards": {"accuracy": {"function": "calculator_accuracy", "weight": 1.0}},
    "sampling": {"max_new_tokens": 40},
    "sample": {"tasks": 3, "n": 3, "dialogues": {"threshold": 1.0}, "pairs": {}, "save_every": 2},
}


def config(out: Path | str, *overrides: str) -> SampleConfig:
    return load(BASE | {"out": str(out)}, overrides, SampleConfig)


def quiet() -> Progress:
    return Progress(quiet=True)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Member 0 is wrong, 1 is right after a call, 2 is cut off in the middle of its answer."""

    def make(settings: Any, model: Any, renderer: Any, **_: Any) -> ScriptedEngine:
        tokenizer = setup.load(settings.model).tokenizer

        def line(prompt: Any, params: Any, session: str) -> Any:
            text, member = renderer.decode(prompt), int(session.split("/")[-2])
            value = eval(text.partition("\n")[0].removeprefix("<bos>"))
            if member == 0:
                return "<answer>\\boxed{0}</answer>"
            if member == 2:
                return tokenizer.encode("<answer>\\boxed{", add_special_tokens=False)
            return f"<answer>\\boxed{{{value}}}</answer>" if "<obs>" in text else "<call>add(1,2)</call>"

        return ScriptedEngine(line, tokenizer)

    monkeypatch.setattr(setup, "make_engine", make)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_episodes_become_rollouts_dialogues_and_pairs_that_training_reads(tmp_path: Path) -> None:
    out = tmp_path / "s"
    summary = run_sample(config(out), progress=quiet())
    assert {k: summary[k] for k in ("tasks", "episodes", "failed", "dialogues", "pairs")} == {
        "tasks": 3, "episodes": 9, "failed": 0, "dialogues": 3, "pairs": 3,
    }  # fmt: skip
    assert summary["dialogues_left_out"] == {"below_threshold": 3, "cut_off": 3}
    assert summary["reward_mean"] == pytest.approx(1 / 3) and summary["reward_best_mean"] == 1.0
    assert sorted(p.name for p in (out / "rollouts").iterdir()) == [
        "sample_000002.jsonl.zst",
        "sample_000003.jsonl.zst",
    ]
    played = [g for p in sorted((out / "rollouts").iterdir()) for g in read_rollouts(p)]
    assert [g.draw for g in played] == [0, 1, 2]

    loaded = setup.load(config(out).model)
    renderer = setup.renderer_for(config(out).renderer, loaded)
    dialogues = make_dialogues("jsonl", seed=0, path=str(out / "dialogues.jsonl"))
    for made, g in zip(dialogue_samples(dialogues, renderer, max_length=256), played, strict=True):
        right = g.episodes[1].trajectories[0]
        assert made.tokens.tolist() == right.tokens.tolist(), "what is imitated is what was said"
        assert made.loss_mask.tolist() == right.loss_mask.tolist()
    compared = make_preferences("table", seed=0, path=str(out / "pairs.jsonl"))
    for pair, g in zip(compared, played, strict=True):
        assert isinstance(pair, Comparison) and pair.prompt == g.episodes[0].trajectories[0].turns[0].observation
        assert [m["role"] for m in pair.chosen] == ["assistant", "tool", "assistant"]
        assert pair.rejected == ({"role": "assistant", "content": "<answer>\\boxed{0}</answer>"},)


class Interrupted(Progress):
    """Ctrl-C after the first rollout file."""

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_and_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_sample(config(whole), progress=quiet())
    with pytest.raises(KeyboardInterrupt):
        run_sample(config(cut), progress=Interrupted(quiet=True))
    assert not (cut / "dialogues.jsonl").exists()
    run_sample(config(cut), progress=quiet(), resume=True)
    for name in ("dialogues.jsonl", "pairs.jsonl"):
        assert (cut / name).read_text() == (whole / name).read_text()
    assert [r["step"] for r in rows(cut / "metrics.jsonl")] == [2, 3]


def test_more_tasks_and_other_choices_go_on_but_other_episodes_do_not(tmp_path: Path) -> None:
    out = tmp_path / "s"
    run_sample(config(out, "sample.tasks=1"), progress=quiet())
    summary = run_sample(config(out, "sample.tasks=2", "sample.dialogues.keep=5"), progress=quiet(), resume=True)
    assert (summary["tasks"], summary["dialogues"]) == (2, 2)
    for change in ("sampling.temperature=0.7", "seed=1", "sample.n=4", "env.max_steps=3"):
        with pytest.raises(RunError, match="choose another --out") as caught:
            run_sample(config(out, change), progress=quiet(), resume=True)
        assert change.split(".")[0].split("=")[0] in str(caught.value)
    with pytest.raises(RunError, match="already holds a run"):
        run_sample(config(out), progress=quiet())


def test_without_being_asked_for_there_are_rollouts_alone(tmp_path: Path) -> None:
    out = tmp_path / "s"
    given = {**BASE, "out": str(out), "sample": {"tasks": 1, "group_size": 1}, "sampling": {"temperature": 0.0}}
    summary = run_sample(load(given, [], SampleConfig), progress=quiet())
    assert "dialogues" not in summary and not list(out.glob("*.jsonl"))[1:]


def test_the_verb_tells_what_was_kept_and_why_the_rest_was_not(tmp_path: Path) -> None:
    (tmp_path / "sample.yaml").write_text(dump(config("runs/s")))
    told = CliRunner().invoke(cli.app, ["sample", str(tmp_path / "sample.yaml"), "--out", str(tmp_path / "s")])
    assert told.exit_code == 0
    assert "3 dialogues; left out: 3 below the threshold, 3 cut off in the middle of a turn" in told.stdout
    assert "3 pairs\n" in told.stdout and f"results in {tmp_path / 's'}" in told.stdout.replace("\n", "")


def test_a_dry_run_says_what_would_be_played() -> None:
    plan = describe(config("runs/s"))
    for line in (
        "3 tasks × 3 episodes = 9 episodes",
        "the best 1 of each task with a reward of at least 1",
        "pairs: up",
    ):
        assert line in plan


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampling.temperature=0", "plays the same episode"),
        ("sample.n=1", "compares episodes"),
        ("sample.task=3", "task"),
    ],
)
def test_settings_that_make_no_sense_are_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config("runs/s", override)
