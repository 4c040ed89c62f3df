# SPDX-License-Identifier: Apache-2.0
"""The pipeline: stages and their references, what is repeated after a kill and what is not, and gates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_pipeline import small, weights
from typer.testing import CliRunner

from palestra import cli
from palestra.config import Config, load
from palestra.data.source import Cursor, make_source
from palestra.errors import ConfigError, RunError
from palestra.model.export import export_merged
from palestra.model.loading import load_model
from palestra.model.lora import LoraConfig, add_lora
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.pipeline import PipelineConfig, plan, run_pipeline
from palestra.pipeline_stages import KINDS, Condition, Kind, Outcome, Work, numbers
from palestra.run.progress import Progress

QUIET = Progress(quiet=True)


# Stages that only count ------------------------------------------------------------------------------------


class StepConfig(Config):
    """A stage of these tests."""

    after: str = ""
    stop: str | None = None
    fails: bool = False


ran: list[str] = []
failing: set[str] = set()


def step(config: StepConfig, work: Work) -> Outcome:
    name = work.path.name
    ran.append(name)
    work.path.mkdir(parents=True, exist_ok=True)
    if name in failing:
        raise KeyboardInterrupt
    (work.path / "made").write_text(config.after)
    return Outcome({"runs": ran.count(name), "accuracy": 0.31}, work.path / "made", config.stop)


KINDS.register("counted_step")(Kind(StepConfig, step))
KINDS.register("resumed_step")(Kind(StepConfig, step, resumes=True))


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()
    failing.clear()


def three(out: Path, **stages: Any) -> PipelineConfig:
    given = {
        "a": {"kind": "counted_step"},
        "b": {"kind": "counted_step", "after": "stage:a"},
        "c": {"kind": "counted_step", "after": "stage:b"},
    }
    return PipelineConfig(out=str(out), stages={**given, **stages})


def run(config: PipelineConfig, start: str | None = None) -> dict[str, Any]:
    return run_pipeline(config, progress=QUIET, start=start)


def test_a_reference_is_what_the_earlier_stage_made(tmp_path: Path) -> None:
    run(three(tmp_path / "p"))
    assert (tmp_path / "p" / "c" / "made").read_text() == str(tmp_path / "p" / "b" / "made")
    result = json.loads((tmp_path / "p" / "results" / "b.json").read_text())
    assert (result["status"], result["summary"]) == ("done", {"runs": 1, "accuracy": 0.31})


def test_a_stage_that_is_done_is_not_repeated(tmp_path: Path) -> None:
    first = run(three(tmp_path / "p"))
    assert run(three(tmp_path / "p")) == first
    assert ran == ["a", "b", "c"]


@pytest.mark.parametrize(("killed", "again"), [("a", "abc"), ("b", "bc"), ("c", "c")])
def test_a_pipeline_killed_in_a_stage_goes_on_with_that_stage(tmp_path: Path, killed: str, again: str) -> None:
    failing.add(killed)
    with pytest.raises(KeyboardInterrupt):
        run(three(tmp_path / "p"))
    ran.clear()
    failing.clear()
    assert run(three(tmp_path / "p"))["status"] == "done"
    assert ran == list(again)


def test_a_killed_training_is_not_finished_under_another_config(tmp_path: Path) -> None:
    def with_b(after: str) -> PipelineConfig:
        return three(tmp_path / "p", b={"kind": "resumed_step", "after": after})

    failing.add("b")
    with pytest.raises(KeyboardInterrupt):
        run(with_b("stage:a"))
    failing.clear()
    with pytest.raises(RunError, match=r"stage 'b' was begun with another config \(after changed\).*--from b"):
        run(with_b("stage:a/x"))
    assert ran == ["a", "b"], "nothing ran under the changed config"
    assert run(with_b("stage:a"))["status"] == "done"
    assert not list((tmp_path / "p" / "results").glob("*.begun.json")), "what has ended is no longer begun"


def test_a_killed_stage_without_memory_begins_anew_under_another_config(tmp_path: Path) -> None:
    failing.add("b")
    with pytest.raises(KeyboardInterrupt):
        run(three(tmp_path / "p"))
    failing.clear()
    (tmp_path / "p" / "b" / "left over").touch()
    run(three(tmp_path / "p", b={"kind": "counted_step", "after": "stage:a/x"}))
    assert ran == ["a", "b", "b", "c"]
    assert not (tmp_path / "p" / "b" / "left over").exists()


def test_from_forgets_what_a_killed_stage_was_begun_with(tmp_path: Path) -> None:
    failing.add("b")
    with pytest.raises(KeyboardInterrupt):
        run(three(tmp_path / "p", b={"kind": "resumed_step"}))
    failing.clear()
    assert run(three(tmp_path / "p", b={"kind": "resumed_step", "after": "new"}), start="b")["status"] == "done"


def test_from_repeats_a_stage_and_all_behind_it(tmp_path: Path) -> None:
    run(three(tmp_path / "p"))
    (tmp_path / "p" / "b" / "left over").touch()
    run(three(tmp_path / "p"), start="b")
    assert ran == ["a", "b", "c", "b", "c"]
    assert not (tmp_path / "p" / "b" / "left over").exists()


def test_a_result_whose_output_is_gone_is_made_again(tmp_path: Path) -> None:
    run(three(tmp_path / "p"))
    shutil.rmtree(tmp_path / "p" / "b")
    run(three(tmp_path / "p"))
    assert ran == ["a", "b", "c", "b"]


def test_a_finished_stage_with_another_config_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    run(three(tmp_path / "p"))
    changed = three(tmp_path / "p", b={"kind": "counted_step", "after": "stage:a/x"})
    with pytest.raises(RunError, match=r"stage 'b' was done with another config \(after changed\).*--from b"):
        run(changed)
    assert run(changed, start="b")["status"] == "done"


def test_a_stage_that_says_stop_ends_the_pipeline_and_is_asked_again(tmp_path: Path) -> None:
    stopping = three(tmp_path / "p", b={"kind": "counted_step", "stop": "not good enough"})
    for _ in range(2):
        summary = run(stopping)
        assert summary["reason"] == "stopped at stage 'b': not good enough"
    assert ran == ["a", "b", "b"]


def test_a_directory_with_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="holds no pipeline"):
        run(three(tmp_path))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"sft": {"model": "stage:base", "sft": {"data": "arithmetic"}}}, "refers to the stage 'base'"),
        ({"stf": {}}, "unknown kind of stage 'stf': did you mean 'sft'"),
        ({"sft": {"model": "m", "sft": {"data": "arithmetic", "epoch": 2}}}, "stage 'sft'.*did you mean 'epochs'"),
        ({"sft": {"model": "m", "out": "x", "sft": {"data": "arithmetic"}}}, "leave `out` away"),
        ({"a": {"kind": "counted_step", "after": "stage:"}}, "is no reference"),
        ({"a/b": {"kind": "counted_step"}}, "its name becomes a directory"),
        ({"e": {"kind": "counted_step"}, "gate": {"of": "e", "require": "accuracy > high"}}, "a name, one of"),
        ({}, "stages is empty"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(stages: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(PipelineConfig(stages=stages))


def test_a_reference_to_a_stage_that_makes_nothing_is_refused() -> None:
    stages = {
        "a": {"kind": "counted_step"},
        "gate": {"of": "a", "require": "accuracy > 0"},
        "b": {"kind": "counted_step", "after": "stage:gate"},
    }
    with pytest.raises(ConfigError, match="stage:gate, which makes nothing"):
        plan(PipelineConfig(stages=stages))


def test_an_adapter_on_an_adapter_is_refused_before_the_first_is_trained() -> None:
    sft = {"model": "builtin:calculator", "lora": {"r": 4}, "sft": {"data": "arithmetic"}}
    with pytest.raises(ConfigError, match="kind: export, model: stage:sft"):
        plan(PipelineConfig(stages={"sft": sft, "more": {"kind": "sft", **sft, "model": "stage:sft"}}))


def test_common_keys_reach_the_stages_that_know_them_and_no_other_key_is_accepted() -> None:
    sft = {"model": "builtin:calculator", "sft": {"data": "arithmetic"}}
    (stage,) = plan(PipelineConfig(seed=5, common={"renderer": "plain"}, stages={"sft": sft}))
    settings = stage.config({}, Path("o"))
    assert (settings.renderer.name, settings.seed) == ("plain", 5)
    with pytest.raises(ConfigError, match=r"common\.rendrer.*did you mean 'renderer'"):
        plan(PipelineConfig(common={"rendrer": "plain"}, stages={"sft": sft}))


# Gates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("require", "reason"),
    [
        ("accuracy >= 0.31", None),
        ("accuracy ≥ 0.31", None),
        ("accuracy ≤ 0.30", "a: accuracy is 0.31, and accuracy ≤ 0.3 is required"),
        ("accuracy >= 0.40", "a: accuracy is 0.31, and accuracy >= 0.4 is required"),
        (["accuracy > 0.3", "runs < 1"], "a: runs is 1, and runs < 1 is required"),
    ],
)
def test_a_gate_lets_through_what_is_good_enough(tmp_path: Path, require: Any, reason: str | None) -> None:
    stages = {"a": {"kind": "counted_step"}, "gate": {"of": "a", "require": require}, "b": {"kind": "counted_step"}}
    summary = run(PipelineConfig(out=str(tmp_path / "p"), stages=stages))
    assert summary["reason"] == (None if reason is None else f"stopped at stage 'gate': {reason}")
    assert ran == (["a", "b"] if reason is None else ["a"])


def test_a_gate_on_a_number_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    stages = {"a": {"kind": "counted_step"}, "gate": {"of": "a", "require": "acuracy >= 0.4"}}
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        run(PipelineConfig(out=str(tmp_path / "p"), stages=stages))


def test_a_number_that_was_not_measured_does_not_pass() -> None:
    assert numbers({"accuracy": None, "rewards": {"format": 0.5}, "right": True}) == {
        "accuracy": None,
        "rewards.format": 0.5,
    }
    assert Condition.parse("rewards.format>=1e-1").holds(0.5)


def test_the_command_line_ends_with_1_and_the_reason_when_a_gate_says_no(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "stages:\n  a: {kind: counted_step}\n  gate: {of: a, require: accuracy >= 0.4}\n", encoding="utf-8"
    )
    args = ["pipeline", str(tmp_path / "p.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 1
    assert "stopped at stage 'gate': a: accuracy is 0.31, and accuracy >= 0.4 is required" in result.output
    loose = CliRunner().invoke(cli.app, [*args, "stages.gate.require=accuracy >= 0.3", "--quiet"])
    assert (loose.exit_code, loose.output) == (0, "")
    assert ran == ["a"]


# The real stages -------------------------------------------------------------------------------------------


class Cut(Progress):
    """Ctrl-C after a step of SFT."""

    def update(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        if "sft/loss" in metrics and step == 2:
            raise KeyboardInterrupt


def test_the_whole_road_cut_in_training_ends_as_an_uncut_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(small(tmp_path / "cut"), progress=Cut(quiet=True))
    with pytest.raises(RunError, match=r"'sft' was begun with another config \(sft\.steps changed\)"):
        run(small(tmp_path / "cut", steps=4))
    summary = run(small(tmp_path / "cut"))
    assert list(summary["stages"]) == list(small(tmp_path).stages)
    assert {r["status"] for r in summary["stages"].values()} == {"done"}
    assert summary["stages"]["compare"]["summary"]["tasks"] == 2
    # SFT in one go, by the same config, gives the same weights.
    whole = small(tmp_path / "whole")
    stages = {name: whole.stages[name] for name in ("data", "check", "sft")}
    run(whole.model_copy(update={"stages": stages, "common": {"renderer": "plain"}}))
    cut, uncut = (weights(tmp_path / name / "sft" / "checkpoints" / "step_000003") for name in ("cut", "whole"))
    assert all(torch.equal(cut[name], uncut[name]) for name in uncut)
    exported, trained = (weights(tmp_path / "cut" / p) for p in ("export", "rl/checkpoints/step_000001"))
    assert exported.keys() == trained.keys() and all(torch.equal(exported[k], trained[k]) for k in trained)


def test_data_files_give_back_the_tasks_of_their_source(tmp_path: Path) -> None:
    stages = {"data": {"tasks": {"name": "arithmetic", "max_operand": 9}, "train": 5, "test": 4}}
    run(PipelineConfig(seed=3, out=str(tmp_path), stages=stages))
    for split, count in (("train", 5), ("test", 4)):
        made = make_source("jsonl", split=split, path=str(tmp_path / "data"), shuffle=False)
        assert made.size == count
        source = make_source("arithmetic", split=split, seed=3, max_operand=9)
        read, drawn = (s.take(Cursor(), count)[0] for s in (made, source))
        assert [t.id for t in read] == [t.id for t in drawn]
        # JSON knows lists and no tuples; everything else comes back as it was.
        assert [json.dumps([t.prompt, t.answer, t.meta]) for t in read] == [
            json.dumps([t.prompt, t.answer, t.meta]) for t in drawn
        ]


def test_a_source_without_end_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no end: say how many tasks `train` is to hold"):
        run(PipelineConfig(out=str(tmp_path), stages={"data": {"tasks": "arithmetic"}}))


def test_faulty_data_stop_the_pipeline_unless_the_fault_is_allowed(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "", "answer": "3"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages: dict[str, Any] = {"check": {"train": str(tmp_path / "t.jsonl")}}
    assert "1 errors in the data" in str(run(PipelineConfig(out=str(tmp_path / "p"), stages=stages))["reason"])
    stages["check"]["allow"] = ["empty"]
    assert run(PipelineConfig(out=str(tmp_path / "q"), stages=stages))["status"] == "done"


def test_an_exported_adapter_computes_what_base_and_adapter_computed(tmp_path: Path) -> None:
    tokenizer = calculator_tokenizer()
    base = tiny_llama(tokenizer)
    for thing in (base, tokenizer):
        thing.save_pretrained(tmp_path / "base")
    adapted = add_lora(load_model(str(tmp_path / "base"), device="cpu").model, LoraConfig(r=4))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    made = export_merged(str(tmp_path / "adapter"), tmp_path / "merged")
    assert made["merged"] and made["parameters"] == 339_360
    ids = torch.arange(5, 15)[None]
    merged = load_model(str(tmp_path / "merged"), device="cpu").model
    with torch.no_grad():
        difference = (merged(ids).logits - adapted(ids).logits).abs().max()
        assert (base(ids).logits - adapted(ids).logits).abs().max() > 0.1
    assert difference < 1e-5
    with pytest.raises(RunError, match="exists already"):
        export_merged("builtin:calculator", tmp_path / "merged")


# The examples ----------------------------------------------------------------------------------------------

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("pipeline_*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_stages_of_the_examples_fit_together(path: Path) -> None:
    stages = plan(load(path, [], PipelineConfig))
    assert len(stages) >= 6
