# SPDX-License-Identifier: Apache-2.0
"""Tokens enter a trajectory once, as they were; a rewritten context is a trajectory of its own."""

from __future__ import annotations

import numpy as np
from fakes import (
    ASK,
    BOS,
    DONE,
    END,
    MORE,
    NEWLINE,
    SAY,
    WORDS,
    FakeRenderer,
    StepsEnv,
    WordTokenizer,
    play,
    said,
)

from palestra.agent import Context
from palestra.chat.base import Rendered
from palestra.engine.base import Completion
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import Observation, StepResult
from palestra.types import Author, Span, StopReason

HE, LLO, HELLO, GO, CALL, X, LONG = (WORDS.index(w) for w in ("he", "llo", "hello", "go", "call;", "x", "long"))
CALLED = StepResult(said("go"), tool_calls=1)


def only(episode):
    (trajectory,) = episode.trajectories
    return trajectory


def test_tk_001_the_next_prompt_is_the_previous_one_plus_what_was_sampled_plus_new_tokens():
    renderer = FakeRenderer()
    engine = ScriptedEngine([[HE, LLO, END], [X, END]], renderer.tokenizer)
    play(StepsEnv(MORE, DONE), None, renderer=renderer, engine=engine)
    first, second = engine.requests
    assert first.prompt.tolist() == [BOS, ASK, GO, END, NEWLINE, SAY]
    assert second.prompt.tolist() == [*first.prompt, HE, LLO, END, NEWLINE, ASK, GO, END, NEWLINE, SAY]


def test_tk_002_text_that_re_encodes_differently_never_drifts_over_three_turns():
    renderer = FakeRenderer()
    engine = ScriptedEngine([[HE, LLO, END]] * 3, renderer.tokenizer)
    trajectory = only(play(StepsEnv(MORE, MORE, DONE), None, renderer=renderer, engine=engine))
    assert trajectory.tokens.tolist() == engine.requests[-1].sequence
    assert trajectory.tokens[trajectory.loss_mask].tolist() == [HE, LLO, END] * 3
    assert not any("hello" in text for text in renderer.tokenizer.encoded)


def test_tk_014_a_special_token_inside_a_completion_stays_in_the_history():
    renderer = FakeRenderer()
    engine = ScriptedEngine([[X, BOS, X, END], [X, END]], renderer.tokenizer)
    trajectory = only(play(StepsEnv(MORE, DONE), None, renderer=renderer, engine=engine))
    start = len(engine.requests[0].prompt)
    assert engine.requests[1].prompt[start : start + 4].tolist() == [X, BOS, X, END]
    observation = trajectory.turns[1].spans[0]
    assert (observation.author, observation.tokens[0]) == (Author.TEMPLATE, NEWLINE)


def test_mk_003_what_the_template_supplies_is_masked_and_the_sampled_end_of_turn_is_not():
    class EmptyReasoning(FakeRenderer):
        def render(self, messages, *, tools=None, add_generation_prompt=False):
            return Rendered([SAY] * 3 + [NEWLINE] * 4, [-1] * 7)

        def bridge_to_next_turn(self, prompt, completion, new_messages, *, tools=None):
            return Rendered([NEWLINE], [-1])

    renderer = EmptyReasoning()
    trajectory = only(play(StepsEnv(MORE, DONE), [[HE, LLO, HE, LLO, X, END], [X, END]], renderer=renderer))
    assert trajectory.loss_mask[:14].tolist() == [False] * 7 + [True] * 6 + [False]


def test_mk_008_an_inner_end_token_closes_a_turn_not_the_trajectory():
    class Bare(FakeRenderer):
        """No scaffolding: the mask of the sampled and the shown tokens alone."""

        def render(self, messages, *, tools=None, add_generation_prompt=False):
            return Rendered([ASK], [0])

        def bridge_to_next_turn(self, prompt, completion, new_messages, *, tools=None):
            return Rendered([8], [0])

    trajectory = only(play(StepsEnv(MORE, DONE), [[4, 2], [5, 2]], renderer=Bare(stops=(2,))))
    assert trajectory.tokens.tolist()[1:] == [4, 2, 8, 5, 2]
    assert trajectory.loss_mask.tolist()[1:] == [True, True, False, True, True]


def test_a_turn_without_its_end_token_is_closed_by_the_template_and_the_closing_is_not_trained():
    trajectory = only(play(StepsEnv(MORE, DONE), [[X, X], [X, END]], sampling={"max_new_tokens": 2}))
    closing = trajectory.turns[1].spans[0]
    assert closing.author is Author.TEMPLATE
    assert closing.tokens.tolist()[:2] == [END, NEWLINE]


def test_the_token_that_straddles_a_stop_string_stays_and_the_action_ends_with_the_stop():
    env = StepsEnv(DONE, stop=("lo",))
    trajectory = only(play(env, [[HE, LLO, X]]))
    assert trajectory.tokens[trajectory.loss_mask].tolist() == [HE, LLO]
    assert (env.actions[0].text, env.actions[0].finish_reason) == ("hello", "stop")


def test_a_completion_sampled_by_two_versions_keeps_both_spans():
    class Updated(ScriptedEngine):
        async def sample(self, prompt, params, *, session):
            spans = [
                Span(np.array([t]), Author.MODEL, "assistant", "", np.array([-1.0]), v) for t, v in ((HE, 0), (END, 1))
            ]
            return Completion(tuple(spans), "eos", "he")

    trajectory = only(play(StepsEnv(DONE), None, engine=Updated([], WordTokenizer())))
    assert trajectory.versions.tolist() == [-1] * 6 + [0, 1]


class LastTurn:
    """Remembers the first turn's question and only the turn before this one."""

    def context(self, history, new):
        return Context(tuple(history[-1:]), tuple(new))


def test_a_context_that_is_rewritten_opens_a_trajectory_of_its_own():
    renderer = FakeRenderer()
    engine = ScriptedEngine(lambda prompt, params, session: [HE, LLO, END], renderer.tokenizer)
    env = StepsEnv(MORE, StepResult(said("!")), DONE)
    episode = play(env, None, engine=engine, renderer=renderer, agent=LastTurn())
    assert [len(t.turns) for t in episode.trajectories] == [2, 1], "one turn kept of one is still everything"
    assert episode.info["rewritten"] == 1
    assert {t.stop for t in episode.trajectories} == {StopReason.ENV_TERMINATED}
    last = episode.trajectories[1]
    assert last.tokens.tolist() == engine.requests[-1].sequence
    assert last.tokens[last.loss_mask].tolist() == [HE, LLO, END], "the retold turn is context, not trained again"
    retold = [s.text for s in last.spans if s.role == "assistant" and s.author is Author.ENV]
    assert retold == ["hello"]
    assert len(engine.released) == 2


def test_a_template_that_cannot_be_extended_opens_a_trajectory_and_a_counter_says_so():
    renderer = FakeRenderer(extends=lambda messages: messages[0]["content"] != "!")
    engine = ScriptedEngine(lambda prompt, params, session: [X, END], renderer.tokenizer)
    env = StepsEnv(StepResult(said("!")), MORE, DONE)
    episode = play(env, None, engine=engine, renderer=renderer)
    assert [len(t.turns) for t in episode.trajectories] == [1, 2], "a rewritten view grows like any other"
    assert episode.info["rewritten"] == 1
    retold = [BOS, ASK, GO, END, NEWLINE, SAY, X, END, NEWLINE, ASK, WORDS.index("!"), END, NEWLINE, SAY]
    assert engine.requests[1].prompt.tolist() == retold
    assert sum(t.sampled_tokens for t in episode.trajectories) == 6


def test_other_tools_make_another_prompt_and_so_another_trajectory():
    tool = {"type": "function", "function": {"name": "go"}}
    env = StepsEnv(StepResult(Observation(({"role": "user", "content": "go"},), tools=(tool,))), MORE, DONE)
    episode = play(env, lambda prompt, params, session: [X, END])
    assert [len(t.turns) for t in episode.trajectories] == [1, 2], "no tools in an observation means: as before"
