# SPDX-License-Identifier: Apache-2.0
"""``palestra eval``: a model on held-out tasks, through the very same episodes as in training."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.data.source import make_source
from palestra.engine.base import Engine
from palestra.engine.openai import CompletionsEngine, EndpointConfig, EndpointEngine
from palestra.engine.openai_chat import ChatEngine, MessageRenderer, Table
from palestra.env import make_env
from palestra.errors import ConfigError, DataError
from palestra.eval.compare import EPISODES, Comparison, compare, read_episodes
from palestra.eval.evaluate import EvalResult, Scorer, demand_scores, evaluate
from palestra.eval.examples import Example, examples_of
from palestra.eval.report import write_pages
from palestra.eval.summary import readable, summarise
from palestra.reward.build import make_rubric
from palestra.rollout.dump import write_rollouts
from palestra.run.directory import Run, check_free
from palestra.run.files import write_json, write_text
from palestra.run.progress import Progress
from palestra.train import setup
from palestra.train.checkpoint import latest_checkpoint
from palestra.train.config import EvalConfig, ModelConfig
from palestra.train.metrics import eval_metrics
from palestra.types import Group, Task

REASONING = (
    "Judge the reasoning, not only the answer: is each step right, does it follow from the one before, and would a "
    "reader be able to check it?"
)


def run_eval(config: EvalConfig, *, progress: Progress) -> dict[str, Any]:
    """Play ``eval.size`` held-out tasks; returns the result that ``summary.json`` holds.

    The run directory also gets the episodes (``rollouts/eval.jsonl.zst``), one line per episode (``examples.jsonl``),
    ``report.html`` and ``report.md``, and with ``eval.baseline`` a ``comparison.json``.
    """
    check_free(config.out)
    baseline = config.eval.baseline
    earlier = read_episodes(baseline) if baseline is not None and _is_evaluation(baseline) else None
    player = _player(config)
    with Run.open(config.out, config) as run:
        if baseline is not None and earlier is None:
            before = _play(_player(_named_model(config, baseline)), progress, f"baseline: {Path(baseline).name}")
            write_rollouts(run.path / "rollouts" / "baseline.jsonl.zst", before.groups)
            earlier = list(before.groups)
        result = _play(player, progress, "evaluation")
        demand_scores(result, "evaluation")
        metrics = eval_metrics(result)
        run.log(0, metrics, phase="eval")
        write_rollouts(run.path / EPISODES, result.groups)
        examples = examples_of(result.groups, config.eval.metric)
        write_text(run.path / "examples.jsonl", "".join(f"{e.to_json()}\n" for e in examples))
        summary = _summary(player, result, examples)
        comparison = _compared(config, earlier, result, run.path)
        write_pages(run.path, f"Evaluation {run.path.name}", summary, examples, comparison)
        run.write_summary(summary)
    return summary


def plan_eval(config: EvalConfig) -> list[str]:
    """What a config amounts to, for ``--dry-run``: the player is made, and nothing asked of it."""
    settings, player = config.eval, _player(config)
    player.engine.close()
    many = f" × {settings.samples} samples" if settings.samples > 1 else ""
    against = [] if settings.baseline is None else [f"compared with {settings.baseline}"]
    return [
        f"model: {player.described}",
        f"{len(player.tasks):,} held-out tasks{many}, temperature {settings.temperature:g}, accuracy by "
        f"{settings.metric!r}",
        *against,
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Player:
    """A model, and everything that its evaluation needs. described: the model in a few words."""

    config: EvalConfig
    world: setup.World
    engine: Engine
    described: str

    @property
    def tasks(self) -> Sequence[Task]:
        return setup.eval_tasks(self.config, self.config.eval, self.config.eval.size)


def _player(config: EvalConfig) -> _Player:
    """Everything from the config; whatever is wrong in it is told here, before anything is written."""
    if not config.eval.size:
        raise DataError("there is no task to evaluate on: eval.size is 0")
    endpoint = config.endpoint
    if endpoint is not None and endpoint.api == "chat":
        world, engine = _chat_world(config, endpoint)
        return _Player(config, world, engine, f"{engine.model} behind {endpoint.url}, as text")
    loaded = setup.load(_model_of(config.model))
    world = setup.make_world(config, loaded)
    if endpoint is not None:
        remote = CompletionsEngine(endpoint, config.model.path, world.renderer.decode)
        return _Player(config, world, remote, f"{remote.model} behind {endpoint.url}, as token ids")
    count = sum(p.numel() for p in loaded.model.parameters())
    return _Player(config, world, setup.make_engine(config, loaded.model, world.renderer), f"{count:,} parameters")


def _play(player: _Player, progress: Progress, phase: str) -> EvalResult:
    settings, tasks = player.config.eval, player.tasks
    progress.phase(phase, total=len(tasks))
    rollout = player.world.rollout(player.engine, setup.eval_sampling(player.config, settings), purpose="eval")
    try:
        result = asyncio.run(
            evaluate(
                tasks,
                rollout,
                _scorer(player.config, player.world.rubric),
                metric=settings.metric,
                samples=settings.samples,
                concurrency=settings.concurrency,
                retries=settings.retries,
                on_group=_Shown(progress, settings.metric),
            )
        )
    finally:
        player.engine.close()
    _tell_failures(progress, result)
    return result


class _Shown:
    """Tells the progress of each group: how many, and the accuracy so far."""

    def __init__(self, progress: Progress, metric: str) -> None:
        self._progress, self._metric = progress, metric
        self._done, self._sum, self._scored = 0, 0.0, 0

    def __call__(self, group: Group) -> None:
        self._done += 1
        terms = [e.trajectories[-1].rewards.get(self._metric) for e in group.episodes if e.trajectories]
        values = [t.value for t in terms if t is not None and t.value is not None]
        self._sum, self._scored = self._sum + sum(values), self._scored + len(values)
        self._progress.update(self._done, {"eval/accuracy": self._sum / self._scored} if self._scored else {})


def _chat_world(config: EvalConfig, endpoint: EndpointConfig) -> tuple[setup.World, ChatEngine]:
    """A world without tokens; ``renderer`` only says whether rewards see messages or, as ``plain``, text."""
    if config.renderer.options:
        raise ConfigError(f"renderer.{min(config.renderer.options)} does nothing with endpoint.api=chat: leave it out")
    table = Table()
    limit = config.limits.reward_timeout_s
    rubric = make_rubric(config.rewards, chat=config.renderer.name != "plain", timeout_s=limit)
    if config.eval.size:
        setup.eval_tasks(config, config.eval, 1, setup.fields_read(rubric))
    world = setup.World(
        config=config,
        renderer=MessageRenderer(table),
        env_factory=make_env(config.env.name, **config.env.options),
        rubric=rubric,
        tasks=make_source(config.data.name, seed=config.seed, **{"split": "train"} | config.data.options),
    )
    return world, ChatEngine(endpoint, config.model.path, table)


def _model_of(model: ModelConfig) -> ModelConfig:
    """A run directory stands for its newest checkpoint."""
    checkpoints = Path(model.path) / "checkpoints"
    found = latest_checkpoint(checkpoints) if checkpoints.is_dir() else None
    return model if found is None else model.model_copy(update={"path": str(found)})


def _named_model(config: EvalConfig, path: str) -> EvalConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _is_evaluation(path: str) -> bool:
    return (Path(path).is_file() and not path.endswith(".gguf")) or (Path(path) / EPISODES).is_file()


class _Judged:
    """A rubric, and a judge's score of the reasoning beside it as a part that weighs nothing."""

    def __init__(self, rubric: Scorer, judge: Scorer) -> None:
        self._rubric, self._judge = rubric, judge

    async def score(self, group: Group) -> Group:
        scored, judged = await self._rubric.score(group), await self._judge.score(group)
        episodes = tuple(
            dataclasses.replace(
                e,
                trajectories=tuple(
                    dataclasses.replace(t, rewards={**t.rewards, "reasoning": j.rewards["reasoning"]})
                    if "reasoning" in j.rewards
                    else t
                    for t, j in zip(e.trajectories, other.trajectories, strict=True)
                ),
            )
            for e, other in zip(scored.episodes, judged.episodes, strict=True)
        )
        return dataclasses.replace(scored, episodes=episodes)


def _scorer(config: EvalConfig, rubric: Scorer) -> Scorer:
    options = config.eval.judge
    if options is None:
        return rubric
    part = {"function": "judge", "weight": 0.0, "criteria": REASONING, **options}
    return _Judged(rubric, make_rubric({"reasoning": part}, chat=config.renderer.name != "plain"))


def _tell_failures(progress: Progress, result: EvalResult) -> None:
    if result.errors:
        error = next(e.error for g in result.groups for e in g.episodes if e.error is not None)
        played = result.examples * result.samples
        said = f"{result.errors} of {played} episodes failed and do not count, one by {error}"
        progress.note(said, warning=True)


def _summary(player: _Player, result: EvalResult, examples: Sequence[Example]) -> dict[str, Any]:
    config, engine = player.config, player.engine
    facts: dict[str, Any] = {"model": config.model.path, "seed": config.seed, "temperature": config.eval.temperature}
    if isinstance(engine, EndpointEngine):
        facts["endpoint"] = {"url": engine.endpoint.config.url, **dataclasses.asdict(engine.endpoint.usage)}
    form = result.format_rate if result.format_rate is not None else readable(examples)
    return {**facts, **result.to_dict(), "format_rate": form, **summarise(examples, config.eval.pass_k)}


def _compared(
    config: EvalConfig, earlier: Sequence[Group] | None, result: EvalResult, folder: Path
) -> Comparison | None:
    if earlier is None:
        return None
    names = (Path(str(config.eval.baseline)).name, folder.name)
    found = compare(earlier, result.groups, config.eval.metric, names)
    write_json(folder / "comparison.json", found.to_dict())
    return found
