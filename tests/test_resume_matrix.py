# SPDX-License-Identifier: Apache-2.0
"""A run that meets SIGKILL anywhere and is resumed ends as if it had never been stopped: the same bits in weights,
optimiser, random states and logged numbers. Kinds of training × full or adapter, with dropout on, × moments."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from palestra.config import Config
from palestra.engine import canary
from palestra.model.loading import LoadedModel
from palestra.model.tiny import calculator_tokenizer
from palestra.reward.novelty import Novelty
from palestra.reward.rubric import Rubric
from palestra.run.progress import Progress
from palestra.train import sealed, setup
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint
from palestra.train.config import ModelConfig, RLConfig, SFTConfig
from palestra.train.prefer import train_prefer
from palestra.train.preference_config import PreferConfig, RewardModelConfig
from palestra.train.reward_model import train_reward_model
from palestra.train.rl import RLTrainer, train_rl
from palestra.train.sft import train_sft

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks a process in which torch is loaded")

STEPS, SAVED, KILLED = 4, 2, 3
"""A checkpoint every second step; the kill comes in the third, so that a logged step is done once more."""

MODEL: dict[str, Any] = {"model": "builtin:calculator", "renderer": "plain"}
PAIRS: dict[str, Any] = {"data": {"name": "arithmetic", "count": 6, "max_operand": 9}, "batch_size": 2, "steps": STEPS}
PLAYED: dict[str, Any] = {
    "env": {"name": "calculator", "max_steps": 2},
    "data": "arithmetic",
    "sampling": {"max_new_tokens": 4},
    "train": {"steps": STEPS, "tasks_per_step": 2, "learning_rate": 1e-3, "save_every": SAVED},
    "eval": {"size": 1},
}
KINDS: dict[str, tuple[type[Config], Callable[..., Any], dict[str, Any]]] = {
    "sft": (SFTConfig, train_sft, {"sft": PAIRS | {"learning_rate": 1e-3}, "save_every": SAVED}),
    "dpo": (PreferConfig, train_prefer, {"prefer": PAIRS | {"learning_rate": 1e-3}, "save_every": SAVED}),
    "reward model": (
        RewardModelConfig,
        train_reward_model,
        {"reward_model": PAIRS | {"learning_rate": 1e-3}, "save_every": SAVED},
    ),
    "grpo": (
        RLConfig,
        train_rl,
        PLAYED | {"algorithm": {"group_size": 2, "updates_per_batch": 2, "kl_control": {"target": 0.01}}},
    ),
    "ppo": (RLConfig, train_rl, PLAYED | {"algorithm": {"preset": "ppo", "group_size": 2, "updates_per_batch": 2}}),
}
MOMENTS = ("rollout", "update", "checkpoint", "between")
CASES = [
    (kind, adapter, moment)
    for kind in KINDS
    for adapter in (False, True)
    for moment in MOMENTS
    if moment != "rollout" or kind in ("grpo", "ppo")
]
PAIRWISE = [
    (kind, adapter, moment)
    for kind, adapter, moment in CASES
    if adapter == (list(KINDS).index(kind) + MOMENTS.index(moment)) % 2
]
"""Every kind with every moment, and each of both with and without an adapter."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A forked process has only the thread that forked; parent and child must cut their sums alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """One narrow layer with attention dropout in the place of the built-in model."""

    def narrow(config: ModelConfig) -> LoadedModel:
        tokenizer = calculator_tokenizer()
        shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": 2, "max_position_embeddings": 128, "attention_dropout": 0.2}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape)
            model = transformers.LlamaForCausalLM(made)
        return LoadedModel(model.eval(), tokenizer, config.path, (2,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "load", narrow)
        yield


def run(kind: str, out: Path, *, adapter: bool, progress: Progress | None = None, resume: bool = False) -> None:
    shape, verb, given = KINDS[kind]
    lora = {"lora": {"r": 2, "dropout": 0.3}} if adapter else {}
    config = shape.model_validate(MODEL | given | lora | {"out": str(out)})
    more: dict[str, Any] = {"on_ready": rewarded} if verb is train_rl else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an unfinished checkpoint is named
        verb(config, progress=progress or Progress(quiet=True), resume=resume, **more)


def rewarded(trainer: RLTrainer) -> None:
    """A random model never answers: pay for what it samples, and for what it has not sampled before."""

    def by_tokens(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [float(np.mean([t % 7 for t in ids])) for ids in completion_ids]

    novelty = Novelty(per_task=False)
    rubric = Rubric({"accuracy": (by_tokens, 1.0), "novelty": (novelty, 0.5)}, chat=False)
    trainer.world = replace(trainer.world, rubric=rubric, memory=rubric.stateful)


# Death -----------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_rollout() -> None:
    """After the second training episode of the third step, while the others are under way."""
    play, played = setup.run_episode, 0

    async def counted(*args: Any, purpose: str, **options: Any) -> Any:
        nonlocal played
        episode = await play(*args, purpose=purpose, **options)
        played += purpose == "train"
        if played == 4 * (KILLED - 1) + 2:
            die()
        return episode

    setup.run_episode = counted  # type: ignore[assignment]


def in_update(updates: int) -> None:
    """Weights have moved; where a step has two updates, those of the first alone."""
    step, taken = torch.optim.AdamW.step, 0

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal taken
        result = step(self, *args, **options)
        taken += 1
        if taken == updates * (KILLED - 1) + 1:
            die()
        return result

    torch.optim.AdamW.step = counted  # type: ignore[method-assign]


def in_checkpoint() -> None:
    """All files of a checkpoint are written, and its mark is not."""
    seal = sealed.seal

    def cut_short(folder: Path, step: int, score: float | None = None) -> None:
        if step == SAVED and folder.parent.name == "checkpoints":
            die()
        seal(folder, step, score)

    sealed.seal = cut_short


class Deadly(Progress):
    """After a step that is logged and not yet in a checkpoint."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if step == KILLED:
            die()


def forked(work: Callable[[], object], *, seconds: int) -> int:
    """``work`` in a process of its own, for so many seconds at most; its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of processes with threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(seconds)
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return child


def killed(kind: str, out: Path, moment: str, *, adapter: bool) -> None:
    """The run, in a process of its own that meets SIGKILL."""
    updates = 2 if kind in ("grpo", "ppo") else 1
    traps: dict[str, Callable[[], object]] = {
        "rollout": in_rollout,
        "update": lambda: in_update(updates),
        "checkpoint": in_checkpoint,
    }

    def work() -> None:
        if moment in traps:
            traps[moment]()
        run(kind, out, adapter=adapter, progress=Deadly() if moment == "between" else None)

    status = os.waitpid(forked(work, seconds=120), 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "it was to be killed, and came to its end"


# What must be the same -------------------------------------------------------------------------------------


def end_of(out: Path) -> dict[str, Any]:
    """Weights, trainer state and logged numbers at the end of a run, without paths and what the clock has a hand in."""
    found = latest_checkpoint(out / "checkpoints")
    assert found is not None and found.name == f"step_{STEPS:06d}"
    state = dict(load_checkpoint(found).trainer)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "speed")
    return {
        "weights": {p.name: p.read_bytes() for p in sorted(found.glob("*.safetensors"))},
        "state": plain({name: value for name, value in state.items() if name != "results"}),
        "rows": [{k: v for k, v in row.items() if k.partition("/")[0] not in timed} for row in rows],
    }


def plain(value: Any) -> Any:
    """Tensors as bytes, so that equality means bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.contiguous().view(torch.uint8).numpy().tobytes() if value.ndim else value.item()
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], dict[str, Any]]:
    done: dict[tuple[str, bool], dict[str, Any]] = {}

    def ended(kind: str, adapter: bool) -> dict[str, Any]:
        if (kind, adapter) not in done:
            out = tmp_path_factory.mktemp("whole") / "run"
            run(kind, out, adapter=adapter)
            done[kind, adapter] = end_of(out)
        return done[kind, adapter]

    return ended


def check(
    uninterrupted: Callable[[str, bool], dict[str, Any]], out: Path, kind: str, adapter: bool, moment: str
) -> None:
    killed(kind, out, moment, adapter=adapter)
    assert not (out / "summary.json").exists()
    run(kind, out, adapter=adapter, resume=True)
    want, got = uninterrupted(kind, adapter), end_of(out)
    assert [row["step"] for row in got["rows"]] == [row["step"] for row in want["rows"]]
    for part in ("rows", "state", "weights"):
        assert got[part] == want[part], part


def named(case: tuple[str, bool, str]) -> str:
    return f"{case[0]}, {'adapter' if case[1] else 'full'}, {case[2]}"


@pytest.mark.parametrize("case", PAIRWISE, ids=named)
def test_a_killed_run_ends_as_if_it_had_never_been_stopped(
    uninterrupted: Callable[[str, bool], dict[str, Any]], tmp_path: Path, case: tuple[str, bool, str]
) -> None:
    """cp-010: what was sampled or computed and not yet learned from is made again, and nothing is skipped."""
    check(uninterrupted, tmp_path / "run", *case)


@pytest.mark.slow  # the rest of the matrix: two runs a case
@pytest.mark.parametrize("case", [case for case in CASES if case not in PAIRWISE], ids=named)
def test_the_rest_of_the_matrix(
    uninterrupted: Callable[[str, bool], dict[str, Any]], tmp_path: Path, case: tuple[str, bool, str]
) -> None:
    check(uninterrupted, tmp_path / "run", *case)


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_the_dropout_and_the_rewards_that_remember_count(
    uninterrupted: Callable[[str, bool], dict[str, Any]], kind: str
) -> None:
    """Without dropout, or without a state of the reward, the matrix would prove less than it says."""
    end = uninterrupted(kind, False)
    if kind == "grpo":
        visits = end["state"]["rewards"]["novelty"]
        assert sum(visits.values()) >= 4 * STEPS and max(visits.values()) > 1
        assert end["state"]["kl"]["coef"] != 0.05, "the coefficient has followed the KL"
    else:
        torch.manual_seed(0)
        assert end["state"]["rng"]["torch"] != plain(torch.get_rng_state()), "dropout has drawn"


def test_a_run_in_rounds_ends_as_one_without_where_a_rows_bits_are_its_own(
    uninterrupted: Callable[[str, bool], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixed schedule for other engines, on one where the schedule may not matter."""
    hear, heard = canary.sing, []

    def batch_dependent(*args: Any) -> Any:
        heard.append(hear(*args))
        return replace(heard[-1], batch_invariant=False)

    shape, verb, given = KINDS["grpo"]
    scheduled = given | {"train": given["train"] | {"deterministic": True}}
    monkeypatch.setattr(canary, "sing", batch_dependent)
    monkeypatch.setitem(KINDS, "in rounds", (shape, verb, scheduled))
    run("in rounds", tmp_path / "run", adapter=False)
    assert heard and heard[0].batch_invariant
    assert end_of(tmp_path / "run") == uninterrupted("grpo", False)
