# SPDX-License-Identifier: Apache-2.0
"""Token exactness as a property: thousands of random scripted episodes, none re-encoded, none off by one."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from chat_templates import SMOLLM2, make_tokenizer
from fakes import WORDS, FakeRenderer, StepsEnv, run, said
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.agent import Context, GrowingAgent
from palestra.chat import make_renderer
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import StepResult
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Author, StopReason, Task

EPISODES = 25
# What environments say; nothing of it, and nothing of a template, is in what only the model says (Kit.own).
SHOWN = ("go", "go go", "!", "x", "", "x!x!x!x!x!")


@dataclass(frozen=True)
class Kit:
    """A renderer under test. pieces: token ids that the model may say at once. own: texts that nobody else says.
    stop: a stop string that straddles pieces. head: tokens of the first prompt."""

    renderer: Any
    tokenizer: Any
    pieces: Sequence[Sequence[int]]
    own: Sequence[str]
    stop: str
    head: int = 0

    def fresh(self, extends: Callable[[Any], bool]) -> tuple[Any, list[str]]:
        """The renderer for one episode, which cannot bridge to messages that do not ``extends``, and the list of texts
        that it will have encoded."""
        renderer, encoded = copy.copy(self.renderer), []
        encode = self.renderer.tokenizer.encode if isinstance(renderer, FakeRenderer) else self.renderer._encode
        bridge = renderer.bridge_to_next_turn

        def recording(text: str) -> Any:
            encoded.append(text)
            return encode(text)

        if isinstance(renderer, FakeRenderer):
            renderer.tokenizer = copy.copy(self.tokenizer)
            renderer.tokenizer.encode = recording
        else:
            renderer._encode = recording
        renderer.bridge_to_next_turn = lambda before, said, new, **tools: (
            bridge(before, said, new, **tools) if extends(new) else None
        )
        return renderer, encoded


@functools.cache
def kit(name: str) -> Kit:
    """``fake``: words, of which ``hello`` is encoded as one and said as two. The others: a byte-level tokenizer, whose
    model also says half of a character, two newlines that are one token, a call, and marks of the template."""
    if name == "fake":
        words = ("he", "llo", "call;", "!", "</s>", "<user>", "<assistant>")
        renderer = FakeRenderer()
        return Kit(renderer, renderer.tokenizer, [[WORDS.index(w)] for w in words], ("he", "llo"), "ello")
    template, eos = {"plain": (None, "</s>"), "chat": (SMOLLM2, "<|im_end|>")}[name]
    tokenizer = make_tokenizer(template, bos="<s>", eos=eos)
    call = '<tool_call>\n{"name": "Q", "arguments": {}}\n</tool_call>'
    texts = ("Q", "z", "QzQ", "\n\n", "!", eos, eos, "<|im_start|>", "日", call)
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    renderer = make_renderer(name, tokenizer)
    head = len(renderer.render(said("go").messages, add_generation_prompt=True).token_ids)
    return Kit(renderer, tokenizer, [*pieces, pieces[-2][:1]], ("Q", "z", "日", "\ufffd"), "zQ", head)


KITS = pytest.mark.parametrize("name", ["fake", "plain", "chat"])


class AsyncEnv(StepsEnv):
    """As StepsEnv; async, because thousands of threads are another test's business."""

    async def reset(self, task, *, seed):
        return StepsEnv.reset(self, task, seed=seed)

    async def step(self, action):
        return StepsEnv.step(self, action)


class Forgetful:
    """Keeps a random number of the last turns."""

    def __init__(self, chance):
        self.chance = chance

    def context(self, history, new):
        keep = self.chance.randint(0, len(history))
        return Context(tuple(history[len(history) - keep :]), tuple(new))


def results(chance):
    found = []
    for _ in range(chance.randint(1, 7)):
        if chance.random() < 0.05:
            found.append(RuntimeError("outage"))
        shown = said(chance.choice(SHOWN))
        found.append(
            StepResult(
                shown,
                chance.choice((None, 0.0, 1.0)),
                terminated=chance.random() < 0.1,
                truncated=chance.random() < 0.05,
                tool_calls=chance.choice((0, 0, 1)),
            )
        )
    return [*found, *[StepResult(said("go"), terminated=True)] * 8]


async def episode(kit, chance, agent, extends=lambda messages: True):
    """One random episode, the requests that its engine got, and the texts that were encoded."""
    renderer, encoded = kit.fresh(extends)

    def script(prompt, params, session):
        return [token for _ in range(chance.randint(1, 9)) for token in chance.choice(kit.pieces)]

    engine = ScriptedEngine(script, kit.tokenizer, max_context=kit.head + chance.choice((12, 40, 400)))
    played = await run_episode(
        Task("t", "go"),
        env=AsyncEnv(*results(chance), first=chance.choice(SHOWN), stop=chance.choice(((), (kit.stop,)))),
        engine=engine,
        renderer=renderer,
        limits=Limits(
            max_turns=chance.randint(1, 6), max_tool_calls=chance.randint(0, 3), max_tokens=chance.choice((5, 20, 500))
        ),
        sampling=SamplingConfig(max_new_tokens=chance.choice((3, 20))),
        seed=0,
        agent=agent,
    )
    return played, engine, encoded


def check(played, engine):
    """Everything that must hold of an episode whose renderer or agent may have rewritten."""
    by_session = {}
    for request in engine.requests:
        by_session.setdefault(request.session, []).append(request)
    # A view whose very first generation failed has no turn and no trajectory.
    views = list(by_session.values())
    assert len(views) == len(played.trajectories)
    for trajectory, requests in zip(played.trajectories, views, strict=True):
        assert len(trajectory.turns) == len(requests)
        told, sampled = [], []
        for turn, request in zip(trajectory.turns, requests, strict=True):
            before = [s for s in turn.spans if s.author is not Author.MODEL]
            told += [int(t) for s in before for t in s.tokens]
            assert told == request.prompt.tolist()
            told += [int(t) for s in request.completion.spans for t in s.tokens]
            sampled.append(request)
        assert trajectory.tokens.tolist() == told == requests[-1].sequence
        mask = np.zeros(len(told), bool)
        for request in sampled:
            mask[len(request.prompt) : len(request.sequence)] = True
        assert trajectory.loss_mask.tolist() == mask.tolist()
        logprobs = np.concatenate([s.logprobs for r in sampled for s in r.completion.spans])
        assert trajectory.logprobs[mask].tolist() == logprobs.tolist()
        assert set(trajectory.versions[mask].tolist()) == {0} and set(trajectory.versions[~mask].tolist()) == {-1}
    assert len(engine.released) == len(set(engine.released))
    assert set(by_session) <= set(engine.released)


def many(kit, seed, make_agent, extends=lambda chance: lambda messages: True):
    async def all_of_them():
        chances = [random.Random(f"{seed}/{i}") for i in range(EPISODES)]
        return await asyncio.gather(*(episode(kit, c, make_agent(c), extends(c)) for c in chances))

    return run(all_of_them())


@KITS
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_spans_are_what_the_engine_was_sent_the_mask_is_the_models_and_nothing_is_re_encoded(name, seed):
    for played, engine, encoded in many(kit(name), seed, lambda chance: GrowingAgent()):
        assert played.info["rewritten"] == 0 and len(played.trajectories) <= 1
        check(played, engine)
        assert encoded and not any(own in text for own in kit(name).own for text in encoded)


@KITS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_holds_for_each_trajectory_when_context_is_rewritten(name, seed):
    def extends(chance):
        return lambda messages: chance.random() < 0.7

    for played, engine, _ in many(kit(name), seed, Forgetful, extends):
        check(played, engine)
        if played.error is None:
            assert played.info["rewritten"] >= len(played.trajectories) - 1


@KITS
def test_random_episodes_meet_every_end_that_they_can(name):
    ends = Counter()
    for seed in range(12):
        for played, _, _ in many(kit(name), seed, lambda chance: GrowingAgent()):
            ends[played.info["stop"]] += 1
    assert set(ends) >= {
        reason.value for reason in StopReason if reason not in (StopReason.TIMEOUT, StopReason.TOOL_FAILURE)
    }
