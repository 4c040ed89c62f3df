# SPDX-License-Identifier: Apache-2.0
"""How long a row may be for a config: what its renderer and environment make of a prompt, against its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.config import Config, load, read_yaml
from palestra.data.faults import Item, form_of, read_item
from palestra.data.rows import Row
from palestra.data.tables import read_table
from palestra.env import make_env
from palestra.errors import ConfigError, DataError, UserError
from palestra.model.loading import LoadedModel
from palestra.train import setup
from palestra.train.config import EvalConfig, RLConfig, SFTConfig, TaskConfig
from palestra.train.preference_config import PreferConfig, RewardModelConfig
from palestra.types import Message, Task

LOOKED_AT = 100
"""Rows among which one is looked for that an environment can be shown."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """length: tokens of a text with what is put around it. most: how many there may be. told: where that comes from.
    whole: replies count too."""

    length: Callable[[str], int]
    most: int
    told: str
    whole: bool


def limit_of(path: Path, file: Path) -> PromptLimit:
    """The limit that the config at ``path`` sets to the rows of ``file``.

    For ``rl`` and ``eval`` a prompt, as the environment shows it, leaves the context room for a whole reply; for the
    other verbs prompt and reply fit into their ``max_length``. What is put around a text is measured once, on the
    first row.
    """
    values = read_yaml(path)
    kinds: dict[str, type[Config]] = {"sft": SFTConfig, "prefer": PreferConfig, "reward_model": RewardModelConfig}
    name = next((name for name in kinds if name in values), None)
    if name is None:
        cls = EvalConfig if not {"algorithm", "train", "warmup"} & values.keys() else RLConfig
        return _of_tasks(load(path, [], cls), file)
    config: Any = load(path, [], kinds[name])
    loaded = setup.load(config.model)
    count = _counter(loaded)
    pair: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = setup.renderer_for(config.renderer, loaded).render(pair)
    frame = len(rendered.token_ids) - count("a") - count("b")
    most = getattr(config, name).max_length
    return PromptLimit(lambda text: count(text) + frame, most, f"{name}.max_length", whole=True)


def _of_tasks(config: TaskConfig, file: Path) -> PromptLimit:
    if isinstance(config, EvalConfig) and config.endpoint is not None:
        raise ConfigError("the config's model is behind an endpoint: give --model and --max-prompt instead of --config")
    loaded = setup.load(config.model)
    count = _counter(loaded)
    row, item = _first(file)
    given = row.get("prompt")
    prompt: Any = tuple(given) if isinstance(given, list) else item.prompt
    task = Task("first", prompt, item.answer, dict(row))
    try:
        factory = make_env(config.env.name, **config.env.options)
        (shown,) = asyncio.run(setup.first_observations(factory, [task]))
    except UserError:
        raise
    except Exception as error:  # environments are the user's own code
        raise ConfigError(f"env {config.env.name!r} cannot show {item.where}: {error!r}") from error
    renderer = setup.renderer_for(config.renderer, loaded)
    rendered = renderer.render(shown.messages, tools=shown.tools or None, add_generation_prompt=True)
    frame = len(rendered.token_ids) - count(item.prompt)
    context = config.engine.max_context or loaded.max_context
    reply = min(config.sampling.max_new_tokens, config.limits.max_tokens)
    most, told = context - reply, f"a context of {context:,} less {reply:,} for a reply"
    if most < 1:  # replies are cut by the context then
        most, told = context - 1, f"a context of {context:,}, which holds no whole reply of {reply:,}"
    return PromptLimit(lambda text: count(text) + frame, most, told, whole=False)


def _first(file: Path) -> tuple[Row, Item]:
    rows: Sequence[tuple[int, Row]] = [found for found, _ in zip(read_table(file), range(LOOKED_AT), strict=False)]
    form = form_of([row for _, row in rows])
    for number, row in rows:
        item, _ = read_item(f"{file}:{number}", row, form)
        if item is not None:
            return row, item
    raise DataError(f"{file}: none of its first {LOOKED_AT} rows can be shown to the environment")


def _counter(loaded: LoadedModel) -> Callable[[str], int]:
    return lambda text: len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
