# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked for near the end of its context, and what an episode says of itself as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fakes import ASK, BOS, DONE, END, MORE, NEWLINE, SAY, WORDS, StepsEnv, WordTokenizer, play

from palestra.agent import Context
from palestra.engine.scripted import ScriptedEngine
from palestra.types import Author, Episode, Group, Message, RewardTerm, Span, StopReason, Task, Trajectory, Turn

X, GO = WORDS.index("x"), WORDS.index("go")
TASK = Task("t", "?")


def test_an_engine_is_asked_for_no_more_tokens_than_its_context_has_room_for() -> None:
    # The first prompt has 6 tokens; with two sampled and six shown the second has 14.
    engine = ScriptedEngine([[X, END]] * 2, WordTokenizer(), max_context=17)
    play(StepsEnv(MORE, DONE), None, engine=engine, sampling={"max_new_tokens": 8})
    assert [(len(r.prompt), r.params.max_new_tokens) for r in engine.requests] == [(6, 8), (14, 3)]


class Forgets:
    """Keeps nothing of what was before."""

    def context(self, history: Sequence[Turn], new: Sequence[Message]) -> Context:
        return Context((), tuple(new))


def test_an_agent_that_forgets_everything_begins_anew_in_every_turn() -> None:
    engine = ScriptedEngine(lambda prompt, params, session: [X, END], WordTokenizer())
    episode = play(StepsEnv(MORE, DONE), None, engine=engine, agent=Forgets())
    assert episode.error is None and [len(t.turns) for t in episode.trajectories] == [1, 1]
    assert [r.prompt.tolist() for r in engine.requests] == [[BOS, ASK, GO, END, NEWLINE, SAY]] * 2


def view(reward: float | None, stop: StopReason = StopReason.ENV_TERMINATED) -> Trajectory:
    return Trajectory((), stop, rewards={"accuracy": RewardTerm(reward)})


def test_an_episodes_reward_is_the_mean_over_the_trajectories_that_have_one() -> None:
    assert Episode(TASK, (view(1.0), view(None), view(0.5))).reward == pytest.approx(0.75)
    assert Episode(TASK, (view(None),)).reward is None and Episode(TASK).reward is None


def test_an_episode_stopped_as_its_last_trajectory_did() -> None:
    assert Episode(TASK, (view(1.0, StopReason.CONTEXT), view(1.0))).stop is StopReason.ENV_TERMINATED
    assert Episode(TASK).stop is StopReason.ERROR


def test_an_outage_is_never_scored_even_where_a_trajectory_carries_a_reward() -> None:
    good, lost, silent = Episode(TASK, (view(0.0),)), Episode(TASK, (view(1.0),), "env.step: gone"), Episode(TASK)
    assert Group(TASK, 0, (good, lost, silent)).scored == (good,)


def test_a_span_keeps_what_it_was_given_and_leaves_the_givers_array_alone() -> None:
    tokens, logprobs = np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32)
    span = Span(tokens, Author.MODEL, "assistant", logprobs=logprobs, version=0)
    tokens[0], logprobs[0] = 9, -9.0
    assert span.logprobs is not None and (span.tokens.tolist(), span.logprobs.tolist()) == ([5, 6], [-1.0, -2.0])
    for mine in (span.tokens, span.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            mine[0] = 0
