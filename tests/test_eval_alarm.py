# SPDX-License-Identifier: Apache-2.0
"""While training: a part of the reward that rises although held-out accuracy does not rings the hacking alarm."""

from __future__ import annotations

import pytest
from test_health import evaluated, heard, level, rl_config, rl_rows, rung, to

PAID = {"accuracy": 1.0, "format": 0.1, "steps": 0.5}
FLAT = dict(reward__accuracy=level(0.3), rollout__success_rate=level(0.3), train__reward=level(0.35))


def test_a_part_that_rises_alone_is_named_with_its_numbers() -> None:
    rows = evaluated(rl_rows(reward__steps=to(0.2, 0.9), **FLAT), 10, accuracy=level(0.3))
    alarm = next(a for a in heard(rows, rl_config(rewards=PAID)) if a.rule == "reward_hacking")
    assert "the part steps rose from" in alarm.seen and "held-out accuracy went from 0.30 to 0.30" in alarm.seen


@pytest.mark.parametrize(
    ("rewards", "accuracy"),
    [
        (PAID, to(0.3, 0.7)),  # held-out accuracy rises with it
        (PAID | {"steps": 0.0}, level(0.3)),  # nobody is paid for it
        (PAID | {"steps": -0.5}, level(0.3)),  # it costs
    ],
)
def test_a_part_that_rises_with_accuracy_or_is_not_paid_rings_nothing(rewards: object, accuracy: object) -> None:
    rows = evaluated(rl_rows(reward__steps=to(0.2, 0.9), **FLAT), 10, accuracy=accuracy)
    assert "reward_hacking" not in rung(rows, rl_config(rewards=rewards))


@pytest.mark.parametrize(("weights", "rings"), [({}, True), ({"env/lucky": 0.5}, True), ({"env/lucky": 0.0}, False)])
def test_what_an_environment_pays_is_watched_unless_its_weight_is_0(weights: dict[str, float], rings: bool) -> None:
    rows = evaluated(rl_rows(reward__env__lucky=to(0.2, 0.9), **FLAT), 10, accuracy=level(0.3))
    assert ("reward_hacking" in rung(rows, rl_config(rewards=PAID | weights))) is rings  # unnamed, it is paid in full


def test_a_flat_part_rings_nothing() -> None:
    rows = evaluated(rl_rows(reward__steps=level(0.5), **FLAT), 10, accuracy=level(0.3))
    assert "reward_hacking" not in rung(rows, rl_config(rewards=PAID))
