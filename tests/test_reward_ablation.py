# SPDX-License-Identifier: Apache-2.0
"""An ablation calls movement what stands against the noise of seeds, repeats no run, and says what it cannot say."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from palestra import cli, config
from palestra.errors import ConfigError, RunError
from palestra.reward.ablation import ALL, Ablation, Movement, compare, t_quantile, two_sided_p
from palestra.run.progress import Progress
from palestra.train import ablate as module
from palestra.train.ablate import Trial, ablate, measures, trials
from palestra.train.config import RLConfig
from palestra.verbs_tables import show_ablation

TINY: dict[str, Any] = {
    "model": "builtin:calculator",
    "renderer": "plain",
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "rewards": {
        "accuracy": {"function": "calculator_accuracy"},
        "format": {"function": "calculator_format", "weight": 0.1},
    },
    "sampling": {"max_new_tokens": 4},
    "limits": {"max_turns": 2},
    "algorithm": {"group_size": 2, "kl_coef": 0.0},
    "train": {"steps": 2, "tasks_per_step": 2, "learning_rate": 1e-3, "save_every": 0, "dump_every": 0},
    "eval": {"size": 2},
}


def settings(**more: Any) -> RLConfig:
    return config.load(TINY | more, [], RLConfig)


def quiet() -> Progress:
    return Progress(quiet=True)


# Noise and movement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("df", "critical"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (7, 2.36462), (30, 2.04227)])
def test_the_quantiles_of_students_t_are_those_of_the_tables(df: int, critical: float) -> None:
    assert t_quantile(df) == pytest.approx(critical, abs=1e-4)
    assert two_sided_p(-critical, df) == pytest.approx(0.05, abs=1e-5)


def test_a_difference_and_its_interval_by_hand() -> None:
    base = [{"x": 0.5}, {"x": 0.6}, {"x": 0.7}]
    off = [{"x": 0.2}, {"x": 0.2}, {"x": 0.5}]
    (m,) = compare({ALL: base, "part": off}, base, tasks=1000).parts["part"]
    # differences −0.3 −0.4 −0.2: mean −0.3, deviation 0.1, so ±4.30265 · 0.1 / √3
    assert (m.base, m.value, m.difference) == (pytest.approx(0.6), pytest.approx(0.3), pytest.approx(-0.3))
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert (m.low, m.high) == (pytest.approx(-0.3 - half, abs=1e-5), pytest.approx(-0.3 + half, abs=1e-5))
    assert m.verdict == "moved"


def test_what_only_one_of_many_comparisons_shows_may_be_chance() -> None:
    # t = 5 at 2 degrees of freedom: p = 1 − 5/√27 = 0.0377; alone it moved, among three it did not (3 · 0.0377 > 0.05)
    error = 0.1 / 5
    spread = error * math.sqrt(3)
    off = [0.1 - spread, 0.1, 0.1 + spread]
    base = [{"x": 0.0, "y": 0.0, "z": 0.0}] * 3
    one = compare({ALL: base, "p": [{"x": v} for v in off]}, base, tasks=10_000).parts["p"]
    assert (one[0].p, one[0].verdict) == (pytest.approx(1 - 5 / math.sqrt(27)), "moved")
    noise = [0.1, -0.1, 0.03]
    many = [{"x": v, "y": n, "z": -n} for v, n in zip(off, noise, strict=True)]
    verdicts = {m.measure: m.verdict for m in compare({ALL: base, "p": many}, base, tasks=10_000).parts["p"]}
    assert verdicts == {"x": "perhaps", "y": "", "z": ""}


def test_noise_is_called_movement_in_fewer_than_one_ablation_in_twenty() -> None:
    rng = random.Random(0)
    rang = 0
    for _ in range(200):

        def runs() -> list[dict[str, float | None]]:
            return [{name: rng.gauss(0.5, 0.1) for name in "abcd"} for _ in range(4)]

        base = runs()
        found = compare({ALL: base, "p": runs(), "q": runs(), "r": runs()}, base, tasks=200)
        rang += any(found.moved(part) for part in found.parts)
    assert rang <= 10


def test_a_real_movement_is_found_among_the_noise() -> None:
    rng = random.Random(1)
    base = [{"accuracy": rng.gauss(0.8, 0.02), "turns_mean": rng.gauss(3, 0.1)} for _ in range(4)]
    off = [{"accuracy": rng.gauss(0.2, 0.02), "turns_mean": rng.gauss(3, 0.1)} for _ in range(4)]
    same = [{"accuracy": rng.gauss(0.8, 0.02), "turns_mean": rng.gauss(3, 0.1)} for _ in range(4)]
    found = compare({ALL: base, "works": off, "idle": same}, base, tasks=200)
    assert (found.moved("works"), found.moved("idle")) == (("accuracy",), ())


def test_seeds_that_agree_by_luck_are_not_certainty_and_one_seed_says_nothing() -> None:
    base = [{"accuracy": 0.5}, {"accuracy": 0.5}]
    lucky = [{"accuracy": 0.505}, {"accuracy": 0.505}]  # one task of 200 more, both times
    (m,) = compare({ALL: base, "p": lucky}, base, tasks=200).parts["p"]
    assert (m.verdict, m.low is not None and m.low < 0) == ("", True)
    (alone,) = compare({ALL: base[:1], "p": [{"accuracy": 0.9}]}, base[:1], tasks=200).parts["p"]
    assert alone == Movement("accuracy", 0.5, 0.9, pytest.approx(0.4), None, None, None, "unknown")


def test_measures_that_some_run_lacks_or_that_never_differ_are_left_out() -> None:
    base = [{"a": 1.0, "b": None, "c": 3.0}, {"a": 1.0, "b": 0.5, "c": 3.0}]
    off = [{"a": 0.0, "b": 0.5, "c": 3.0}, {"a": 0.0, "b": 0.5, "c": 3.0}]
    assert [m.measure for m in compare({ALL: base, "p": off}, base, tasks=9).parts["p"]] == ["a"]


# The runs --------------------------------------------------------------------------------------------------


def test_a_part_is_off_by_its_weight_so_that_it_is_still_scored(tmp_path: Path) -> None:
    made = trials(settings(), tmp_path, seeds=2, steps=5)
    assert [(t.off, t.config.seed) for t in made[:3]] == [(ALL, 0), ("accuracy", 0), ("format", 0)]
    assert made[1].config.rewards == {
        "accuracy": {"function": "calculator_accuracy", "weight": 0.0},
        "format": {"function": "calculator_format", "weight": 0.1},
    }
    assert {t.config.train.steps for t in made} == {5}
    assert len({t.config.out for t in made}) == 6


@pytest.mark.parametrize(
    ("more", "parts", "said"),
    [
        ({}, ["fromat"], "did you mean 'format'"),
        ({"rewards": {"accuracy": 1.0}}, [], "two or more parts"),
        ({"rewards": None}, [], "env: 1.0"),
        ({"eval": {"size": 0}}, [], "eval.size"),
    ],
)
def test_what_cannot_be_ablated_is_refused_in_one_line(more: Any, parts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        trials(settings(**more), "runs/x", parts=parts)
    assert "\n" not in str(caught.value)


def played(seen: list[str]) -> Any:
    """A stand-in for training: with the part `format` the format is learned, accuracy is the seed's luck."""

    def train(trained: RLConfig, *, progress: Progress, resume: bool) -> dict[str, Any]:
        assert resume, "an interrupted run goes on"
        seen.append(trained.out)
        entry = (trained.rewards or {})["format"]
        kept = isinstance(entry, dict) and entry["weight"] > 0
        variant, seed = Path(trained.out).parts[-2:]  # never the whole path: a temporary folder is another each time
        luck = random.Random(f"{variant}/{seed}").uniform(-0.05, 0.05)
        before = {"examples": 200, "rewards": {"format": 0.1 + luck / 9, "accuracy": 0.3 + luck}, "turns_mean": 2.0}
        after = {"examples": 200, "rewards": {"format": 0.9 * kept, "accuracy": 0.3 - luck}, "turns_mean": 2.0}
        summary = {"eval_before": before, "eval_after": after}
        folder = Path(trained.out)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config.dump(trained))
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary

    return train


def test_a_finished_run_is_not_repeated_and_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "train_rl", played(seen))
    first = ablate(trials(settings(), tmp_path, seeds=2), tmp_path, progress=quiet())
    assert len(seen) == len(set(seen)) == 6
    found = ablate(trials(settings(), tmp_path, seeds=3), tmp_path, progress=quiet())
    assert len(seen) == 9, "only the third seed was new"
    assert (first.seeds, found.seeds) == (2, 3)
    assert (found.moved("format"), found.moved("accuracy")) == (("format",), ())
    written = json.loads((tmp_path / "ablation.json").read_text())
    assert (written["format"], written["seeds"], written["tasks"]) == (1, 3, 200)
    verdicts = {m["measure"]: m["verdict"] for m in written["parts"]["format"]}
    assert verdicts == {"accuracy": "", "format": "moved"}  # turns never differ
    assert [m["verdict"] for m in written["training"] if m["measure"] == "format"] == ["moved"]


def test_a_directory_with_runs_of_another_config_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(module, "train_rl", played(seen))
    ablate(trials(settings(), tmp_path, seeds=1), tmp_path, progress=quiet())
    with pytest.raises(RunError, match="another config"):
        ablate(trials(settings(), tmp_path, seeds=2, steps=99), tmp_path, progress=quiet())
    assert len(seen) == 3


def test_measures_begin_with_the_one_that_counts_as_accuracy() -> None:
    result = {"rewards": {"a": 0.1, "right": 0.5}, "turns_mean": 2.0, "truncated_share": None, "seconds": 9.0}
    assert list(measures(result, "right")) == ["right", "a", "turns_mean", "truncated_share"]


# The verb --------------------------------------------------------------------------------------------------


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["rewards", "ablate", *args])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(config.dump(settings(out=str(tmp_path / "run"))))
    return path


def test_the_verb_trains_goes_on_and_shows_a_table(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run-ablation"
    options = (str(file), "--parts", "format", "--seeds", "1", "--steps", "1", "--quiet")
    shown = call(*options)
    assert shown.exit_code == 0, shown.output
    assert "one seed cannot tell" in shown.output
    assert sorted(p.name for p in out.iterdir()) == ["ablation.json", "all", "without_format"]
    stamp = (out / "all" / "seed_0" / "summary.json").stat().st_mtime_ns
    again = call(*options, "--json")
    assert json.loads(again.output)["seeds"] == 1
    assert (out / "all" / "seed_0" / "summary.json").stat().st_mtime_ns == stamp


def test_a_dry_run_lists_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    shown = call(str(file), "train.steps=7", "--dry-run")
    assert (shown.exit_code, shown.output.count("7 steps")) == (0, 9)
    assert not (tmp_path / "run-ablation").exists()
    wrong = call(str(file), "--parts", "fromat")
    assert (wrong.exit_code, "did you mean 'format'" in wrong.output) == (2, True)


def test_the_table_names_what_moved(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_rl", played([]))
    shown = call(str(file), "--quiet").output
    assert "format: format moved" in shown
    assert "accuracy: no movement seen with 3 seeds" in shown
    assert "perhaps" not in shown


def test_an_interrupted_run_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    trial = trials(settings(), tmp_path, seeds=1)[0]
    trial.folder.mkdir(parents=True)
    assert Trial(trial.off, trial.config).summary() is None
    (trial.folder / "config.yaml").write_text(config.dump(trial.config))
    assert trial.summary() is None


def test_what_perhaps_moved_is_not_called_still() -> None:
    hint = Movement("accuracy", 0.9, 0.4, -0.5, -0.9, -0.1, 0.03, "perhaps")
    trained = Movement("accuracy", 0.5, 0.9, 0.4, 0.3, 0.5, 0.001, "moved")
    written = io.StringIO()
    show_ablation(Console(file=written, width=200), Ablation(3, {"accuracy": (hint,)}, (trained,)))
    assert "accuracy: accuracy perhaps; 3 seeds cannot tell" in written.getvalue()
