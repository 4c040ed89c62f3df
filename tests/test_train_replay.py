# SPDX-License-Identifier: Apache-2.0
"""A recorded step taken again: the same numbers and weights to the last bit, and a difference is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from palestra import cli
from palestra.config import load
from palestra.errors import RunError
from palestra.rollout.dump import read_rollouts, write_rollouts
from palestra.run.directory import Run
from palestra.run.progress import Progress
from palestra.train import rl
from palestra.train.config import RLConfig
from palestra.train.fault_replay import replay_fault
from palestra.train.replay import replay, replayable
from palestra.train.rl import train_rl
from palestra.types import Group

BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "rewards": {"short": {"function": "test_train_replay:short", "weight": 1.0}},
    "sampling": {"max_new_tokens": 4, "temperature": 0.9},
    "algorithm": {"group_size": 2, "kl_coef": 0.05, "updates_per_batch": 2, "kl_control": "steps"},
    "train": {"steps": 3, "tasks_per_step": 2, "learning_rate": 1e-3, "warmup_ratio": 0.0, "save_every": 1},
    "eval": {"size": 0},
}


def short(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A random model solves nothing: let it be paid for some tokens, so that there is a gradient."""
    return [float(np.mean([t % 7 for t in ids])) for ids in completion_ids]


def trained(out: Path, *overrides: str, **more: Any) -> Path:
    train_rl(load(BASE | {"out": str(out)} | more, overrides, RLConfig), progress=Progress(quiet=True))
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 2 and 3 are kept, so steps 3 and (were there one) 4 can be taken again."""
    return trained(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_the_recorded_batch_through_the_recorded_weights_gives_the_recorded_step(run: Path) -> None:
    before = contents(run)
    found = replay(run)
    assert (found.step, found.exact, found.same, found.weights) == (3, True, True, 0.0)
    assert {"train/loss", "train/grad_norm", "train/kl", "train/entropy", "train/kl_coef"} <= set(found.replayed)
    assert found.replayed["train/grad_norm"] > 0 and found.drift is None
    assert "train/epoch" not in found.replayed
    assert contents(run) == before, "a replay changes nothing"


def test_an_adapter_that_starts_fresh_replays_from_the_base_under_it(tmp_path: Path) -> None:
    out = trained(tmp_path / "a", "train.steps=2", "algorithm.preset=gspo", "algorithm.kl_coef=0.05", lora={"r": 2})
    assert replay(out, 2).exact


def test_the_first_step_after_every_checkpoint_has_its_rollouts(tmp_path: Path) -> None:
    out = trained(tmp_path / "a", "train.steps=6", "train.save_every=2", "train.dump_every=0", "train.keep_last=9")
    names = sorted(p.name.partition(".")[0] for p in (out / "rollouts").iterdir())
    assert names == ["step_000001", "step_000003", "step_000005", "step_000006"]
    assert replayable(out) == [1, 3, 5]
    with pytest.raises(RunError, match="step 6 began with weights that no finished checkpoint holds") as caught:
        replay(out, 6)
    assert "steps that can be replayed: 1, 3, 5" in str(caught.value) and "keep_last" in str(caught.value)
    with pytest.raises(RunError, match="holds no rollouts of step 4"):
        replay(out, 4)


@pytest.mark.parametrize("kept", [9, 2])
def test_what_an_older_policy_sampled_is_compared_with_its_own_weights_or_it_is_said_why_not(
    tmp_path: Path, kept: int
) -> None:
    """One version behind, the third step's tokens are of version 1, and the trainer stands at version 2."""
    out = trained(tmp_path / "a", "train.max_staleness=1", f"train.keep_last={kept}", "train.dump_every=1")
    found = replay(out, 3, drift=True)
    assert found.exact, "the weights before the step are back after the drift was measured"
    if kept == 9:
        assert found.drift is not None and found.drift.largest < 1e-4 and found.drift.other_versions == 0
        assert found.no_drift is None
    else:
        said = "no drift: no checkpoint holds the weights that sampled (step_000001); train.keep_last keeps more"
        assert found.drift is None and found.no_drift == said and found.text().endswith(said)


def test_the_drift_is_the_gap_between_sampler_and_trainer(copied: Path) -> None:
    honest = replay(copied, 3, drift=True).drift
    assert honest is not None and honest.largest < 1e-4 and 0 <= honest.mean <= honest.largest
    file = copied / "rollouts" / "step_000003.jsonl.zst"
    groups = list(read_rollouts(file))
    assert honest.tokens == sum(int(t.loss_mask.sum()) for g in groups for e in g.episodes for t in e.trajectories)
    write_rollouts(file, [shifted(groups[0], 0.5), *groups[1:]])
    found = replay(copied, 3, drift=True)
    assert found.drift is not None and found.drift.largest == pytest.approx(0.5, abs=1e-4)
    assert (found.drift.task, found.drift.member) == (groups[0].task.id, "1")
    assert found.drift.mean == pytest.approx(0.5 / honest.tokens, abs=1e-4)
    assert not found.same, "a shifted log-prob is a ratio of e^-0.5"


def shifted(group: Group, by: float) -> Group:
    """The log-prob of the last token that member 1 sampled, off by so much."""
    one = group.episodes[1]
    view = one.trajectories[0]
    turn = view.turns[-1]
    span = turn.spans[-1]
    assert span.logprobs is not None
    values = np.array(span.logprobs)
    values[-1] += by
    turn = replace(turn, spans=(*turn.spans[:-1], replace(span, logprobs=values)))
    view = replace(view, turns=(*view.turns[:-1], turn))
    return replace(group, episodes=(group.episodes[0], replace(one, trajectories=(view,))))


def test_tokens_of_other_weights_are_counted_and_not_compared(copied: Path) -> None:
    file = copied / "rollouts" / "step_000003.jsonl.zst"
    groups = list(read_rollouts(file))
    old = groups[0].episodes[1].trajectories[0]
    spans = tuple(replace(s, version=1) if s.version is not None else s for s in old.turns[-1].spans)
    older = replace(old, turns=(*old.turns[:-1], replace(old.turns[-1], spans=spans)))
    first = replace(groups[0].episodes[1], trajectories=(older,))
    write_rollouts(file, [replace(groups[0], episodes=(groups[0].episodes[0], first)), *groups[1:]])
    found = replay(copied, 3, drift=True)
    assert found.drift is not None and found.drift.other_versions == old.turns[-1].sampled_tokens
    assert "of other versions left out" in found.text() and found.exact


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["replay", *args])


def test_the_verb_says_it_in_words_or_json_and_by_its_exit_code(copied: Path) -> None:
    told = call(str(copied), "--drift")
    assert told.exit_code == 0 and "the step came out the same, bit for bit" in told.stdout
    assert "train/loss" in told.stdout and "drift of" in told.stdout
    log = copied / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[-1]["train/loss"] += 0.25
    log.write_text("".join(json.dumps(r) + "\n" for r in rows))
    wrong = call(str(copied), "--step", "3", "--json")
    found = json.loads(wrong.stdout)
    assert (wrong.exit_code, found["same"], found["exact"], found["weights"]) == (1, False, False, 0.0)
    assert found["recorded"]["train/loss"] == pytest.approx(found["replayed"]["train/loss"] + 0.25)


def test_what_is_no_run_and_what_is_damaged_is_one_line(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        replay(tmp_path / "nowhere")
    with Run.open(tmp_path / "other", load(BASE, [], RLConfig).eval):
        pass
    with pytest.raises(RunError, match="only its steps can be replayed"):
        replay(tmp_path / "other")
    weights = copied / "checkpoints" / "step_000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"model\.safetensors is missing or damaged"):
        replay(copied, 3)
    shutil.rmtree(copied / "checkpoints")
    told = call(str(copied))
    assert told.exit_code == 2 and "no step of it can be replayed" in told.stderr


def test_a_batch_that_was_not_learned_from_names_the_episode_and_what_of_it_is_ill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotate, calls = rl.annotate, 0

    def sick(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        made = annotate(*args, **options)
        if calls == 2:
            made.advantages[1][:] = float("nan")
        return made

    monkeypatch.setattr(rl, "annotate", sick)
    out = trained(tmp_path / "a", "train.keep_last=9", "algorithm.updates_per_batch=1")
    (file,) = (out / "faults").iterdir()
    before = contents(out)
    found = replay_fault(out, file)
    assert (found.step, found.weights, found.samples) == (2, "step_000001", 4)
    ((episode, parts),) = found.ill.items()
    assert parts == ("advantages",) and episode.endswith("/1") and found.gap < 1e-4
    told = CliRunner().invoke(cli.app, ["replay", str(out), "--fault", str(file)])
    assert told.exit_code == 0 and f"episode {episode}: not finite: advantages" in told.stdout
    assert contents(out) == before
