# SPDX-License-Identifier: Apache-2.0
"""One episode: the loop between a model and an environment, and the one place where all limits live."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pydantic

from palestra.agent import Agent, GrowingAgent
from palestra.chat.base import Renderer
from palestra.config import Config
from palestra.engine.base import Completion, Engine, SamplingParams
from palestra.env.base import Action, Env, Observation, StepResult
from palestra.env.threads import message_of
from palestra.errors import PalestraError, UserError
from palestra.rollout.answers import check_messages, rewards_of
from palestra.rollout.journal import Clock, Seen, described, restored
from palestra.rollout.seeds import noise_key
from palestra.rollout.view import View
from palestra.rollout.worker import EnvThread
from palestra.types import Episode, StopReason, Task, Turn

T = TypeVar("T")
_serial = itertools.count()


class Limits(Config):
    """What an episode may use. Every limit is finite, and its end is recorded as a :class:`StopReason`.

    max_turns: actions of the model. max_tool_calls: calls executed; the first call beyond is refused where the
    model can see it, the next one ends the episode. max_tokens: sampled tokens. timeout_s: the whole episode.
    step_timeout_s: one ``reset`` or ``step``. reward_timeout_s: one reward function, for a whole group.
    """

    max_turns: int = pydantic.Field(8, ge=1)
    max_tool_calls: int = pydantic.Field(16, ge=0)
    max_tokens: int = pydantic.Field(2048, ge=1)
    timeout_s: float = pydantic.Field(600.0, gt=0, allow_inf_nan=False)
    step_timeout_s: float = pydantic.Field(120.0, gt=0, allow_inf_nan=False)
    reward_timeout_s: float = pydantic.Field(600.0, gt=0, allow_inf_nan=False)

    @property
    def step_budget_s(self) -> float:
        """What an environment is told of ``step_timeout_s``: less, so that who keeps to it is not given up."""
        return self.step_timeout_s - min(0.1 * self.step_timeout_s, 2.0)


class SamplingConfig(Config):
    """How each turn is sampled. max_new_tokens is per turn; ``stop`` adds strings to the environment's."""

    max_new_tokens: int = pydantic.Field(256, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0)
    top_p: float = pydantic.Field(1.0, gt=0, le=1)
    top_k: int = pydantic.Field(0, ge=0)
    min_p: float = pydantic.Field(0.0, ge=0, lt=1)
    stop: tuple[str, ...] = ()


async def run_episode(
    task: Task,
    *,
    env: Env,
    engine: Engine,
    renderer: Renderer,
    limits: Limits,
    sampling: SamplingConfig,
    seed: int,
    draw: int = 0,
    member: int = 0,
    agent: Agent | None = None,
    purpose: str = "train",
    stop: Sequence[str] = (),
    clock: Clock | None = None,
) -> Episode:
    """Play one task to its end. Training, evaluation and serving all call this.

    The episode's noise is keyed by (seed, purpose, draw, task, member, turn); the environment's seed leaves out
    the member, so a group meets one and the same problem. The stops of a generation are the renderer's token ids,
    the environment's strings, the config's and ``stop``, merged. clock: journals the time limits that strike, and lets
    those strike again that struck before the run was killed.

    An exception from the environment, the engine, the renderer or the agent makes an episode with ``error`` and
    the turns played so far: an outage, counted and excluded. A :class:`UserError` and cancellation propagate. The
    engine's cache is released and the environment closed in every case. ``info``: ``stop`` (the reason, also
    where no turn was played), ``rewritten`` (how often a new trajectory opened), ``permanent`` (a second try
    would fail alike), ``tool_failure`` (what failed), ``tool_calls_refused`` (calls beyond the limit).
    """
    begin = time.perf_counter()
    who = (seed, draw, member, purpose)
    clock = (clock or Clock()).under(timeout_s=limits.timeout_s, step_timeout_s=limits.step_timeout_s)
    played = _Played(task, env, engine, renderer, limits, sampling, agent or GrowingAgent(), *who, tuple(stop), clock)
    error: str | None = None
    try:
        reason = await played.to_the_end()
    except UserError:
        raise
    except _PromptTooLong as problem:
        reason, error = StopReason.CONTEXT, str(problem)
        played.info["permanent"] = True
    except Exception as problem:
        reason, error = StopReason.ERROR, f"{played.doing}: {_one_line(problem)}"
    finally:
        played.release()
        await played.close_env()
    if reason is StopReason.TIMEOUT and not played.history:
        error = f"no turn was finished within timeout_s={limits.timeout_s:g} (in {played.doing})"
    return Episode(
        task,
        tuple(view.trajectory(reason) for view in played.views if view.turns),
        error,
        {**played.timings, "total_s": time.perf_counter() - begin},
        member,
        {**played.info, "stop": reason.value},
    )


class _PromptTooLong(Exception):
    """The very first prompt leaves no room for an answer."""


class StepTimeout(PalestraError):
    """One of our own time limits struck; a TimeoutError of the environment's is another thing."""


@dataclass
class _Played:
    """An episode while it is being played."""

    task: Task
    env: Env
    engine: Engine
    renderer: Renderer
    limits: Limits
    sampling: SamplingConfig
    agent: Agent
    seed: int
    draw: int
    member: int
    purpose: str
    more_stops: tuple[str, ...]
    clock: Clock

    views: list[View] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=lambda: {"generate_s": 0.0, "env_s": 0.0})
    info: dict[str, Any] = field(default_factory=lambda: {"rewritten": 0})
    doing: str = "start"
    sampled_tokens: int = 0
    tool_calls: int = 0
    _seen: Seen = ()
    _over: bool = False  # a limit that struck was that of the whole episode
    _thread: EnvThread = field(default_factory=EnvThread)
    _tools: tuple[Mapping[str, Any], ...] = ()
    _stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.limits.timeout_s
        self._name = f"{self.purpose}/{self.draw}/{self.task.id}/{self.member}/{next(_serial)}"

    async def to_the_end(self) -> StopReason:
        """Turn after turn until something ends it."""
        seed = noise_key(self.seed, self.purpose, "env", self.draw, self.task.id) % 2**31
        observation = await self._ask_env("reset", Observation, partial(self.env.reset, self.task, seed=seed))
        while True:
            view = self._open(observation)
            room = self.engine.max_context - len(view.prompt)
            if room < 1 and not self.history:
                raise _PromptTooLong(
                    f"the prompt has {len(view.prompt)} tokens and the context holds {self.engine.max_context}; "
                    "shorten the prompt or raise the engine's context"
                )
            if room < 1:
                return StopReason.CONTEXT
            completion = await self._generate(view, room)
            if completion is None:
                return StopReason.TIMEOUT
            result, reason = await self._act(view, completion)
            if reason is not None:
                return reason
            observation = result.observation

    def _open(self, observation: Observation) -> View:
        """The view to sample from next: the present one, grown, or a new one where the context was rewritten."""
        self.doing = "renderer"
        self._tools = observation.tools or self._tools
        self._stops = observation.stop or self._stops
        context = self.agent.context(self.history, observation.messages)
        if self.views and self.views[-1].holds(context.kept, self._tools) and self.views[-1].extend(context.messages):
            return self.views[-1]
        if self.views:
            self.info["rewritten"] += 1
            self.engine.release(self.views[-1].session)
        view = View(self.renderer, self._tools, context.kept, f"{self._name}#{len(self.views)}")
        view.extend(context.messages)
        self.views.append(view)
        return view

    async def _generate(self, view: View, room: int) -> Completion | None:
        """One completion, or None when the episode's time was over first."""
        self.doing = "engine.sample"
        config = self.sampling
        params = SamplingParams(
            max_new_tokens=min(config.max_new_tokens, self.limits.max_tokens - self.sampled_tokens, room),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop=tuple(dict.fromkeys((*self._stops, *config.stop, *self.more_stops))),
            stop_token_ids=tuple(self.renderer.get_stop_token_ids()),
            include_stop_str_in_output=True,
            seed=noise_key(self.seed, self.purpose, self.draw, self.task.id, self.member, len(self.history)),
        )
        begin, prompt = time.perf_counter(), view.prompt
        self._seen = (prompt,)
        try:
            completion = await self._within(
                "sample", self._time_left(), lambda: self.engine.sample(prompt, params, session=view.session)
            )
        except StepTimeout:
            return None
        finally:
            self.timings["generate_s"] += time.perf_counter() - begin
        if completion.finish_reason == "abort":
            raise RuntimeError("the engine aborted the generation")
        return completion

    async def _act(self, view: View, completion: Completion) -> tuple[StepResult, StopReason | None]:
        """Let the environment answer the completion, and file the turn whatever happens."""
        self.doing = "renderer.parse_response"
        sampled = [int(t) for s in completion.spans for t in s.tokens]
        self._seen = (*self._seen, sampled)
        parsed = self.renderer.parse_response(sampled)
        message = parsed.message()
        allowance = self.limits.max_tool_calls - self.tool_calls
        ended, budget_s = completion.finish_reason, self.limits.step_budget_s
        action = Action(message, completion.text, parsed.malformed, ended, allowance, budget_s)
        result, reason = StepResult(), None
        paid: Mapping[str, float] = {}
        try:
            if self._refused(len(parsed.tool_calls) - allowance):
                reason = StopReason.MAX_TOOL_CALLS
            else:
                result = await self._step(action)
                paid = rewards_of(result.reward)
        except StepTimeout as expired:
            reason = StopReason.TIMEOUT
            if not self._over:
                reason = StopReason.TOOL_FAILURE
                self.info["tool_failure"] = f"env.step: {expired}"
        finally:
            reply = (message, ended, paid, result.tool_calls, result.info)
            turn = view.record(completion.spans, *reply)
            self.history.append(turn)
            self.sampled_tokens += turn.sampled_tokens
            self.tool_calls += result.tool_calls
        return result, reason or self._reason(result, self._truncation(view, ended))

    def _refused(self, excess: int) -> bool:
        """Count calls beyond the allowance. True when the model was told of the limit before and still calls: the
        environment is not even asked then. The first time it is, and shows the limit."""
        if excess <= 0:
            return False
        told = "tool_calls_refused" in self.info
        self.info["tool_calls_refused"] = self.info.get("tool_calls_refused", 0) + excess
        return told

    def _truncation(self, view: View, ended: str) -> StopReason:
        """What it means that the environment truncates. Behind a reply without an end it does so because of the limit
        that cut this one; that of a single turn is no end of an episode, so there it is the environment's doing."""
        if ended == "length" and len(view.prompt) + self.history[-1].sampled_tokens >= self.engine.max_context:
            return StopReason.CONTEXT
        if ended == "length" and self.sampled_tokens >= self.limits.max_tokens:
            return StopReason.MAX_TOKENS
        return StopReason.ENV_TRUNCATED

    def _reason(self, result: StepResult, truncation: StopReason) -> StopReason | None:
        """Why the episode ends here, or None. The task's own end wins over every limit met in the same step."""
        if result.tool_failure is not None:
            self.info["tool_failure"] = result.tool_failure
        ends = (
            (result.terminated, StopReason.ENV_TERMINATED),
            (result.tool_failure is not None, StopReason.TOOL_FAILURE),
            (result.truncated, truncation),
            (self.tool_calls > self.limits.max_tool_calls, StopReason.MAX_TOOL_CALLS),
            (self.sampled_tokens >= self.limits.max_tokens, StopReason.MAX_TOKENS),
            (len(self.history) >= self.limits.max_turns, StopReason.MAX_TURNS),
        )
        met = next((reason for met, reason in ends if met), None)
        return met or (StopReason.TIMEOUT if self._time_is_over() else None)

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()

    def _time_is_over(self) -> bool:
        """Whether the episode's time is over between two turns."""
        turn = len(self.history)
        if self.clock.struck(turn, "episode", self._seen) is not None:
            return True
        if self._time_left() > 0:
            return False
        self.clock.strikes(turn, "episode", self._seen)
        return True

    async def _within(self, kind: str, limit_s: float, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """``work`` in at most ``limit_s``. A limit that struck before the run was killed strikes again, at once; one
        that strikes now is on the disk before anybody knows of it."""
        turn = len(self.history)
        if (entry := self.clock.struck(turn, kind, self._seen)) is not None:
            self._over = entry["over"]
            raise StepTimeout(_late(entry["limit_s"]))
        try:
            return await _within(limit_s, work())
        except StepTimeout:
            self._over = self._time_left() <= 0
            self.clock.strikes(turn, kind, self._seen, limit_s=limit_s, over=self._over)
            raise

    async def _step(self, action: Action) -> StepResult:
        """What the environment answers. Where that took as long as its own ``timeout_s`` (or what it was told of ours),
        a clock may have decided it, and it is journalled: when the step is played again the environment is asked all
        the same, since its state goes on from there, and the first answer counts."""
        turn, begin, own = len(self.history), time.monotonic(), getattr(self.env, "timeout_s", None)
        own = min(own, self.limits.step_budget_s) if isinstance(own, int | float) else None
        result = await self._ask_env("step", StepResult, partial(self.env.step, action))
        entry = self.clock.struck(turn, "result", self._seen)
        if entry is not None and entry["limit_s"] == own:
            return restored(result, entry["result"])
        late = own is not None and time.monotonic() - begin >= own
        if late and (plain := described(result)) is not None:
            self.clock.strikes(turn, "result", self._seen, limit_s=own, result=plain)
        return result

    async def _ask_env(self, what: str, kind: type[T], call: Callable[[], Any]) -> T:
        self.doing = f"env.{what}"
        begin = time.perf_counter()
        limit = min(self.limits.step_timeout_s, self._time_left())
        try:
            instant = getattr(self.env, "never_blocks", False)
            answer = call() if instant else await self._within(what, limit, lambda: self._thread.call(call))
        finally:
            self.timings["env_s"] += time.perf_counter() - begin
        if not isinstance(answer, kind):
            raise TypeError(
                f"{type(self.env).__name__}.{what} returned {type(answer).__name__}; it must return {kind.__name__}"
            )
        shown: object = answer.observation if isinstance(answer, StepResult) else answer
        if isinstance(shown, Observation):
            check_messages(shown.messages)
        return answer

    def release(self) -> None:
        if self.views:
            self.engine.release(self.views[-1].session)

    async def close_env(self) -> None:
        """``aclose`` is optional; a failure there is told, not raised: the episode is already what it is."""
        aclose = getattr(self.env, "aclose", None)
        try:
            if aclose is not None:
                await _within(self.limits.step_timeout_s, self._thread.call(aclose))
        except Exception as problem:
            self.info["close_error"] = _one_line(problem)
        finally:
            self._thread.close()


async def _within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    try:
        async with asyncio.timeout(limit_s) as scope:
            return await work
    except TimeoutError as problem:
        if scope.expired():
            raise StepTimeout(_late(limit_s)) from problem
        raise


def _late(limit_s: float) -> str:
    return f"no answer within {limit_s:g} s"


def _one_line(problem: BaseException) -> str:
    text = " ".join(message_of(problem).split())
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__
