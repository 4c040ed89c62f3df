# SPDX-License-Identifier: Apache-2.0
"""The nouns: what one episode is made of. Standard library and numpy only.

Values, not bags: every class is frozen and every array read-only, so whoever holds one may keep it.
Two rules carry the rest of the library:

* a :class:`Turn` stores only the tokens that the turn added, so the concatenation of a trajectory's spans
  *is* the sequence the engine saw, by construction;
* who wrote a token (:class:`Author`) is recorded where it is known, and the loss mask is derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class Message(TypedDict, total=False):
    """One chat message in the OpenAI shape: ``role`` and ``content`` always, the rest when present."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    reasoning_content: str


class Author(Enum):
    """Who wrote a token. Only ``MODEL`` tokens are trained on."""

    MODEL = "model"
    ENV = "env"
    TEMPLATE = "template"


class StopReason(Enum):
    """Why an episode ended. How one *generation* ended is ``finish_reason`` (eos, stop, length, abort)."""

    ENV_TERMINATED = "env_terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    TIMEOUT = "timeout"
    TOOL_FAILURE = "tool_failure"
    ERROR = "error"

    @property
    def truncated(self) -> bool:
        """True when a limit cut the episode short, rather than the task coming to its end."""
        return self not in (StopReason.ENV_TERMINATED, StopReason.TOOL_FAILURE, StopReason.ERROR)


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what is asked, and what a verifier may know about the answer.

    ``prompt`` is plain text or chat messages. ``meta`` holds the data row's other columns; reward functions
    receive them by name.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def messages(self) -> tuple[Message, ...]:
        """The prompt as chat messages; plain text becomes one user message."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A run of tokens by one author.

    tokens: int32[n]. role: system, user, assistant or tool. text: a decoded *view*, for people and reward
    functions; it is never encoded again. ``MODEL`` spans, and only they, carry ``logprobs`` (float32[n],
    nats, log-softmax(logits / T) of the full vocabulary) and the policy ``version`` that sampled them.
    ``kept_logmass`` (float32[n]) is the log of the probability mass that top-p/top-k/min-p kept, when used.
    """

    tokens: IntArray
    author: Author
    role: str
    text: str = ""
    logprobs: FloatArray | None = None
    version: int | None = None
    kept_logmass: FloatArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _frozen(self.tokens, np.int32))
        for name in ("logprobs", "kept_logmass"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _frozen(value, np.float32))
                if len(value) != len(self.tokens):
                    raise ValueError(f"span has {len(self.tokens)} tokens but {len(value)} {name}")
        sampled = self.author is Author.MODEL
        if sampled != (self.logprobs is not None) or sampled != (self.version is not None):
            raise ValueError("a span carries logprobs and a version exactly when its author is MODEL")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One action of the model: the spans added before it (observation, template), then its own.

    observation: the messages shown before the action. action: the parsed assistant message.
    finish_reason: how the generation ended (eos, stop, length, abort). rewards: what the environment paid
    for this action, by name. ``tool_calls`` counts calls that were executed.
    """

    spans: tuple[Span, ...]
    observation: tuple[Message, ...]
    action: Message
    finish_reason: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the model wrote in this turn."""
        return sum(len(s) for s in self.spans if s.author is Author.MODEL)

    @property
    def text(self) -> str:
        """What the model wrote in this turn, decoded."""
        return "".join(s.text for s in self.spans if s.author is Author.MODEL)


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One named part of a reward. ``value`` None = not scored (abstained or failed); 0.0 = scored zero."""

    value: float | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One agent's view of an episode: turns whose spans concatenate to the tokens the engine saw.

    >>> import numpy as np
    >>> ask = Span(np.array([5, 6]), Author.ENV, "user", "2+2?")
    >>> say = Span(np.array([9]), Author.MODEL, "assistant", "4", logprobs=np.array([-0.5]), version=0)
    >>> turn = Turn((ask, say), ({"role": "user", "content": "2+2?"},), {"role": "assistant", "content": "4"}, "eos")
    >>> one = Trajectory((turn,), StopReason.ENV_TERMINATED)
    >>> one.tokens.tolist(), one.loss_mask.tolist(), one.logprobs.tolist()
    ([5, 6, 9], [False, False, True], [0.0, 0.0, -0.5])
    """

    turns: tuple[Turn, ...]
    stop: StopReason
    agent: str = "agent"
    rewards: Mapping[str, RewardTerm] = field(default_factory=dict)
    media: tuple[Any, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(s for t in self.turns for s in t.spans)

    @property
    def tokens(self) -> IntArray:
        """int32[T]: every token of this view, in the order the engine saw them."""
        return np.concatenate([s.tokens for s in self.spans]) if self.turns else np.zeros(0, np.int32)

    @property
    def loss_mask(self) -> BoolArray:
        """bool[T]: True where the model wrote the token."""
        parts = [np.full(len(s), s.author is Author.MODEL) for s in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    @property
    def logprobs(self) -> FloatArray:
        """float32[T]: the sampler's log-probability of token i at index i; 0 where the mask is False."""
        parts = [s.logprobs if s.logprobs is not None else np.zeros(len(s), np.float32) for s in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @property
    def versions(self) -> IntArray:
        """int32[T]: the policy version that sampled token i; -1 where the model did not write it."""
        parts = [np.full(len(s), -1 if s.version is None else s.version, np.int32) for s in self.spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    @property
    def text(self) -> str:
        """The whole view, decoded."""
        return "".join(s.text for s in self.spans)

    @property
    def completion_text(self) -> str:
        """Only what the model wrote."""
        return "".join(t.text for t in self.turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The dialogue: observations and actions in order."""
        return tuple(m for t in self.turns for m in (*t.observation, t.action))

    @property
    def sampled_tokens(self) -> int:
        return sum(t.sampled_tokens for t in self.turns)

    @property
    def tool_calls(self) -> int:
        return sum(t.tool_calls for t in self.turns)

    @property
    def reward(self) -> float | None:
        """Weighted sum of the parts that were scored; None when none was."""
        scored = [t.weight * t.value for t in self.rewards.values() if t.value is not None]
        return math.fsum(scored) if scored else None


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One run of one task: usually one trajectory; several when context was rewritten or agents are several.

    ``error`` (one line) marks a failure of the infrastructure: the episode is excluded from learning and
    counted, never scored zero. ``timings`` in seconds.
    """

    task: Task
    trajectories: tuple[Trajectory, ...] = ()
    error: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    member: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """Mean reward over the trajectories that have one."""
        values = [r for t in self.trajectories if (r := t.reward) is not None]
        return math.fsum(values) / len(values) if values else None

    @property
    def stop(self) -> StopReason:
        return self.trajectories[-1].stop if self.trajectories else StopReason.ERROR


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Episodes of the same draw of the same task: the unit of credit. ``draw`` counts draws over the run,
    so the same task drawn twice makes two groups."""

    task: Task
    draw: int
    episodes: tuple[Episode, ...]

    @property
    def id(self) -> str:
        return f"{self.draw}:{self.task.id}"

    @property
    def scored(self) -> tuple[Episode, ...]:
        """The episodes that ended without an infrastructure error and carry a reward."""
        return tuple(e for e in self.episodes if e.error is None and e.reward is not None)


def _frozen(values: Sequence[Any] | npt.NDArray[Any], dtype: type) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.ascontiguousarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array
