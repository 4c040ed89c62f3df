# SPDX-License-Identifier: Apache-2.0
"""More rows from those that are there, with answers that are right for certain: other numbers, names, order, wording.

``numbers`` recomputes the solution (:mod:`palestra.data.renumber`); the other kinds leave the answer as it is. A row
to which a kind cannot be applied without doubt gives nothing. Everything follows from (seed, row, copy).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from palestra.data.renumber import renumbered
from palestra.data.rows import ID, Row
from palestra.data.tables import ANSWERS, QUESTIONS, column
from palestra.errors import ConfigError, unknown

Problem = tuple[str, str]
"""Question and solution."""

_SHE = """
Alice Amanda Amy Ana Andrea Angela Anna Annie Barbara Beth Betty Brenda Carla Carol Cindy Claire Diana Donna
Emily Emma Erica Gina Hannah Heather Helen Jane Janet Jenny Jessica Julia Karen Kate Katie Laura Linda Lisa
Lucy Maria Marie Martha Mary Megan Melissa Michelle Monica Nancy Natalia Nicole Olivia Pamela Rachel Rebecca
Sandra Sara Sarah Sofia Sophie Susan Tina Wendy
"""
_HE = """
Aaron Adam Alan Andrew Andy Ben Billy Bob Bobby Brad Brian Carl Carlos Charles Dan Daniel Dave David Dennis
Ed Edward Eric Ethan Fred Gary George Greg Harry Henry Jack Jacob Jake James Jason Jeff Jim Jimmy Joe John
Johnny Jose Josh Kevin Kyle Larry Luke Marcus Martin Matt Michael Mike Nathan Nick Paul Pedro Peter Robert
Ryan Scott Simon Steve Ted Tim Toby Todd Tom Tommy Tony Victor
"""
NAMES = (tuple(_SHE.split()), tuple(_HE.split()))
"""A name is exchanged for one of its own list, so that pronouns still fit."""
_ANY = "|".join(name for line in NAMES for name in line)
NO_PERSON = re.compile(
    rf"\b(?:San|Santa|St\.?|Saint|Lake|Port|Fort|Mount|Mt\.?|Cape|Big|King|Queen|Prince|Princess|Papa|Monterey|Trader)"
    rf"[ -](?:{_ANY})\b"
    rf"|\b(?:{_ANY})(?:['’]s)? (?!Mr|Mrs|Ms|Dr)(?:[A-Z]\w+)"  # a surname, a shop, a place: the two belong together
    rf"|\b(?:{_ANY})-|\w-(?:{_ANY})\b|\b(?:Wendy|Joe|Barbara)['’]s (?:on|at|for|in|to)\b"
)
WORDINGS = (
    "Solve this problem: {}",
    "Here is a question for you. {}",
    "Please work this out step by step. {}",
    "{} Show your work.",
    "{} Explain how you get there.",
    "Question: {}",
    "Read carefully and answer. {}",
    "{} Give the answer at the end.",
)
REFERS = re.compile(
    r"\b(?:he|she|it|they|him|her|them|his|hers|its|their|theirs|this|that|these|those|then|both|each|other|others|same"
    r"|such|altogether|so|there|remaining|left)\b",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
ASKS = ("How", "What", "Which", "When", "Who", "Find", "Calculate")


def rename(question: str, solution: str, rng: random.Random) -> Problem | None:
    """Every name that is known here becomes another one, in question and solution alike; None where one may be no
    person's: San Jose, Wendy's, a jack-o'-lantern.

    >>> rename("Karen has 3 pens, 2 of them Tom's.", "Karen keeps 3-2=1.", random.Random(0))
    ("Sofia has 3 pens, 2 of them Michael's.", 'Sofia keeps 3-2=1.')
    """
    text = f"{question}\n{solution}"
    if NO_PERSON.search(text):
        return None
    present = set(re.findall(r"\b[A-Z][a-z]+\b", text))
    new: dict[str, str] = {}
    for line in NAMES:
        free = [name for name in line if name not in present]
        old = [name for name in line if name in present]
        if len(old) > len(free):
            return None
        new.update(zip(old, rng.sample(free, len(old)), strict=True))
    if not new:
        return None
    names = re.compile(rf"\b(?:{'|'.join(new)})\b")
    changed = (names.sub(lambda m: new[m[0]], part) for part in (question, solution))
    return (next(changed), next(changed))


def ask_first(question: str, solution: str, rng: random.Random) -> Problem | None:
    """The question at the end of the story moves to its front, where it refers to nothing that was said before.

    >>> ask_first("Ann has 3 pens. She buys 4. How many pens does Ann have?", "7", random.Random(0))
    ('How many pens does Ann have? Ann has 3 pens. She buys 4.', '7')
    >>> ask_first("Ann has 3 pens. How many does she have?", "3", random.Random(0)) is None
    True
    """
    *story, asked = SENTENCE.split(question.strip())
    if not story or not asked.startswith(ASKS) or REFERS.search(asked):
        return None
    return " ".join([asked, *story]), solution


def reword(question: str, solution: str, rng: random.Random) -> Problem | None:
    """The question with a request before or behind it.

    >>> reword("2+2?", "4", random.Random(0))
    ('Read carefully and answer. 2+2?', '4')
    """
    return rng.choice(WORDINGS).format(question.strip()), solution


KINDS: dict[str, Callable[[str, str, random.Random], Problem | None]] = {
    "numbers": renumbered,
    "names": rename,
    "order": ask_first,
    "wording": reword,
}


def augment(
    rows: Iterable[Row], kinds: Sequence[str] = ("numbers", "names"), *, copies: int = 1, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """New rows, each with the kind that made it: ``copies`` of every kind for every row, as far as it can be done.

    A row keeps its columns; its id becomes ``ID/KIND-COPY`` (rows without an id are counted from 1).

    >>> solution = "<<8/2=4>>4\\n<<8+4=12>>12\\n#### 12"
    >>> row = {"question": "Tom sold 8 clips and then half as many. How many in all?", "answer": solution}
    >>> [(kind, new["id"], new["answer"].split()[-1]) for kind, new in augment([row], seed=1)]
    [('numbers', '1/numbers-1', '24'), ('names', '1/names-1', '12')]
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(unknown("kind of augmentation", kind, KINDS))
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        asks = column(row, QUESTIONS, "question", where)
        answers = column(row, [n for n in ANSWERS if n != asks], "answer", where)
        question, solution = str(row[asks]), str(row[answers])
        name = next((str(row[n]) for n in ID if row.get(n) is not None), str(number))
        seen = {question}
        for kind in kinds:
            for copy in range(1, copies + 1):
                made = KINDS[kind](question, solution, random.Random(f"augment/{seed}/{name}/{kind}/{copy}"))
                if made is not None and made[0] not in seen:
                    seen.add(made[0])
                    kept = {k: v for k, v in row.items() if k not in ID}
                    yield kind, {"id": f"{name}/{kind}-{copy}", **kept, asks: made[0], answers: made[1]}
