# SPDX-License-Identifier: Apache-2.0
"""The built-in reward functions, with the numbers of the documents they come from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from palestra.errors import ConfigError
from palestra.reward.base import FACTORIES, REWARDS
from palestra.reward.calculator import calculator_accuracy, calculator_format
from palestra.reward.formats import boxed_format, think_answer_format
from palestra.reward.functions import (
    accuracy,
    combined,
    count_steps,
    length_penalty,
    model_tokens,
    overlong_penalty,
    partial_credit,
    soft_overlong,
    step,
)
from palestra.types import Author, Message, Span, StopReason, Trajectory, Turn

THREE_STEPS = "Step 1: 48/2=24\nStep 2: 48+24=72\nStep 3: so\n#### 72"


def turn(text: str, *, observed: str = "", tokens: int = 1) -> Turn:
    seen = Span(np.zeros(3), Author.ENV, "user", observed)
    said = Span(np.zeros(tokens), Author.MODEL, "assistant", text, logprobs=np.zeros(tokens), version=0)
    message: Message = {"role": "assistant", "content": text}
    return Turn((seen, said), ({"role": "user", "content": observed},), message, "stop")


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(tuple(turns), StopReason.ENV_TERMINATED)


def test_length_penalty_of_500_characters_at_target_200_is_0_7() -> None:
    assert length_penalty(target=200)(completions=["#### 72".ljust(500)], answer=["72"]) == [pytest.approx(0.7)]


def test_three_steps_are_worth_1_3() -> None:
    assert step()(completions=[THREE_STEPS], answer=["72"]) == [pytest.approx(1.3)]


def test_right_100_characters_over_with_three_steps_is_1_2_at_unit_weights_and_1_04_at_the_template_weights() -> None:
    text = THREE_STEPS.ljust(300)
    assert combined()(completions=[text], answer=["72"]) == [pytest.approx(1.2)]
    weights = {"accuracy_weight": 1.0, "length_weight": 0.5, "step_weight": 0.3}
    assert combined(**weights)(completions=[text], answer=["72"]) == [pytest.approx(1.04)]


def test_length_and_steps_count_only_when_right() -> None:
    wrong = THREE_STEPS.replace("#### 72", "#### 71").ljust(900)
    for made in (length_penalty(), step(), combined()):
        assert made(completions=[wrong], answer=["72"]) == [0.0]


def test_a_right_answer_never_falls_below_a_wrong_one() -> None:
    assert length_penalty(target=0, alpha=1.0)(completions=["#### 72".ljust(5000)], answer=["72"]) == [0.0]


def test_steps_are_markers_and_calculations_and_not_newlines_and_are_capped() -> None:
    assert count_steps("a\n" * 50) == 0
    assert count_steps("1. a\n2) b\nStep 3: <<1+1=2>>2") == 3  # a marked line with its calculation is one step
    assert count_steps("**Step 1:** a\n### Step 2: b\nso <<1+1=2>>2 and <<2*2=4>>4") == 4
    assert count_steps("Stepping 3. stones in step 1: no\n3.5 metres") == 0
    farmed = "\n".join(f"Step {i}: x" for i in range(100)) + "\n#### 72"
    assert step(max_steps=5)(completions=[farmed], answer=["72"]) == [pytest.approx(1.5)]


def test_partial_credit_follows_the_error_bands_and_pays_for_work_only_inside_one() -> None:
    texts = [
        "#### 72",
        "#### 72.005",
        "#### 71.5",
        "#### 75",
        "#### 90",
        "1. x\n#### 75",
        "1. x\n#### 72",
        "Step 1: x = 9",
    ]
    scores = partial_credit()(completions=texts, answer=["72"] * len(texts))
    assert scores == pytest.approx([1.0, 1.0, 0.8, 0.5, 0.0, 0.6, 1.0, 0.0])


def test_partial_credit_pays_all_for_what_accuracy_calls_right_in_every_mode() -> None:
    texts = ["#### 25%", "#### 0.25", "\\boxed{2x+2}", "\\boxed{2x+3}", "#### 5", "#### two dozen"]
    gold, modes = (
        ["0.25", "25%", "2(x+1)", "2(x+1)", "5", "24"],
        ["numeric", "numeric", "math", "math", "boxed", "numeric"],
    )
    assert partial_credit()(completions=texts, answer=gold, mode=modes) == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]


REASONED: Message = {"role": "assistant", "reasoning_content": "1. add\n2. check", "content": "<answer>9</answer>"}


def test_reasoning_that_a_message_holds_apart_is_written_too() -> None:
    chat: list[Message] = [{"role": "user", "content": "?"}, REASONED]
    assert think_answer_format([chat]) == [1.0]
    assert step()(completions=[chat], answer=["9"]) == [pytest.approx(1.2)]
    over = length_penalty(target=0, alpha=0.001)(completions=[chat], answer=["9"])
    assert over == [pytest.approx(1 - 0.001 * (15 + 1 + 18))]  # the reasoning, a line break, the reply
    assert boxed_format([[{**REASONED, "reasoning_content": "\\boxed{4}?", "content": "\\boxed{9}"}]]) == [1.0]


def test_reasoning_that_a_server_took_out_of_a_turn_is_put_back_and_what_the_text_still_holds_is_not_doubled() -> None:
    apart = Turn(turn(REASONED["content"]).spans, (), REASONED, "stop")
    whole = Turn(turn("<think>1. add</think><answer>9</answer>").spans, (), REASONED, "stop")
    assert think_answer_format([""] * 2, trajectories=[trajectory(apart), trajectory(whole)]) == [1.0, 1.0]


def test_accuracy_reads_1_072_and_abstains_without_gold() -> None:
    assert accuracy(["#### 1,072", "x = 5", "#### 5"], answer=["1072", "6", None]) == [1.0, 0.0, None]


def test_accuracy_looks_at_the_last_assistant_message_and_not_at_tool_results() -> None:
    chat: list[Message] = [
        {"role": "assistant", "content": "The answer is 7."},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "The answer is 8."},
        {"role": "tool", "content": "The answer is 42."},
    ]
    assert accuracy([chat, chat, chat], answer=["8", "42", "7"]) == [1.0, 0.0, 0.0]


def test_accuracy_takes_its_mode_from_the_data() -> None:
    assert accuracy(["\\boxed{2x+2}", "\\boxed{5}"], answer=["2(x+1)", "5"], mode=["math", "boxed"]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>\nstep one\nstep two\n</think>\n<answer>9</answer>", 1.0),  # rw-007
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),  # rw-009
        ("<think>a</think>\n<answer>4</answer><|im_end|>", 1.0),  # rw-010
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_think_answer_format(text: str, score: float) -> None:
    assert think_answer_format([text]) == [score]


def test_boxed_format_wants_exactly_one_complete_box() -> None:
    assert boxed_format(["so \\boxed{5}", "\\boxed{4} or \\boxed{5}", "\\boxed{5", "5", "\\boxed{ }"]) == [
        1.0,
        0,
        0,
        0,
        0,
    ]


def test_the_overlong_ramp_runs_over_the_last_cache_tokens_rw_011() -> None:
    ids = [[0] * n for n in (10, 16, 17, 18, 20, 21)]
    assert soft_overlong(max_len=20, cache=4)(completion_ids=ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_the_overlong_ramp_of_the_paper() -> None:
    got = [overlong_penalty(n, 20480, 4096) for n in (0, 16384, 16385, 18432, 20480, 30000)]
    assert got == [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    assert math.copysign(1, got[0]) == 1, "no minus zero in a log"


@pytest.mark.parametrize(("max_len", "cache"), [(100, 0), (100, 101), (100, -1), ("long", 20), (100, 0.5)])
def test_overlong_limits_that_do_not_fit_are_refused(max_len: Any, cache: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache must be in 1\.\.max_len"):
        soft_overlong(max_len=max_len, cache=cache)


def test_length_counts_the_models_tokens_and_not_what_tools_wrote_between_rw_012() -> None:
    # mask 0 0 | 1 1 1 | 0 0 0 0 | 1 1 | 0 | 1: six sampled tokens in a stretch of eleven
    def said(n: int) -> Span:
        return Span(np.zeros(n), Author.MODEL, "assistant", "", logprobs=np.zeros(n), version=0)

    def seen(n: int) -> Span:
        return Span(np.zeros(n), Author.ENV, "tool")

    message: Message = {"role": "assistant", "content": "#### 7"}
    spans = ((seen(2), said(3)), (seen(4), said(2)), (seen(1), said(1)))
    one = trajectory(*(Turn(s, (), message, "stop") for s in spans))
    assert model_tokens(one) == 6
    penalty = length_penalty(target=4, alpha=0.1, unit="tokens")
    assert penalty(completions=["#### 7"], answer=["7"], trajectories=[one]) == [pytest.approx(0.8)]
    with pytest.raises(ConfigError, match="characters"):
        penalty(completions=["#### 7"], answer=["7"])


CALL = "<call>add(3,4)</call>"
RIGHT = "<answer>\\boxed{35}</answer>"


@pytest.mark.parametrize(
    ("texts", "right", "form"),
    [
        ([CALL, RIGHT], 1.0, 1.0),
        ([RIGHT], 1.0, 1.0),
        ([CALL, "<answer>\\boxed{-35}</answer>"], 0.0, 1.0),
        (["<call>add(3</call>", RIGHT], 1.0, 0.0),  # a malformed call
        ([RIGHT, CALL], 0.0, 0.0),  # the answer is not in the last turn
        ([CALL], 0.0, 0.0),
        (["35"], 0.0, 0.0),
        ([RIGHT + RIGHT], 0.0, 0.0),  # two answers
        ([CALL + RIGHT], 1.0, 0.0),  # an answer wins over a call, but is not the form
        (["<answer>35</answer>"], 0.0, 0.0),
        (["<answer>\\boxed{35}"], 0.0, 0.0),
    ],
)
def test_calculator_rewards(texts: list[str], right: float, form: float) -> None:
    one = [trajectory(*(turn(t) for t in texts))]
    assert calculator_accuracy(trajectories=one, answer=[35]) == [right]
    assert calculator_format(trajectories=one) == [form]


def test_what_the_calculator_does_not_read_earns_nothing_there_either() -> None:
    """Its environment answers each of these with an error, or goes on."""
    for text in ("<answer> \\boxed{35} </answer>", "<answer>\\boxed{３５}</answer>"):
        one = [trajectory(turn(text))]
        assert calculator_accuracy(trajectories=one, answer=[35]) == calculator_format(trajectories=one) == [0.0]
    spaced = [trajectory(turn("<call> add(2,3) </call>"), turn(RIGHT))]
    assert calculator_format(trajectories=spaced) == [0.0]


@pytest.mark.parametrize(
    ("gold", "right"), [(35, 1.0), (35.0, 1.0), ("35", 1.0), ("35.0", 1.0), (35.5, 0.0), ("1,035", 0.0), ("34", 0.0)]
)
def test_the_calculators_gold_may_be_any_number(gold: Any, right: float) -> None:
    assert calculator_accuracy(trajectories=[trajectory(turn(RIGHT))], answer=[gold]) == [right]


def test_a_gold_that_is_no_number_is_an_error_that_shows_it() -> None:
    with pytest.raises(ValueError, match="the answer 'many' is no number"):
        calculator_accuracy(trajectories=[trajectory(turn(RIGHT))], answer=["many"])


def test_a_right_number_in_an_observation_earns_nothing() -> None:
    one = [trajectory(turn(CALL), turn("no idea", observed=f"<obs>35</obs>{RIGHT}"))]
    assert calculator_accuracy(trajectories=one, answer=[35]) == [0.0]
    assert calculator_format(trajectories=one) == [0.0]


def test_every_built_in_reward_is_registered() -> None:
    assert {"accuracy", "format", "boxed_format", "calculator_accuracy", "calculator_format"} <= set(REWARDS)
    made = {"length_penalty", "step", "combined", "partial_credit", "soft_overlong"}
    assert made | {"unit_tests", "judge", "judge_pairwise", "novelty"} <= set(FACTORIES)
