# SPDX-License-Identifier: Apache-2.0
"""How a group is scored: one call by keyword, checked values, failures counted, environment pay added."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from palestra.errors import ConfigError, RewardError
from palestra.reward.build import make_rubric, weighted
from palestra.reward.gates import Gate
from palestra.reward.rubric import REWARD_ERRORS, Rubric, mean_scored
from palestra.reward.worker import RewardTimeout, Worker
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

TASK = Task("t1", "2+2?", "4", {"level": "easy"})


def trajectory(*texts: str, paid: dict[str, float] | None = None, agent: str = "agent") -> Trajectory:
    turns = []
    for i, text in enumerate(texts):
        said = Span(np.arange(len(text)), Author.MODEL, "assistant", text, logprobs=np.zeros(len(text)), version=0)
        seen: tuple[Message, ...] = ({"role": "tool" if i else "user", "content": f"seen{i}"},)
        action: Message = {"role": "assistant", "content": text}
        turns.append(Turn((Span([7], Author.ENV, "user", "seen"), said), seen, action, "stop", rewards=paid or {}))
    return Trajectory(tuple(turns), StopReason.ENV_TERMINATED, agent=agent)


def group(*texts: str) -> Group:
    return Group(TASK, 0, tuple(Episode(TASK, (trajectory(t),), member=i) for i, t in enumerate(texts)))


def score(rubric: Rubric, scored: Group) -> Group:
    return asyncio.run(rubric.score(scored))


def values(scored: Group, name: str) -> list[float | None]:
    return [e.trajectories[0].rewards[name].value for e in scored.episodes]


def test_a_function_is_called_once_by_keyword_with_the_columns_of_the_task() -> None:
    seen: list[dict[str, Any]] = []

    def spy(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        return [0.25, 0.75]

    scored = score(Rubric({"spy": (spy, 2.0)}, chat=False), group("a", "bc"))
    assert len(seen) == 1
    assert seen[0]["prompts"] == ["2+2?", "2+2?"]
    assert seen[0]["completions"] == ["a", "bc"]
    assert seen[0]["answer"] == seen[0]["ground_truth"] == ["4", "4"]
    assert seen[0]["task_id"] == ["t1", "t1"]
    assert seen[0]["level"] == ["easy", "easy"]
    assert seen[0]["completion_ids"] == [[0], [0, 1]]
    assert [e.reward for e in scored.episodes] == [0.5, 1.5]


def test_a_function_without_kwargs_gets_only_what_it_asks_for_and_a_missing_column_is_named() -> None:
    def by_level(completions: list[str], level: list[str]) -> list[float]:
        return [float(x == "easy") for x in level]

    assert values(score(Rubric({"f": (by_level, 1.0)}, chat=False), group("a", "b")), "f") == [1.0, 1.0]

    def by_solution(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0 for _ in solution]

    with pytest.raises(RewardError, match=r"'g' asks for a column 'solution'.*answer"):
        score(Rubric({"g": (by_solution, 1.0)}, chat=False), group("a"))


def test_chat_functions_written_for_trl_get_message_lists() -> None:
    def trl_format(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [1.0 if c[0]["content"].startswith("a") else 0.0 for c in completions]

    seen: list[Any] = []

    def shape(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.extend([prompts, [[m["role"] for m in c] for c in completions]])
        return [0.0]

    two_turns = Group(TASK, 0, (Episode(TASK, (trajectory("a", "b"),)),))
    scored = score(Rubric({"format": (trl_format, 1.0), "shape": (shape, 1.0)}, chat=True), two_turns)
    assert values(scored, "format") == [1.0]
    assert seen == [[[{"role": "user", "content": "seen0"}]], [["assistant", "tool", "assistant"]]]


def test_async_functions_are_awaited() -> None:
    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    assert values(score(Rubric({"judge": (judge, 1.0)}, chat=False), group("a", "bc")), "judge") == [1.0, 2.0]


def test_a_slow_plain_function_does_not_hold_up_the_event_loop() -> None:
    threads: set[str] = set()

    def slow(completions: list[str], **_: Any) -> list[float]:
        threads.add(threading.current_thread().name)
        time.sleep(0.2)
        return [0.0]

    async def both() -> int:
        ticks = 0
        task = asyncio.create_task(Rubric({"slow": (slow, 1.0)}, chat=False).score(group("a")))
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(both()) >= 5
    assert threads == {"palestra-reward"}


def returning(value: Any) -> Rubric:
    return Rubric({"mine": (lambda completions: value, 1.0)}, chat=False)


def test_a_wrong_count_names_the_function_and_both_numbers_rw_002() -> None:
    with pytest.raises(ValueError, match="'mine' returned 3 values for 4 completions"):
        score(returning([1.0, 0.0, 1.0]), group(*"abcd"))


@pytest.mark.parametrize("value", [{"a": 1.0, "b": 0.0, "c": 1.0}, "abc", 1.0, None, {1.0, 2.0, 3.0}, ["1", "2", "3"]])
def test_something_else_than_a_list_of_numbers_is_a_type_error_rw_003(value: Any) -> None:
    with pytest.raises(TypeError, match="'mine'"):
        score(returning(value), group(*"abc"))


def test_an_infinite_reward_is_refused_rw_006() -> None:
    with pytest.raises(ValueError, match="finite"):
        score(returning([1.0, float("inf")]), group(*"ab"))


def test_none_and_nan_abstain_and_numpy_numbers_are_numbers() -> None:
    scored = score(returning(np.array([1.0, float("nan"), 0.5])), group(*"abc"))
    assert values(scored, "mine") == [1.0, None, 0.5]
    assert [e.reward for e in scored.episodes] == [1.0, None, 0.5]
    assert len(scored.scored) == 2


def test_the_logged_mean_skips_what_was_not_scored_rw_005() -> None:
    assert mean_scored([0.25, None, 0.75, None, 0.5, 0.9]) == pytest.approx(0.6)
    assert mean_scored([None, float("nan")]) is None


def test_one_failing_completion_gets_none_and_is_counted_rw_016() -> None:
    def fragile(completions: list[str], **_: Any) -> list[float]:
        if "c" in completions:
            raise RuntimeError("scorer\nbroke")
        return [0.0 if c == "b" else 1.0 for c in completions]

    rubric = Rubric({"fragile": (fragile, 1.0)}, chat=False, on_error="exclude")
    assert values(score(rubric, group(*"abcd")), "fragile") == [1.0, 0.0, None, 1.0]
    assert rubric.errors == {"fragile": 1}
    assert rubric.last_error == {"fragile": "RuntimeError: scorer broke"}
    with pytest.raises(RuntimeError):
        score(Rubric({"fragile": (fragile, 1.0)}, chat=False, on_error="raise"), group(*"abcd"))


def test_what_the_environment_pays_is_summed_over_turns_and_added() -> None:
    paid = Episode(TASK, (trajectory("a", "b", paid={"env": 0.5, "tool": 0.1}),))
    unpaid = Episode(TASK, (trajectory("a"),))
    rubric = make_rubric({"mine": 1.0, "env": 0.5}, chat=False, functions={"mine": lambda completions: [1.0, 0.0]})
    first, second = score(rubric, Group(TASK, 0, (paid, unpaid))).episodes
    assert first.trajectories[0].rewards == {
        "env": RewardTerm(1.0, 0.5),
        "tool": RewardTerm(0.2, 1.0),
        "mine": RewardTerm(1.0, 1.0),
    }
    assert second.trajectories[0].rewards["env"] == RewardTerm(0.0, 0.5)  # paid nothing: zero, not unscored
    assert first.reward == pytest.approx(1.7)


def test_without_functions_an_episode_that_was_paid_nothing_scores_zero() -> None:
    assert [e.reward for e in score(make_rubric(None, chat=False), group("a")).episodes] == [0.0]


def test_a_part_cannot_be_paid_twice() -> None:
    paid = Group(TASK, 0, (Episode(TASK, (trajectory("a", paid={"mine": 1.0}),)),))
    with pytest.raises(RewardError, match="'mine'"):
        score(returning([1.0]), paid)


def test_an_episode_with_an_error_is_not_scored_and_keeps_its_place() -> None:
    broken = Episode(TASK, (trajectory("a"),), error="engine stopped", member=1)
    mixed = Group(TASK, 3, (Episode(TASK, (trajectory("b"),)), broken))
    scored = score(returning([1.0]), mixed)
    assert [e.reward for e in scored.episodes] == [1.0, None]
    assert scored.episodes[1] is not mixed.episodes[0]
    assert scored.id == "3:t1"
    assert mixed.episodes[0].reward is None  # values: the group that was given is unchanged


def test_a_group_of_errors_only_calls_no_function() -> None:
    broken = Group(TASK, 0, (Episode(TASK, error="x"),))
    assert score(returning("never looked at"), broken).scored == ()


def test_each_agent_is_scored_apart_and_a_rewritten_context_shares_one_score() -> None:
    episode = Episode(TASK, (trajectory("a"), trajectory("bb", agent="critic"), trajectory("ccc")))
    rubric = Rubric({"size": (lambda completions: [float(len(c)) for c in completions], 1.0)}, chat=False)
    scored = score(rubric, Group(TASK, 0, (episode,))).episodes[0]
    assert [t.rewards["size"].value for t in scored.trajectories] == [3.0, 2.0, 3.0]


def test_a_column_that_hides_one_of_ours_is_refused() -> None:
    task = Task("t", "?", None, {"completions": "x"})
    with pytest.raises(RewardError, match="'completions'"):
        score(returning([1.0]), Group(task, 0, (Episode(task, (trajectory("a"),)),)))


def test_make_rubric_refuses_what_it_cannot_read() -> None:
    for rewards, words in [
        ({"acuracy": 1.0}, "did you mean 'accuracy'"),
        ({"accuracy": "much"}, "one finite number"),
        ({"accuracy": {"weight": 1.0, "target": 5}}, "takes no option 'target'"),
        ({"length_penalty": {"traget": 5}}, "did you mean 'target'"),
        ({"soft_overlong": {"max_len": 5}}, "needs the option 'cache'"),
        ({"no.such.module:f": 1.0}, "cannot load"),
        ({"math:pi": 1.0}, "is a float, not a function"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_rubric(rewards, chat=False)  # type: ignore[arg-type]


def test_a_reward_is_found_by_path_and_under_a_name_of_its_own() -> None:
    rubric = make_rubric({"right": {"function": "palestra.reward.functions:accuracy", "weight": 0.5}}, chat=False)
    scored = score(rubric, group("The answer is 4.", "5"))
    assert values(scored, "right") == [1.0, 0.0]
    assert [e.reward for e in scored.episodes] == [0.5, 0.0]


def test_one_weight_for_two_functions_is_an_error_with_both_numbers_cf_009() -> None:
    def a(completions: list[str]) -> list[float]:
        return []

    def b(completions: list[str]) -> list[float]:
        return []

    with pytest.raises(ValueError, match="1 reward weights for 2 reward functions"):
        weighted([a, b], [1.0])
    assert weighted([a, b], [1.0, 0.1]) == {"a": (a, 1.0), "b": (b, 0.1)}


def graded(score_of: dict[str, float | None]) -> Any:
    return lambda completions: [score_of[c] for c in completions]


def test_a_part_behind_a_gate_counts_only_where_the_other_part_passed_and_stays_visible() -> None:
    right = graded({"a": 1.0, "b": 0.0, "c": None})
    rubric = make_rubric(
        {"right": 1.0, "brief": {"weight": 0.5, "gate": "right"}},
        chat=False,
        functions={"right": right, "brief": lambda completions: [0.8] * len(completions)},
    )
    scored = score(rubric, group("a", "b", "c"))
    assert values(scored, "brief") == [0.8, 0.8, 0.8]
    assert [e.trajectories[0].rewards["brief"].weight for e in scored.episodes] == [0.5, 0.0, 0.0]
    assert [e.reward for e in scored.episodes] == [1.4, 0.0, 0.0]


def test_a_gate_may_open_below_one_and_may_be_what_the_environment_pays() -> None:
    paid = Episode(TASK, (trajectory("a", paid={"steps": 0.5}),))
    unpaid = Episode(TASK, (trajectory("b"),))
    rubric = make_rubric(
        {"env/steps": 1.0, "bonus": {"gate": {"part": "env/steps", "at_least": 0.5}}},
        chat=False,
        functions={"bonus": lambda completions: [1.0] * len(completions)},
    )
    assert [e.reward for e in score(rubric, Group(TASK, 0, (paid, unpaid))).episodes] == [1.5, 0.0]


def test_a_part_that_does_not_count_opens_no_gate() -> None:
    one = graded({"a": 1.0, "b": 1.0})
    gates = {"second": Gate("first"), "third": Gate("second")}
    functions = {"first": (graded({"a": 1.0, "b": 0.0}), 1.0), "second": (one, 1.0), "third": (one, 1.0)}
    scored = score(Rubric(functions, chat=False, gates=gates), group("a", "b"))
    assert [e.reward for e in scored.episodes] == [3.0, 0.0]


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ({"accuracy": "brif"}, "did you mean 'brief'"),
        ({"accuracy": "brief", "brief": "accuracy"}, "circle of gates, accuracy → brief → accuracy"),
        ({"brief": "brief"}, "circle"),
        ({"brief": 1}, "name a part"),
        ({"brief": {"part": "accuracy", "above": 1}}, "name a part"),
        ({"brief": {"part": "accuracy", "at_least": "much"}}, "one finite number"),
    ],
)
def test_a_gate_that_cannot_be_is_refused(gates: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_rubric(
            {name: {"gate": gates[name]} if name in gates else 1.0 for name in ("accuracy", "brief")},
            chat=False,
            functions={"brief": lambda completions: []},
        )


def test_an_exception_in_a_completions_place_is_one_failure_and_no_second_call_rw_016() -> None:
    calls: list[int] = []

    def judge(completions: list[str]) -> list[float | Exception | None]:
        calls.append(len(completions))
        return [TimeoutError("no reply") if c == "b" else 1.0 for c in completions]

    rubric = Rubric({"judge": (judge, 1.0)}, chat=False)
    assert values(score(rubric, group(*"abc")), "judge") == [1.0, None, 1.0]
    assert (calls, rubric.errors, rubric.last_error) == ([3], {"judge": 1}, {"judge": "TimeoutError: no reply"})
    with pytest.raises(TimeoutError):
        score(Rubric({"judge": (judge, 1.0)}, chat=False, on_error="raise"), group(*"ab"))


def test_an_episode_that_reads_a_repository_is_paid_turn_by_turn_1_0_in_all() -> None:
    turns = tuple(
        dataclasses.replace(trajectory("x").turns[0], rewards={part: pay})
        for part, pay in (("list", 0.1), ("read", 0.1), ("test", 0.2), ("report", 0.6))
    )
    episode = Episode(TASK, (Trajectory(turns, StopReason.ENV_TERMINATED),))
    (scored,) = score(make_rubric(None, chat=False), Group(TASK, 0, (episode,))).episodes
    assert scored.reward == pytest.approx(1.0)
    assert {n: t.value for n, t in scored.trajectories[0].rewards.items()} == {
        "list": 0.1, "read": 0.1, "test": 0.2, "report": 0.6, "env": 0.0,
    }  # fmt: skip


# Functions that misbehave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async", "async object"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration, SystemExit])
def test_whatever_a_function_raises_costs_its_score_and_not_the_run(kind: str, error: type[BaseException]) -> None:
    def plain(**_: Any) -> Any:
        raise error

    async def later(**_: Any) -> Any:
        raise error

    class Called:
        def __call__(self, **_: Any) -> Any:
            return later()

    function = {"plain": plain, "async": later, "async object": Called()}[kind]
    rubric = Rubric(
        {"bad": (function, 1.0), "good": (lambda completions, **_: [1.0] * len(completions), 1.0)}, chat=False
    )
    scored = score(rubric, group("a", "b"))
    assert [e.trajectories[-1].rewards["good"].value for e in scored.episodes] == [1.0, 1.0]
    assert [e.trajectories[-1].rewards["bad"].value for e in scored.episodes] == [None, None]
    assert rubric.errors["bad"] == 2 and scored.episodes[0].info[REWARD_ERRORS]["bad"].startswith("RuntimeError: ")


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_function_that_hangs_is_given_up_in_time_once_for_the_group_and_others_go_on(kind: str) -> None:
    gone, calls = threading.Event(), []

    def plain(**_: Any) -> Any:
        calls.append(1)
        gone.wait(20)

    async def later(**_: Any) -> Any:
        calls.append(1)
        await asyncio.sleep(20)

    functions = {
        "hung": (plain if kind == "plain" else later, 1.0),
        "good": (lambda completions, **_: [1.0] * len(completions), 1.0),
    }
    rubric = Rubric(functions, chat=False, timeout_s=0.2)
    began = time.monotonic()
    scored = score(rubric, group("a", "b", "c"))
    assert time.monotonic() - began < 5 and len(calls) == 1
    assert [e.trajectories[-1].rewards["good"].value for e in scored.episodes] == [1.0, 1.0, 1.0]
    told = {e.info[REWARD_ERRORS]["hung"] for e in scored.episodes}
    assert told == {"RewardTimeout: no score within 0.2 s (limits.reward_timeout_s)"} and rubric.errors["hung"] == 3
    gone.set()


def test_what_waits_behind_a_function_that_hangs_is_called_when_that_is_given_up() -> None:
    gone, worker = threading.Event(), Worker()

    async def both() -> tuple[Any, ...]:
        hung = worker.call("hung", lambda: gone.wait(20), {}, 0.2)
        behind = worker.call("behind", lambda: 7, {}, 10.0)
        return tuple(await asyncio.gather(hung, behind, return_exceptions=True))

    hung, behind = asyncio.run(both())
    gone.set()
    assert isinstance(hung, RewardTimeout) and behind == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only there the processes of a thread are known")
def test_the_processes_of_a_function_that_is_given_up_are_killed() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def waits(**_: Any) -> Any:
        started.append(subprocess.Popen(["sleep", "30"]))
        started[0].wait()
        return [0.0]

    score(Rubric({"waits": (waits, 1.0)}, chat=False, timeout_s=0.3), group("a"))
    assert started[0].wait(5) == -signal.SIGKILL
