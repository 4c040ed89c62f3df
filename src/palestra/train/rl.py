# SPDX-License-Identifier: Apache-2.0
"""The loop: play groups, score them, learn from them, hand the new weights to the engine. ``palestra rl``.

Follow one batch: :meth:`RLTrainer.step` → ``collect_step`` (``collect`` → ``Rubric.score``) → ``rows`` → ``annotate`` →
``train_step`` → ``Engine.load_weights``. What goes on beside a step where ``train.max_staleness`` allows it:
``ahead.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from palestra.data.source import Cursor
from palestra.engine import canary
from palestra.engine.base import Engine
from palestra.eval.evaluate import EvalResult, demand_scores, evaluate
from palestra.learn.batch import Rows
from palestra.learn.klcontrol import KLController
from palestra.learn.update import annotate, train_step
from palestra.model.lora import add_lora, is_adapter
from palestra.rollout.dump import write_rollouts
from palestra.rollout.failures import Failures
from palestra.rollout.journal import FILE as JOURNAL
from palestra.rollout.journal import Journal
from palestra.rollout.seeds import noise_key
from palestra.run.directory import Run, check_free, check_writable
from palestra.run.health import Watch
from palestra.run.progress import Progress
from palestra.train import setup, sft, warmup
from palestra.train.ahead import Ahead
from palestra.train.checkpoint import latest_checkpoint, load_checkpoint, restore_model, save_checkpoint, seed_rng
from palestra.train.config import RAILS, RLConfig, learning_rate
from palestra.train.faults import Faults, remedies
from palestra.train.groups import Collected, RewardErrors, collect_step, learnable
from palestra.train.learner import critic_state, make_learner, restore_critic
from palestra.train.metrics import (
    advantages_by_trajectory,
    curve_accuracy,
    eval_metrics,
    eval_notes,
    rollout_metrics,
    timed,
)
from palestra.train.prepare import Prepared, prepare
from palestra.train.reference import keep_reference
from palestra.train.schedule import sampler
from palestra.types import Group


class RLTrainer:
    """One reinforcement-learning run, from a config to trained weights in a run directory.

    The public steps are :meth:`run` (everything), :meth:`step` (one update) and :meth:`evaluate`; a script can
    call them itself.
    """

    def __init__(
        self, prepared: Prepared, run: Run, *, progress: Progress, resume: bool = False, checkpoint: Path | None = None
    ) -> None:
        """resume: go on from the run's newest checkpoint; checkpoint: from this one."""
        config = prepared.config
        self.config, self.run_dir, self.progress = config, run, progress
        self.loaded, self.demonstrations = prepared.loaded, prepared.demonstrations
        self.world = replace(prepared.world, journal=Journal(run.path / JOURNAL))
        self.teacher = prepared.teacher
        self.checkpoints = run.path / "checkpoints"
        tell = partial(progress.note, warning=True)
        self.health = Watch(run.path, config.model_dump(mode="json"), rails=RAILS, tell=tell)
        found = checkpoint or (latest_checkpoint(self.checkpoints) if resume else None)
        model = restore_model(found, self.loaded.model) if found else self.loaded.model
        if config.lora is not None and found is None:
            model = add_lora(model, config.lora, seed=config.seed)
        self.model = model
        self.steps_done, self.cursor, self.version = 0, Cursor(), 0
        self._timings: dict[str, float] = {}
        self._resume, self._resumed = resume, found
        self.facts: dict[str, Any] = {}
        self.failures = Failures()
        tokens, most = config.algorithm.micro_batch_tokens, config.train.max_nonfinite
        advice = remedies("train", config.train, adapter=is_adapter(model), shorter="sampling.max_new_tokens")
        self.faults = Faults(run.path, tokens, most, phase="rl", remedies=advice, tell=tell)
        self.reward_errors = RewardErrors(tell)
        self._saved = 0
        self._score: float | None = None  # of the weights as they are, on the tasks of the curve
        control = config.algorithm.kl_control
        self.kl = KLController(control, config.algorithm.kl_coef) if control is not None else None
        self._lag = config.train.max_staleness
        self.engine = setup.make_engine(config, model, self.world.renderer, apart=self._lag > 0)
        self.sampler: Engine = self.engine
        self.ahead = Ahead(self._lag, config.train.steps, self._collect, self.engine, model)
        self._unlogged: dict[str, float] | None = None  # the row of the last step, until it is logged
        self.results: dict[str, dict[str, Any] | None] = {}
        self._updating = False
        self._began = prepared.began

    # The whole run ---------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Warm-up, evaluation, the loop, evaluation, summary. Ctrl-C leaves a checkpoint of the last whole step."""
        try:
            self._listen_to_canary()
            if self._resumed is None and self.config.warmup is not None:
                self._warm_up()
            self.begin_rl()
            asyncio.run(self._loop())
        finally:
            self.engine.close()
        return self._finish()

    def _listen_to_canary(self) -> None:
        """Wrong log-probs stop the run here; a batch-dependent decode is said, for then runs do not repeat."""
        heard = canary.sing(self.engine, self.model)
        self.facts = {"engine": {"logprob_gap": heard.max_difference, "batch_invariant": heard.batch_invariant}}
        self.sampler, said = sampler(self.config, self.engine, batch_invariant=heard.batch_invariant)
        if said is not None:
            self.progress.note(said, warning=True)

    def _warm_up(self) -> None:
        """Supervised training on demonstrations; stopped or killed, it goes on from its last checkpoint."""
        settings, every = self.config.warmup, self.config.eval.warmup_every
        assert settings is not None

        def on_step(step: int, metrics: dict[str, float]) -> None:
            if every and step % every == 0:
                self.engine.load_weights(self.model, self.version)
                metrics |= eval_metrics(asyncio.run(self._play_held_out(self.config.eval.curve_size)))
            self._log(step, metrics, "sft")

        warmup.warm_up(
            self.model,
            self.loaded.tokenizer,
            self.demonstrations,
            settings,
            self.run_dir,
            seed=self.config.seed,
            rate=self._rate("sft"),
            resume=self._resume,
            progress=self.progress,
            journal=self.world.journal,
            on_step=on_step,
        )

    def begin_rl(self) -> None:
        """The reference is a teacher, or the policy after the warm-up, before the first update."""
        config = self.config
        kept, resumed = self.run_dir.path / "reference", self._resumed is not None
        reference = keep_reference(config, self.model, self.loaded.tokenizer, self.teacher, kept, resumed=resumed)
        learner = make_learner(config, self.model, reference=reference, rate=self._rate("rl"))
        self.policy, self.optimizer, self.scheduler = learner
        ahead: Any = None
        if self._resumed is not None:
            state: Any = load_checkpoint(self._resumed)
            restore_critic(self.policy, state.trainer)
            self.steps_done = sft.restore_trainer(self._resumed, self.optimizer, self.scheduler, self.faults.guard)
            self.cursor = Cursor.from_dict(state.trainer["cursor"])
            if self.kl is not None:
                self.kl.load_state_dict(state.trainer["kl"])
            self.version = self._saved = self.steps_done
            self._score = state.score
            self.results = dict(state.trainer["results"])
            self._unlogged = state.trainer.get("row")
            self.world.remember(state.trainer.get("rewards", {}))
            ahead = state.trainer.get("ahead")
        # Step 0 is the evaluation before, which is played again, from the same draws, when nothing else was done.
        if not self.steps_done:
            seed_rng(config.seed)
        logged = self.steps_done - (self._unlogged is not None)
        self.run_dir.rewind(logged if self.steps_done else -1, phase="rl")
        self._remembered = self.world.remembered()
        self.engine.load_weights(self.model, self.version)
        if (last := self.ahead.restore(ahead, self.steps_done, self.cursor)) is not None:
            self.world.remember(last.remembered)

    async def _loop(self) -> None:
        """Steps until the end; what happens around a step is decided here, what happens in it in :meth:`step`."""
        settings, steps = self.config.eval, self.config.train.steps
        if self.steps_done == 0:
            try:
                self.results["before"] = await self.evaluate(settings.size, "evaluation before")
            except (asyncio.CancelledError, KeyboardInterrupt):
                self.save()  # Ctrl-C: what is resumed plays this evaluation from its beginning
                raise
            self.save()
            warmup.clear(self.run_dir)
        self.progress.phase(f"RL ({self.config.algorithm.preset})", total=steps, done=self.steps_done)
        try:
            while self._unlogged is not None or self.steps_done < steps:
                await self._after_step(self._unlogged if self._unlogged is not None else await self.step())
        finally:
            try:
                await self.ahead.close()
            finally:
                if not (self._updating or self.ahead.learning):  # half an update must not overwrite a whole step
                    self.save()
        self.results["after"] = await self.evaluate(settings.size, "evaluation after")
        if self.config.train.keep_best:
            self.save()  # with its score

    async def _after_step(self, metrics: dict[str, float]) -> None:
        """A point of the learning curve, the row, a checkpoint. One that is written before the row is logged holds the
        row, and a resumed run goes on here."""
        at, settings, train = self.steps_done, self.config.eval, self.config.train
        self.faults.keep(at)
        if curve := bool(settings.every) and at % settings.every == 0 and at < train.steps:
            await self.ahead.settle(at)
            self.world.journal.at("rl", at)
            result = await self._play_held_out(settings.curve_size)
            metrics, self._score = metrics | eval_metrics(result), result.accuracy
        self._log(at, metrics, "rl")
        self._unlogged = None
        self.progress.update(at, metrics)
        self.faults.settle(at)
        self.reward_errors.check()
        regular = bool(train.save_every) and at % train.save_every == 0
        if at < train.steps and (regular or (curve and train.keep_best)):
            await self.ahead.settle(at)
            self.save()

    # One step --------------------------------------------------------------------------------------------

    async def step(self) -> dict[str, float]:
        """One batch, from tasks to new weights; returns the step's metrics."""
        self._timings, began = {}, time.perf_counter()
        batch = await self.ahead.take(self.steps_done, self.cursor)
        if self._lag:
            self._timings["time/wait_s"] = time.perf_counter() - began
        learned, rows = await self.ahead.learn(self.steps_done, lambda: self.learn(batch.groups, batch.cursor))
        self._remembered = dict(batch.remembered)
        self._timings["time/step_s"] = time.perf_counter() - began
        timings = {**batch.timings, **self._timings}
        told = rollout_metrics(batch.groups, rows, self.config.eval.metric, timings)
        self._unlogged = row = {**learned, **batch.metrics, **told}
        self._updating = False
        self.reward_errors.hear(self.steps_done, batch.groups, rows)
        self._dump(batch.groups, rows)
        return row

    async def _collect(self, step: int, cursor: Cursor) -> Collected:
        return await collect_step(self.config, self.world, self.sampler, self.engine, step, cursor, self.failures)

    def learn(self, groups: Sequence[Group], cursor: Cursor) -> tuple[dict[str, float], Rows]:
        """The learning half of a step: scored groups in, new weights out (the engine has them at once, unless episodes
        are played meanwhile); the metrics, and the rows that they were learned from. cursor: where the tasks of the
        next step begin."""
        temperature, algorithm = self.config.sampling.temperature, self.config.algorithm
        if self.kl is not None:
            algorithm = algorithm.model_copy(update={"kl_coef": self.kl.coef})
        with timed(self._timings, "time/reference_s"):
            selected = learnable(groups, algorithm)

            def annotated(tokens: int) -> Rows:
                cut = algorithm.model_copy(update={"micro_batch_tokens": tokens})
                return annotate(self.policy, selected, cut, temperature=temperature)

            rows = self.faults.guard.retried(annotated)
        self._updating = True
        with timed(self._timings, "time/update_s"):
            learner = (self.policy, self.optimizer, self.scheduler)
            seed = noise_key(self.config.seed, "minibatches", self.steps_done)
            learned = train_step(*learner, rows, algorithm, temperature=temperature, guard=self.faults.guard, seed=seed)
        learned["train/kl_coef"] = algorithm.kl_coef
        if self.kl is not None:
            self.kl.update(learned.get("train/kl"))
        self.version += 1
        if not self._lag:
            with timed(self._timings, "time/sync_s"):
                self.engine.load_weights(self.model, self.version)
        size = self.world.tasks.size
        learned["train/epoch"] = cursor.epoch + (cursor.position / size if size else 0.0)
        self.cursor, self.steps_done, self._score = cursor, self.steps_done + 1, None
        return learned, rows

    # Around a step ---------------------------------------------------------------------------------------

    async def evaluate(self, size: int, phase: str) -> dict[str, Any] | None:
        """Greedy episodes of ``size`` held-out tasks, logged under ``eval/``; the result as plain data."""
        if not size:
            return None
        self.progress.phase(phase, total=1)
        await self.ahead.settle(self.steps_done)
        self.world.journal.at("rl", self.steps_done)
        result = await self._play_held_out(size)
        self.reward_errors.tell(result.groups, f"the {phase}")
        if not self.steps_done:
            demand_scores(result, phase)  # later there is something to lose
        metrics = eval_metrics(result)
        self._log(self.steps_done, metrics, "rl")
        self._score = curve_accuracy(result, self.config.eval.curve_size)
        self.progress.update(1, metrics)
        for text, warning in eval_notes(result, phase):
            self.progress.note(text, warning=warning)
        return result.to_dict()

    async def _play_held_out(self, size: int) -> EvalResult:
        settings = self.config.eval
        sampling = setup.eval_sampling(self.config, settings)
        with self.world.forgetting():  # what is measured must not change what training pays
            return await evaluate(
                setup.eval_tasks(self.config, settings, size),
                self.world.rollout(self.sampler, sampling, purpose="eval"),
                self.world.rubric,
                metric=settings.metric,
                concurrency=self.config.train.concurrency,
            )

    def save(self) -> Path:
        """A checkpoint of the last whole step."""
        state = sft.trainer_state(
            self.optimizer,
            self.scheduler,
            self.faults.guard,
            step=self.steps_done,
            cursor=self.cursor.to_dict(),
            version=self.version,
            results=self.results,
            kl=self.kl.state_dict() if self.kl is not None else None,
            rewards=self._remembered,
            critic=critic_state(self.policy),
            row=self._unlogged,
            ahead=self.ahead.state(self.steps_done),
        )
        self._saved = self.steps_done
        with timed(self._timings, "time/checkpoint_s"):
            saved = save_checkpoint(
                self.checkpoints,
                self.steps_done,
                model=self.model,
                tokenizer=self.loaded.tokenizer,
                trainer_state=state,
                keep_last=self.config.train.keep_last,
                keep_best=self.config.train.keep_best,
                score=self._score,
            )
        self.world.journal.settle("rl", self.steps_done)
        return saved

    def _dump(self, groups: Sequence[Group], rows: Rows) -> None:
        every, at = self.config.train.dump_every, self.steps_done
        replayable = at == self._saved + 1  # the weights that this step began with are in a checkpoint
        if replayable or at in (1, self.config.train.steps) or (every and at % every == 0):
            write_rollouts(
                self.run_dir.path / "rollouts" / f"step_{at:06d}.jsonl.zst",
                groups,
                advantages_by_trajectory(groups, rows),
            )

    def _log(self, step: int, metrics: dict[str, float], phase: str) -> None:
        self.health.observe(step, metrics, phase=phase)
        self.run_dir.log(step, metrics, phase=phase)

    def _rate(self, kind: Any) -> float:
        optim = self.config.warmup if kind == "sft" else self.config.train
        assert optim is not None
        rate, warning = learning_rate(
            optim, kind, lora=self.config.lora is not None, from_scratch=self.config.model.from_scratch
        )
        if warning:
            self.progress.note(warning, warning=True)
        return rate

    def _finish(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"seed": self.config.seed, "steps": self.steps_done, **self.facts}
        for name in ("before", "after"):
            result = self.results.get(name)
            summary[f"accuracy_{name}"] = result["accuracy"] if result else None
            summary[f"format_{name}"] = result["format_rate"] if result else None
            summary[f"eval_{name}"] = result
        summary["alarms"] = len(self.health.monitor.alarms)
        summary["seconds"] = time.perf_counter() - self._began
        summary["checkpoint"] = str(latest_checkpoint(self.checkpoints))
        self.run_dir.write_summary(summary)
        return summary


def train_rl(
    config: RLConfig,
    *,
    progress: Progress,
    resume: bool = False,
    on_ready: Callable[[RLTrainer], None] | None = None,
) -> dict[str, Any]:
    """``palestra rl``: returns the summary that is also written to the run directory, beside ``report.html``."""
    from palestra.train.report import report_run

    (check_writable if resume else check_free)(config.out)
    prepared = prepare(config, partial(progress.note, warning=True))
    with Run.open(config.out, config, resume=resume, trackers=config.trackers) as run:
        trainer = RLTrainer(prepared, run, progress=progress, resume=resume)
        if on_ready is not None:
            on_ready(trainer)
        summary = trainer.run()
        report_run(run.path, summary, decode=trainer.world.renderer.decode)
    return summary
