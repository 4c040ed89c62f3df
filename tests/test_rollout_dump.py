# SPDX-License-Identifier: Apache-2.0
"""What is written comes back exactly; what cannot be read is refused with file and line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import zstandard
from fakes import END, WORDS, FakeRenderer, StepsEnv, play, said

from palestra.env.base import StepResult
from palestra.errors import DataError
from palestra.rollout.dump import group_from_dict, group_to_dict, read_rollouts, write_rollouts
from palestra.types import Episode, Group, RewardTerm, Task, Trajectory

X = WORDS.index("x")


def group():
    task = Task("t/1", ({"role": "user", "content": "2 + 2 = ? 好"},), 4, {"level": 2})
    env = StepsEnv(StepResult(said("!"), 0.1, tool_calls=1, info={"tool_result": "4"}), StepResult(terminated=True))
    played = play(env, [[X, X, END], [X, END]], renderer=FakeRenderer(), task=task, sampling={"top_p": 0.5})
    (t,) = played.trajectories
    scored = Trajectory(t.turns, t.stop, t.agent, {"a": RewardTerm(1.0, 0.5), "b": RewardTerm(None)})
    episode = Episode(task, (scored,), None, played.timings, 0, played.info)
    return Group(task, 3, (episode, Episode(task, error="env.reset: OSError", member=1)))


def same(one, two):
    assert (one.task, one.draw, len(one.episodes)) == (two.task, two.draw, len(two.episodes))
    for a, b in zip(one.episodes, two.episodes, strict=True):
        assert (a.error, a.member, a.timings, a.info) == (b.error, b.member, b.timings, b.info)
        for t, u in zip(a.trajectories, b.trajectories, strict=True):
            assert (t.stop, t.agent, t.rewards, t.messages) == (u.stop, u.agent, u.rewards, u.messages)
            for p, q in zip(t.turns, u.turns, strict=True):
                assert (p.finish_reason, p.rewards, p.tool_calls, p.info) == (
                    q.finish_reason,
                    q.rewards,
                    q.tool_calls,
                    q.info,
                )
            for s, r in zip(t.spans, u.spans, strict=True):
                assert (s.author, s.role, s.text, s.version) == (r.author, r.role, r.text, r.version)
                for name in ("tokens", "logprobs", "kept_logmass"):
                    v, w = getattr(s, name), getattr(r, name)
                    assert (v is None) == (w is None)
                    assert v is None or (v.tobytes() == w.tobytes() and v.dtype == w.dtype)


def test_a_group_comes_back_bit_for_bit_through_a_compressed_file(tmp_path):
    write_rollouts(tmp_path / "step_1.jsonl.zst", [group(), group()])
    back = list(read_rollouts(tmp_path / "step_1.jsonl.zst"))
    assert len(back) == 2
    for one in back:
        same(one, group_like(one))


def group_like(read):
    """The same group made anew; its timings are those of another run."""
    fresh = group()
    episodes = tuple(
        Episode(e.task, e.trajectories, e.error, r.timings, e.member, e.info)
        for e, r in zip(fresh.episodes, read.episodes, strict=True)
    )
    return Group(fresh.task, fresh.draw, episodes)


def test_logprobs_are_written_in_the_shortest_form_that_reads_back_to_the_same_float32():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(1e-3)
    (first, *_) = group().episodes[0].trajectories[0].turns
    span = next(s for s in first.spans if s.logprobs is not None)
    many = type(span)(np.arange(1000), span.author, span.role, "", values, 0)
    turn = type(first)((many,), (), first.action, "eos")
    whole = Group(Task("t", ""), 0, (Episode(Task("t", ""), (Trajectory((turn,), group().episodes[0].stop),)),))
    text = json.dumps(group_to_dict(whole))
    assert group_from_dict(json.loads(text)).episodes[0].trajectories[0].logprobs.tobytes() == values.tobytes()
    assert len(text) < 1000 * 22


def test_advantages_are_written_beside_the_trajectories_for_the_viewer():
    data = group_to_dict(group(), [[0.25], []])
    assert data["episodes"][0]["trajectories"][0]["advantage"] == 0.25
    with pytest.raises(ValueError):
        group_to_dict(group(), [[0.25, 0.5], []])


def test_the_shape_of_a_line_is_the_documented_one():
    data = json.loads(json.dumps(group_to_dict(group())))
    assert (data["format"], data["draw"], data["task"]["id"]) == (1, 3, "t/1")
    trajectory = data["episodes"][0]["trajectories"][0]
    assert trajectory["stop"] == "env_terminated"
    assert trajectory["rewards"]["a"] == {"value": 1.0, "weight": 0.5}
    turn = trajectory["turns"][0]
    assert (turn["finish_reason"], turn["rewards"], turn["tool_calls"]) == ("eos", {"env": 0.1}, 1)
    assert [s["author"] for s in turn["spans"]] == ["template", "env", "template", "model"]
    assert turn["spans"][-1]["tokens"] == [X, X, END]
    assert data["episodes"][1] == {
        "member": 1,
        "error": "env.reset: OSError",
        "timings": {},
        "info": {},
        "trajectories": [],
    }


def test_columns_that_json_cannot_hold_are_written_as_numbers_or_as_their_repr(tmp_path):
    odd = Task("t", "", np.int64(4), {"set": {2, 1}, "complex": 1j})
    write_rollouts(tmp_path / "r.jsonl.zst", [Group(odd, 0, ())])
    (back,) = read_rollouts(tmp_path / "r.jsonl.zst")
    assert (back.task.answer, back.task.meta) == (4, {"set": [1, 2], "complex": "1j"})


def compressed(path, text):
    path.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    return path


def test_half_a_surrogate_and_a_key_that_is_no_text_do_not_stop_a_run(tmp_path):
    one = group()
    odd = Episode(one.task, (), "env: \ud800", info={("a", 1): {2: "\udfff"}}, member=2)
    write_rollouts(tmp_path / "r.jsonl.zst", [Group(one.task, 3, (*one.episodes, odd))])
    (back,) = read_rollouts(tmp_path / "r.jsonl.zst")
    same(Group(one.task, 3, back.episodes[:2]), one)
    assert back.episodes[2].error == "env: \ud800"
    assert back.episodes[2].info == {"('a', 1)": {"2": "\udfff"}}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"format": 2, "episodes": []}', "format 2 is not known here; this version reads 1"),
        ("{}", "not a line of a rollouts file"),
        ('{"format": 1, "draw": 0, "episodes": []}', "field 'task' is missing"),
        ("{nonsense", "not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused_with_file_and_line(tmp_path, line, told):
    good_line = json.dumps(group_to_dict(Group(Task("t", ""), 0, ())))
    path = compressed(tmp_path / "r.jsonl.zst", f"{good_line}\n{line}\n")
    with pytest.raises(DataError, match=told) as raised:
        list(read_rollouts(path))
    assert "r.jsonl.zst:" in str(raised.value)


def test_a_file_that_is_not_compressed_or_not_there_is_refused(tmp_path):
    (tmp_path / "plain.jsonl.zst").write_text("{}")
    with pytest.raises(DataError, match="not zstandard-compressed"):
        list(read_rollouts(tmp_path / "plain.jsonl.zst"))
    with pytest.raises(DataError, match="does not exist"):
        list(read_rollouts(tmp_path / "absent"))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "r.jsonl.zst"
    write_rollouts(path, [group()])
    before = path.read_bytes()

    def breaks():
        yield group()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_rollouts(path, breaks())
    with pytest.raises(ValueError):
        write_rollouts(path, [group()], [[[0.5, 0.5], []]])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
