# SPDX-License-Identifier: Apache-2.0
"""How speed and memory grow with episodes, context, group size, turns, vocabulary and steps; and Python's share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.benches.sampling import NEW, PROMPT, TOKEN_RATE
from bench.benches.training import step_config
from bench.lab import Lab, Measured, Member, Replies, bench
from bench.models import noise
from bench.peers.serve import GIB
from bench.rows import Bar, Check, Row

FLAT = 1 / 1.15
"""Under 1.15 × two speeds count as equal."""
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class _Point:
    """One point of a curve. beside: the point that it must keep up with."""

    work: str
    prompts: int
    samples: int
    prompt: int = PROMPT
    new: int = NEW
    turns: int = 1
    added: int = 0
    beside: str | None = None

    def request(self, model: str) -> dict[str, Any]:
        """Random prompts that have nothing in common."""
        return {
            "prompts": [noise(model, self.prompt, seed=i) for i in range(self.prompts)],
            "samples": self.samples,
            "lengths": [self.new],
            "turns": self.turns,
            "added": noise(model, self.added, seed=-1),
        }

    @property
    def tokens(self) -> int:
        """New ones: sampled, and added between turns."""
        return self.prompts * self.samples * (self.turns * self.new + (self.turns - 1) * self.added)


def points(quick: bool) -> list[_Point]:
    """The curves: episodes 1 → 256, context 128 → 4096, group size 1 → 16 of 32 rows, turns 1 → 8."""
    if quick:
        return [
            _Point("scale: 1 episodes", 1, 1, 24, 4),
            _Point("scale: 8 episodes", 2, 4, 24, 4, beside="1 episodes"),
            _Point("scale: 2 turns", 2, 2, 24, 4, turns=2, added=4),
        ]
    return [
        *(_Point(f"scale: {n} episodes", max(1, n // 8), min(n, 8)) for n in (1, 8, 32, 64, 128)),
        _Point("scale: 256 episodes", 32, 8, beside="32 episodes"),
        *(_Point(f"scale: context {n}", 1, 8, prompt=n - NEW) for n in (128, 512, 2048, 4096)),
        *(_Point(f"scale: group size {n}", 32 // n, n) for n in (1, 2, 4, 8, 16)),
        *(_Point(f"scale: {n} turns", 4, 8, new=32, turns=n, added=24) for n in (1, 2, 4)),
        _Point("scale: 8 turns", 4, 8, new=32, turns=8, added=24, beside="2 turns"),
    ]


@bench("scaling", suite="full")
def scaling(lab: Lab) -> Iterator[Row]:
    """New tokens per second, memory and Python's share against episodes, context, group size and turns."""
    model, hollow = lab.model(), lab.model("hollow")
    real, thin = (Member("ours", {"work": "sampling", "model": m, "dtype": DTYPE}) for m in (model, hollow))
    warm = _Point("", 1, 1, 24, 4).request(hollow)
    with lab.crew({"ours": real, "hollow": thin}) as crew:
        for point in points(lab.settings.quick):
            if lab.wants(point.work, DTYPE):
                thin.request = point.request(hollow)
                yield _scaled(lab, point, crew.take_turns(point.request(model), warm=warm))


def _scaled(lab: Lab, point: _Point, replies: Replies) -> Row:
    """The row of one point, with the earlier point of its curve as what it is compared with."""
    measured, bar = replies.values(lambda reply: point.tokens / reply["seconds"], {"ours": "ours"}), Bar()
    earlier = lab.results.find(f"scale: {point.beside}", DTYPE)
    if point.beside is not None and earlier is not None:
        measured = replace(measured, runs=dict(measured.runs) | {point.beside: earlier["runs"]["ours"]})
        bar = Bar({point.beside: FLAT}, said=f"as fast as {point.beside}, within 1.15 ×")
    facts = {"peak_gib": replies.last("peak_gib").get("ours"), "python_share": _share(replies)}
    return lab.row(point.work, DTYPE, measured, unit=TOKEN_RATE, bar=bar, facts=facts)


def _share(replies: Replies) -> float | None:
    """Seconds of the hollow model over those of the real one: Python and the dispatch of kernels."""
    seconds = {name: median(reply["seconds"] for reply in found) for name, found in replies.by.items() if found}
    return seconds["hollow"] / seconds["ours"] if len(seconds) == 2 else None


@bench("growth", suite="full")
def growth(lab: Lab) -> Iterator[Row]:
    """What must not grow: an update's memory with the vocabulary, a step's time and memory with the steps done."""
    if lab.wants("scale: update memory by vocabulary", DTYPE):
        yield _vocabulary(lab)
    if lab.wants("scale: late steps", DTYPE):
        yield _late_steps(lab)
    if lab.wants("scale: Python in a step", DTYPE):
        yield _python(lab)


def _vocabulary(lab: Lab) -> Row:
    """How much more memory an update takes with 16 times the vocabulary, over the size of the logits in float32."""
    tokens, small, large = (64, 256, 4096) if lab.settings.quick else (2048, 4096, 65536)
    configs = {n: {"work": "growth", "vocabulary": n, "tokens": tokens} for n in (small, large)}
    members = {"ours": Member("ours", configs[large]), "small": Member("ours", configs[small])}
    with lab.crew(members) as crew:
        replies = crew.take_turns({})
    less = median([reply["gib"] for reply in replies.by["small"]] or [0.0])
    logits = 2 * tokens * (large - small) * 4 / GIB
    return lab.row(
        "scale: update memory by vocabulary",
        DTYPE,
        replies.values(lambda reply: (reply["gib"] - less) / logits, {"ours": "ours"}),
        unit="of the logits",
        better="lower",
        bar=Bar(at_most=0.5),
    )


def _late_steps(lab: Lab) -> Row:
    """Steps 101–120 of the tiny model beside steps 21–40."""
    config = step_config(lab, lab.model("tiny"))
    block = {"steps": 1 if lab.settings.quick else 20}
    with lab.crew({"ours": Member("ours", config)}) as crew:
        blocks = [crew.once("ours", block) for _ in range(2 if lab.settings.quick else 6)]
    early, late = blocks[1], blocks[-1]
    return lab.row(
        "scale: late steps",
        DTYPE,
        Measured({"ours": [late["seconds"]], "early steps": [early["seconds"]]}),
        unit="s a step",
        better="lower",
        bar=Bar({"early steps": FLAT}, said="as fast as early steps, within 1.15 ×"),
        checks={"GiB more than early": Check(late["resident_gib"] - early["resident_gib"], at_most=0.05)},
    )


def _python(lab: Lab) -> Row:
    """A whole step of the hollow model over that of the real one."""
    members = {
        "real": Member("ours", step_config(lab, lab.model())),
        "hollow": Member("ours", step_config(lab, lab.model("hollow"))),
    }
    with lab.crew(members) as crew:
        replies = crew.take_turns({})
    pairs = zip(replies.by["hollow"], replies.by["real"], strict=False)
    shares = [thin["seconds"] / real["seconds"] for thin, real in pairs]
    measured = Measured({"ours": shares}, replies.absent, replies.versions)
    return lab.row("scale: Python in a step", DTYPE, measured, unit="of a step", better="lower")
