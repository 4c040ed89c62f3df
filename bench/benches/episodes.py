# SPDX-License-Identifier: Apache-2.0
"""Episodes: rollouts of several turns beside TRL's tool loop, and a loop whose tools are slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.benches.sampling import NEW, PROMPT, TOKEN_RATE, rate
from bench.lab import Lab, Member, bench
from bench.rows import Bar, Check, Row

TURNS = 3
ADDED = 24
"""About what a tool's result and the template around it have in tokens; for the limit only."""


def _sizes(lab: Lab) -> tuple[int, int, int, int]:
    """(prompts, samples, prompt tokens, new tokens of a turn)."""
    return (2, 2, 32, 8) if lab.settings.quick else (4, 8, PROMPT, NEW)


def _config(lab: Lab, **more: Any) -> dict[str, Any]:
    model = lab.model()
    prompts, samples, prompt, new = _sizes(lab)
    texts = [p.text for p in lab.prompts(model, prompts, prompt)]
    return {"model": model, "texts": texts, "samples": samples, "new": new, "turns": TURNS} | more


@bench("tools")
def tools(lab: Lab) -> Iterator[Row]:
    """Sampled tokens per second in episodes of three turns with a tool between them, 4×8, 64 tokens a turn."""
    work, dtype = "tool episodes 4×8, 3 turns", "float32"
    if not lab.wants(work, dtype):
        return
    config = _config(lab, work="episodes")
    prompts, samples, prompt, new = _sizes(lab)
    with lab.crew({"ours": Member("ours", config), "trl": Member("trl", config)}) as crew:
        replies = crew.take_turns({})
        turns = [(0, new)] + [(ADDED, new)] * (TURNS - 1)
        total = prompts * samples * TURNS * new
        yield lab.row(
            work,
            dtype,
            replies.values(rate),
            unit=TOKEN_RATE,
            limit=lab.limit(
                config["model"], dtype, lambda limit: total / limit.episodes_s(prompts, samples, prompt, turns)
            ),
            bar=Bar({"trl": 4.0}, stretch={"trl": 6.0}),
            checks={f"turns of {who}": Check(n, TURNS, TURNS) for who, n in replies.last("turns").items()},
        )


@bench("slow-tool")
def slow_tool(lab: Lab) -> Iterator[Row]:
    """A step of 32 episodes of three turns whose tool takes a second each time, beside the same with instant tools."""
    work, dtype = "step, tools of 1 s, 4×8, 3 turns", "float32"
    if not lab.wants(work, dtype):
        return
    config = _config(lab, work="step", new=_sizes(lab)[3] // 2)
    slow = config | {"delay_s": 0.05 if lab.settings.quick else 1.0}
    members = {"ours": Member("ours", slow), "instant tools": Member("ours", config)}
    with lab.crew(members, together=False) as crew:
        yield lab.row(
            work,
            dtype,
            crew.take_turns({}).values(lambda reply: float(reply["seconds"])),
            unit="s",
            better="lower",
            bar=Bar({"instant tools": 1 / 1.3}, said="≤ 1.3 × instant tools"),
        )
