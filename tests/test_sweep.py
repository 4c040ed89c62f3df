# SPDX-License-Identifier: Apache-2.0
"""The search: which values come next, what is pruned, how a sweep goes on after a kill, and what it leaves.

Trials are a small stand-in for training: a process that writes the files of a run, its accuracy a known function of
the learning rate.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra import sweep
from palestra.config import load
from palestra.errors import ConfigError, RunError
from palestra.run.progress import Progress
from palestra.sweep import SweepConfig, run_sweep
from palestra.sweep_space import SPACES, Grid, Random, make_sampler
from palestra.sweep_trials import PruneConfig, Trial, falls_behind
from palestra.train.config import RLConfig

QUIET = Progress(quiet=True)
TPE = pytest.param("tpe", marks=pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs optuna"))

BASE: dict[str, Any] = {
    "model": "builtin:calculator",
    "data": "arithmetic",
    "env": "calculator",
    "rewards": {"accuracy": {"function": "calculator_accuracy"}},
    "train": {"steps": 4},
    "eval": {"size": 10, "every": 1},
}

# Accuracy falls with the distance of the rate from 1e-3, in decades; a trial with rank 64 runs out of memory.
STAND_IN = """
import json, math, re, sys, time, pathlib
verb, config = sys.argv[1:]
text = pathlib.Path(config).read_text()
out = pathlib.Path(config).parent / "run"
rate = float(re.search(r"learning_rate: ([-+.e0-9]+)", text.partition("train:")[2])[1])
out.mkdir(exist_ok=True)
with (out / "starts").open("a") as file:
    file.write("x")
if re.search(r"\\n  r: 64", text):
    sys.exit("error: out of memory")
good = 1 - abs(math.log10(rate) + 3) / 4
with (out / "metrics.jsonl").open("w") as file:
    for step in (1, 2, 3, 4):
        file.write(json.dumps({"step": step, "phase": "rl", "eval/accuracy": good * step / 4}) + "\\n")
        file.flush()
        time.sleep(SLEEP)
(out / "summary.json").write_text(json.dumps({"accuracy_after": good, "steps": 4}))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch, tmp_path, 0.0)


def use_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pause: float, reports: str = "eval/accuracy") -> None:
    script = tmp_path / "trial.py"
    script.write_text(STAND_IN.replace("SLEEP", str(pause)).replace("eval/accuracy", reports))
    monkeypatch.setattr(
        sweep, "worker_command", lambda verb, config: [sys.executable, "-S", str(script), verb, str(config)]
    )
    monkeypatch.setattr(sweep, "POLL_S", 0.02)


def config(out: Path, **more: Any) -> SweepConfig:
    return load({"out": str(out), "base": BASE, "method": "random", **more}, [], SweepConfig)


RATES = {"train.learning_rate": [1e-5, 1e-4, 1e-3]}


# Values ----------------------------------------------------------------------------------------------------


def test_the_usual_grid_is_rate_by_rank_by_kl() -> None:
    axes = SPACES["rl", "grid"]
    assert {name: axis.choices for name, axis in axes.items()} == {
        "train.learning_rate": (1e-5, 5e-5, 1e-4),
        "lora.r": (8, 16, 32),
        "algorithm.kl_coef": (0.05, 0.1, 0.2),
    }
    grid = Grid(axes)
    points = {tuple(grid.params(n).values()) for n in range(27)}
    assert len(points) == 27 and (1e-4, 32, 0.2) in points


def test_random_draws_are_log_uniform_and_the_same_for_a_number_whatever_was_drawn_before() -> None:
    draws = Random(SPACES["rl", "random"], seed=1)
    rates = [draws.params(n)["train.learning_rate"] for n in range(400)]
    assert all(1e-6 <= rate <= 1e-4 for rate in rates)
    # Half of them lie below the geometric mean of the ends, 1e-5; uniform ones would in 1 of 11 cases.
    assert sum(rate < 1e-5 for rate in rates) == pytest.approx(200, abs=40)
    assert Random(SPACES["rl", "random"], seed=1).params(7) == draws.params(7)
    assert {draws.params(n)["lora.r"] for n in range(100)} == {4, 8, 16, 32, 64}


@pytest.mark.parametrize(("method", "count"), [("grid", 27), ("random", 10), ("tpe", 20)])
def test_how_many_trials_a_method_has_of_its_own(method: str, count: int, tmp_path: Path) -> None:
    assert config(tmp_path, method=method).count == count


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ({"low": 1.0}, "both low and high"),
        ({"low": 2, "high": 1}, "low is below high"),
        ({"low": 0, "high": 1, "log": True}, "above 0 with log"),
        ([], "at least one"),
        ({"choices": [1], "log": True}, "no low, high, log"),
    ],
)
def test_an_axis_that_means_nothing_is_refused(axis: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load({"base": BASE, "space": {"seed": axis}}, [], SweepConfig)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"space": {"train.learning_rte": [1e-4]}}, "did you mean 'learning_rate'"),
        ({"space": {"train.learning_rate": [1e-4, -1.0]}}, r"train\.learning_rate"),
        ({"prune": {}, "base": BASE | {"eval": {"size": 10}}}, "set eval.every"),
        ({"base": BASE | {"eval": {"size": 0}}}, "set eval.size"),
        ({"prune": {"metric": "eval/acuracy"}}, "rl logs no such number: .*did you mean 'eval/accuracy'"),
        ({"prune": {"metric": "eval/margin"}}, "rl logs no such number"),
        ({"prune": {"metric": "train/entropy"}}, r"prune\.direction: say whether train/entropy"),
        ({"metric": "steps"}, "direction: say whether steps is to maximize or to minimize"),
    ],
)
def test_a_mistake_is_told_before_the_first_trial(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run_sweep(config(tmp_path, **more), progress=QUIET)


def test_a_grid_of_a_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"space\.train\.learning_rate: a grid needs a list"):
        config(tmp_path, method="grid", space={"train.learning_rate": {"low": 1e-5, "high": 1e-4}})


# Pruning ---------------------------------------------------------------------------------------------------


def test_the_median_rule_looks_at_the_same_step_and_waits_for_enough_trials() -> None:
    ended = [Trial(n, {}, "done", reports=[(1, 0.1 * n), (2, 0.9)]) for n in (1, 2, 3)]
    young = Trial(9, {}, reports=[(1, 0.15)])
    assert falls_behind(young, ended, PruneConfig(trials=3), larger=True), "0.15 at step 1, the median there is 0.2"
    assert not falls_behind(young, ended, PruneConfig(trials=4), larger=True)
    assert not falls_behind(young, ended, PruneConfig(trials=3, steps=2), larger=True)
    assert not falls_behind(young, ended, PruneConfig(trials=3), larger=False), "where less is better, 0.15 is good"
    assert not falls_behind(Trial(9, {}), ended, PruneConfig(trials=1), larger=True), "nothing reported yet"


def test_a_trial_that_falls_behind_is_killed_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, tmp_path, 0.15)
    rates = {"train.learning_rate": [1e-3, 1e-6]}
    settings = config(tmp_path / "s", method="grid", space=rates, prune={"trials": 1})
    good, bad = run_sweep(settings, progress=QUIET)["trials"]
    assert (good["status"], bad["status"]) == ("done", "pruned")
    assert len(good["reports"]) == 4 and 1 <= len(bad["reports"]) < 4
    assert not (tmp_path / "s" / "trials" / "001" / "run" / "summary.json").exists()
    # What it had reached is told apart from what trials that came to their end have reached.
    assert bad["value"] is None and bad["error"].startswith("eval/accuracy 0.0")
    step, reached = bad["reports"][-1]
    assert bad["error"] == f"eval/accuracy {reached:.4g} at step {step}"


def test_pruning_goes_by_the_way_of_its_own_number_and_not_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracy that counts at the end is to be large; the loss that is pruned by is to be small."""
    use_stand_in(monkeypatch, tmp_path, 0.15, reports="train/loss")
    rates = {"train.learning_rate": [1e-3, 1e-6]}  # the better rate has the larger "loss" here
    prune = {"trials": 1, "metric": "train/loss"}
    good, bad = run_sweep(config(tmp_path / "s", method="grid", space=rates, prune=prune), progress=QUIET)["trials"]
    assert (good["status"], bad["status"]) == ("done", "done"), "0.06 is a smaller loss than 0.25"
    prune["direction"] = "maximize"
    _, bad = run_sweep(config(tmp_path / "t", method="grid", space=rates, prune=prune), progress=QUIET)["trials"]
    assert bad["status"] == "pruned"


@pytest.mark.parametrize(
    ("verb", "rule", "name", "larger"),
    [
        ("rl", {}, "eval/accuracy", True),
        ("sft", {}, "sft/loss", False),
        ("prefer", {"metric": "eval/loss"}, "eval/loss", False),
        ("rl", {"metric": "eval/reward/format"}, "eval/reward/format", True),
        ("rl", {"metric": "train/kl", "direction": "minimize"}, "train/kl", False),
    ],
)
def test_what_a_verb_prunes_by_and_which_way(verb: str, rule: Any, name: str, larger: bool) -> None:
    pruning = PruneConfig(**rule)
    pruning.check(verb)
    assert (pruning.name(verb), pruning.larger(verb)) == (name, larger)


@pytest.mark.parametrize(("metric", "larger"), [("loss_after", False), ("margin_after", True), ("seconds", False)])
def test_which_way_of_a_result_is_better_is_said_by_its_name(tmp_path: Path, metric: str, larger: bool) -> None:
    assert config(tmp_path, metric=metric).target == (metric, larger)


# Sweeps ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_the_best_of_a_grid_is_written_out_ready_to_run(tmp_path: Path) -> None:
    summary = run_sweep(config(tmp_path / "s", method="grid", space=RATES, workers=2), progress=QUIET)
    assert [t["value"] for t in summary["trials"]] == pytest.approx([0.5, 0.75, 1.0])
    assert (summary["best"], summary["best_params"]) == (2, {"train.learning_rate": 1e-3})
    best = load(summary["best_config"], [], RLConfig)
    assert best.train.learning_rate == 1e-3 and best.train.steps == 4
    assert best.out == str(tmp_path / "s" / "best")
    page = (tmp_path / "s" / "report.html").read_text()
    assert page.count("<svg") == 2 and "train.learning_rate" in page and "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("method", ["random", TPE])
@pytest.mark.usefixtures("stand_in")
def test_more_trials_are_added_and_none_is_repeated(method: str, tmp_path: Path) -> None:
    space = {"train.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True}, "lora.r": [8, 16]}
    first = run_sweep(config(tmp_path / "s", method=method, space=space, trials=2), progress=QUIET)
    more = run_sweep(config(tmp_path / "s", method=method, space=space, trials=4), progress=QUIET)
    assert more["trials"][:2] == first["trials"]
    assert len({t["params"]["train.learning_rate"] for t in more["trials"]}) == 4
    starts = [(p / "run" / "starts").read_text() for p in sorted((tmp_path / "s" / "trials").iterdir())]
    assert starts == ["x"] * 4
    for trial in more["trials"]:
        rate = trial["params"]["train.learning_rate"]
        assert trial["value"] == pytest.approx(1 - abs(math.log10(rate) + 3) / 4)


@pytest.mark.parametrize("method", ["grid", TPE])
@pytest.mark.usefixtures("stand_in")
def test_a_trial_that_was_cut_off_is_taken_up_with_its_own_values(method: str, tmp_path: Path) -> None:
    space = {"train.learning_rate": [1e-5, 1e-4, 1e-3]}
    settings = config(tmp_path / "s", method=method, space=space, trials=2)
    run_sweep(settings, progress=QUIET)
    file = tmp_path / "s" / "trials" / "001" / "trial.json"
    cut = json.loads(file.read_text())
    file.write_text(json.dumps(cut | {"status": "running", "value": None}))
    (file.parent / "run" / "summary.json").unlink()
    again = run_sweep(settings, progress=QUIET)["trials"][1]
    assert (again["status"], again["params"]) == ("done", cut["params"])
    assert (file.parent / "run" / "starts").read_text() == "xx"


@pytest.mark.usefixtures("stand_in")
def test_a_failed_trial_is_told_and_the_others_count(tmp_path: Path) -> None:
    settings = config(tmp_path / "s", method="grid", space={"lora.r": [8, 64], "train.learning_rate": [1e-4]})
    good, bad = run_sweep(settings, progress=QUIET)["trials"]
    assert (good["status"], bad["status"], bad["error"]) == ("done", "failed", "error: out of memory")
    alone = config(tmp_path / "t", method="grid", space={"lora.r": [64], "train.learning_rate": [1e-4]})
    with pytest.raises(RunError, match="no trial came to its end; the first: error: out of memory"):
        run_sweep(alone, progress=QUIET)


@pytest.mark.usefixtures("stand_in")
def test_a_result_that_no_trial_has_names_the_nearest(tmp_path: Path) -> None:
    settings = config(
        tmp_path / "s", method="grid", space=RATES, trials=1, metric="acuracy_after", direction="maximize"
    )
    with pytest.raises(
        ConfigError, match=r"metric: unknown number in a trial's summary .*did you mean 'accuracy_after'"
    ):
        run_sweep(settings, progress=QUIET)


@pytest.mark.usefixtures("stand_in")
def test_a_sweep_does_not_go_on_with_another_space(tmp_path: Path) -> None:
    run_sweep(config(tmp_path / "s", method="grid", space=RATES, trials=1), progress=QUIET)
    with pytest.raises(RunError, match="another space"):
        run_sweep(config(tmp_path / "s", method="grid", space={"lora.r": [8]}), progress=QUIET)


def test_tpe_without_optuna_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'palestra\[optuna\]', or choose method=random"):
        make_sampler("tpe", SPACES["rl", "tpe"], 0, tmp_path, larger=True)


def test_a_trial_does_not_outlive_its_sweep() -> None:
    code = "import signal, time; from palestra.sweep_worker import end_with_parent;"
    code += "signal.signal(signal.SIGINT, signal.SIG_IGN); end_with_parent(); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        _, said = child.communicate(timeout=30)  # closes its standard input, as the end of the parent would
    assert "KeyboardInterrupt" in said


def test_the_example_is_a_sweep_whose_trials_load() -> None:
    example = load(Path(__file__).parents[1] / "examples" / "sweep_calculator.yaml", [], SweepConfig)
    sweep.check(example)
    assert example.count == 10
