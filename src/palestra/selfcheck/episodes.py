# SPDX-License-Identifier: Apache-2.0
"""Known answers that play something: an episode on an engine with a script, a batch that is refilled, a run's log."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.chat.plain import PlainRenderer
from palestra.config import Config
from palestra.data.source import Cursor, GeneratedSource
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import Action, Observation, StepResult
from palestra.model.testing import ByteTokenizer
from palestra.reward.sandbox import SandboxLimits, run_python
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.rollout.refill import fill, select
from palestra.run.directory import Run
from palestra.run.trackers import read_metrics
from palestra.selfcheck.given import Given, NotData
from palestra.selfcheck.kinds import kind
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

END = ByteTokenizer.eos_token_id


class _Asks:
    """Shows a text, asks on for ``turns`` turns, and is then content."""

    def __init__(self, first: str, turns: int) -> None:
        self._first, self._left = first, turns

    def reset(self, task: Task, *, seed: int) -> Observation:
        return Observation((_user(self._first),))

    def step(self, action: Action) -> StepResult:
        self._left -= 1
        return StepResult(Observation((_user("and?"),)), terminated=self._left < 0)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _play(env: _Asks, prompt: str = "", *, max_context: int = 4096, **limits: Any) -> tuple[Episode, ScriptedEngine]:
    tokenizer = ByteTokenizer()
    engine = ScriptedEngine(lambda *_: [*b"ok", END], tokenizer, max_context=max_context)
    made = run_episode(
        Task("t", prompt),
        env=env,
        engine=engine,
        renderer=PlainRenderer(tokenizer),
        limits=Limits(**limits),
        sampling=SamplingConfig(max_new_tokens=8),
        seed=0,
    )
    return asyncio.run(made), engine


@kind("env_tool", "max_turns")
def of_turns(given: Given) -> dict[str, Any]:
    """A limit, and in which turn a model still goes on (``turn_N_still_wants_tool``, or ``turns_wanted``). → truncated,
    stop_reason, turns"""
    limit = given.integer("max_turns")
    wanted = given.integer("turns_wanted", 0)
    for key in given.data:
        if (found := re.fullmatch(r"turn_(\d+)_still_wants_tool", key)) and given.flag(key):
            wanted = max(wanted, int(found[1]))
    played = _play(_Asks("go", wanted), max_turns=limit)[0]
    assert played.stop is not None
    return {
        "truncated": played.stop.truncated,
        "stop_reason": played.stop.value,
        "turns": len(played.trajectories[0].turns),
    }


@kind("env_tool", "reset_returns", "dataset_prompt")
def of_first_observation(given: Given) -> dict[str, Any]:
    """What an environment shows first, and the prompt of its task. → prompt (what the model was shown)"""
    engine = _play(_Asks(given.text("reset_returns"), 0), given.text("dataset_prompt"))[1]
    return {"prompt": ByteTokenizer().decode(engine.requests[0].prompt.tolist(), skip_special_tokens=True)}


@kind("env_tool", "code")
def of_code(given: Given) -> dict[str, Any]:
    """A program for the sandbox, ``timeout_s``, ``memory_limit_mb``. → observation (what it wrote), returns (seconds),
    timed_out, exit_code, trainer_alive"""
    if "child_spawns_grandchild" in given:
        raise NotData("child_spawns_grandchild describes a program that is not given")
    limits = SandboxLimits(timeout_s=given.number("timeout_s", 10.0), memory_mb=given.integer("memory_limit_mb", 512))
    began = time.monotonic()
    ended = run_python(given.text("code"), limits=limits)
    return {
        "observation": ended.stdout + ended.stderr,
        "returns": time.monotonic() - began,
        "timed_out": ended.ended == "timeout",
        "exit_code": ended.exit_code,
        "trainer_alive": True,  # or nobody would say so
    }


@kind("data", "prompt_lengths", "max_prompt")
def of_long_prompts(given: Given) -> dict[str, Any]:
    """Prompts of so many tokens, and the longest that leaves room for a reply; others are failed episodes, never cut. →
    kept (indices), dropped (a number), reported (each by its length)"""
    if given.text("policy", "filter") != "filter":
        raise NotData("a prompt that is too long is left out and never cut")
    longest, kept, told = given.integer("max_prompt"), [], []
    for i, length in enumerate(given.numbers("prompt_lengths").astype(int)):
        episode, engine = _play(_Asks("x" * (length - 1), 0), max_context=longest + 1)  # the renderer adds <bos>
        if episode.error is None and len(engine.requests[0].prompt) == length:
            kept.append(i)
        else:
            told.append(str(length) in str(episode.error))
    return {"kept": kept, "dropped": len(told), "reported": all(told)}


@kind("data", "pass_rates_all", "max_gen_batches")
def of_refill(given: Given) -> dict[str, Any]:
    """The pass rates of tasks, in turn, whose groups (of ten) without signal are replaced by fresh ones. →
    generation_rounds, missing (of four groups), outcome (it ended, with a full step or without)"""
    rates = given.numbers("pass_rates_all")
    dynamic = given.flag("dynamic_sampling", True)

    async def play(draws: Sequence[tuple[int, Task]]) -> list[Group]:
        return [_answered(task, draw, round(10 * rates[draw % len(rates)])) for draw, task in draws]

    step = asyncio.run(
        fill(
            GeneratedSource(lambda i: Task(f"t{i}", "")),
            Cursor(),
            4,
            play,
            useful=lambda group: len(select([group], dynamic_sampling=dynamic)) > 0,
            max_batches=given.integer("max_gen_batches"),
        )
    )
    return {"generation_rounds": step.batches, "missing": step.missing, "outcome": True}


def _answered(task: Task, draw: int, right: int) -> Group:
    """Ten episodes, of which so many are right."""
    said = Span(np.array([1]), Author.MODEL, "assistant", logprobs=np.array([-1.0]), version=0)
    turn = Turn((said,), (), {"role": "assistant", "content": ""}, "eos")

    def episode(member: int) -> Episode:
        reward = {"accuracy": RewardTerm(float(member < right))}
        return Episode(task, (Trajectory((turn,), StopReason.ENV_TERMINATED, rewards=reward),), member=member)

    return Group(task, draw, tuple(episode(i) for i in range(10)))


@kind("eval", "log_calls")
def of_log(given: Given) -> dict[str, Any]:
    """Calls of a run's log as {step, k (a metric's name)}. → rows_lost, steps (as they are read back), step_axis (each
    row has the step that it was given)"""
    calls = given.get("log_calls")
    if not isinstance(calls, list) or not all(isinstance(c, dict) and "step" in c for c in calls):
        raise NotData("log_calls is not a list of {step, k}")
    with tempfile.TemporaryDirectory() as folder:
        with Run.open(Path(folder) / "run", Config()) as run:
            for call in calls:
                run.log(int(call["step"]), {f"train/{call.get('k', 'loss')}": 1.0}, phase="rl")
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    return {"rows_lost": len(calls) - len(rows), "steps": steps, "step_axis": steps == [c["step"] for c in calls]}
