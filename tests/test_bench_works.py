# SPDX-License-Identifier: Apache-2.0
"""What the bench's processes do, on the tiny model: the work is the work that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.benches import episodes as episode_benches
from bench.lab import Lab, Settings
from bench.models import TEMPLATE, checkpoint, noise, prompts
from bench.ours import ceilings, loop, sampling, supervised, update
from bench.ours.worlds import Turns
from bench.peers import hf
from bench.peers.calculator import Episode, Player, result, right
from bench.rows import Results
from palestra.env import CalculatorEnv
from palestra.env.base import Action
from palestra.errors import ConfigError
from palestra.model.tiny import calculator_tokenizer
from palestra.reward.calculator import given_answer
from palestra.types import Author, Span, StopReason, Task, Trajectory, Turn

PROMPT = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> str:
    return checkpoint("tiny", folder)


def ids(tiny: str, count: int) -> list[list[int]]:
    return [prompt.ids for prompt in prompts(tiny, count, PROMPT)]


def run_config(tiny: str, **more: Any) -> dict[str, Any]:
    return {"model": tiny, "texts": [p.text for p in prompts(tiny, 2, PROMPT)], "samples": 2, "new": 4, **more}


# Models and prompts ----------------------------------------------------------------------------------------


def test_prompts_differ_and_have_exactly_the_length_that_is_asked_for(tiny: str) -> None:
    made = prompts(tiny, 3, 100)
    assert [len(p.ids) for p in made] == [100] * 3
    assert len({p.text for p in made}) == 3
    assert made == prompts(tiny, 3, 100)


def test_a_prompt_shorter_than_the_template_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match="no prompt of exactly 5 tokens"):
        prompts(tiny, 1, 5)


def test_a_dialogue_only_grows_at_its_end() -> None:
    tokenizer = calculator_tokenizer()
    call = {"function": {"name": "lookup", "arguments": {"key": "x"}}}
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    texts = [
        tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
        for messages in (asked, [*asked, {"role": "tool", "name": "lookup", "content": "7"}])
    ]
    assert texts[1].startswith(texts[0])
    assert 'lookup {"key": "x"}' in texts[0] and texts[1].endswith("tool\n7<|im_end|>\n")


def test_a_checkpoint_is_made_once(folder: Path, tiny: str) -> None:
    before = (Path(tiny) / "model.safetensors").stat().st_mtime_ns
    assert checkpoint("tiny", folder) == tiny
    assert (Path(tiny) / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        checkpoint("tny", folder)


# Ours ------------------------------------------------------------------------------------------------------


def test_the_ceilings_of_the_machine_are_positive_rates() -> None:
    found = ceilings.ceilings(64, 2**12)({})
    assert found["bandwidth"] > 0 and all(rate > 0 for rate in found["flops"].values())
    assert set(found["flops"]) == {"float32", "bfloat16"}


def test_sampling_has_the_lengths_and_turns_that_are_asked_for(tiny: str) -> None:
    measure = sampling.sampling(tiny, "float32")
    assert measure({"prompts": ids(tiny, 2), "samples": 2, "lengths": [3, 1, 2, 5]})["tokens"] == 11
    turns = {"prompts": ids(tiny, 2), "samples": 2, "lengths": [2], "turns": 3, "added": noise(tiny, 5)}
    assert measure(turns)["tokens"] == 2 * 2 * 2 * 3


def test_episodes_have_their_turns_and_every_turn_its_tokens(tiny: str) -> None:
    found = loop.episodes(**run_config(tiny, turns=3))({})
    assert (found["tokens"], found["turns"]) == (2 * 2 * 3 * 4, 3.0)


def test_a_step_says_where_its_seconds_went(tiny: str) -> None:
    found = loop.step(**run_config(tiny))({"steps": 2})
    parts = {name: found["split"][f"time/{name}_s"] for name in ("rollout", "update", "sync")}
    assert all(seconds > 0 for seconds in parts.values())
    assert found["seconds"] > 0 and found["peak_gib"] > 0


def test_a_step_in_bfloat16_is_corrected_for_its_sampler(tiny: str) -> None:
    given = loop.settings(**run_config(tiny, dtype="bfloat16"))
    assert given["algorithm"]["importance"] == "token_truncate"
    assert (given["engine"]["dtype"], given["train"]["compute_dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(("count", "samples"), [(2, 2), (4, 1)])
def test_the_timed_update_has_the_gradient_of_plain_forward_passes(tiny: str, count: int, samples: int) -> None:
    found = update.update(tiny, ids(tiny, count), samples, 6)({"check": True})
    assert 0 < found["gradient_error"] < 1e-5


def test_supervised_steps_count_their_tokens(tiny: str) -> None:
    measure = supervised.sft(tiny, 2, 16)
    assert [measure({})["tokens"] for _ in range(2)] == [32, 32]
    assert supervised.dpo(tiny, 2, 16)({})["tokens"] == 64


def test_tools_take_their_time_and_pay_by_the_text() -> None:
    env = Turns(turns=2)
    env.reset(Task("t", "go"), seed=0)
    first, last = (env.step(Action({"role": "assistant", "content": text}, text)) for text in ("a", "b"))
    assert (first.tool_calls, first.terminated, last.tool_calls, last.terminated) == (1, False, 0, True)
    assert first.reward != last.reward


# Peers -----------------------------------------------------------------------------------------------------


class Told:
    """A channel with nothing but a configuration."""

    def __init__(self, **config: Any) -> None:
        self.config = {"threads": 1, **config}


def test_transformers_samples_and_learns_the_same_work(tiny: str) -> None:
    channel: Any = Told(work="sampling", model=tiny, dtype="float32")
    assert hf.prepare(channel)({"prompts": ids(tiny, 2), "samples": 2, "lengths": [3]})["tokens"] == 12
    batch: Any = Told(work="update", model=tiny, dtype="float32", prompts=ids(tiny, 2), samples=2, new=3)
    assert hf.prepare(batch)({})["seconds"] > 0


@pytest.mark.parametrize(
    "text",
    [
        "<call>add(3,4)</call>",
        "<call>mul( -3 , 40 )</call>",
        "<call>div(3,4)</call>",
        "<call>add(3)</call>",
        "<call>",
        "",
    ],
)
def test_the_peers_calculator_says_what_ours_says(text: str) -> None:
    env = CalculatorEnv()
    env.reset(Task("t", "1+1\n", 2), seed=0)
    said = env.step(Action({"role": "assistant", "content": text}, text)).observation.messages[0]["content"]
    assert f"<obs>{result(text)}</obs>" == said


@pytest.mark.parametrize("text", [r"<answer>\boxed{7}</answer>", r"<answer>\boxed{8}</answer>", "<obs>7</obs>", "7"])
def test_the_peers_reward_is_ours(text: str) -> None:
    span = Span([5], Author.MODEL, "assistant", text, logprobs=[0.0], version=0)  # type: ignore[arg-type]
    turn = Turn((span,), (), {"role": "assistant", "content": text}, "stop")
    ours = given_answer(Trajectory((turn,), StopReason.ENV_TERMINATED)) == 7
    assert right(text, 7) is ours


class Scripted:
    """A model that says, row by row, what it was told."""

    training = True

    def __init__(self, *rounds: list[list[int]]) -> None:
        self.rounds = list(rounds)

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode

    def generate(self, *, input_ids: Any, **_: Any) -> Any:
        import torch

        said = self.rounds.pop(0)
        width = max(map(len, said))
        return torch.cat([input_ids, torch.tensor([row + [0] * (width - len(row)) for row in said])], 1)


def test_a_peers_episode_ends_with_its_answer_and_results_are_masked() -> None:
    tokenizer = calculator_tokenizer()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    call, answer = encode("<call>add(1,2)</call>"), encode(r"<answer>\boxed{3}</answer>")
    model = Scripted([call, answer], [answer])
    found = Player(model, tokenizer, turns=4, new=24).play(["1+2\n", "3\n"], greedy=True)
    seen = encode("<obs>3</obs>")
    assert [e.tokens for e in found] == [call + seen + answer, answer]
    assert found[0].mask == [1] * len(call) + [0] * len(seen) + [1] * len(answer)
    assert (found[0].turns, model.training) == (2, True)
    assert isinstance(found[0], Episode)


# All together ----------------------------------------------------------------------------------------------


@pytest.mark.slow  # a process that imports everything and builds models: a quarter of a minute
def test_a_row_of_the_tiny_model_by_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    settings = Settings(models=folder, logs=tmp_path, against=(), repeats=1, quick=True, threads=1)
    lab = Lab(settings, Results(tmp_path / "rows.json"), tell=lambda _: None)
    (row,) = list(episode_benches.tools.rows(lab))
    record = lab.file(row)
    assert record["absent"] == {"trl": "not asked for"}, (tmp_path / "ours.log").read_text()
    assert record["ours"] > 0 and record["versions"]["ours"]["torch"]
    assert record["settings"] == {"repeats": 1, "quick": True, "threads": 1}
