# SPDX-License-Identifier: Apache-2.0
"""How an episode with tools ends: what cut a reply has its name, and hung calls stay within the step's time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.chat.base import Parsed, Rendered
from palestra.chat.plain import PlainRenderer
from palestra.chat.toolcalls import parse_reply
from palestra.engine.scripted import ScriptedEngine
from palestra.env import ToolEnv, tool
from palestra.env.base import Action, StepResult
from palestra.model.testing import ByteTokenizer
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.rollout.journal import FILE, Clock, Journal
from palestra.types import Episode, Message, StopReason, Task

TASK = Task("t", "What is 3+4?", 7)
PROMPT = 1 + len(TASK.messages()[0]["content"])  # bos, then a token a byte


class Bytes(PlainRenderer):
    """Raw text, a token a byte, whose replies are read for tool calls; the schemas are not shown."""

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> Rendered:
        return super().render(messages)

    def bridge_to_next_turn(self, prompt: Any, completion: Any, messages: Any, *, tools: Any = None) -> Rendered:
        return super().bridge_to_next_turn(prompt, completion, messages)

    def parse_response(self, token_ids: Sequence[int]) -> Parsed:
        return parse_reply(super().parse_response(token_ids).content)


async def hang(name: str) -> str:
    await asyncio.sleep(60)
    return name


def add(a: int, b: int) -> int:
    return a + b


def called(*calls: tuple[str, Mapping[str, Any]]) -> str:
    said = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "".join(f"<tool_call>{call}</tool_call>" for call in said)


def play(
    env: ToolEnv,
    *script: str,
    max_context: int = 4096,
    max_new_tokens: int = 1024,
    clock: Clock | None = None,
    **limits: Any,
) -> Episode:
    tokenizer = ByteTokenizer()
    work = run_episode(
        TASK,
        env=env,
        engine=ScriptedEngine(script, tokenizer, max_context=max_context),
        renderer=Bytes(tokenizer),
        limits=Limits(**limits),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
        seed=0,
        clock=clock,
    )
    return asyncio.run(asyncio.wait_for(work, 60))


# What cut a reply ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", ["It is surely 7, I think.", called(("add", {"a": 3, "b": 4}))], ids=["answer", "call"]
)
@pytest.mark.parametrize(
    ("room", "reason"),
    [
        ({"max_context": PROMPT + 20}, StopReason.CONTEXT),
        ({"max_tokens": 20}, StopReason.MAX_TOKENS),
        ({"max_new_tokens": 20}, StopReason.ENV_TRUNCATED),
        ({"max_context": PROMPT + 20, "max_tokens": 20}, StopReason.CONTEXT),
    ],
    ids=["context", "episode", "turn", "context and episode"],
)
def test_a_reply_that_is_cut_ends_the_episode_by_the_name_of_what_cut_it(
    room: dict[str, int], reason: StopReason, reply: str
) -> None:
    episode = play(ToolEnv([add]), reply, **room)
    (turn,) = episode.trajectories[0].turns
    assert (turn.sampled_tokens, turn.finish_reason, turn.tool_calls) == (20, "length", 0)
    assert (episode.stop, episode.info["stop"], episode.error) == (reason, reason.value, None)


@pytest.mark.parametrize("room", [{"max_context": PROMPT + 2}, {"max_tokens": 2}], ids=["context", "episode"])
def test_a_reply_that_just_fits_is_an_answer(room: dict[str, int]) -> None:
    episode = play(ToolEnv([add]), "7", **room)  # and the end token
    assert episode.stop is StopReason.ENV_TERMINATED
    assert episode.trajectories[0].turns[0].finish_reason == "eos"


def test_the_last_of_several_turns_is_named_by_what_all_of_them_used() -> None:
    call = called(("add", {"a": 3, "b": 4}))
    episode = play(ToolEnv([add]), call, "It is surely 7.", max_tokens=len(call) + 1 + 5)
    first, last = episode.trajectories[0].turns
    assert (first.tool_calls, last.sampled_tokens, episode.stop) == (1, 5, StopReason.MAX_TOKENS)


# A turn's time ---------------------------------------------------------------------------------------------


def act(env: ToolEnv, calls: Sequence[tuple[str, Mapping[str, Any]]], budget_s: float | None) -> StepResult:
    message = parse_reply(called(*calls)).message()
    return asyncio.run(env.step(Action(message, "", step_budget_s=budget_s)))


def contents(result: StepResult) -> list[str]:
    return [m["content"] for m in result.observation.messages]


STOPPED = "Error: tool hang was stopped, the turn's time is over"
NOT_EXECUTED = "Error: not executed, the turn's time is over"


def test_calls_that_the_turns_time_leaves_over_are_not_executed_and_answered_in_call_order() -> None:
    """0.6 s hold one call of 0.4 s, half of the next, and no other."""
    calls = [("add", {"a": 3, "b": 4}), *(("hang", {"name": n}) for n in "xy"), ("add", {"a": 1, "b": 1})]
    result = act(ToolEnv([add, hang], timeout_s=0.4), calls, 0.6)
    assert contents(result) == ["7", "Error: tool hang timed out after 0.4 s", STOPPED, NOT_EXECUTED]
    assert (result.tool_calls, result.tool_failure, result.info) == (3, None, {"tool_errors": 3})
    assert not result.terminated and not result.truncated


def test_parallel_calls_share_the_turns_time() -> None:
    begin = time.perf_counter()
    result = act(ToolEnv([hang], timeout_s=30, parallel=True), [("hang", {"name": n}) for n in "xyz"], 0.2)
    assert contents(result) == [STOPPED] * 3
    assert time.perf_counter() - begin < 10


def test_without_a_limit_of_the_step_every_call_has_its_own_time() -> None:
    result = act(ToolEnv([hang], timeout_s=0.1), [("hang", {"name": n}) for n in "xyz"], None)
    assert contents(result) == ["Error: tool hang timed out after 0.1 s"] * 3


def test_a_method_that_the_turns_time_stops_ends_its_environment() -> None:
    class Shop(ToolEnv):
        @tool
        async def hang(self, name: str) -> str:
            return await hang(name)

    result = act(Shop(timeout_s=30), [("hang", {"name": "x"})], 0.1)
    assert result.tool_failure == "tool hang was stopped, the turn's time is over"


def test_hung_calls_of_a_turn_leave_the_model_a_next_one() -> None:
    """Four of 0.8 s in a step of 2 s, of which an environment is told 1.8 s."""
    calls = called(*(("hang", {"name": n}) for n in "wxyz"))
    episode = play(ToolEnv([hang], timeout_s=0.8), calls, "I give up.", step_timeout_s=2.0)
    assert (episode.stop, episode.error) == (StopReason.ENV_TERMINATED, None)
    first, last = episode.trajectories[0].turns
    timed_out = "Error: tool hang timed out after 0.8 s"
    assert [m["content"] for m in last.observation] == [timed_out, timed_out, STOPPED, NOT_EXECUTED]
    assert (first.tool_calls, first.info) == (3, {"tool_errors": 4})


def test_a_call_that_the_turns_time_stopped_is_seen_to_be_so_again(tmp_path: Path) -> None:
    """Its own time would be longer than the step's; when the step is played again it would answer at once."""
    waits = 60.0

    async def hang() -> str:
        await asyncio.sleep(waits)
        return "done"

    def attempt() -> Sequence[Message]:
        journal = Journal(tmp_path / FILE)
        clock = journal.clock("train", 0, TASK.id, 0)
        episode = play(ToolEnv([hang], timeout_s=30), called(("hang", {})), "Well.", step_timeout_s=1.0, clock=clock)
        return episode.trajectories[0].turns[1].observation

    first, waits = attempt(), 0.0
    assert [m["content"] for m in first] == [STOPPED] and attempt() == first
    (tmp_path / FILE).unlink()
    assert [m["content"] for m in attempt()] == ["done"]


def test_an_environment_is_told_a_tenth_less_than_the_limit_and_at_most_two_seconds() -> None:
    assert [round(Limits(step_timeout_s=s).step_budget_s, 9) for s in (1.0, 20.0, 120.0)] == [0.9, 18.0, 118.0]


# After a failure -------------------------------------------------------------------------------------------


def test_nothing_runs_after_a_fatal_call_however_many_calls_are_left() -> None:
    class Counter(ToolEnv):
        count = 0

        @tool
        async def hang(self) -> None:
            await asyncio.sleep(60)

        @tool
        def increase(self) -> int:
            self.count += 1
            return self.count

    env = Counter(timeout_s=0.05)
    result = act(env, [("hang", {}), *[("increase", {})] * 3], None)
    assert (env.count, result.tool_calls) == (0, 1)
    assert contents(result)[1:] == ["Error: not executed after the failure."] * 3


def test_a_call_may_not_outlast_the_step_it_is_part_of() -> None:
    from palestra.errors import ConfigError
    from palestra.train.config import RLConfig
    from palestra.train.setup import load, make_world

    plain = {
        "model": "builtin:calculator",
        "renderer": "plain",
        "data": "arithmetic",
        "rewards": {"calculator_format": 1.0},
    }
    env = {"name": "calculator_tools", "timeout_s": 5}
    config = RLConfig.model_validate(plain | {"env": env, "limits": {"step_timeout_s": 4}})
    with pytest.raises(ConfigError, match=r"env.timeout_s is 5 and limits.step_timeout_s 4: a call would outlast"):
        make_world(config, load(config.model))
    make_world(RLConfig.model_validate(plain | {"env": env, "limits": {"step_timeout_s": 5}}), load(config.model))
