# SPDX-License-Identifier: Apache-2.0
"""From a config to the things it names: model, renderer, environment, rubric, tasks, and one call that plays an
episode. Training and evaluation share this, so a policy meets the same prompts in both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from palestra.chat import Renderer, make_renderer
from palestra.data.source import NOTHING, Cursor, Needs, TaskSource, make_source
from palestra.engine.base import Engine
from palestra.engine.local import LocalEngine
from palestra.engine.rounds import Rounds
from palestra.env import Env, make_env
from palestra.env.base import Observation
from palestra.errors import ConfigError
from palestra.model.kernels import bfloat16_products
from palestra.model.loading import LoadedModel, load_model
from palestra.reward.base import Stateful
from palestra.reward.build import make_rubric
from palestra.reward.rubric import RESERVED, Rubric, required
from palestra.rollout.collect import Rollout
from palestra.rollout.episode import SamplingConfig, run_episode
from palestra.rollout.journal import Journal
from palestra.train.config import Choice, EvalConfig, EvalSettings, ModelConfig, RLConfig, TaskConfig
from palestra.types import Episode, Task


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """Everything around the policy: how tasks are shown, played and scored. memory: what of the scoring remembers.
    journal: keeps what clocks decide; none by default."""

    config: TaskConfig
    renderer: Renderer
    env_factory: Callable[[], Env]
    rubric: Rubric
    tasks: TaskSource
    memory: Mapping[str, Stateful] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)

    def remembered(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint: the states of those rewards that have one, by name."""
        return {name: reward.state_dict() for name, reward in self.memory.items()}

    def remember(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The inverse of :meth:`remembered`; a reward without a state in it goes on as it is."""
        for name, reward in self.memory.items():
            if name in states:
                reward.load_state_dict(states[name])

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """What is scored inside leaves no trace in what the rewards remember."""
        states = self.remembered()
        try:
            yield
        finally:
            self.remember(states)

    def rollout(self, engine: Engine, sampling: SamplingConfig, *, purpose: str) -> Rollout:
        """The call that plays one episode of a task with this engine."""

        def play(task: Task, draw: int, member: int) -> Awaitable[Episode]:
            if isinstance(engine, Rounds):
                return engine.play(lambda seat: played(seat, task, draw, member))
            return played(engine, task, draw, member)

        def played(engine: Engine, task: Task, draw: int, member: int) -> Awaitable[Episode]:
            return run_episode(
                task,
                env=self.env_factory(),
                engine=engine,
                renderer=self.renderer,
                limits=self.config.limits,
                sampling=sampling,
                seed=self.config.seed,
                draw=draw,
                member=member,
                purpose=purpose,
                clock=self.journal.clock(purpose, draw, task.id, member),
            )

        return play


def load(config: ModelConfig) -> LoadedModel:
    """The model of a config."""
    return load_model(config.path, dtype=config.dtype, device=config.device)


def make_world(config: TaskConfig, loaded: LoadedModel) -> World:
    """Build what surrounds the policy; every unknown name and option is refused here, before anything runs, and so are
    tasks that lack what the rewards read."""
    own, whole = config.env.options.get("timeout_s"), config.limits.step_timeout_s
    if isinstance(own, int | float) and own > whole:
        raise ConfigError(
            f"env.timeout_s is {own:g} and limits.step_timeout_s {whole:g}: a call would outlast the step it is part "
            "of; lower the first or raise the second"
        )
    renderer = renderer_for(config.renderer, loaded)
    ahead = isinstance(config, RLConfig) and config.train.max_staleness > 0  # weights change while rewards are paid
    rubric = make_rubric(
        config.rewards,
        chat=config.renderer.name != "plain",
        policy=None if ahead else loaded,
        timeout_s=config.limits.reward_timeout_s,
    )
    needs: Needs = fields_read(rubric)
    if isinstance(config, EvalConfig | RLConfig) and config.eval.size:
        eval_tasks(config, config.eval, 1, needs)
    if isinstance(config, EvalConfig):  # which plays the held-out tasks, and no others
        needs = NOTHING
    return World(
        config=config,
        renderer=renderer,
        env_factory=make_env(config.env.name, **config.env.options),
        rubric=rubric,
        tasks=make_source(
            config.data.name,
            needs,
            seed=config.seed,
            **{"split": "train"} | config.data.options,
        ),
        memory=rubric.stateful,
    )


def fields_read(rubric: Rubric) -> dict[str, str]:
    """What a task must have for its rewards, each field with the first function that reads it: their parameters
    without a default, but for those that every function gets from us (``question`` is the prompt, if no column).

    >>> rubric = make_rubric({"accuracy": 1.0, "format": 0.5}, chat=True)
    >>> fields_read(rubric)
    {'answer': "reward 'accuracy'"}
    """
    found: dict[str, str] = {}
    for name, (function, _) in rubric.functions.items():
        for parameter in required(name, function):
            field = "answer" if parameter == "ground_truth" else parameter
            if field == "answer" or field not in (*RESERVED, "question"):
                found.setdefault(field, f"reward {name!r}")
    return found


def renderer_for(choice: Choice, loaded: LoadedModel) -> Renderer:
    """The renderer of a config, told of every id that ends the model's turn."""
    if fixed := {"tokenizer", "extra_stop_token_ids"} & {*choice.options}:
        raise ConfigError(f"renderer.{min(fixed)} comes from the model: leave it out")
    return make_renderer(choice.name, loaded.tokenizer, extra_stop_token_ids=loaded.stop_token_ids, **choice.options)


def make_engine(config: TaskConfig, model: nn.Module, renderer: Renderer, *, apart: bool = False) -> LocalEngine:
    """The in-process engine over the trainer's own parameters; ``apart``, over a copy of those that train."""
    return LocalEngine(model, lambda ids: renderer.decode(ids), config.engine, apart=apart)


def eval_tasks(config: TaskConfig, settings: EvalSettings, size: int, needs: Needs = NOTHING) -> Sequence[Task]:
    """The first ``size`` held-out tasks (fewer when there are fewer). needs: what each of them must have."""
    choice = settings.data or config.data
    source = make_source(choice.name, needs, seed=config.seed, **choice.options | {"split": settings.split})
    wanted = size if source.size is None else min(size, source.size)
    return source.take(Cursor(), wanted)[0]


def eval_sampling(config: TaskConfig, settings: EvalSettings) -> SamplingConfig:
    """As in training, but at the evaluation's temperature."""
    return config.sampling.model_copy(update={"temperature": settings.temperature})


async def first_observations(env_factory: Callable[[], Env], tasks: Sequence[Task]) -> list[Observation]:
    """What an environment shows at the start of each task: demonstrations begin with the same words."""
    observations = []
    for task in tasks:
        shown: Any = env_factory().reset(task, seed=0)
        observations.append(await shown if inspect.isawaitable(shown) else shown)
    return observations


def torch_dtype(name: str, model: torch.nn.Module) -> torch.dtype | None:
    """The autocast dtype of a config; None for float32, where nothing is cast. Warns where that is far slower."""
    if name != "bfloat16":
        return None
    if next(model.parameters()).device.type == "cpu" and not bfloat16_products():
        warnings.warn(
            "this processor has no products in bfloat16, so compute_dtype=bfloat16 takes several times as long as "
            "float32; engine.dtype=bfloat16 alone does not, and takes half the memory",
            stacklevel=2,
        )
    return torch.bfloat16
