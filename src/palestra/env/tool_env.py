# SPDX-License-Identifier: Apache-2.0
"""An environment of tools: the model calls functions until it answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.env.base import ENVS, Action, Observation, StepResult
from palestra.env.tools import MAX_RESULT_CHARS, TIMEOUT_S, Tool, ToolResult, execute, tool_methods
from palestra.errors import ConfigError
from palestra.types import Message, Task

GRACE_S = 1.0
"""How long a tool that timed out may take to end."""
TICK_S = 0.01
"""With less of a turn's time left no call is begun."""
TIME_IS_OVER = "the turn's time is over"


@ENVS.register("tool_env")
class ToolEnv:
    """Functions as tools; a message without calls is the final answer and ends the episode.

    tools: functions, or ``"module:function"`` paths. A subclass adds its public methods that are marked
    :func:`~palestra.env.tools.tool`; it overrides :meth:`reset` to set up its state. system: text of a system
    message. timeout_s: per call. max_result_chars: longer results are cut, with a marker. parallel: the calls of
    a turn run at the same time; results keep the order of the calls either way.

    Errors are observations: an unknown tool, wrong arguments, an exception, a timeout of a function, calls that
    cannot be read (then none of the turn's calls runs), calls beyond the episode's limit (which do not run). A
    timeout inside a method is different: the object may be half-changed, so the step reports ``tool_failure``; so
    does one of an async function that does not even end when it is cancelled.
    The calls of a turn stay within the step's time together: the one that meets its end is stopped, which is a timeout
    like any other, and those behind it do not run.
    A turn that the length limit cut before a complete call or answer ends the episode as truncated.

    >>> def add(a: int, b: int) -> int: return a + b
    >>> env = ToolEnv([add])
    >>> shown = env.reset(Task("t", "3+4?"), seed=0)
    >>> call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    >>> action = Action({"role": "assistant", "content": "", "tool_calls": [call]}, "…")
    >>> asyncio.run(env.step(action)).observation.messages
    ({'role': 'tool', 'tool_call_id': 'c', 'name': 'add', 'content': '7'},)
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str] = (),
        system: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        parallel: bool = False,
    ) -> None:
        if isinstance(tools, str):
            raise ConfigError(f"tools is the text {tools!r}; give a list")
        if not 0 < timeout_s < math.inf or max_result_chars < 1:
            raise ConfigError("a tool environment needs timeout_s > 0, finite, and max_result_chars >= 1")
        made = [Tool.of(function) for function in (*tools, *tool_methods(self))]
        if not made:
            raise ConfigError("a tool environment without tools: give tools=[…] or mark methods with @tool")
        self.tools: dict[str, Tool] = {item.name: item for item in made}
        if len(self.tools) < len(made):
            raise ConfigError(f"two tools have the same name: {', '.join(sorted(t.name for t in made))}")
        self.system = system
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self.parallel = parallel

    def reset(self, task: Task, *, seed: int) -> Observation:
        messages = list(task.messages())
        if self.system:
            own: Message = {"role": "system", "content": self.system}
            if messages[0].get("role") == "system":
                own["content"] += f"\n\n{messages.pop(0).get('content', '')}"
            messages.insert(0, own)
        return self._shown(messages)

    async def step(self, action: Action) -> StepResult:
        cut_off = action.finish_reason == "length"
        if action.malformed is not None:
            why = " (the reply was cut by the length limit)" if cut_off else ""
            text = f"Error: {action.malformed}{why}. No call of this turn was executed."
            return StepResult(
                self._shown([{"role": "tool", "content": text}]), truncated=cut_off, info={"tool_errors": 1}
            )
        calls = action.message.get("tool_calls") or []
        if not calls:
            return StepResult(self._shown(()), terminated=not cut_off, truncated=cut_off)
        allowed = len(calls) if action.max_tool_calls is None else max(action.max_tool_calls, 0)
        budget_s = math.inf if action.step_budget_s is None else action.step_budget_s
        results = await self._run(calls[:allowed], time.monotonic() + budget_s)
        refused = "Error: the limit of tool calls is reached; this call was not executed."
        results += [ToolResult(refused, ran=False, failed=True)] * (len(calls) - len(results))
        return StepResult(
            self._shown([_reply(call, result) for call, result in zip(calls, results, strict=True)]),
            tool_calls=sum(result.ran for result in results),
            tool_failure=next((result.fatal for result in results if result.fatal), None),
            info={"tool_errors": sum(result.failed for result in results)},
        )

    async def _run(self, calls: Sequence[Mapping[str, Any]], deadline: float) -> list[ToolResult]:
        """The results in call order; after a fatal one the rest of a sequence is not started."""
        if self.parallel:
            return list(await asyncio.gather(*(self._execute(call, deadline) for call in calls)))
        results: list[ToolResult] = []
        for call in calls:
            if any(result.fatal for result in results):
                results.append(ToolResult("Error: not executed after the failure.", ran=False, failed=True))
            else:
                results.append(await self._execute(call, deadline))
        return results

    async def _execute(self, call: Mapping[str, Any], deadline: float) -> ToolResult:
        """One call, and its end whatever the tool does: an async one may cancel itself, or refuse to be cancelled."""
        left = deadline - time.monotonic()
        if left < TICK_S:
            await asyncio.sleep(left)  # a step that a clock decided lasts as long as that clock says
            return ToolResult(f"Error: not executed, {TIME_IS_OVER}", ran=False, failed=True)
        work = asyncio.ensure_future(execute(call, self.tools, self.timeout_s, self.max_result_chars))
        stopped = False
        try:
            await asyncio.wait({work}, timeout=min(left, self.timeout_s + GRACE_S))
            if not work.done() and left < self.timeout_s + GRACE_S:
                stopped = work.cancel()
                await asyncio.wait({work}, timeout=GRACE_S)
        finally:
            work.cancel()
        name = call["function"]["name"]
        if not work.done():
            said = f"tool {name} timed out after {min(left, self.timeout_s):g} s and does not end"
            return ToolResult(f"Error: {said}", failed=True, fatal=said)
        if work.cancelled() and stopped:
            said = f"tool {name} was stopped, {TIME_IS_OVER}"
            return ToolResult(f"Error: {said}", failed=True, fatal=said if self.tools[name].stateful else None)
        if work.cancelled():
            return ToolResult(f"Error: tool {name} was cancelled from inside", failed=True)
        return work.result()

    def _shown(self, messages: Sequence[Message]) -> Observation:
        return Observation(tuple(messages), tools=tuple(item.schema for item in self.tools.values()))


def _reply(call: Mapping[str, Any], result: ToolResult) -> Message:
    return {
        "role": "tool",
        "tool_call_id": str(call["id"]),
        "name": str(call["function"]["name"]),
        "content": result.text.encode("utf-8", "replace").decode(),  # a lone surrogate has no tokens
    }
