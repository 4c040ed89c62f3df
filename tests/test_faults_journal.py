# SPDX-License-Identifier: Apache-2.0
"""What clocks decide in an episode is on the disk before it counts, and comes back when the episode is played again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import DONE, MORE, FakeRenderer, StepsEnv, play, said

from palestra.engine.scripted import ScriptedEngine
from palestra.env.base import Action, Observation, StepResult
from palestra.env.tool_env import ToolEnv
from palestra.errors import RunError
from palestra.rollout.journal import FILE, Journal, described, restored
from palestra.types import Episode, StopReason, Task

LATE_S = 0.5
"""A time limit of the tests; what hangs takes ten times as long."""


class SlowEnv(StepsEnv):
    """Hangs in one of its calls (``reset``, or ``step`` by its number), where it is told to."""

    def __init__(self, *results: StepResult, hangs: str | int | None) -> None:
        super().__init__(*results)
        self.hangs, self.file, self.on_disk = hangs, Path("none"), b""

    def _maybe_hang(self, here: str | int) -> None:
        if here == self.hangs:
            time.sleep(10 * LATE_S)

    def reset(self, task: Task, *, seed: int) -> Observation:
        self._maybe_hang("reset")
        return super().reset(task, seed=seed)

    def step(self, action: Action) -> StepResult:
        self._maybe_hang(len(self.actions))
        return super().step(action)

    async def aclose(self) -> None:
        self.on_disk = self.file.read_bytes() if self.file.exists() else b""


def outcome(episode: Episode) -> tuple[Any, ...]:
    """All of an episode but how long it took."""
    turns = [t for trajectory in episode.trajectories for t in trajectory.turns]
    texts = [(s.author, s.text) for turn in turns for s in turn.spans]
    rest = [(turn.observation, turn.rewards, turn.tool_calls, turn.info) for turn in turns]
    return episode.error, episode.info, texts, rest


def played(file: Path, env: Any, *, step: int = 3, script: Any = ("he", "llo"), **options: Any) -> Episode:
    """The episode as a process meets it that opens the run's journal."""
    journal = Journal(file)
    journal.at("rl", step)
    return play(env, script, clock=journal.clock("train", 6, "t", 1), **options)


def kinds(file: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()] if file.exists() else []


CASES: dict[str, tuple[str | int, dict[str, float], StopReason, str]] = {
    "reset": ("reset", {"step_timeout_s": LATE_S}, StopReason.ERROR, "reset"),
    "step": (1, {"step_timeout_s": LATE_S}, StopReason.TOOL_FAILURE, "step"),
    "step, the whole time": (1, {"timeout_s": 2 * LATE_S}, StopReason.TIMEOUT, "step"),
}


@pytest.mark.parametrize("hangs, limits, stop, kind", CASES.values(), ids=CASES)
def test_a_limit_that_struck_strikes_again_and_nothing_is_asked_there(
    tmp_path: Path, hangs: str | int, limits: dict[str, float], stop: StopReason, kind: str
) -> None:
    file = tmp_path / FILE
    first, again = SlowEnv(MORE, DONE, hangs=hangs), SlowEnv(MORE, DONE, hangs=None)
    first.file = file
    want = played(file, first, limits=limits)
    assert want.info["stop"] == stop.value and kinds(file) == [kind]
    assert first.on_disk == file.read_bytes(), "it was there before the episode had ended"
    got = played(file, again, limits=limits)
    assert outcome(got) == outcome(want) and len(again.actions) == (hangs == 1)
    assert kinds(file) == [kind], "what comes back is not written twice"
    (tmp_path / FILE).unlink()
    assert played(file, SlowEnv(MORE, DONE, hangs=None), limits=limits).info["stop"] == "env_terminated"


def test_a_generation_that_took_too_long_is_not_begun_again(tmp_path: Path) -> None:
    def engine(delay_s: float) -> ScriptedEngine:
        return ScriptedEngine(["he", "llo"], FakeRenderer().tokenizer, delay_s=delay_s)

    limits, quick = {"timeout_s": LATE_S}, engine(0.0)
    want = played(tmp_path / FILE, StepsEnv(MORE, DONE), engine=engine(10 * LATE_S), limits=limits)
    got = played(tmp_path / FILE, StepsEnv(MORE, DONE), engine=quick, limits=limits)
    assert want.error is not None and got.error == want.error
    assert quick.requests == [] and kinds(tmp_path / FILE) == ["sample"]


def test_the_end_of_the_time_between_two_turns_comes_after_the_same_turn(tmp_path: Path) -> None:
    class Instant(StepsEnv):
        """Called without a limit, so that only the look at the clock after the turn can tell."""

        never_blocks = True
        busy_s = 0.0

        def step(self, action: Action) -> StepResult:
            time.sleep(self.busy_s)
            return super().step(action)

    slow, quick = Instant(MORE, DONE), Instant(MORE, DONE)
    slow.busy_s, limits = 2 * LATE_S, {"timeout_s": LATE_S}
    want = played(tmp_path / FILE, slow, limits=limits)
    got = played(tmp_path / FILE, quick, limits=limits)
    assert want.info["stop"] == "timeout" and kinds(tmp_path / FILE) == ["episode"]
    assert outcome(got) == outcome(want) and len(quick.actions) == 1


# Tools -----------------------------------------------------------------------------------------------------


class Asking(ToolEnv):
    """Whatever the model writes calls both tools: ``count``, and ``wait``, which hangs until ``marker`` exists."""

    def __init__(self, marker: Path) -> None:
        self.counted = 0

        def count() -> int:
            """Count the calls."""
            self.counted += 1
            return self.counted

        def wait() -> str:
            """Wait for the file."""
            if not marker.exists():
                time.sleep(10 * LATE_S)
            return "hello"

        super().__init__([count, wait], timeout_s=LATE_S)

    async def step(self, action: Action) -> StepResult:
        calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in self.tools]
        result = await super().step(Action({"role": "assistant", "content": "", "tool_calls": calls}, action.text))
        self.last = [m["content"] for m in result.observation.messages]
        words = {"1": "he", "2": "llo", "hello": "hello"}
        shown = tuple({**m, "content": words.get(m["content"], "long")} for m in result.observation.messages)
        return StepResult(Observation(shown), tool_calls=result.tool_calls, info=result.info)

    def reset(self, task: Task, *, seed: int) -> Observation:
        return said("go")


def test_a_tool_that_timed_out_is_seen_to_do_so_again_and_the_environment_goes_on(tmp_path: Path) -> None:
    """In the first run the tool hangs; when the step is played again it would answer at once."""
    file, marker = tmp_path / FILE, tmp_path / "marker"
    want = played(file, Asking(marker), limits={"max_turns": 2})
    assert kinds(file) == ["result", "result"]
    marker.touch()
    again = Asking(marker)
    got = played(file, again, limits={"max_turns": 2})
    assert outcome(got) == outcome(want) and again.last == ["2", "hello"], "it was asked, and answered otherwise"
    seen = [m["content"] for m in got.trajectories[0].turns[1].observation]
    assert seen == ["he", "long"] and [t.info["tool_errors"] for t in got.trajectories[0].turns] == [1, 1]
    file.unlink()
    other = played(file, Asking(marker), limits={"max_turns": 2})
    assert [m["content"] for m in other.trajectories[0].turns[1].observation] == ["he", "hello"] and not kinds(file)


def test_an_answer_survives_the_file_and_what_json_cannot_say_is_told_anew() -> None:
    paid = {"speed": 0.1 + 0.2}
    late = StepResult(said("nein \ud800"), paid, truncated=True, tool_calls=2, info={"n": np.int64(7)})
    plain = described(late)
    assert plain is not None
    fresh = StepResult(Observation((), tools=({"name": "x"},), stop=("!",)), terminated=True)
    back = restored(fresh, json.loads(json.dumps(plain)))
    assert back.observation == Observation(late.observation.messages, ({"name": "x"},), ("!",))
    assert (back.reward, back.terminated, back.truncated, back.tool_calls) == (paid, False, True, 2)
    assert back.info == {"n": 7}
    plain = described(StepResult(info={"x": object()}))
    assert plain is not None and restored(StepResult(info={"y": 1}), plain).info == {"y": 1}
    assert described(StepResult(Observation(({"role": "tool", "content": b""},)))) is None


# What comes back, and what does not ------------------------------------------------------------------------


def test_a_limit_that_did_not_strike_the_first_time_may_strike_the_second(tmp_path: Path) -> None:
    file, limits = tmp_path / FILE, {"step_timeout_s": LATE_S}
    played(file, SlowEnv(MORE, DONE, hangs=None), limits=limits)
    assert kinds(file) == []
    assert played(file, SlowEnv(MORE, DONE, hangs=1), limits=limits).info["stop"] == "tool_failure"
    assert kinds(file) == ["step"]


def test_an_episode_that_went_another_way_meets_nothing_of_the_old_one(tmp_path: Path) -> None:
    file, limits = tmp_path / FILE, {"step_timeout_s": LATE_S}
    played(file, SlowEnv(MORE, DONE, hangs=1), limits=limits)
    env = SlowEnv(MORE, DONE, hangs=None)
    assert played(file, env, limits=limits, script=("he", "x")).info["stop"] == "env_terminated"


def test_limits_that_were_raised_for_the_resume_are_the_new_ones(tmp_path: Path) -> None:
    file = tmp_path / FILE
    played(file, SlowEnv(MORE, DONE, hangs=1), limits={"step_timeout_s": LATE_S})
    got = played(file, SlowEnv(MORE, DONE, hangs=None), limits={"step_timeout_s": 2 * LATE_S})
    assert got.info["stop"] == "env_terminated"


@pytest.mark.parametrize("other", [("rl", 4, 6, 1), ("sft", 3, 6, 1), ("rl", 3, 7, 1), ("rl", 3, 6, 0)])
def test_an_entry_belongs_to_one_step_one_draw_and_one_member(tmp_path: Path, other: tuple[str, int, int, int]) -> None:
    phase, step, draw, member = other
    first = Journal(tmp_path / FILE)
    first.at("rl", 3)
    first.clock("train", 6, "t", 1).strikes(0, "step", [[5]], limit_s=1.0, over=False)
    again = Journal(tmp_path / FILE)
    again.at(phase, step)
    assert again.clock("train", draw, "t", member).struck(0, "step", [[5]]) is None
    again.at("rl", 3)
    assert again.clock("eval", 6, "t", 1).struck(0, "step", [[5]]) is None
    clock = again.clock("train", 6, "t", 1)
    assert clock.struck(0, "step", [[5]]) is not None and clock.struck(1, "step", [[5]]) is None
    assert again.clock("train", 6, "t", 1).struck(0, "step", [[5]]) is None, "the second attempt is another one"
    again.at("rl", 4)
    again.at("rl", 3)
    assert again.clock("train", 6, "t", 1).struck(0, "step", [[5]]) is not None


def test_what_lies_before_a_checkpoint_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE)
    for phase, step in (("sft", 9), ("rl", 3), ("rl", 4), ("rl", 5)):
        journal.at(phase, step)
        journal.clock("train", 0, "t", 0).strikes(0, "step", [])
    journal.settle("rl", 4)
    assert [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()] == [4, 5]
    journal.settle("rl", 6)
    assert (tmp_path / FILE).read_bytes() == b""


def test_a_line_torn_by_a_kill_never_counted_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / FILE
    journal = Journal(file)
    journal.at("rl", 0)
    for member in (0, 1):
        journal.clock("train", 0, "t", member).strikes(0, "step", [])
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    again = Journal(file)
    assert file.read_bytes() == whole[:-9], "to look at it changes nothing"
    again.at("rl", 0)
    assert again.clock("train", 0, "t", 1).struck(0, "step", []) is None
    again.clock("train", 0, "t", 2).strikes(0, "step", [])
    assert [json.loads(line)["member"] for line in file.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize(
    "given, said",
    [
        ("{}", "'format' is missing"),
        ("no", "'format' is missing"),
        ("[1]", "'format' is missing"),
        ({"seen": None}, "'seen' is missing"),
        ({"draw": [6]}, "'draw' is missing"),
        ({"format": 9}, "format 9 is not known here"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_in_one_line(
    tmp_path: Path, given: str | dict[str, Any], said: str
) -> None:
    file = tmp_path / FILE
    Journal(file).clock("train", 6, "t", 1).strikes(0, "step", [])
    line = given if isinstance(given, str) else json.dumps(json.loads(file.read_text()) | given)
    file.write_text(line + "\n")
    with pytest.raises(RunError, match=rf"journal\.jsonl:1 is no entry of a journal: {said}; remove the file"):
        Journal(file)


def test_a_disk_that_cannot_be_written_stops_the_run_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "gone" / FILE
    with pytest.raises(RunError, match=r"cannot write .*journal\.jsonl"):
        played(file, SlowEnv(DONE, hangs=0), limits={"step_timeout_s": LATE_S})


def test_without_a_run_nothing_is_kept() -> None:
    journal = Journal()
    clock = journal.clock("train", 0, "t", 0)
    clock.strikes(0, "step", [])
    assert clock.struck(0, "step", []) is None
