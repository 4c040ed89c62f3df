# SPDX-License-Identifier: Apache-2.0
"""Word problems that a model poses itself, with answers that a calculation checks.

A posed problem is worth training on when its answer is right for certain. What can be checked is the arithmetic: every
written step is computed again, every number is traced to the question, an earlier step or a constant that a word
explains (the same rules by which ``renumber.py`` changes numbers), and the last step is the answer. Whether the words
ask for that calculation is not checked; solving the problem several times shows it (``palestra data difficulty``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from palestra.data.duplicates import NEAR, plain_words, similarity
from palestra.data.renumber import steps_of, trace
from palestra.types import Group

PARTS = re.compile(
    r"question\s*[:：]\s*(?P<question>.+?)\s*^\W*solution\s*[:：]\s*(?P<solution>.+)", re.I | re.S | re.M
)
KEY = "posed"
"""Under this name an episode's turn carries the problem that it posed, and the environment's payment its worth."""

NO_PARTS = "Write it as 'Question: …' and then 'Solution: …'."
NO_STEPS = "Write each calculation as <<48/2=24>>24, each of them right, and end with '#### ' and the last result."
UNTRACED = "Each number of the solution must stand in the question or be the result of one earlier step only."
COPIED = "That is the example again: tell another story with other numbers."


def posed_problem(text: str) -> tuple[str, str] | None:
    """The question and the solution of a reply; None where it does not hold both.

    >>> posed_problem("Sure!\\n**Question:** 2 cats and 3 dogs. How many pets?\\n**Solution:** <<2+3=5>>5\\n#### 5")
    ('2 cats and 3 dogs. How many pets?', '<<2+3=5>>5\\n#### 5')
    """
    found = PARTS.search(text)
    if found is None:
        return None
    question, solution = (found[part].strip().strip("*").strip() for part in ("question", "solution"))
    return (question, solution) if question and solution else None


def fault_of(question: str, solution: str, examples: Sequence[str] = ()) -> str:
    """What is wrong with a posed problem, in words for who posed it; "" when nothing that can be checked is.

    examples: questions that it was shown, of which it must not be a copy.

    >>> fault_of("Ann has 48 clips and half as many pins. How many in all?", "<<48/2=24>>24\\n<<48+24=72>>72\\n#### 72")
    ''
    >>> fault_of("Ann has 48 clips.", "<<48/2=25>>25\\n#### 25") == NO_STEPS
    True
    >>> fault_of("Ann has clips.", "<<23+31=54>>54\\n#### 54") == UNTRACED
    True
    """
    steps = steps_of(solution)
    if steps is None:
        return NO_STEPS
    if trace(question, solution, steps) is None:
        return UNTRACED
    words = plain_words(question)
    return COPIED if any(similarity(words, plain_words(e)) >= NEAR for e in examples) else ""


def posed_rows(groups: Iterable[Group]) -> Iterator[dict[str, Any]]:
    """Rows ``id``, ``question``, ``answer`` of the problems that episodes of the environment ``self_question`` posed,
    each once: equal words are one problem."""
    seen: set[tuple[str, ...]] = set()
    for group in groups:
        for episode in group.episodes:
            found = (t.info.get(KEY) for view in episode.trajectories for t in view.turns)
            for problem in (p for p in found if p):
                words = plain_words(problem["question"])
                if words not in seen:
                    seen.add(words)
                    yield {"id": f"posed/{len(seen)}", "question": problem["question"], "answer": problem["answer"]}
