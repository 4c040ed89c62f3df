# SPDX-License-Identifier: Apache-2.0
"""Known answers about configurations: what is refused, and in which words. Flat keys find their place in the tree."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import pydantic

from palestra import config as configuration
from palestra.reward.build import weighted
from palestra.rollout.episode import Limits, SamplingConfig
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind
from palestra.train.config import AlgorithmConfig, RLConfig, SFTSettings, TrainSettings

SMALLEST: dict[str, Any] = {"model": "builtin:calculator", "data": "calculator", "env": "calculator"}
ALIASES = {
    # what other trainers call it → our key
    "beta": "algorithm.kl_coef",
    "estimator": "algorithm.preset",
    "preset": "algorithm.preset",
    "num_generations": "algorithm.num_generations",
    "learning_rate": "train.learning_rate",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "max_completion_length": "sampling.max_new_tokens",
    "num_iterations": "algorithm.updates_per_batch",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
}
PLACES = {"kl_in_reward": "reward", "kl_in_loss": "loss"}
"""A switch for each place of the KL term, as other trainers have them; ours is one option, which can name one place."""
SECTIONS: dict[str, type[pydantic.BaseModel]] = {
    "train": TrainSettings,
    "algorithm": AlgorithmConfig,
    "sampling": SamplingConfig,
    "limits": Limits,
}


@kind("config", "config")
def of_mapping(given: Given) -> dict[str, Any]:
    """Keys of a training config, flat or as the tree has them. → raises; reference_model_loaded, learning_rate …"""
    settings = given.get("config")
    if not isinstance(settings, dict):
        raise NotData("config is not a mapping")
    return _loaded(settings)


@kind("config", "reward_weights", "reward_funcs")
def of_weights(given: Given) -> dict[str, Any]:
    """Weights for a number of reward functions. → raises, weights"""
    count = given.integer("reward_funcs")

    def function(number: int) -> Any:
        def one(completions: list[str]) -> list[float | None]:
            return [0.0] * len(completions)

        one.__name__ = f"reward_{number}"
        return one

    named = weighted([function(i) for i in range(count)], given.numbers("reward_weights").tolist())
    return {"weights": [weight for _, weight in named.values()]}


@kind("config", "prompts", "prompts_per_step", "epochs")
def of_schedule(given: Given) -> dict[str, Any]:
    """Prompts, prompts per optimiser step and epochs. → optimizer_steps, completions_total; with ``drop_last`` a list
    (for false and true), one number each. A last step that is not full is taken, as in ``palestra sft``."""
    from palestra.train.sft import steps_of

    prompts, batch, epochs = (given.integer(k) for k in ("prompts", "prompts_per_step", "epochs"))
    group = given.integer("num_generations", 1)
    drop = given.get("drop_last", False)
    steps = []
    for dropped in drop if isinstance(drop, list) else [drop]:
        used = prompts // batch * batch if dropped else prompts
        settings = SFTSettings(data={"name": "calculator"}, epochs=epochs, batch_size=batch)
        steps.append((steps_of(settings, used), used * epochs * group))
    listed = isinstance(drop, list)
    return {
        "optimizer_steps": [s for s, _ in steps] if listed else steps[0][0],
        "completions_total": [c for _, c in steps] if listed else steps[0][1],
    }


@kind("config", "completions_per_step")
def of_completions(given: Given) -> dict[str, Any]:
    """Never run: Palestra is told tasks per step and episodes per task."""
    raise NotData("a step is given as tasks and episodes per task, so no number of completions can fail to divide")


@kind("config")
def of_flat_keys(given: Given) -> dict[str, Any]:
    """Keys of an RL run without a section, under our names or those of other trainers (beta, num_generations,
    estimator, epsilon, num_iterations …); kl_in_reward and kl_in_loss are switches. → as `config`"""
    if any(isinstance(v, str) and " " in v for v in given.data.values()):
        raise NotData("one of its values is a description, not data")
    known = set(ALIASES).union(PLACES, *(cls.model_fields for cls in SECTIONS.values()))
    if strange := [key for key in given.data if key not in known]:
        raise NotData(f"no option of an RL run is called {strange[0]}")
    settings = {k: given.get(k) for k in given.data if k not in PLACES}
    if asked := [place for k, place in PLACES.items() if given.flag(k)]:
        settings["kl_in"] = asked[0] if len(asked) == 1 else asked
    return _loaded(settings)


def _loaded(settings: Mapping[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree: dict[str, Any] = dict(SMALLEST)
        for key, value in settings.items():
            section, name = _place(key)
            if section is None:
                tree[name] = value
            else:
                tree.setdefault(section, {})[name] = value
        loaded = configuration.load(tree, [], RLConfig)
    algorithm = loaded.algorithm
    return {
        "reference_model_loaded": algorithm.kl_coef > 0,
        "kl_metric_logged": algorithm.kl_coef > 0,
        "learning_rate": loaded.train.learning_rate,
        "group_size": algorithm.group_size,
        "warned": [str(w.message) for w in caught],
    }


def _place(key: str) -> tuple[str | None, str]:
    """Where a flat key belongs: as aliases say, in the root, or in the section that has the most similar key."""
    if key in ALIASES:
        section, _, name = ALIASES[key].partition(".")
        return section, name
    if key in RLConfig.model_fields or "." in key:
        section, _, name = key.rpartition(".")
        return section or None, name
    names = {name: section for section, cls in SECTIONS.items() for name in cls.model_fields}
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return (names[near[0]], key) if near else (None, key)
