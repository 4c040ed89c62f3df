# SPDX-License-Identifier: Apache-2.0
"""`palestra selfcheck`: known answers are computed, wrong ones fail, and what is no data is said to be none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from palestra.cli import app
from palestra.errors import DataError
from palestra.learn.advantage import ADVANTAGES
from palestra.learn.kl import KL_ESTIMATORS
from palestra.learn.loss import LOSSES
from palestra.learn.preference import PREFERENCE_LOSSES
from palestra.selfcheck.judge import Outcome, judge
from palestra.selfcheck.kinds import KINDS
from palestra.selfcheck.run import OWN, Case, check, read_cases

CASES = list(read_cases(OWN))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_our_own_known_answers_hold_and_wrong_ones_do_not(case: Case) -> None:
    result = check(case)
    assert (result.status, result.said) == ("passed", ""), "nothing of it unread or unchecked"
    wrong = one_number_wrong(case.expected)
    assert wrong is None or check(Case(case.id, case.area, case.input, wrong)).status == "failed"


def one_number_wrong(expected: dict[str, Any]) -> dict[str, Any] | None:
    """The expectation with its first number half too large; None where it has none."""
    for key, value in expected.items():
        if key.startswith("not_"):
            continue
        wrong = copy.deepcopy(expected)
        if isinstance(value, list) and value:
            inner = wrong[key]
            while isinstance(inner[0], list):
                inner = inner[0]
            if isinstance(inner[0], int | float) and not isinstance(inner[0], bool):
                inner[0] += 0.5
                return wrong
        elif isinstance(value, int | float) and not isinstance(value, bool):
            wrong[key] = value + 0.5
            return wrong
    return None


def test_every_registered_name_has_a_known_answer() -> None:
    inputs = [c.input for c in CASES]
    estimators, losses = ({i.get(key) for i in inputs} for key in ("estimator", "loss"))
    ours = {n for n in ADVANTAGES if str(ADVANTAGES[n].__module__).startswith("palestra.")}  # tests register others
    assert ours - estimators == set()
    assert {n for n in LOSSES if str(LOSSES[n].__module__).startswith("palestra.")} - losses == set()
    assert set(PREFERENCE_LOSSES) - losses == set()
    demanded = {key for c in CASES if c.area == "kl" for key in c.expected}
    assert set(KL_ESTIMATORS) - demanded == set()


def test_the_page_lists_every_kind_in_the_codes_own_words() -> None:
    page = (Path(__file__).parents[1] / "docs" / "selfcheck.md").read_text(encoding="utf-8")
    check(CASES[0])  # registers the kinds of all areas
    for area, kinds in KINDS.items():
        assert f"### {area}\n" in page
        for kind in kinds:
            said = " ".join((kind.check.__doc__ or "").replace("``", "`").split())
            keys = ", ".join(f"`{need}`" for need in kind.needs) or "any other"
            assert f"| {keys} | {said} |" in page


# Demands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "met"),
    [
        ({"loss": 1.0000009}, True),
        ({"loss": 1.00001}, False),
        ({"loss": 1.00001, "abs_tol": 1e-3}, True),
        ({"rows": [[1, 2], [3]]}, True),
        ({"rows": [[1, 2], [4]]}, False),
        ({"rows": [[1, 2]]}, False),
        ({"nothing": None}, True),
        ({"loss": None}, False),
        ({"not_loss": 0.8}, True),
        ({"not_loss": 1.0}, False),
        ({"loss_below": 2.0}, True),
        ({"loss_greater_than": 1.0}, False),
        ({"loss_at_least": 1.0}, True),
        ({"loss_within_s": 1.0}, True),
        ({"loss_within_s": 0.9}, False),
        ({"max_loss": 0.5}, False),
        ({"finite": True}, True),
        ({"must_not": "NaN anywhere"}, True),
        ({"must_not": 1.0}, False),
        ({"said_contains": ["a", "word"]}, True),
        ({"said_contains": "sword"}, False),
        ({"either": ["raises ValueError", "loss 1.0"]}, True),
        ({"either": ["raises ValueError", "loss 2.0"]}, False),
        ({"either": ["treated as masked"]}, True),
        ({"property": "holds in words"}, True),
        ({"raises": "ValueError"}, False),
        ({"raises": None, "loss": 1.0}, True),
        ({"warns_or_raises": True}, False),
    ],
)
def test_a_demand_is_met_or_it_is_not(expected: dict[str, Any], met: bool) -> None:
    values = {"loss": 1.0, "rows": [[1, 2], [3]], "nothing": None, "said": "a word", "treated_as_masked": True}
    assert (judge(Outcome({**values, "property": True}), expected).wrong == []) is met


def test_numbers_that_are_not_finite_are_noticed_however_deep() -> None:
    assert judge(Outcome({"rows": [[1.0], [float("nan")]]}), {"finite": True}).wrong
    assert judge(Outcome({"loss": float("nan")}), {"loss": 1.0}).wrong, "NaN is no number near 1"


def test_an_error_is_judged_by_its_class_and_words() -> None:
    outcome = Outcome(raised=DataError("a.jsonl:3: no field 'prompt'"))
    assert judge(outcome, {"raises": "ValueError", "message_mentions": ["prompt", "3"]}).wrong == []
    assert judge(outcome, {"raises": "TypeError"}).wrong
    assert judge(outcome, {"raises": "ValueError", "message_mentions": ["answer"]}).wrong
    assert judge(outcome, {"loss": 1.0}).wrong == ["raised DataError: a.jsonl:3: no field 'prompt'"]
    assert judge(outcome, {"raises": None}).wrong


def test_a_demand_in_words_is_told_and_not_called_met() -> None:
    verdict = judge(Outcome({"loss": 1.0}), {"loss": 1.0, "run_continues": True})
    assert (verdict.wrong, verdict.unchecked, verdict.checked) == ([], ["run_continues"], 1)


# What is run, and what is not ------------------------------------------------------------------------------


def line(area: str, given: dict[str, Any], expected: dict[str, Any]) -> str:
    return check(Case("x", area, given, expected)).line


def test_an_input_in_words_is_not_run_and_the_line_says_which() -> None:
    words = line("loss", {"loss": "dpo", "policy": "same as reference"}, {"loss": 0.69})
    assert words == "not run  x  loss: policy is no mapping of chosen and rejected to log-probs"
    assert line("loss", {"weather": "fine"}, {"loss": 1.0}).startswith("not run  x  loss: its input describes")
    assert line("checkpoint", {"steps": 3}, {}).startswith("not run  x  checkpoint: area checkpoint is about behaviour")
    nothing = line("kl", {"policy_logp": 0.0, "ref_logp": 0.0}, {"run_continues": True})
    assert nothing == "not run  x  kl: nothing here computes run_continues"


def test_a_key_that_nothing_reads_is_told() -> None:
    assert line("loss", {"ratio": 1.0, "advantage": 1.0, "mood": 3}, {"per_token_loss": -1.0}).endswith(
        "not read: mood"
    )


def test_a_key_that_nothing_reads_is_told_where_the_case_failed_too() -> None:
    """It may be why: an option that the kind does not have."""
    told = line("advantage", {"rewards": [1.0, 0.0], "scale": "none", "beta": 0.1}, {"advantages": [0.4, -0.4]})
    assert told.startswith("failed") and told.endswith("not read: beta")


@pytest.mark.parametrize(
    ("area", "given", "expected"),
    [
        (
            "data",
            {"prompt_lengths": [10, 600, 20], "max_prompt": 512, "policy": "filter"},
            {"kept": [0, 2], "dropped": 1},
        ),
        ("data", {"pass_rates_all": [0.0], "dynamic_sampling": True, "max_gen_batches": 3}, {"generation_rounds": 3}),
        (
            "env_tool",
            {"max_turns": 3, "turn_3_still_wants_tool": True},
            {"truncated": True, "stop_reason": "max_turns"},
        ),
        (
            "env_tool",
            {"code": "x = 'a' * 8 * 1024**3", "memory_limit_mb": 256},
            {"observation_contains": "MemoryError"},
        ),
        (
            "eval",
            {"reward_parts": {"correct": 1.0, "speed_bonus": 0.4}},
            {"logged": ["reward total 1.4", "correct 1.0"]},
        ),
        ("tokenization", {"bos_token": None, "text": "hi"}, {"contains_none": False, "bos_count": 0}),
        ("tokenization", {"prompt": "2+2=", "raw_string": True, "bos_id": 1}, {"first_id": 1, "bos_count": 1}),
    ],
    ids=["da-001", "da-004", "et-002", "et-008", "ev-012", "tk-004", "tk-005"],
)
def test_data_is_run_and_never_skipped(area: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert line(area, given, expected) == f"passed   x  {area}"
    key, value = next(iter(expected.items()))
    wrong = one_number_wrong(expected) or {key: not value if isinstance(value, bool) else "something else"}
    assert line(area, given, wrong).startswith("failed")


def test_what_is_logged_must_hold_each_named_series() -> None:
    told = line("eval", {"reward_parts": {"correct": 1.0}}, {"logged": ["correct 1.0", "speed 0.4"]})
    assert told == "failed   x  eval: logged has no 'speed 0.4': ['correct 1.0', 'reward total 1.0']"


def test_data_that_does_not_fit_together_fails_with_what_went_wrong() -> None:
    told = line("gae", {"rewards": [0, 1], "values": [0.5, 0.5], "mask": [1, 0]}, {"advantages": [0, 0]})
    assert told.startswith("failed   x  gae: raised ValueError: a reward on a token that the model did not write")
    unknown = line("loss", {"ratio": 1.0, "loss": "clap"}, {"per_token_loss": 1.0})
    assert "raised ConfigError" in unknown and "did you mean 'clip'" in unknown


# The verb --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], tuple[int, list[str]]]:
    def made(text: str) -> tuple[int, list[str]]:
        (tmp_path / "cases.jsonl").write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["selfcheck", str(tmp_path / "cases.jsonl")])
        return result.exit_code, result.output.splitlines()

    return made


GOOD = {"id": "a", "area": "eval", "input": {"n": 5, "c": 2, "k": 2}, "expected": {"value": 0.7}}


def test_the_verb_prints_a_line_each_and_the_count_last(run: Callable[[str], tuple[int, list[str]]]) -> None:
    bad, other = {**GOOD, "id": "b", "expected": {"value": 0.6}}, {**GOOD, "id": "c", "area": "weather"}
    code, lines = run(json.dumps(GOOD))
    assert (code, lines) == (0, ["passed   a  eval", "1 passed, 0 failed, 0 not run"])
    code, lines = run("\n".join(map(json.dumps, (GOOD, bad, other))))
    assert (code, lines[-1], len(lines)) == (1, "1 passed, 1 failed, 1 not run", 4)
    assert run(json.dumps(other))[0] == 0, "not run is no failure"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no cases in it"),
        ("[1]", "cases.jsonl:1"),
        (json.dumps({**GOOD, "input": "words"}), "cases.jsonl:1: input must be an object, not 'words'"),
        (json.dumps({"id": 3}), "cases.jsonl:1: id must be a text, not 3"),
    ],
)
def test_a_file_that_holds_no_cases_is_a_mistake(
    text: str, said: str, run: Callable[[str], tuple[int, list[str]]]
) -> None:
    code, lines = run(text)
    assert code == 2 and len(lines) == 1 and said in lines[0]
