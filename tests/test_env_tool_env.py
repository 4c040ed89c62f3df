# SPDX-License-Identifier: Apache-2.0
"""The environment of tools."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from palestra.chat.toolcalls import parse_reply
from palestra.env import ArithmeticToolEnv, Observation, StepResult, ToolEnv, make_env, tool
from palestra.env.base import Action, Env
from palestra.errors import ConfigError
from palestra.types import Message, Task

TASK = Task("t", "What is 3+4?", 7)
RAN: list[str] = []


def note(word: str) -> str:
    RAN.append(word)
    return word


@pytest.fixture(autouse=True)
def _nothing_ran_yet() -> None:
    RAN.clear()


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def act(env: Env, *calls: dict[str, Any], **fields: Any) -> StepResult:
    message: Message = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = list(calls)
    result: Any = env.step(Action(message, "", **fields))
    done: StepResult = asyncio.run(result)
    return done


def said(env: Env, text: str, finish_reason: str = "eos") -> StepResult:
    """A turn of the model, read the way the chat renderer reads it."""
    parsed = parse_reply(text)
    action = Action(parsed.message(), text, malformed=parsed.malformed, finish_reason=finish_reason)
    result: Any = env.step(action)
    done: StepResult = asyncio.run(result)
    return done


def contents(result: StepResult) -> list[str]:
    return [m["content"] for m in result.observation.messages]


def test_the_first_observation_has_the_task_the_system_text_and_the_schemas() -> None:  # et-015
    class Files(ToolEnv):
        def reset(self, task: Task, *, seed: int) -> Observation:
            shown = super().reset(task, seed=seed)
            return Observation((*shown.messages, {"role": "user", "content": "Task: list the files"}), shown.tools)

    shown = Files([note], system="You are an agent.").reset(TASK, seed=0)
    assert [m["content"] for m in shown.messages] == ["You are an agent.", "What is 3+4?", "Task: list the files"]
    assert [t["function"]["name"] for t in shown.tools] == ["note"]


def test_a_system_message_of_the_task_is_kept_behind_the_environments() -> None:
    task = Task("t", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}))
    shown = ToolEnv([note], system="Use tools.").reset(task, seed=0)
    assert [m["content"] for m in shown.messages] == ["Use tools.\n\nBe brief.", "?"]


def test_a_message_without_calls_is_the_final_answer() -> None:
    result = said(ToolEnv([note]), "The answer is 7.")
    assert (result.terminated, result.truncated, result.tool_calls) == (True, False, 0)


def test_an_answer_cut_by_the_length_limit_is_truncation() -> None:
    result = said(ToolEnv([note]), "The answer is", finish_reason="length")
    assert (result.terminated, result.truncated) == (False, True)


def test_results_answer_their_calls_in_order() -> None:
    result = act(ArithmeticToolEnv(), call("add", 0, a=3, b=4), call("divide", 1, a=1, b=4))
    assert result.observation.messages == (
        {"role": "tool", "tool_call_id": "call0", "name": "add", "content": "7"},
        {"role": "tool", "tool_call_id": "call1", "name": "divide", "content": "0.25"},
    )
    assert result.tool_calls == 2
    assert not result.terminated


def test_a_division_by_zero_is_seen_and_the_episode_goes_on() -> None:  # et-004
    env = ArithmeticToolEnv()
    result = act(env, call("divide", a=1, b=0))
    assert "ZeroDivisionError" in contents(result)[0]
    assert (result.terminated, result.truncated, result.tool_failure) == (False, False, None)
    assert result.info == {"tool_errors": 1}
    assert contents(act(env, call("add", a=1, b=0))) == ["1"]


def test_whole_numbers_are_shown_without_a_point() -> None:
    env = ArithmeticToolEnv()
    calls = [
        call("subtract", a=5, b=5),
        call("multiply", a=2.5, b=2),
        call("divide", a=7, b=2),
        call("add", a=1e300, b=0),
    ]
    assert contents(act(env, *calls)) == ["0", "5", "3.5", "1e+300"]


def test_calls_beyond_the_limit_do_not_run() -> None:  # et-001
    env = ToolEnv([note])
    result = act(env, *(call("note", i, word=str(i)) for i in range(3)), max_tool_calls=2)
    assert RAN == ["0", "1"]
    assert result.tool_calls == 2
    assert "limit" in contents(result)[2]
    assert "not executed" in contents(result)[2]
    assert act(env, call("note", word="x"), max_tool_calls=0).tool_calls == 0
    assert RAN == ["0", "1"]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "note", "arguments": {"word": 1, "b": </tool_call>',  # et-009
        '<tool_call>{"name": "note", "arguments": {"word": "/"}</tool_call>',  # et-010
        '<tool_call>{"name": "note", "arguments": {"word": "a"}}</tool_call><tool_call>{</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_is_reported_and_nothing_runs(text: str) -> None:
    result = said(ToolEnv([note]), text)
    (message,) = result.observation.messages
    assert message["role"] == "tool"
    assert "JSON" in message["content"]
    assert (RAN, result.tool_calls) == ([], 0)
    assert (result.terminated, result.truncated) == (False, False)


def test_a_call_cut_by_the_length_limit_never_runs() -> None:  # et-011
    result = said(ToolEnv([note]), '<tool_call>{"name": "note", "arguments": {"word": "abc', finish_reason="length")
    assert (RAN, result.tool_calls, result.truncated) == ([], 0, True)
    assert "length limit" in contents(result)[0]


def test_an_unknown_tool_is_an_observation() -> None:  # et-019
    result = act(ToolEnv([note]), call("noet"))
    assert "noet" in contents(result)[0]
    assert "did you mean 'note'" in contents(result)[0]
    assert (result.tool_calls, result.terminated) == (0, False)


async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slow {seconds}"


def blocking(seconds: float) -> str:
    time.sleep(seconds)
    return f"blocking {seconds}"


def test_parallel_results_follow_the_order_of_the_calls() -> None:  # et-012
    """The first call ends only when the second has run: one after the other, it would time out."""
    second_ran = asyncio.Event()

    async def first() -> str:
        await second_ran.wait()
        return "first"

    async def second() -> str:
        second_ran.set()
        return "second"

    calls = (call("first", 0), call("second", 1))
    assert contents(act(ToolEnv([first, second], parallel=True), *calls)) == ["first", "second"]


@pytest.mark.parametrize("parallel", [False, True])
def test_plain_and_async_tools_mix_without_reordering(parallel: bool) -> None:  # et-025
    env = ToolEnv([slow, blocking], parallel=parallel)
    result = act(env, call("slow", 0, seconds=0.03), call("blocking", 1, seconds=0.02), call("slow", 2, seconds=0.01))
    assert [m["tool_call_id"] for m in result.observation.messages] == ["call0", "call1", "call2"]
    assert contents(result) == ["slow 0.03", "blocking 0.02", "slow 0.01"]


def test_a_function_that_hangs_is_an_observation() -> None:  # et-006
    result = act(ToolEnv([slow], timeout_s=0.05), call("slow", seconds=60))
    assert "timed out after 0.05 s" in contents(result)[0]
    assert result.tool_failure is None


class Counter(ToolEnv):
    """Counts; its tools are methods."""

    def __init__(self, timeout_s: float = 1.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self.count = 0

    @tool
    def increase(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: how far
        """
        self.count += by
        return self.count

    @tool
    async def hang(self) -> None:
        await asyncio.sleep(60)

    def secret(self) -> str:
        return "not a tool"


def test_marked_methods_are_tools_of_their_episode() -> None:
    one, other = Counter(), Counter()
    names = [t["function"]["name"] for t in one.reset(TASK, seed=0).tools]
    assert names == ["increase", "hang"]
    assert contents(act(one, call("increase", by=2), call("increase", 1))) == ["2", "3"]
    assert other.count == 0


def test_a_method_that_hangs_ends_its_environment() -> None:
    env = Counter(timeout_s=0.05)
    result = act(env, call("hang"), call("increase", 1))
    assert "timed out" in (result.tool_failure or "")
    assert env.count == 0
    assert result.tool_calls == 1


def test_static_and_class_methods_are_tools_in_either_order_of_the_decorators() -> None:
    class Many(ToolEnv):
        name = "many"

        @staticmethod
        @tool
        def a(x: int) -> int:
            return x + 1

        @tool
        @staticmethod
        def b(x: int) -> int:
            return x + 2

        @classmethod
        @tool
        def c(cls, x: int) -> str:
            return f"{cls.name}{x}"

        @tool
        @classmethod
        def d(cls, x: int) -> str:
            return f"{cls.name}{x}"

        @staticmethod
        def unmarked(x: int) -> int:
            return x

    env = Many()
    assert list(env.tools) == ["a", "b", "c", "d"]
    assert contents(act(env, *(call(name, x=1) for name in "abcd"))) == ["2", "3", "many1", "many1"]
    assert [env.tools[name].stateful for name in "abcd"] == [False, False, True, True]


def test_mistakes_of_configuration_are_told_at_construction() -> None:
    with pytest.raises(ConfigError, match="without tools"):
        ToolEnv()
    with pytest.raises(ConfigError, match="same name"):
        ToolEnv([note, note])
    with pytest.raises(ConfigError, match="give a list"):
        ToolEnv("math:gcd")
    with pytest.raises(ConfigError, match="timeout_s > 0"):
        ToolEnv([note], timeout_s=0)
    for endless in (float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="finite"):
            ToolEnv([note], timeout_s=endless)


def test_tools_can_be_named_in_a_config() -> None:
    env = make_env("tool_env", tools=["palestra.env.arithmetic:add"])()
    assert contents(act(env, call("add", a=3, b=4))) == ["7"]
