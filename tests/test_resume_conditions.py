# SPDX-License-Identifier: Apache-2.0
"""What the bits of a run depend on is written down, and a resume under other conditions says so."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from listening import Listening

from palestra.config import Config
from palestra.reward.novelty import Novelty
from palestra.reward.rubric import Rubric
from palestra.run.directory import Run, read_run
from palestra.run.trackers import read_metrics
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint, rng_state, seed_rng
from palestra.train.config import SFTConfig
from palestra.train.setup import World
from palestra.train.sft import train_sft
from palestra.types import Author, Span, StopReason, Trajectory, Turn


class Engine(Config):
    dtype: str = "auto"


class Settings(Config):
    seed: int = 7
    engine: Engine = Engine()


def begun(path: Path) -> Path:
    Run.open(path, Settings()).close()
    return path


def test_threads_and_dtypes_are_recorded(tmp_path: Path) -> None:
    info = read_run(begun(tmp_path / "a"))
    assert info["threads"] == torch.get_num_threads()
    assert info["dtypes"] == {"engine.dtype": "auto"}


def test_a_resume_under_the_same_conditions_says_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.open(begun(tmp_path / "a"), Settings(), resume=True).close()


def test_a_resume_names_what_is_otherwise_than_last_time(tmp_path: Path) -> None:
    out = begun(tmp_path / "a")
    info = read_run(out)
    info["versions"]["torch"], info["threads"] = "1.0", 99
    (out / "run.json").write_text(json.dumps(info))
    torch_now, threads = read_run(begun(tmp_path / "b"))["versions"]["torch"], torch.get_num_threads()
    changed = Settings(engine=Engine(dtype="bfloat16"))
    said = (
        rf"torch 1\.0 then, {torch_now.split('+')[0]}.* now; threads 99 then, {threads} now; "
        "engine.dtype auto then, bfloat16 now"
    )
    with pytest.warns(UserWarning, match=said):
        Run.open(out, changed, resume=True).close()
    with warnings.catch_warnings():  # compared with the last time, not with the first
        warnings.simplefilter("error")
        Run.open(out, changed, resume=True).close()


def test_a_run_of_a_version_that_recorded_less_is_resumed_in_silence(tmp_path: Path) -> None:
    out = begun(tmp_path / "a")
    info = {key: value for key, value in read_run(out).items() if key not in ("threads", "dtypes")}
    (out / "run.json").write_text(json.dumps(info))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run.open(out, Settings(), resume=True).close()


def test_one_seed_is_one_state_of_every_global_generator() -> None:
    def drawn(seed: int) -> list[object]:
        seed_rng(seed)
        state = rng_state()
        return [state["python"], state["numpy"], torch.rand(2).tolist()]

    assert drawn(2**40 + 5) == drawn(2**40 + 5) != drawn(6)


def walk(text: str) -> Trajectory:
    said = Span(np.zeros(1), Author.MODEL, "assistant", text, np.zeros(1), 0)
    return Trajectory((Turn((said,), (), {"role": "assistant"}, "eos"),), StopReason.ENV_TERMINATED)


def test_what_a_reward_remembers_goes_into_the_state_and_evaluation_adds_nothing_to_it() -> None:
    novelty = Novelty()
    rubric = Rubric({"novelty": (novelty, 1.0), "plain": (lambda **_: [0.0], 1.0)}, chat=False)
    world = World(None, None, None, rubric, None, memory=rubric.stateful)  # type: ignore[arg-type]
    novelty([walk("go north")], ["a"])
    state = world.remembered()
    assert list(state) == ["novelty"] and list(state["novelty"].values()) == [1]
    with world.forgetting():
        novelty([walk("go north")], ["a"])
        assert world.remembered() != state
    assert world.remembered() == state
    other = Novelty()
    replaced = World(None, None, None, rubric, None, memory={"novelty": other})  # type: ignore[arg-type]
    replaced.remember(state)
    assert other([walk("go north")], ["a"]) == novelty([walk("go north")], ["a"]) == [pytest.approx(2**-0.5)]


def test_a_changed_learning_rate_holds_from_the_resume_on_and_is_told(tmp_path: Path) -> None:
    """The checkpoint keeps the optimiser's own numbers; the config's rate, decay and betas are put back over them."""

    def config(rate: float, **more: float) -> SFTConfig:
        data = {"name": "arithmetic", "count": 6, "max_operand": 9}
        given = {"data": data, "batch_size": 2, "steps": 4, "warmup_ratio": 0.0, "learning_rate": rate} | more
        return SFTConfig.model_validate(
            {"model": "builtin:calculator", "renderer": "plain", "sft": given, "out": str(tmp_path / "a")}
        )

    with pytest.raises(KeyboardInterrupt):
        train_sft(config(1e-3), progress=Listening(stop_at=2))
    with pytest.warns(UserWarning, match=r"sft\.learning_rate 0\.001 → 0\.0004; sft\.weight_decay 0\.01 → 0\.5"):
        train_sft(config(4e-4, weight_decay=0.5), progress=Listening(), resume=True)
    rates = [row["sft/learning_rate"] for row in read_metrics(tmp_path / "a" / "metrics.jsonl")]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5 * 4e-4, 0.25 * 4e-4])
    found = latest_checkpoint(tmp_path / "a" / "checkpoints")
    assert found is not None
    groups = load_checkpoint(found).trainer["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0], "matrices, then norms"
