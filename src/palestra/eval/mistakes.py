# SPDX-License-Identifier: Apache-2.0
"""What kind of mistake a wrong answer is, and the rule that decided.

* format: the right answer is there, but not where or how it was asked for; or there is no answer at all;
* calculation: a written equation is false;
* comprehension: the question was misread: only a part of it answered, a number of it left out, a number made up;
* reasoning: the right numbers, the wrong operations.

Written equations are checked exactly. Operations are compared with the gold solution's (``<<48/2=24>>`` in GSM8K, or a
question that is plain arithmetic); without one, only what can be said from the question. A mistake about which no rule
can say anything is ``undecided``, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from palestra.data.gsm8k import steps as solution_steps
from palestra.data.renumber import MARK
from palestra.eval.equations import Operation, equations, numbers, operations_of, shown, to_float
from palestra.eval.equations import operations as operations_in
from palestra.reward.answers import to_number
from palestra.types import Task

KINDS = ("calculation", "reasoning", "comprehension", "format", "undecided")
EXPLAINED = frozenset(map(Fraction, (0, 1, 2, 3, 4, 5, 7, 10, 12, 24, 30, 52, 60, 100, 365, 1000)))
"""Numbers that a word explains (half, dozen, week, percent): using one that the question lacks says nothing."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """kind: one of ``KINDS``. rule: what decided, in words that name the numbers."""

    kind: str
    rule: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What is known of a reply that was wrong. text: all that the model wrote; prediction: the answer that could be
    read, None when none could; ended: how the episode ended, in words, where it did not end with an answer;
    operations: those of tool calls, beside what the text writes."""

    text: str
    prediction: str | None
    ended: str | None = None
    operations: tuple[Operation, ...] = ()


def gold_operations(task: Task) -> tuple[Operation, ...]:
    """The operations of the gold solution, in order; none where there is no solution to read.

    The solution's ``<<…>>`` (meta ``full_answer`` or ``solution``), or the question itself where it is arithmetic.

    >>> task = Task("t", "Half of 48?", "24", {"full_answer": "<<48/2=24>>24\\n#### 24"})
    >>> [str(o) for o in gold_operations(task)], [str(o) for o in gold_operations(Task("t", "(3+4)*5", 35))]
    (['48 / 2'], ['3 + 4', '7 * 5'])
    """
    solution = str(task.meta.get("full_answer") or task.meta.get("solution") or "")
    marked = [o for expression, _ in MARK.findall(solution) for o in operations_of(expression)]
    return tuple(marked or operations_of(question_of(task).strip().rstrip("=?").strip()))


def question_of(task: Task) -> str:
    """The task's own words: the last user message, or the prompt."""
    asked = [m for m in task.messages() if m.get("role") == "user"] or list(task.messages())
    return str(task.meta.get("question") or asked[-1].get("content") or "")


def difficulty(task: Task) -> int | None:
    """How many steps a task takes: its column ``steps``, its solution's, or the operations of its question.

    >>> difficulty(Task("t", "(3+4)*5", 35)), difficulty(Task("t", "Who?", "me"))
    (2, None)
    """
    told = task.meta.get("steps")
    if isinstance(told, int) and not isinstance(told, bool):
        return told
    solution = task.meta.get("full_answer") or task.meta.get("solution")
    return solution_steps(str(solution)) if solution else len(gold_operations(task)) or None


def classify(task: Task, reply: Reply) -> Mistake:
    """The kind of a wrong reply's mistake: no answer or a bare one, a false equation, a result that was not reported,
    then the comparison with the gold solution.

    >>> task = Task("t", "Half of 48, and 48 more?", "72", {"full_answer": "<<48/2=24>>24\\n<<24+48=72>>72\\n#### 72"})
    >>> for said in ("48/2 = 25, 25+48 = 73", "48/2 = 24", "48*2 = 96, 96+48 = 144", "It is 72, or so: 27"):
    ...     found = classify(task, Reply(said, said.split()[-1]))
    ...     print(found.kind, "-", found.rule)
    calculation - 48/2 = 25 is written; it is 24
    comprehension - 24 answers step 1 of 2 of the gold solution: a part of what was asked
    reasoning - 48 * 2 is computed where the gold solution has 48 / 2
    format - the right answer, 72, is in the text, but 27 was read as the answer
    """
    gold = None if task.answer is None else to_number(str(task.answer))
    done = (*reply.operations, *operations_in(reply.text))
    return (
        _form(reply, gold)
        or _calculation(reply.text)
        or _not_reported(task, reply, gold, [to_float(o.result) for o in done])
        or _against_gold(task, reply, done, gold_operations(task))
        or _against_question(task, done)
        or Mistake("undecided", "no equation to check, and no gold solution to compare with")
    )


def _form(reply: Reply, gold: float | None) -> Mistake | None:
    if reply.ended is not None:
        return Mistake("format", f"there is no answer: {reply.ended}")
    if reply.prediction is None:
        return Mistake("format", "no answer could be read")
    if gold is not None and to_number(reply.prediction) == gold:
        return Mistake("format", f"the answer, {reply.prediction}, is right, but not in the form that counts")
    return None


def _not_reported(task: Task, reply: Reply, gold: float | None, results: Sequence[float]) -> Mistake | None:
    """The right answer was found, and another one is read. Where nothing is computed, it must be new in the text."""
    if gold is None or reply.prediction is None or to_number(reply.prediction) is None:
        return None
    if results and results[-1] == gold:
        return Mistake("format", f"{gold:g}, the right answer, was computed last, and {reply.prediction} answered")
    new = set(map(to_float, numbers(reply.text))) - set(map(to_float, numbers(question_of(task))))
    if not results and gold in new:
        rule = f"the right answer, {gold:g}, is in the text, but {reply.prediction} was read as the answer"
        return Mistake("format", rule)
    return None


def _calculation(text: str) -> Mistake | None:
    false = next((e for e in equations(text) if not e.true), None)
    return None if false is None else Mistake("calculation", f"{false.text} is written; it is {shown(false.value)}")


def _against_gold(task: Task, reply: Reply, done: Sequence[Operation], gold: Sequence[Operation]) -> Mistake | None:
    if not gold:
        return None
    said = None if reply.prediction is None else to_number(reply.prediction)
    results = [to_float(o.result) for o in gold]
    if said is not None and said in results[:-1]:
        step = results.index(said) + 1
        rule = f"{said:g} answers step {step} of {len(gold)} of the gold solution: a part of what was asked"
        return Mistake("comprehension", rule)
    if not done:
        return Mistake("reasoning", f"no step is written; the gold solution has {len(gold)}")
    asked = set(numbers(question_of(task)))
    if (found := _numbers_used(done, asked, {n for o in gold for n in (o.left, o.right)} & asked)) is not None:
        return found
    return _operations_differ(done, gold)


def _numbers_used(done: Sequence[Operation], asked: set[Fraction], needed: set[Fraction]) -> Mistake | None:
    """A number made up, or one of the question that the gold solution needs left out."""
    used = [n for o in done for n in (o.left, o.right)]
    results = {o.result for o in done}
    invented = next((n for n in used if n not in asked | results | EXPLAINED and n * 100 not in asked), None)
    if invented is not None:
        return Mistake("comprehension", f"{shown(invented)} is neither in the question nor the result of a step")
    left_out = sorted(needed - {*used, *results, *(n * 100 for n in used)} - EXPLAINED)
    if left_out:
        return Mistake("comprehension", f"{shown(left_out[0])}, which the gold solution needs, is never used")
    return None


def _operations_differ(done: Sequence[Operation], gold: Sequence[Operation]) -> Mistake:
    results = {o.result for o in gold}
    other = next((o for o in done if o.result not in results), None)
    if other is None:
        missing = next((o for o in gold if o.result not in {d.result for d in done}), gold[-1])
        return Mistake("reasoning", f"the gold solution's {missing} is missing")
    for one in gold:
        if {one.left, one.right} == {other.left, other.right}:
            return Mistake("reasoning", f"{other} is computed where the gold solution has {one}")
    return Mistake("reasoning", f"{other} is no step of the gold solution")


def _against_question(task: Task, done: Sequence[Operation]) -> Mistake | None:
    """Without a gold solution: every equation is true, so either a number or the plan is wrong."""
    if not done:
        return None
    asked = set(numbers(question_of(task)))
    if asked and (found := _numbers_used(done, asked, set())) is not None:
        return found
    return Mistake("reasoning", "every written equation is true, and the answer is wrong")
