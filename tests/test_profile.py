# SPDX-License-Identifier: Apache-2.0
"""Where a step's seconds went: shares of the step, tokens per second, and advice that names keys of the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_health import BASE
from typer.testing import CliRunner

from palestra.cli import app
from palestra.config import load
from palestra.engine.stats import EngineStats
from palestra.errors import RunError
from palestra.run.directory import Run
from palestra.run.profile import profile
from palestra.train.config import RLConfig
from palestra.train.metrics import rollout_timings

STEP = {
    "time/step_s": 10.0, "time/rollout_s": 6.0, "time/prefill_s": 1.0, "time/decode_s": 3.0, "time/sampling_s": 0.5,
    "time/tools_s": 1.0, "time/python_s": 0.5, "time/reward_s": 0.5, "time/reference_s": 0.5, "time/update_s": 2.0,
    "time/forward_s": 0.5, "time/backward_s": 1.4, "time/optimizer_s": 0.1, "time/sync_s": 1.0,
    "rollout/sampled_tokens": 600.0, "speed/prefill_tokens": 2000.0, "train/row_tokens": 1000.0,
}  # fmt: skip


def a_run(path: Path, *rows: dict[str, float], **config: object) -> Path:
    with Run.open(path, load(BASE | config, [], RLConfig)) as run:
        for step, row in enumerate(rows, start=1):
            run.log(step, row, phase="rl")
    return path


def test_shares_are_of_the_step_and_rates_are_tokens_over_seconds(tmp_path: Path) -> None:
    # Two steps of 10 s and 30 s, the rollout 6 s and 18 s of it: 12 of 20 s a step, 60 %.
    longer = {name: value * 3 if name.startswith("time/") else value for name, value in STEP.items()}
    found = profile(a_run(tmp_path / "run", STEP, longer))
    assert (found.steps, found.step_s) == (2, 20.0)
    parts = {p.name: p for p in found.parts}
    assert (parts["rollout"].seconds, parts["rollout"].share) == (12.0, 0.6)
    assert parts["decode"].tokens_per_s == 600 / 6
    assert parts["prefill"].tokens_per_s == 2000 / 2
    assert parts["update"].tokens_per_s == 1000 / 4
    assert parts["reward"].tokens_per_s is None
    assert sum(p.share for p in found.parts if p.depth == 0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "seconds", "key"),
    [
        ("time/tools_s", 4.0, "train.concurrency"),
        ("time/prefill_s", 4.0, "algorithm.group_size"),
        ("time/decode_s", 5.5, "sampling.max_new_tokens"),
        ("time/python_s", 3.0, "train.tasks_per_step"),
        ("time/reward_s", 3.0, "a judge behind an endpoint"),
        ("time/reference_s", 2.0, "algorithm.kl_coef=0"),
        ("time/update_s", 6.0, "algorithm.updates_per_batch"),
        ("time/sync_s", 1.0, "engine.pack_weights=false"),
    ],
)
def test_a_part_that_takes_too_much_is_met_with_the_key_that_changes_it(
    tmp_path: Path, name: str, seconds: float, key: str
) -> None:
    calm = {metric: 0.01 for metric in STEP if metric.startswith("time/")} | {"time/step_s": 10.0}
    (advice,) = profile(a_run(tmp_path / "sick", calm | {name: seconds})).advice
    assert key in advice
    assert profile(a_run(tmp_path / "calm", calm)).advice == ()


def test_the_verb_prints_a_table_or_json(tmp_path: Path) -> None:
    run = str(a_run(tmp_path / "run", STEP))
    shown = CliRunner().invoke(app, ["profile", run]).output
    assert "1 steps of 10.00 s" in shown
    assert "reward 35%" in shown, "the typical profile stands beside it"
    plain = json.loads(CliRunner().invoke(app, ["profile", run, "--json"]).output)
    assert plain["parts"][0] == {
        "name": "rollout", "depth": 0, "seconds": 6.0, "share": 0.6, "tokens_per_s": 100.0
    }  # fmt: skip


def test_a_run_without_a_step_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no step of reinforcement learning"):
        profile(a_run(tmp_path / "run"))
    outcome = CliRunner().invoke(app, ["profile", str(tmp_path / "nowhere")])
    assert outcome.exit_code == 2
    assert len(outcome.output.strip().splitlines()) == 1


def test_what_neither_the_engine_nor_the_event_loop_did_was_waiting_for_tools() -> None:
    stats = EngineStats(
        schedule_s=0.5, prefill_s=1.0, decode_s=2.0, sample_s=0.25, collect_s=0.25, prefill_tokens=90,
        decode_tokens=40, guessed_tokens=10,
    )  # fmt: skip
    # busy 4 s
    seen = rollout_timings(stats, 10.0, loop_s=1.0)
    assert seen["time/tools_s"] == 10 - 4 - 1
    assert seen["time/python_s"] == 0.5 + 0.25 + 1.0, "the engine's own Python and the event loop's"
    assert (seen["time/prefill_s"], seen["time/decode_s"], seen["time/sampling_s"]) == (1.0, 2.0, 0.25)
    assert (seen["speed/prefill_tokens"], seen["speed/guessed_share"]) == (90, 0.25)
    parts = [v for name, v in seen.items() if name.startswith("time/")]
    assert sum(parts) == pytest.approx(10.0)
    assert rollout_timings(stats, 4.5, loop_s=1.0)["time/tools_s"] == 0, "they overlap: never below nothing"
