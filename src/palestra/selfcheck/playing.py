# SPDX-License-Identifier: Apache-2.0
"""Known answers about replies with tool calls, tools, and rows of data."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from palestra.chat.toolcalls import openai_calls, openai_tools, parse_reply
from palestra.data.source import Cursor, ListSource
from palestra.data.tables import column
from palestra.env.arithmetic import add, divide, multiply, subtract
from palestra.env.base import Action, StepResult
from palestra.env.tool_env import ToolEnv
from palestra.env.tools import Tool, execute
from palestra.learn.advantage import AdvantageConfig, group_mean
from palestra.learn.batch import Rows, rows
from palestra.registry import Registry
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind, make_sample
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn


def echo(x: str) -> str:
    """Say it again."""
    return x


TOOLS = {t.name: t for t in [Tool.of(f) for f in (add, subtract, multiply, divide, echo)]}


@kind("env_tool", "text")
def of_reply(given: Given) -> dict[str, Any]:
    """A sampled reply in which tool calls stand between tags. → executed (calls that would run),
    observation (why a call cannot be read), raises, truncated, reported_as_malformed"""
    given.get("note")
    parsed = parse_reply(given.text("text"))
    return {
        "executed": len(parsed.tool_calls),
        "observation": parsed.malformed or "",
        "raises": None,
        "truncated": given.get("finish_reason") == "length",
        "reported_as_malformed": parsed.malformed is not None,
    }


@kind("env_tool", "tool", "args")
def of_call(given: Given) -> dict[str, Any]:
    """A call of add, subtract, multiply, divide or echo with its arguments. → observation"""
    name = given.text("tool")
    if name not in TOOLS:
        raise NotData(f"tool {name!r} is described, not given; tools here: {', '.join(TOOLS)}")
    given.get("raises"), given.get("returns")
    call = {"function": {"name": name, "arguments": given.get("args")}}
    result = asyncio.run(execute(call, TOOLS))
    number = result.text.removesuffix(".0")
    return {"observation": number}


@kind("env_tool", "max_tool_calls", "model_requests")
def of_limit(given: Given) -> dict[str, Any]:
    """A limit and how many calls a model asks for in one turn. → executed, third_executed, limit_recorded"""
    limit, asked = given.integer("max_tool_calls"), given.integer("model_requests")
    calls = [_call(str(i), "echo", {"x": str(i)}) for i in range(asked)]
    result = _step(ToolEnv([echo]), calls, max_tool_calls=limit)
    texts = [m["content"] for m in result.observation.messages]
    return {
        "executed": result.tool_calls,
        "third_executed": len(texts) > 2 and texts[2] == "2",
        "limit_recorded": any("limit of tool calls" in t for t in texts) == (asked > limit),
    }


@kind("env_tool", "calls")
def of_order(given: Given) -> dict[str, Any]:
    """Calls of one turn as [id, seconds] or [id, sync or async]. → result_order"""
    given.get("call_field")
    calls = given.get("calls")

    async def slow(x: str, seconds: float) -> str:
        """Wait, then say it again."""
        await asyncio.sleep(min(seconds, 1.0))
        return x

    asked = [
        _call(str(i), "echo", {"x": str(i)})
        if what == "sync"
        else _call(str(i), "slow", {"x": str(i), "seconds": float(what) if what != "async" else 0.01})
        for i, what in calls
    ]
    result = _step(ToolEnv([echo, slow], parallel=given.flag("parallel", True)), asked)
    return {"result_order": [m["content"] for m in result.observation.messages]}


@kind("env_tool", "group_size", "infra_failure_in")
@kind("env_tool", "group_size", "reset_raises_in")
def of_failures(given: Given) -> dict[str, Any]:
    """A group in which some members failed for good. → other_rollouts_kept, failed_reward, failed_loss_mask_sum,
    counted_as_error"""
    key = "infra_failure_in" if "infra_failure_in" in given else "reset_raises_in"
    failed = {int(i) for i in given.numbers(key)}
    given.get("policy"), given.get("retries")
    task, size = Task("t", ""), given.integer("group_size")
    said = Span(np.array([1]), Author.MODEL, "assistant", logprobs=np.array([-1.0]), version=0)
    turn = Turn((said,), (), {"role": "assistant", "content": ""}, "eos")
    whole = Trajectory((turn,), StopReason.ENV_TERMINATED, rewards={"r": RewardTerm(1.0)})
    episodes = tuple(
        Episode(task, error="the machine went away", member=i) if i in failed else Episode(task, (whole,), member=i)
        for i in range(size)
    )
    kept = rows([Group(task, 0, episodes)])
    members = [int(s.episode.rpartition("/")[2]) for s in kept.samples]
    lost = [s for s in kept.samples if int(s.episode.rpartition("/")[2]) in failed]
    return {
        "other_rollouts_kept": members,
        "failed_reward": next((e.reward for e in episodes if e.error), None),
        "failed_loss_mask_sum": sum(int(s.loss_mask.sum()) for s in lost),
        "counted_as_error": kept.counts["errors"],
    }


@kind("env_tool", "dataset_env_values", "registered")
def of_registry(given: Given) -> dict[str, Any]:
    """Names that a data set asks for, and the registered ones. → raises"""
    table: Registry[str] = Registry("env")
    for name in given.get("registered"):
        table.register(str(name))(str(name))
    return {"found": [table[str(name)] for name in given.get("dataset_env_values")]}


def _call(identity: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _step(env: ToolEnv, calls: list[dict[str, Any]], **limits: Any) -> StepResult:
    env.reset(Task("t", ""), seed=0)
    return asyncio.run(env.step(Action({"role": "assistant", "content": "", "tool_calls": calls}, "", **limits)))


@kind("env_tool", "call", "registered")
def of_unknown_call(given: Given) -> dict[str, Any]:
    """A call of a name that may not be among the registered ones. → observation"""
    registered = {str(n): TOOLS["echo"] for n in given.get("registered")}
    call = {"function": {"name": given.text("call"), "arguments": {}}}
    return {"observation": asyncio.run(execute(call, registered)).text}


@kind("env_tool", "group", "max_lag")
def of_stale_group(given: Given) -> dict[str, Any]:
    """Episodes as {version, reward}; those more than max_lag behind the newest only serve the baseline. →
    advantages_centre_only, trained"""
    members, lag = given.get("group"), given.integer("max_lag")
    given.get("withhold")
    newest = max(m["version"] for m in members)
    stale = Rows(
        tuple(
            make_sample([1], episode=str(i), reward=float(m["reward"]), trained=newest - m["version"] <= lag)
            for i, m in enumerate(members)
        )
    )
    return {
        "advantages_centre_only": [float(a[1]) for a in group_mean(stale, AdvantageConfig())],
        "trained": [s.trained for s in stale.samples],
    }


@kind("chat_template", "sampled_text")
def of_reasoning(given: Given) -> dict[str, Any]:
    """A sampled reply, and ``generation_prompt_ends_with``. → reasoning, answer, open_tags, close_tags (also
    rendered_…), empty_block_inserted"""
    before = given.text("generation_prompt_ends_with", "")
    given.get("template_adds_empty_reasoning")
    said = given.text("sampled_text")
    parsed = parse_reply(said, thinking=before.strip().endswith("<think>"))
    whole = before + said  # what is kept is what was sampled: nothing is rendered again
    counts = {"open_tags": whole.count("<think>"), "close_tags": whole.count("</think>")}
    return {
        "reasoning": parsed.reasoning_content,
        "answer": parsed.content,
        **counts,
        **{f"rendered_{k}": v for k, v in counts.items()},
        "empty_block_inserted": "<think>\n\n</think>" in whole,
    }


@kind("chat_template", "tool_call_arguments")
def of_arguments(given: Given) -> dict[str, Any]:
    """The same arguments as text and as a mapping. → rendered_equal"""
    calls = [
        openai_calls([{"id": "c", "type": "function", "function": {"name": "f", "arguments": a}}])
        for a in given.get("tool_call_arguments")
    ]
    return {"rendered_equal": all(c == calls[0] for c in calls)}


@kind("chat_template", "tools")
def of_columnar_tools(given: Given) -> dict[str, Any]:
    """Tools whose parameters a table has filled up with nulls. → tool_NAME_properties, nulls"""
    given.get("stored_in")
    tools = given.get("tools")
    names = {n for t in tools for n in t["parameters"]["properties"]}
    stored = [
        {**t, "parameters": {**t["parameters"], "properties": dict.fromkeys(names) | t["parameters"]["properties"]}}
        for t in tools
    ]
    clean = [t["function"] for t in openai_tools(stored)]
    found: dict[str, Any] = {f"tool_{t['name']}_properties": sorted(t["parameters"]["properties"]) for t in clean}
    return found | {"nulls": str(clean).count("None")}


@kind("data", "rows", "required")
def of_columns(given: Given) -> dict[str, Any]:
    """Rows of a table and the column that a run names. → raises, columns"""
    required = given.text("required")
    return {"columns": [column(r, (), "text", f"rows:{i}", required) for i, r in enumerate(given.get("rows"), 1)]}


@kind("data", "prompts", "num_generations")
def of_groups(given: Given) -> dict[str, Any]:
    """Prompts, some of them equal, and the size of a group. → groups, group_sizes"""
    prompts, size = given.get("prompts"), given.integer("num_generations")
    if "returns_order" in given:
        raise NotData("returns_order describes an engine's behaviour")
    source = ListSource(tuple(Task(str(i), str(p)) for i, p in enumerate(prompts)))
    taken, _ = source.take(Cursor(), len(prompts))
    names = [Group(task, draw, ()).id for draw, task in enumerate(taken) for _ in range(size)]
    unique = list(dict.fromkeys(names))
    return {"groups": len(unique), "group_sizes": [names.count(n) for n in unique]}
