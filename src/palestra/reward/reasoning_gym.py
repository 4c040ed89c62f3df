# SPDX-License-Identifier: Apache-2.0
"""The score that reasoning-gym itself gives, for tasks of the data source of that name (extra ``reasoning-gym``)."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.data.boxes import boxed_contents
from palestra.errors import RewardError
from palestra.reward.base import FACTORIES, REWARDS, RewardFunction
from palestra.reward.functions import Completion, final_texts
from palestra.reward.jobs import JobWorker
from palestra.reward.reading import END_OF_TURN, HASHES, PHRASE, REASONING, REASONING_END, TAGGED
from palestra.types import Trajectory

TIMEOUT_S = 10.0
WORKER = JobWorker(Path(__file__).with_name("gym_worker.py"), what="scoring by reasoning-gym", needs="reasoning-gym")
_LOCK = threading.Lock()
atexit.register(WORKER.close)


class ScorerError(Exception):
    """A scorer raised at a reply, or did not end in time."""


def free_answer(text: str) -> str | None:
    r"""The answer that a text gives, as it is written: any text, of any number of lines.

    The last ``<answer>…</answer>``, else the last box, else what follows ``####`` or "the answer is"; None without any
    of them. Reasoning in tags is no answer.

    >>> free_answer("<think>\\boxed{1}</think>\n<answer>\nA B\nC D\n</answer>"), free_answer("so the answer is: red.")
    ('A B\nC D', 'red.')
    >>> free_answer("perhaps 5") is None
    True
    """
    text = END_OF_TURN.sub("", REASONING_END.sub("", REASONING.sub(" ", text)))
    tagged = TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    if boxes := boxed_contents(text):
        return boxes[-1].strip()
    marks = [*HASHES.finditer(text), *PHRASE.finditer(text)]
    return text[max(m.end() for m in marks) :].strip() or None if marks else None


@FACTORIES.register("reasoning_gym")
def reasoning_gym(timeout_s: float = TIMEOUT_S) -> RewardFunction:
    """What reasoning-gym's own scorer gives the answer of the last message (:func:`free_answer`), mostly 0 to 1.

    For tasks of the data source ``reasoning_gym``, whose column ``gym`` says how to make a task again. The scorer runs
    in a process of its own; where it raises or takes longer than ``timeout_s``, the completion is not scored.
    """

    def reward(
        completions: Sequence[Completion],
        question: Sequence[str],
        gym: Sequence[Mapping[str, Any]],
        trajectories: Sequence[Trajectory] | None = None,
        **_: Any,
    ) -> list[float | Exception | None]:
        texts = final_texts(completions, trajectories)
        return [_score(free_answer(t), g, q, timeout_s) for t, g, q in zip(texts, gym, question, strict=True)]

    return reward


def _score(answer: str | None, gym: Mapping[str, Any], question: str, timeout_s: float) -> float | Exception:
    with _LOCK:
        reply = WORKER.ask({"answer": answer, "gym": dict(gym), "question": question}, timeout_s)
    if reply is None:
        return ScorerError(f"no score of {gym['name']} within {timeout_s:g} s")
    if "differs" in reply:
        raise RewardError(
            f"reasoning-gym makes task {gym['index']} of {gym['name']!r} differently now: play and score it with one "
            "version of the package"
        )
    return ScorerError(str(reply["error"])) if "error" in reply else float(reply["score"])


REWARDS.register("reasoning_gym")(reasoning_gym())
