# SPDX-License-Identifier: Apache-2.0
"""A model behind a server plays the very same episodes: over text (chat) and over token ids (completions)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import run
from http_server import JsonServer

from palestra.chat import PlainRenderer
from palestra.engine.base import SamplingParams
from palestra.engine.openai import CompletionsEngine, EndpointConfig, first_stop
from palestra.engine.openai_chat import ChatEngine, MessageRenderer, Table
from palestra.env import CalculatorEnv, ToolEnv
from palestra.errors import ConfigError, EngineError
from palestra.model.testing import ByteTokenizer
from palestra.rollout.collect import collect
from palestra.rollout.dump import group_from_dict, group_to_dict
from palestra.rollout.episode import Limits, SamplingConfig, run_episode
from palestra.types import Author, Episode, StopReason, Task


@pytest.fixture
def server() -> Iterator[JsonServer]:
    with JsonServer(lambda body: 500) as made:
        yield made


def chat(content: str, *, tokens: int | None = 8, finish: str = "stop", **more: Any) -> dict[str, Any]:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"message": message, "finish_reason": finish}], **usage}


def play(server: JsonServer, env: Any, task: Task, **options: Any) -> tuple[Episode, ChatEngine]:
    table = Table()
    engine = ChatEngine(EndpointConfig(url=server.url, retries=1), "m", table)
    episode = run(
        run_episode(
            task,
            env=env,
            engine=engine,
            renderer=MessageRenderer(table),
            limits=Limits(**options.pop("limits", {})),
            sampling=SamplingConfig(temperature=0, **options),
            seed=0,
            purpose="eval",
        )
    )
    return episode, engine


def test_a_chat_model_plays_a_text_environment_and_its_stop_strings_are_found_here(server: JsonServer) -> None:
    lines = iter(["<call>add(3,4)</call> and then I would say", r"<answer>\boxed{7}</answer>"])
    server.answer = lambda body: chat(next(lines), tokens=20)
    episode, engine = play(server, CalculatorEnv(), Task("t", "3+4\n", 7))
    (trajectory,) = episode.trajectories
    assert (trajectory.stop, trajectory.tool_calls) == (StopReason.ENV_TERMINATED, 1)
    assert [t.text for t in trajectory.turns] == ["<call>add(3,4)</call>", r"<answer>\boxed{7}</answer>"]
    assert [t.finish_reason for t in trajectory.turns] == ["stop", "stop"]
    assert [(m["role"], m["content"]) for m in server.requests[1]["messages"]] == [
        ("user", "3+4\n"),
        ("assistant", "<call>add(3,4)</call>"),
        ("user", "<obs>7</obs>"),
    ]
    assert "stop" not in server.requests[0] and server.requests[0]["path"] == "/v1/chat/completions"
    assert engine.endpoint.usage.completion_tokens == 40


def test_lengths_and_limits_count_the_servers_tokens(server: JsonServer) -> None:
    server.answer = lambda body: chat("hm, let me think", tokens=body["max_tokens"], finish="length")
    episode, _ = play(server, CalculatorEnv(), Task("t", "3+4\n", 7), max_new_tokens=30, limits={"max_tokens": 50})
    assert [r["max_tokens"] for r in server.requests] == [30, 20]
    assert (episode.trajectories[0].sampled_tokens, episode.stop) == (50, StopReason.MAX_TOKENS)
    assert episode.trajectories[0].completion_text == "hm, let me think" * 2


def test_tools_and_their_calls_travel_in_the_servers_own_shape(server: JsonServer) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    replies = iter([chat("", finish="tool_calls", tool_calls=[call]), chat("It is 7.")])
    server.answer = lambda body: next(replies)
    episode, _ = play(server, ToolEnv([add]), Task("t", "3+4?", "7"))
    first, second = server.requests
    assert first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][1]["tool_calls"] == [call]
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"}
    assert episode.trajectories[0].turns[-1].action["content"] == "It is 7."


def test_arguments_that_are_no_json_are_a_malformed_call_and_reach_the_environment(server: JsonServer) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{a: 3"}}
    replies = iter([chat("", tool_calls=[call]), chat("7")])
    server.answer = lambda body: next(replies)
    episode, _ = play(server, ToolEnv([add]), Task("t", "3+4?", "7"))
    assert episode.trajectories[0].turns[0].info["tool_errors"] == 1
    assert "not a JSON object" in server.requests[1]["messages"][-1]["content"]


def test_such_episodes_are_marked_as_nothing_to_train_on_and_survive_a_rollouts_file(server: JsonServer) -> None:
    server.answer = lambda body: chat(r"<answer>\boxed{7}</answer>", tokens=None)

    async def one() -> Any:
        async for group in collect([(0, Task("t", "3+4\n", 7))], rollout, group_size=1, min_group=1):
            return group

    async def rollout(task: Task, draw: int, member: int) -> Episode:
        table = Table()
        engine = ChatEngine(EndpointConfig(url=server.url), "m", table)
        given: dict[str, Any] = {"limits": Limits(), "sampling": SamplingConfig(), "seed": 0}
        return await run_episode(task, env=CalculatorEnv(), engine=engine, renderer=MessageRenderer(table), **given)

    group = run(one())
    (episode,) = group.episodes
    assert episode.info["stale"] is True
    assert {s.version for s in episode.trajectories[0].spans if s.author is Author.MODEL} == {-1}
    again = group_from_dict(json.loads(json.dumps(group_to_dict(group), allow_nan=False)))
    assert again.episodes[0].trajectories[0].completion_text == r"<answer>\boxed{7}</answer>"


def test_an_outage_is_an_episode_with_an_error_and_a_refusal_stops_the_run(server: JsonServer) -> None:
    episode, _ = play(server, CalculatorEnv(), Task("t", "3+4\n", 7))
    assert "no reply after 2 tries; the last: HTTP 500" in (episode.error or "") and len(server.requests) == 2
    server.answer = lambda body: 401
    with pytest.raises(ConfigError, match="the key is missing or wrong"):
        play(server, CalculatorEnv(), Task("t", "3+4\n", 7))
    server.answer = lambda body: {"choices": []}
    assert "no choices" in (play(server, CalculatorEnv(), Task("t", "3+4\n", 7))[0].error or "")


def completions(server: JsonServer, **options: Any) -> CompletionsEngine:
    renderer = PlainRenderer(ByteTokenizer())
    return CompletionsEngine(EndpointConfig(url=server.url, api="completions", **options), "m", renderer.decode)


PARAMS = SamplingParams(16, 0.5, stop=("</a>",), stop_token_ids=(258,), include_stop_str_in_output=True, seed=2**40 + 1)


def test_completions_send_token_ids_and_take_the_sampled_ones_back(server: JsonServer) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-0.5, -0.25, -1.0]}
        return {
            "choices": [{"text": "hi", "token_ids": [104, 105, 258], "finish_reason": "stop", "logprobs": logprobs}]
        }

    server.answer = reply
    engine = completions(server, extra_body={"priority": 3})
    said = run(engine.sample(np.array([1, 2, 3], np.int32), PARAMS, session="s"))
    (span,) = said.spans
    assert (span.tokens.tolist(), said.text, said.finish_reason) == ([104, 105, 258], "hi", "eos")
    assert (span.logprobs.tolist(), span.version) == ([-0.5, -0.25, -1.0], -1)
    (asked,) = server.requests
    assert (asked["prompt"], asked["temperature"], asked["seed"], asked["priority"]) == ([1, 2, 3], 0.5, 1, 3)
    assert (asked["stop"], asked["stop_token_ids"]) == (["</a>"], [258])


def test_a_reply_to_another_request_is_refused_where_the_server_says_what_it_read(server: JsonServer) -> None:
    """vLLM repeats the prompt's token ids beside those it sampled."""
    prompt = np.array([1, 2, 3], np.int32)
    server.answer = lambda body: {"choices": [{"token_ids": [104, 258], "prompt_token_ids": body["prompt"]}]}
    assert run(completions(server).sample(prompt, PARAMS, session="s")).text == "h"
    server.answer = lambda body: {"choices": [{"token_ids": [104, 258], "prompt_token_ids": [1, 2, 4]}]}
    with pytest.raises(EngineError, match=r"answers another prompt than it was sent \(3 tokens\)"):
        run(completions(server).sample(prompt, PARAMS, session="s"))
    server.answer = lambda body: {"choices": [{"token_ids": [104, 258]}], "prompt_token_ids": [9]}
    with pytest.raises(EngineError, match="answers another prompt"):
        run(completions(server).sample(prompt, PARAMS, session="s"))


def test_token_ids_are_also_read_from_the_names_of_log_probs_and_a_server_without_them_is_refused(
    server: JsonServer,
) -> None:
    tokens = [f"token_id:{i}" for i in b"x</a>"]
    server.answer = lambda body: {"choices": [{"finish_reason": "stop", "logprobs": {"tokens": tokens}}]}
    said = run(completions(server).sample(np.array([1], np.int32), PARAMS, session="s"))
    assert (said.text, said.finish_reason, said.spans[0].tokens.tolist()) == ("x</a>", "stop", list(b"x</a>"))
    server.answer = lambda body: {"choices": [{"text": "hi", "finish_reason": "stop"}]}
    with pytest.raises(ConfigError, match=r"set endpoint\.api=chat"):
        run(completions(server).sample(np.array([1], np.int32), PARAMS, session="s"))


def test_weights_cannot_be_loaded_into_a_server_and_an_address_is_checked(server: JsonServer) -> None:
    with pytest.raises(EngineError, match="evaluated, not trained"):
        completions(server).load_weights(None, 1)
    with pytest.raises(ValueError, match="is no address"):
        EndpointConfig(url="localhost:8000")
    assert first_stop("a</b>c", ["</d>"]) is None
