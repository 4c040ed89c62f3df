# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym (arXiv:2505.24760) by name: puzzles, algebra, logic, made by the hundred thousand.

Optional: the extra ``reasoning-gym``. A task keeps how it was made, so that its own scorer can make it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from palestra.data.source import SOURCES, ListSource, check_split
from palestra.errors import ConfigError, DataError, unknown
from palestra.types import Task

PACKAGE = "reasoning_gym"


@dataclass(frozen=True, slots=True, eq=False)
class GymTasks(Sequence[Task]):
    """``size`` tasks, each made when it is asked for; those of several data sets take turns.

    sets: data sets by name, as the package makes them. recipes: by the same names, what they were made with.
    """

    sets: Mapping[str, Any]
    recipes: Mapping[str, Mapping[str, Any]]
    size: int
    prefix: str

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        names = list(self.sets)
        name, at = names[index % len(names)], index // len(names)
        entry = self.sets[name][at]
        question, gold = str(entry["question"]), entry.get("answer")
        meta = {"task": name, "question": question, "gym": {**self.recipes[name], "index": at}}
        return Task(f"{self.prefix}/{name}/{at}", question, None if gold is None else str(gold), meta)


@SOURCES.register("reasoning_gym")
def reasoning_gym(
    task: str | Sequence[str],
    split: str = "train",
    seed: int = 0,
    size: int = 1000,
    options: Mapping[str, Any] | None = None,
    shuffle: bool | None = None,
) -> ListSource:
    """``size`` tasks of one reasoning-gym data set, or of several that take turns.

    task: its name, like ``leg_counting``, or a list of them. options: of its own configuration (with several, of each
    of them). The splits are made from unrelated seeds; a data set of few different tasks may still repeat one. meta:
    ``task`` (the name), ``question``, and ``gym`` (how the task was made), by which the reward ``reasoning_gym``
    scores. Raises DataError where the package is missing.
    """
    check_split(split)
    if size < 1:
        raise ConfigError(f"data.size is {size}; it must be at least 1")
    names = [task] if isinstance(task, str) else list(dict.fromkeys(task))
    if not names:
        raise ConfigError("data.task is an empty list: name one task of reasoning-gym or more")
    recipes = {
        name: {
            "name": name,
            "seed": int.from_bytes(hashlib.blake2b(f"{name}/{seed}/{split}".encode(), digest_size=4).digest()) // 2,
            "size": -(-size // len(names)),
            "options": dict(options or {}),
        }
        for name in names
    }
    sets = {name: made(recipe) for name, recipe in recipes.items()}
    tasks = GymTasks(sets, recipes, size, f"reasoning_gym/{split}/{seed}")
    return ListSource(tasks, seed if (split == "train" if shuffle is None else shuffle) else None)


def made(recipe: Mapping[str, Any]) -> Any:
    """The package's data set of a recipe: ``name``, ``seed``, ``size``, ``options``."""
    try:
        package: Any = importlib.import_module(PACKAGE)
        known: Any = importlib.import_module(f"{PACKAGE}.factory").DATASETS
    except ImportError as error:
        raise DataError(
            f"data source 'reasoning_gym' needs the package 'reasoning-gym' (pip install 'palestra[reasoning-gym]'): "
            f"{error}"
        ) from error
    name, options = recipe["name"], recipe["options"]
    if name not in known:
        raise ConfigError(unknown("reasoning-gym task", str(name), known))
    fields = [f.name for f in dataclasses.fields(known[name][1]) if f.name not in ("seed", "size")]
    for option in options:
        if option not in fields:
            raise ConfigError(unknown(f"option of reasoning-gym task {name!r}:", str(option), fields))
    try:
        return package.create_dataset(name, seed=recipe["seed"], size=recipe["size"], **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym task {name!r} refuses data.options {dict(options)}: {error}") from error
