# SPDX-License-Identifier: Apache-2.0
"""Token exactness as a property: thousands of random scripted episodes, none re-encoded, none off by one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
from fakes import ASK, END, SAY, WORDS, FakeRenderer, StepsEnv, run, said
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.agent import Context, GrowingAgent
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import StepResult
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Author, StopReason, Task

EPISODES = 25
HE, LLO = WORDS.index("he"), WORDS.index("llo")
# Only the model says "he" and "llo"; environments say these:
SHOWN = ("go", "go go", "!", "x", "", "x!x!x!x!x!")


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


async def episode(chance, agent, extends=lambda messages: True):
    """One random episode and the requests that its engine got."""
    renderer = FakeRenderer(extends=extends)
    sayable = [HE, LLO, END, WORDS.index("call;"), WORDS.index("!"), ASK, SAY]

    def script(prompt, params, session):
        return [chance.choice(sayable) for _ in range(chance.randint(1, 9))]

    engine = ScriptedEngine(script, renderer.tokenizer, max_context=chance.choice((12, 40, 400)))
    played = await run_episode(
        Task("t", "go"),
        env=AsyncEnv(*results(chance), first=chance.choice(SHOWN), stop=chance.choice(((), ("ello",)))),
        engine=engine,
        renderer=renderer,
        limits=Limits(
            max_turns=chance.randint(1, 6), max_tool_calls=chance.randint(0, 3), max_tokens=chance.choice((5, 20, 500))
        ),
        sampling=SamplingConfig(max_new_tokens=chance.choice((3, 20))),
        seed=0,
        agent=agent,
    )
    return played, engine, renderer


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


def many(seed, make_agent, extends=lambda chance: lambda messages: True):
    async def all_of_them():
        chances = [random.Random(f"{seed}/{i}") for i in range(EPISODES)]
        return await asyncio.gather(*(episode(c, make_agent(c), extends(c)) for c in chances))

    return run(all_of_them())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_spans_are_what_the_engine_was_sent_the_mask_is_the_models_and_nothing_is_re_encoded(seed):
    for played, engine, renderer in many(seed, lambda chance: GrowingAgent()):
        assert played.info["rewritten"] == 0 and len(played.trajectories) <= 1
        check(played, engine)
        assert not any("he" in text or "llo" in text for text in renderer.tokenizer.encoded)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_holds_for_each_trajectory_when_context_is_rewritten(seed):
    def extends(chance):
        return lambda messages: chance.random() < 0.7

    for played, engine, _ in many(seed, Forgetful, extends):
        check(played, engine)
        if played.error is None:
            assert played.info["rewritten"] >= len(played.trajectories) - 1


def test_random_episodes_meet_every_end_that_they_can():
    ends = Counter()
    for seed in range(12):
        for played, _, _ in many(seed, lambda chance: GrowingAgent()):
            ends[played.info["stop"]] += 1
    assert set(ends) >= {
        reason.value for reason in StopReason if reason not in (StopReason.TIMEOUT, StopReason.TOOL_FAILURE)
    }
