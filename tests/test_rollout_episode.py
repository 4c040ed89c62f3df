# SPDX-License-Identifier: Apache-2.0
"""How one episode runs: tokens enter once, every end has its reason, an outage is not a wrong answer."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pydantic
import pytest
from fakes import (
    DONE,
    END,
    MORE,
    TASK,
    WORDS,
    FakeRenderer,
    StepsEnv,
    WordTokenizer,
    play,
    run,
    said,
)

from palestra.engine.base import Completion
from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import StepResult
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.rollout.seeds import noise_key
from palestra.types import StopReason, Task

HE, LLO, HELLO, GO, CALL, X, LONG = (WORDS.index(w) for w in ("he", "llo", "hello", "go", "call;", "x", "long"))
CALLED = StepResult(said("go"), tool_calls=1)


def only(episode):
    (trajectory,) = episode.trajectories
    return trajectory


# ------------------------------------------------------------------------------------------ what is asked for


def test_stops_of_the_renderer_the_environment_the_config_and_the_caller_are_merged():
    engine = ScriptedEngine([[X, END]], WordTokenizer())
    play(StepsEnv(DONE, stop=("a", "b")), None, engine=engine, sampling={"stop": ("b", "c")}, stop=("d",))
    params = engine.requests[0].params
    assert (params.stop, params.stop_token_ids) == (("a", "b", "c", "d"), (END,))


def test_sampling_options_reach_the_engine():
    engine = ScriptedEngine([[X, END]], WordTokenizer())
    options = {"max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    play(StepsEnv(DONE), None, engine=engine, sampling=options)
    assert {name: getattr(engine.requests[0].params, name) for name in options} == options


def test_noise_is_keyed_by_who_and_when_and_by_nothing_else():
    def keys(**options):
        engine = ScriptedEngine([[X, END]] * 2, WordTokenizer())
        play(StepsEnv(MORE, DONE), None, engine=engine, **options)
        return [r.params.seed for r in engine.requests]

    base = keys()
    assert base == keys() == [noise_key(0, "train", 0, "t", 0, turn) for turn in (0, 1)]
    others = [keys(seed=1), keys(draw=1), keys(member=1), keys(purpose="eval"), keys(task=Task("u", "go"))]
    assert len({k for run_ in (base, *others) for k in run_}) == 12


def test_noise_keys_are_the_same_in_every_process():
    # printf "(1, 'train', 2, 'task', 3)" | b2sum -l 64
    assert noise_key(1, "train", 2, "task", 3) == 0x54237F188DB9E7E2


def test_a_string_and_a_number_that_read_alike_are_different_keys():
    assert len({noise_key(0, "p", 1, "1"), noise_key(0, "p", "1", 1), noise_key(0, "p", "1", "1")}) == 3


def test_the_members_of_a_group_meet_the_same_environment_and_evaluation_another():
    def env_seed(**options):
        env = StepsEnv(DONE)
        play(env, [[X, END]], **options)
        return env.seed

    assert env_seed(member=0) == env_seed(member=5)
    assert len({env_seed(), env_seed(draw=1), env_seed(purpose="eval")}) == 3


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "async"])
def test_et_015_the_first_observation_reaches_the_model(wrap):
    class Shows(StepsEnv):
        if wrap:

            async def reset(self, task, *, seed):
                return StepsEnv.reset(self, task, seed=seed)

            async def step(self, action):
                return StepsEnv.step(self, action)

    engine = ScriptedEngine([[X, END]], WordTokenizer())
    play(Shows(DONE, first="hello!"), None, engine=engine, task=Task("t", "go"))
    assert "hello!" in WordTokenizer().decode(engine.requests[0].prompt)


# ------------------------------------------------------------------------------------------------------ ends


def test_et_002_stopping_at_the_turn_cap_is_truncation_even_when_the_last_message_ended_normally():
    episode = play(StepsEnv(CALLED, CALLED, CALLED), [[CALL, END]] * 3, limits={"max_turns": 3})
    assert episode.stop is StopReason.MAX_TURNS
    assert episode.stop.truncated and len(only(episode).turns) == 3
    assert only(episode).turns[-1].finish_reason == "eos"


REFUSED = StepResult(said("!"))


def test_et_001_of_three_calls_two_are_executed_the_third_is_refused_and_shown_and_a_fourth_ends_it():
    env = StepsEnv(CALLED, CALLED, REFUSED)
    episode = play(env, [[CALL, END]] * 4, limits={"max_tool_calls": 2})
    assert [a.max_tool_calls for a in env.actions] == [2, 1, 0], "the fourth time the environment is not asked"
    assert (only(episode).tool_calls, episode.stop) == (2, StopReason.MAX_TOOL_CALLS)
    assert episode.info["tool_calls_refused"] == 2
    assert only(episode).turns[3].observation[0]["content"] == "!"


def test_et_001_after_a_refusal_the_model_may_still_answer():
    env = StepsEnv(StepResult(said("!"), tool_calls=2), DONE)
    episode = play(env, [[CALL, CALL, CALL, END], [X, END]], limits={"max_tool_calls": 2})
    assert [a.max_tool_calls for a in env.actions] == [2, 0]
    assert (only(episode).tool_calls, episode.stop) == (2, StopReason.ENV_TERMINATED)
    assert episode.info["tool_calls_refused"] == 1


def test_calls_within_the_limit_leave_no_mark():
    episode = play(StepsEnv(CALLED, CALLED, DONE), [[CALL, END], [CALL, END], [X, END]], limits={"max_tool_calls": 2})
    assert "tool_calls_refused" not in episode.info


def test_an_environment_that_executes_beyond_the_allowance_ends_there():
    episode = play(StepsEnv(StepResult(said("go"), tool_calls=3)), [[X, END]], limits={"max_tool_calls": 2})
    assert episode.stop is StopReason.MAX_TOOL_CALLS


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_tokens": 2}, {"max_tool_calls": 1}])
@pytest.mark.parametrize(("flag", "reason"), [("terminated", "env_terminated"), ("truncated", "env_truncated")])
def test_the_environments_own_end_wins_over_a_limit_of_the_same_step(limits, flag, reason):
    episode = play(StepsEnv(StepResult(tool_calls=2, **{flag: True})), [[X, END]], limits=limits)
    assert episode.stop.value == reason


def test_termination_wins_over_truncation_of_the_same_step():
    assert play(StepsEnv(StepResult(terminated=True, truncated=True)), [[X, END]]).stop is StopReason.ENV_TERMINATED


def test_tokens_are_counted_over_turns_and_the_last_turn_gets_what_is_left():
    engine = ScriptedEngine([[X, X, X, END], [X, X, X, END]], WordTokenizer())
    env = StepsEnv(MORE, MORE)
    episode = play(env, None, engine=engine, limits={"max_tokens": 6}, sampling={"max_new_tokens": 4})
    assert [r.params.max_new_tokens for r in engine.requests] == [4, 2]
    assert (episode.stop, env.actions[1].finish_reason) == (StopReason.MAX_TOKENS, "length")


def test_a_full_context_ends_the_episode_with_the_turns_that_fitted():
    # prompt 6, completion 2, then NEWLINE ASK go END NEWLINE SAY: the second prompt has 14 tokens
    for room, turns, reason in ((14, 1, StopReason.CONTEXT), (16, 2, StopReason.ENV_TERMINATED)):
        engine = ScriptedEngine([[X, END]] * 2, WordTokenizer(), max_context=room)
        episode = play(StepsEnv(MORE, DONE), None, engine=engine)
        assert (len(only(episode).turns), episode.stop, episode.error) == (turns, reason, None)


def test_da_001_a_prompt_that_does_not_fit_is_an_error_that_names_both_numbers_and_is_never_cut():
    def prompt_of(tokens):
        engine = ScriptedEngine([[X, END]], WordTokenizer(), max_context=512)
        episode = play(StepsEnv(DONE, first="x" * (tokens - 5)), None, engine=engine)
        return episode, [len(r.prompt) for r in engine.requests]

    assert [prompt_of(n)[1] for n in (10, 600, 20)] == [[10], [], [20]]
    lost = prompt_of(600)[0]
    assert "600 tokens" in lost.error and "512" in lost.error
    assert (lost.trajectories, lost.info["permanent"], lost.info["stop"]) == ((), True, "context")


def test_a_failure_that_the_environment_declares_final_is_a_tool_failure_and_no_error():
    episode = play(StepsEnv(StepResult(tool_failure="the shop is closed")), [[X, END]])
    assert (episode.stop, episode.error) == (StopReason.TOOL_FAILURE, None)
    assert episode.info["tool_failure"] == "the shop is closed"


def hanging(where):
    class Hangs(StepsEnv):
        def step(self, action):
            threading.Event().wait(60) if where == "thread" else None
            return super().step(action)

    class HangsAsync(StepsEnv):
        async def step(self, action):
            await asyncio.Event().wait()

    return (Hangs if where == "thread" else HangsAsync)(MORE)


@pytest.mark.parametrize("where", ["thread", "loop"])
def test_a_step_that_hangs_is_a_tool_failure_and_the_turn_is_kept(where):
    begin = time.perf_counter()
    episode = play(hanging(where), [[X, END]], limits={"step_timeout_s": 0.5})
    assert time.perf_counter() - begin < 30
    assert (episode.stop, episode.error, len(only(episode).turns)) == (StopReason.TOOL_FAILURE, None, 1)
    assert episode.info["tool_failure"] == "env.step: no answer within 0.5 s"


def test_a_step_that_outlasts_the_episodes_time_is_a_timeout():
    episode = play(hanging("loop"), [[X, END]], limits={"timeout_s": 1})
    assert (episode.stop, len(only(episode).turns)) == (StopReason.TIMEOUT, 1)


@pytest.mark.parametrize("field", ["timeout_s", "step_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_every_time_limit_is_finite(field, value):
    with pytest.raises(pydantic.ValidationError, match=r"finite|greater than"):
        Limits(**{field: value})


def test_a_generation_that_outlasts_the_episodes_time_keeps_the_turns_before_it():
    class Slow(ScriptedEngine):
        async def sample(self, prompt, params, *, session):
            if self.requests:
                await asyncio.Event().wait()
            return await super().sample(prompt, params, session=session)

    engine = Slow([[X, END]] * 2, WordTokenizer())
    episode = play(StepsEnv(MORE, DONE), None, engine=engine, limits={"timeout_s": 1})
    assert (episode.stop, episode.error, len(only(episode).turns)) == (StopReason.TIMEOUT, None, 1)


def test_no_turn_within_the_episodes_time_is_an_error_for_there_is_nothing_to_learn_from():
    engine = ScriptedEngine([[X, END]], WordTokenizer(), delay_s=60)
    episode = play(StepsEnv(DONE), None, engine=engine, limits={"timeout_s": 1})
    assert episode.error == "no turn was finished within timeout_s=1 (in engine.sample)"
    assert (episode.trajectories, episode.info["stop"]) == ((), "timeout")


# --------------------------------------------------------------------------------------------------- outages


def test_a_step_that_raises_is_an_outage_and_the_turns_so_far_are_kept():
    env = StepsEnv(MORE, RuntimeError("database\nis down"))
    episode = play(env, [[X, END]] * 2)
    assert episode.error == "env.step: RuntimeError: database is down"
    assert (episode.stop, len(only(episode).turns), episode.reward) == (StopReason.ERROR, 2, None)


def test_a_timeout_error_of_the_environments_own_is_an_outage_not_our_limit():
    episode = play(StepsEnv(TimeoutError("socket")), [[X, END]])
    assert episode.error == "env.step: TimeoutError: socket"


def test_a_reset_that_raises_or_hangs_is_an_outage_without_a_turn():
    class Broken(StepsEnv):
        async def reset(self, task, *, seed):
            raise OSError("no disk")

    class Hung(StepsEnv):
        async def reset(self, task, *, seed):
            await asyncio.Event().wait()

    assert play(Broken(), []).error == "env.reset: OSError: no disk"
    hung = play(Hung(), [], limits={"step_timeout_s": 0.5})
    assert hung.error == "env.reset: StepTimeout: no answer within 0.5 s"
    assert hung.trajectories == ()


def test_an_engine_that_fails_or_aborts_is_an_outage():
    assert play(StepsEnv(DONE), []).error.startswith("engine.sample: EngineError: the script has 0 lines")

    class Aborts(ScriptedEngine):
        async def sample(self, prompt, params, *, session):
            return Completion((), "abort", "")

    assert "aborted" in play(StepsEnv(DONE), None, engine=Aborts([], WordTokenizer())).error


def test_an_answer_of_the_wrong_type_fails_this_episode_and_says_what_was_expected():
    class ReturnsTuple(StepsEnv):
        def step(self, action):
            return ("obs", 1.0)

    episode = play(ReturnsTuple(), [[X, END]])
    assert episode.error == "env.step: TypeError: ReturnsTuple.step returned tuple; it must return StepResult"


@pytest.mark.parametrize("env", [StepsEnv(DONE), StepsEnv(RuntimeError("x"))], ids=["fine", "raises"])
def test_the_cache_is_released_and_the_environment_closed_whatever_happened(env):
    engine = ScriptedEngine([[X, END]], WordTokenizer())
    play(env, None, engine=engine)
    assert engine.released == [engine.requests[0].session]
    assert env.closed == 1


def test_a_close_that_raises_is_told_and_changes_nothing():
    class Sticky(StepsEnv):
        def aclose(self):
            raise RuntimeError("stuck")

    episode = play(Sticky(DONE), [[X, END]])
    assert (episode.error, episode.info["close_error"]) == (None, "RuntimeError: stuck")


def test_cancellation_propagates_after_releasing_and_closing():
    asked = asyncio.Event()

    class Waits(ScriptedEngine):
        async def sample(self, prompt, params, *, session):
            asked.set()
            await asyncio.Event().wait()

    env, engine = StepsEnv(DONE), Waits([], WordTokenizer())

    async def main():
        work = run_episode(
            TASK, env=env, engine=engine, renderer=FakeRenderer(), limits=Limits(), sampling=SamplingConfig(), seed=0
        )
        task = asyncio.create_task(work)
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert (len(engine.released), env.closed) == (1, 1)


# --------------------------------------------------------------------------------------- rewards and messages


@pytest.mark.parametrize(
    ("paid", "filed"),
    [
        (0.5, {"env": 0.5}),
        ({"a": 1, "b": -2.0}, {"a": 1.0, "b": -2.0}),
        (None, {}),
        (0, {"env": 0.0}),
        (np.float32(0.5), {"env": 0.5}),
        ({"a": np.int64(3), "b": np.array(0.25), "c": np.bool_(True)}, {"a": 3.0, "b": 0.25, "c": 1.0}),
        (np.float32("nan"), {}),
    ],
)
def test_what_the_environment_pays_is_filed_by_name(paid, filed):
    assert only(play(StepsEnv(StepResult(reward=paid, terminated=True)), [[X, END]])).turns[0].rewards == filed


def test_a_reward_that_is_nan_counts_as_not_scored_and_an_infinite_one_is_told():
    nan = StepResult(reward={"a": float("nan"), "b": 1.0}, terminated=True)
    assert only(play(StepsEnv(nan), [[X, END]])).turns[0].rewards == {"b": 1.0}
    assert "must be finite" in play(StepsEnv(StepResult(reward=float("inf"))), [[X, END]]).error


@pytest.mark.parametrize("paid", ["1.0", {"env": "1.0"}, {"env": None}])
def test_a_reward_that_is_no_number_is_told(paid):
    error = play(StepsEnv(StepResult(reward=paid)), [[X, END]]).error
    assert error.startswith("env.step: TypeError: the environment paid ") and error.endswith("a reward is a number")


def test_content_that_is_no_text_is_told_where_it_comes_from():
    assert play(StepsEnv(DONE, first=7), [[X, END]]).error == (
        "env.reset: TypeError: Observation content must be text, got int"
    )
    parts = StepResult(said([{"type": "text", "text": "go"}]))
    assert play(StepsEnv(parts), [[X, END]]).error == "env.step: TypeError: Observation content must be text, got list"


def test_an_exception_that_cannot_say_what_it_is_is_an_outage_like_any_other():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    assert play(StepsEnv(Mute()), [[X, END]]).error == "env.step: Mute: (a message that cannot be shown)"


def test_the_dialogue_is_observations_and_actions_in_order():
    episode = play(StepsEnv(StepResult(said("!")), DONE), [[HE, LLO, END], [X, END]])
    assert [m["content"] for m in only(episode).messages] == ["go", "hello", "!", "x"]


def test_timings_add_up():
    timings = play(StepsEnv(DONE), None, engine=ScriptedEngine([[X, END]], WordTokenizer(), delay_s=0.03)).timings
    assert timings["generate_s"] >= 0.03
    assert timings["total_s"] >= timings["generate_s"] + timings["env_s"]


def test_plain_methods_may_block_without_holding_up_other_episodes():
    class Sleeps(StepsEnv):
        def step(self, action):
            time.sleep(1)
            return super().step(action)

    async def main():
        renderer = FakeRenderer()
        engine = ScriptedEngine([[X, END]], renderer.tokenizer)
        work = [
            run_episode(
                TASK,
                env=Sleeps(DONE),
                engine=engine,
                renderer=renderer,
                limits=Limits(),
                sampling=SamplingConfig(),
                seed=0,
            )
            for _ in range(20)
        ]
        begin = time.perf_counter()
        await asyncio.gather(*work)
        return time.perf_counter() - begin

    assert run(main()) < 10, "twenty sleepers of a second, one after the other, would need twenty"


def test_a_plain_environment_lives_on_one_thread_which_ends_with_its_episode():
    seen = []

    class Notes(StepsEnv):
        def reset(self, task, *, seed):
            seen.append(threading.current_thread())
            return super().reset(task, seed=seed)

        def step(self, action):
            seen.append(threading.current_thread())
            return super().step(action)

        def aclose(self):
            seen.append(threading.current_thread())

    play(Notes(MORE, DONE), [[X, END]] * 2)
    assert len(seen) == 4 and len(set(seen)) == 1
    assert seen[0] is not threading.main_thread()
    seen[0].join(1)
    assert not seen[0].is_alive()


def test_an_environment_that_hangs_is_still_closed_at_once():
    class Hangs(StepsEnv):
        def step(self, action):
            threading.Event().wait(60)

        def aclose(self):
            self.closed += 1

    env, begin = Hangs(), time.perf_counter()
    play(env, [[X, END]], limits={"step_timeout_s": 0.5})
    assert (env.closed, time.perf_counter() - begin < 30) == (1, True)


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_an_environment_that_leaves_in_a_strange_way_ends_its_episode_not_the_run(raised):
    class Leaves(StepsEnv):
        def step(self, action):
            raise raised

    assert play(Leaves(), [[X, END]]).error.startswith(f"env.step: RuntimeError: {type(raised).__name__}")


@pytest.mark.parametrize("instant", [True, False])
def test_an_environment_that_promises_never_to_block_is_called_where_the_episode_is_driven(instant: bool) -> None:
    threads = []

    class Noting(StepsEnv):
        never_blocks = instant

        def reset(self, task, *, seed):
            threads.append(threading.current_thread())
            return super().reset(task, seed=seed)

        def step(self, action):
            threads.append(threading.current_thread())
            return super().step(action)

    play(Noting(DONE), [[X, END]])
    assert len(threads) == 2
    assert all((thread is threading.current_thread()) == instant for thread in threads)


def test_what_such_an_environment_raises_is_still_an_outage_of_its_episode_alone() -> None:
    class Raising(StepsEnv):
        never_blocks = True

        def step(self, action):
            raise ZeroDivisionError("oops")

    assert play(Raising(DONE), [[X, END]]).error == "env.step: ZeroDivisionError: oops"
