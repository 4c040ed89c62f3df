# SPDX-License-Identifier: Apache-2.0
"""What alarms advise, that they come and go, and the windows under them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_health import BASE, HEALTHY, SFT, SICK, SICK_SFT, WARMUP, rl_config, rl_rows, rung

from palestra.config import Config, load
from palestra.run.health import QUIET, Monitor
from palestra.run.health_facts import Facts, Finding, Series
from palestra.run.health_rules import RULES
from palestra.run.metrics import METRICS
from palestra.train.config import RAILS, RLConfig, SFTConfig, learning_rate

# Remedies --------------------------------------------------------------------------------------------------


def changes_of(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(rule, change) of every remedy of every rule for a run of this config."""
    every = [replace(rule, check=lambda look: Finding(1, "seen")) for rule in RULES]
    monitor = Monitor(config, RAILS, every)
    alarms = [*monitor.observe(1, {}, phase="sft"), *monitor.observe(1, {}, phase="rl")]
    return [(alarm.rule, change) for alarm in alarms for change in alarm.changes if _phase_runs(alarm.phase, config)]


def _phase_runs(phase: str, config: Mapping[str, Any]) -> bool:
    return phase == "sft" if "sft" in config else phase == "rl" or config["warmup"] is not None


CONFIGS: dict[str, tuple[type[Config], dict[str, Any], list[str]]] = {
    "full": (RLConfig, BASE, []),
    "adapter": (RLConfig, BASE | {"lora": {"r": 8, "dropout": 0.1}, "warmup": WARMUP}, ["sampling.temperature=0.7"]),
    "plain weights": (RLConfig, BASE | {"rewards": {"accuracy": 1.0, "format": 2.0}}, ["algorithm.kl_coef=0"]),
    "at the rails": (RLConfig, BASE | {"warmup": WARMUP}, ["train.learning_rate=1e-5", "warmup.learning_rate=1e-4"]),
    "beyond the rails": (RLConfig, BASE, ["train.learning_rate=1e-3", "algorithm.group_size=2"]),
    "from scratch": (RLConfig, BASE | {"model": "builtin:calculator", "warmup": WARMUP}, []),
    "sft": (SFTConfig, SFT, []),
    "sft adapter": (SFTConfig, SFT | {"lora": {"r": 8}}, ["sft.epochs=12"]),
}


def resolves(cls: type[Config], key: str, values: Mapping[str, Any]) -> bool:
    """Does a config of this class have the key? Parts of ``rewards`` are named by the user."""
    first, _, rest = key.partition(".")
    if first == "rewards":
        return not rest or rest.split(".")[0] in values["rewards"]
    options: Any = cls
    for part in key.split("."):
        found = [o for o in _classes(options) if part in o.model_fields]
        if not found:
            return False
        options = found[0].model_fields[part].annotation
    return True


def _classes(annotation: Any) -> list[Any]:
    arguments = getattr(annotation, "__args__", ())
    inner = [c for a in arguments for c in _classes(a)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, Config) else inner


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_that_a_remedy_names_exists_and_every_value_can_be_given(name: str) -> None:
    cls, data, overrides = CONFIGS[name]
    config: Any = load(data, overrides, cls)
    changes = changes_of(config.model_dump(mode="json"))
    assert changes
    for rule, change in changes:
        assert resolves(cls, change.key, data), (rule, change.key)
        if change.override is not None:
            changed: Any = load(data, [*overrides, change.override], cls)  # refused, if it were no legal value
            assert changed != config, (rule, change.override)
            assert change.override.partition("=")[0] == change.key
            if change.key.endswith("learning_rate"):
                _inside_the_rails(changed, change.key.split(".")[0])


def _inside_the_rails(config: Any, section: str) -> None:
    kind: Any = "rl" if section == "train" else "sft"
    scratch = config.model.from_scratch
    rate, warning = learning_rate(getattr(config, section), kind, lora=config.lora is not None, from_scratch=scratch)
    assert warning is None
    low, _, high = RAILS[kind, config.lora is not None]
    assert scratch or low <= rate <= high


def test_at_the_end_of_the_rails_no_higher_rate_is_advised() -> None:
    config = rl_config("train.learning_rate=1e-5")
    kept = [c.override for rule, c in changes_of(config) if rule == "reward_flat"]
    assert not any(o and o.startswith("train.learning_rate") for o in kept)
    assert Facts(config, RAILS).moved_rate("rl", 5) is None


def test_every_rule_has_a_name_of_its_own_a_cause_and_something_to_change() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(names) == set(SICK) | set(SICK_SFT), "each rule has a sick run above"
    for rule in RULES:
        assert rule.cause and rule.remedies
    for config in (rl_config(), rl_config(warmup=WARMUP, lora={"r": 8})):
        told = {rule for rule, _ in changes_of(config)}
        assert told >= set(SICK) - {"small_group"}, "a group of 8 needs no remedy"


def test_the_series_that_rules_look_at_are_registered_metrics() -> None:
    registered = set(METRICS)
    used = set(HEALTHY) - {
        "reward/accuracy",
        "reward/format",
        "rollout/stop/env_terminated",
        "rollout/stop/env_truncated",
    }
    assert used <= registered


# Alarms come and go ----------------------------------------------------------------------------------------


def test_an_alarm_rings_once_while_its_condition_lasts_and_again_when_it_comes_back() -> None:
    def bad(step: int) -> float:
        return 0.9 if 20 <= step < 30 or step >= 70 else 0.05

    monitor = Monitor(rl_config(), RAILS)
    rings = [(s, a.rule) for s, row in rl_rows(90, train__kl=bad) for a in monitor.observe(s, row, phase="rl")]
    assert [rule for _, rule in rings] == ["kl_high", "kl_high"]
    assert 20 <= rings[0][0] < 30 and rings[1][0] >= 70
    over = monitor.over[0]
    assert 30 <= over <= 30 + QUIET and 1 not in monitor.over, "the second lasts to the end"


def test_rows_that_come_twice_count_once() -> None:
    rows = rl_rows(60)
    assert rung([row for row in rows for _ in range(2)]) == []
    series = Series()
    for step in (1, 2, 2, 1, 3):
        series.append(step, float(step))
    assert (series.steps, series.last(9).mean) == ([1, 2, 3], 2.0)


def test_a_window_knows_its_mean_and_its_noise() -> None:
    series = Series()
    for step, value in enumerate([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], start=1):
        series.append(step, value)
    window = series.last(4)
    # Five jumps of 2: a variance of 4 · 5 / 5 / 2 = 2 per value, and the error of a mean of 4 is sqrt(2 / 4).
    assert (window.mean, window.since, window.until) == (2.0, 3, 6)
    assert window.error == pytest.approx(math.sqrt(2 / 4))
    trend = Series()
    for step in range(100):
        trend.append(step, 0.01 * step)
    assert trend.last(10).above(trend.first(10), 50), "a trend is not noise"


def test_the_best_window_is_found_as_values_come() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    series = Series()
    for step, value in enumerate(values):
        series.append(step, value)
        for n in (1, 2, 3):
            if step + 1 >= n:
                means = [sum(values[i : i + n]) / n for i in range(step + 2 - n)]
                assert series.best(n).mean == pytest.approx(max(means))
                assert series.best(n, -1.0).mean == pytest.approx(min(means))
    assert (series.best(2).since, series.best(2).until) == (4, 5)


# The page --------------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[1] / "docs" / "health.md"


def test_the_page_tells_of_every_rule_in_order_and_of_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows == [rule.name for rule in RULES]


def test_the_keys_on_the_page_exist() -> None:
    sections = "train|algorithm|sampling|limits|engine|lora|warmup|sft"
    keys = set(re.findall(rf"`((?:{sections})\.\w+)\b", PAGE.read_text(encoding="utf-8")))
    assert len(keys) > 20
    assert [key for key in sorted(keys) if not resolves(RLConfig, key, BASE)] == []
