# SPDX-License-Identifier: Apache-2.0
"""Whether a run may be gone on with under a config, and what is otherwise than it was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra import config as configuration
from palestra.config import Config
from palestra.errors import PalestraError, RunError

CONDITIONS = ("versions", "threads", "kernels", "device", "dtypes")
"""Of ``run.json``: what the bits of a number depend on."""

_SAME = ("kind", "seed")
_FREE = ("out", "trackers", "save_every", "keep_last", "keep_best", "dump_every")
"""Keys that change where a run goes and what it leaves there, and no number of it."""
_LONGER = ("steps", "epochs")
"""Of a section of the root: how far a run goes, which is what many a resume is for."""
_SHOWN = 8


def check_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any], config: Config) -> list[str]:
    """Refuse to go on with a run of another kind, seed or model, by RunError; returns every other key of the config
    that is not as it was, with both values. then, now: as :func:`~palestra.run.directory.describe` has them."""
    for name in _SAME:
        if then.get(name) not in (None, now[name]):
            raise RunError(
                f"{path} holds a run whose {name} is {then[name]}, not {now[name]}; "
                "repeat its config or choose another out"
            )
    try:
        old = configuration.read_yaml(path / "config.yaml")
    except PalestraError:
        return []  # nothing to compare with
    new = config.model_dump(mode="json")
    models = [v["path"] if isinstance(v := c.get("model"), Mapping) and "path" in v else v for c in (old, new)]
    if models[0] is not None and models[0] != models[1]:
        raise RunError(
            f"{path} holds a run of the model {models[0]}, not {models[1]}; repeat its config or choose another out"
        )
    try:  # options that the run's own version did not have are as they are by default
        old = configuration.load(old, [], type(config)).model_dump(mode="json")
    except PalestraError:
        old = {name: value for name, value in old.items() if name in new}
    return changed(old, new)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, but for those that change no number and the dtypes, which are conditions.

    >>> changed({"data": {"count": 9}, "train": {"steps": 5}}, {"data": {"name": "a"}, "train": {"steps": 9}})
    ['data.count 9 → left out', 'data.name left out → a']
    """
    before, now = flat(old), flat(new)
    names = [n for n in dict.fromkeys((*before, *now)) if not _left_free(n) and before.get(n) != now.get(n)]
    return [f"{name} {_shown(before, name)} → {_shown(now, name)}" for name in names]


def told(changes: list[str]) -> str:
    """The changes on one line, the first of them where they are many.

    >>> told([f"a.{i} 0 → 1" for i in range(10)])[-17:]
    'a.7 0 → 1; 2 more'
    """
    more = len(changes) - _SHOWN
    return "; ".join([*changes[:_SHOWN], *([f"{more} more"] if more > 0 else [])])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of options by full key; an empty branch is one too.

    >>> flat({"model": {"path": "a"}, "rewards": None, "data": {}})
    {'model.path': 'a', 'rewards': None, 'data': {}}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {f"{prefix}{name}": value}
    return found


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was recorded then and is otherwise now.

    >>> differences({"threads": 2, "versions": {"torch": "2.12"}}, {"threads": 4, "versions": {"torch": "2.13"}})
    ['torch 2.12 then, 2.13 now', 'threads 2 then, 4 now']
    """
    found = []
    for kind in CONDITIONS:
        old, new = (v if isinstance(v, Mapping) else {kind: v} for v in (then.get(kind), now.get(kind)))
        found += [f"{k} {old[k]} then, {new[k]} now" for k in new if old.get(k) not in (None, new[k])]
    return found


def _left_free(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "sample":  # which refuses what may not change, and lets the rest
        return True
    return parts[-1] in _FREE or parts[-1].endswith("dtype") or (len(parts) == 2 and parts[1] in _LONGER)


def _shown(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "left out")
    text = " ".join(("none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


__all__ = ["CONDITIONS", "changed", "check_same", "differences", "flat", "told"]
