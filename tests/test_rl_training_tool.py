# SPDX-License-Identifier: Apache-2.0
"""The facade: the chapter's own calls as they are printed, on a model of a few thousand weights, and what each
parameter turns into."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from palestra.config import load, read_yaml
from palestra.errors import ConfigError, DataError
from palestra.model.loading import load_model
from palestra.model.lora import is_adapter
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.rl_training_tool import RLTrainingTool, format_math_dataset, held_out
from palestra.rl_training_tool.datasets import Writer, rows_of, split_off
from palestra.rl_training_tool.parameters import EvaluateParameters, TrainParameters, read
from palestra.rl_training_tool.rewards import reward_parts
from palestra.train.config import RLConfig

CHATML = (
    "{% for m in messages %}{{ '<bos>' + m['role'] + '\n' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)
ROWS = [
    {
        "question": f"what is {n} plus {n + 1}?",
        "answer": f"it is <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1}.\n#### {2 * n + 1}",
    }
    for n in range(6)
]
SMALL = {"max_samples": 2, "num_epochs": 1, "batch_size": 2}
SAMPLED = {"max_new_tokens": 4, "logging_steps": 1}


def custom_reward_function(completions: list[str], **kwargs: Any) -> list[float]:
    """The chapter's own example, as it is printed."""
    ground_truths = kwargs.get("ground_truth", [])
    rewards = []
    for completion, truth in zip(completions, ground_truths):  # noqa: B905
        numbers = re.findall(r"-?\d+\.?\d*", completion)
        reward = 0.0
        if numbers:
            error = abs(float(numbers[-1]) - float(truth))
            reward = 1.0 if error < 0.01 else (0.8 if error < 1.0 else (0.5 if error < 5.0 else 0.0))
            if "step" in completion.lower() or "=" in completion:
                reward += 0.1
        rewards.append(min(reward, 1.0))
    return rewards


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = calculator_tokenizer()
    tokenizer.chat_template = CHATML
    for thing in (tiny_llama(tokenizer, hidden=32, layers=1, heads=2, intermediate=32), tokenizer):
        thing.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RLTrainingTool:
    monkeypatch.chdir(tmp_path)
    made = RLTrainingTool(quiet=True)
    made.register_dataset("gsm8k", ROWS)
    return made


def run(tool: RLTrainingTool, parameters: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(tool.run(parameters))
    assert result["status"] == "success", result
    return result


def error(tool: RLTrainingTool, parameters: Mapping[str, Any]) -> str:
    result = json.loads(tool.run(parameters))
    assert result["status"] == "error" and "\n" not in result["error"]
    return str(result["error"])


# The chapter's calls ---------------------------------------------------------------------------------------


def test_the_skeleton_trains_by_sft_and_then_by_grpo_from_what_sft_left(tool: RLTrainingTool, model: str) -> None:
    skeleton = {
        "action": "train",
        "algorithm": "sft",
        "model_name": model,
        "max_samples": 2,
        "num_epochs": 1,
        "batch_size": 4,
        "use_lora": True,
        "lora_rank": 8,
        "lora_alpha": 16,
    }
    sft = run(tool, skeleton)
    assert (sft["model_path"], sft["num_samples"], sft["steps"]) == ("models/sft_model", 2, 1)
    assert sft["final_loss"] > 0
    assert (sft["output_dir"], sft["num_epochs"]) == ("models/sft_model", 1)
    assert is_adapter(load_model("models/sft_model").model)
    grpo = run(tool, skeleton | {"algorithm": "grpo", "model_name": "models/sft_model", "max_new_tokens": 4})
    # A batch of 4 completions holds one group of 4: the usual 8 would not fit.
    assert (grpo["details"]["num_generations"], grpo["details"]["prompts_per_step"], grpo["steps"]) == (4, 1, 2)
    for name in ("final_loss", "average_reward", "accuracy", "average_length", "format_correctness", "errors"):
        assert isinstance(grpo[name], int | float), name
    again = run(tool, skeleton)
    assert again["details"]["run"] == "models/sft_model/run-2", "a second call does not fail on the first one's files"


def test_the_full_grpo_template_reaches_the_config(tool: RLTrainingTool, model: str) -> None:
    result = run(
        tool,
        {
            "action": "train",
            "algorithm": "grpo",
            "model_name": model,
            "max_samples": 1,
            "num_epochs": 1,
            "batch_size": 4,
            "learning_rate": 1e-5,
            "warmup_ratio": 0.1,
            "num_generations": 4,
            "max_new_tokens": 5,
            "temperature": 0.8,
            "kl_coef": 0.05,
            "clip_range": 0.2,
            "use_lora": True,
            "lora_rank": 16,
            "lora_alpha": 32,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "weight_decay": 0.02,
            "save_steps": 7,
            "eval_steps": None,
            "use_tensorboard": False,
            "output_dir": "./models/grpo_full",
            "reward_type": "combined",
            "reward_config": {
                "components": [
                    {"type": "accuracy", "weight": 1.0},
                    {"type": "length_penalty", "weight": 0.5, "target_length": 200},
                    {"type": "step", "weight": 0.3, "step_bonus": 0.1},
                ]
            },
        },
    )
    settings = load(Path(result["details"]["run"]) / "config.yaml", [], RLConfig)
    assert settings.lora is not None and settings.rewards is not None
    assert (settings.lora.r, settings.lora.alpha) == (16, 32)
    assert settings.lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    algorithm, train = settings.algorithm, settings.train
    assert (algorithm.group_size, algorithm.kl_coef, algorithm.clip_low, algorithm.clip_high) == (4, 0.05, 0.2, 0.2)
    assert (train.learning_rate, train.warmup_ratio, train.weight_decay) == (1e-5, 0.1, 0.02)
    assert (train.save_every, train.steps) == (7, 1)
    assert (settings.sampling.temperature, settings.sampling.max_new_tokens) == (0.8, 5)
    assert settings.rewards["combined"] == {
        "weight": 1.0,
        "accuracy_weight": 1.0,
        "length_weight": 0.5,
        "step_weight": 0.3,
        "target": 200,
        "beta": 0.1,
    }
    assert not (Path(result["details"]["run"]) / "tensorboard").exists()


def test_the_printed_reward_pays_what_its_text_says_and_pairs_with_the_data_set_of_its_name(
    tool: RLTrainingTool, model: str
) -> None:
    tool.register_dataset("my_dataset", ROWS)
    tool.register_reward_function("my_dataset", custom_reward_function)
    said = ["Step 1: 3+4=7. Final Answer: 7", "7", "7.5", "10", "99", "none"]
    tried = {"completions": said, "ground_truth": [7] * 6, "reward_type": "my_dataset"}
    result = run(tool, {"action": "create_reward", **tried})
    assert result["rewards"] == [1.0, 1.0, 0.8, 0.5, 0.0, 0.0]
    trained = run(
        tool, {"action": "train", "algorithm": "grpo", "dataset": "my_dataset", "model_name": model} | SMALL | SAMPLED
    )
    rewards = read_yaml(Path(trained["details"]["run"]) / "config.yaml")["rewards"]
    assert rewards["my_dataset"]["function"] == "user_function"
    assert rewards["accuracy"]["weight"] == 0.0


def test_a_reward_of_the_name_of_the_usual_data_set_goes_with_it_unnamed(tool: RLTrainingTool, model: str) -> None:
    tool.register_reward_function("gsm8k", custom_reward_function)
    for named in ({}, {"dataset": "gsm8k"}):
        result = run(tool, {"action": "train", "algorithm": "grpo", "model_name": model, **SMALL, **SAMPLED, **named})
        assert read_yaml(Path(result["details"]["run"]) / "config.yaml")["rewards"]["gsm8k"]["weight"] == 1.0
    own = {"custom_dataset": ROWS, "model_name": model, **SMALL, **SAMPLED}
    result = run(tool, {"action": "train", "algorithm": "grpo", **own})
    assert "gsm8k" not in read_yaml(Path(result["details"]["run"]) / "config.yaml")["rewards"]


def test_format_is_what_the_algorithm_reads_or_raw(tool: RLTrainingTool, model: str) -> None:
    given = {"action": "train", "model_name": model, **SMALL}
    for form in ("sft", "raw"):
        assert run(tool, given | {"algorithm": "sft", "format": form})["num_samples"] == 2
    assert run(tool, given | SAMPLED | {"algorithm": "grpo", "format": "rl"})["num_samples"] == 2
    assert "sft reads format sft (or raw, which is brought into it), not rl" in error(
        tool, given | {"algorithm": "sft", "format": "rl"}
    )
    formed = [{"prompt": "1+1?", "ground_truth": "2"}] * 2
    assert "format raw needs a question and an answer" in error(
        tool, given | {"algorithm": "grpo", "format": "raw", "custom_dataset": formed}
    )
    assert "format is not read by algorithm dpo" in error(tool, given | {"algorithm": "dpo", "format": "rl"})


def test_custom_data_and_a_custom_reward_are_handed_over_as_objects(tool: RLTrainingTool, model: str) -> None:
    table = {"question": ["a?", "b?"], "prompt": ["a?", "b?"], "ground_truth": ["1", "2"], "level": [3, 4]}
    seen: list[dict[str, Any]] = []

    def paid(completions: list[str], level: list[int], prompts: list[str]) -> list[float]:
        seen.extend({"level": n, "prompt": p} for n, p in zip(level, prompts, strict=True))
        return [float(i) for i, _ in enumerate(completions)]

    result = tool.train(
        algorithm="grpo", model_name=model, custom_dataset=table, custom_reward=paid, **SMALL, **SAMPLED
    )
    assert result["status"] == "success", result
    assert result["average_reward"] == 0.5, "of two completions the first is paid 0 and the second 1"
    assert {(s["level"], s["prompt"]) for s in seen} == {(3, "a?"), (4, "b?")}


def test_evaluation_gives_the_metrics_that_are_asked_for(tool: RLTrainingTool, model: str) -> None:
    plain = {"action": "evaluate", "model_path": model, "max_samples": 3, "max_new_tokens": 4}
    every = run(tool, plain | {"use_lora": False, "return_details": True})
    assert {"accuracy", "average_reward", "average_length", "format_correctness", "errors"} <= {*every}
    assert (every["num_samples"], every["errors"], every["accuracy"]) == (3, 0, 0.0)
    assert 0 < every["average_length"] <= 4
    assert [d["question"] for d in every["details"]] == [row["question"] for row in ROWS[:3]]
    assert {d["correct"] for d in every["details"]} == {False}
    chosen = run(tool, plain | {"metrics": ["accuracy", "accuracy_at_k"], "k": 3})
    assert {*chosen} == {"status", "model_path", "num_samples", "errors", "accuracy", "accuracy_at_k"}
    assert "holds no adapter" in error(tool, plain | {"use_lora": True})


@pytest.mark.parametrize(("algorithm", "more"), [("dpo", {"kl_coef": 0.2}), ("reward", {"eval_steps": 1})])
def test_pairs_are_learned_from(tool: RLTrainingTool, model: str, algorithm: str, more: dict[str, Any]) -> None:
    pairs = [{"prompt": f"{n}+1?", "chosen": f"{n + 1}", "rejected": f"{n + 2}"} for n in range(4)]
    given = {"action": "train", "algorithm": algorithm, "model_name": model, "custom_dataset": pairs}
    result = run(tool, given | {"num_epochs": 1, "batch_size": 2} | more)
    assert result["final_loss"] > 0
    settings = read_yaml(Path(result["details"]["run"]) / "config.yaml")
    if algorithm == "dpo":
        assert settings["prefer"]["loss"]["beta"] == 0.2
    else:
        assert settings["reward_model"]["eval_every"] == 1 and "accuracy_after" in result


def test_ppo_needs_no_group(tool: RLTrainingTool, model: str) -> None:
    result = run(tool, {"action": "train", "algorithm": "ppo", "model_name": model} | SMALL | SAMPLED)
    assert (result["details"]["num_generations"], result["details"]["prompts_per_step"]) == (1, 2)


def test_held_out_rows_are_measured_on_the_way(tool: RLTrainingTool, model: str) -> None:
    given = {"action": "train", "model_name": model, "num_epochs": 1, "batch_size": 2, "eval_steps": 2}
    sft = run(tool, given | {"algorithm": "sft", "use_lora": False})
    # Five rows to train on in three steps, one to measure on: after step 2 and at the end.
    assert sft["num_samples"] == 5 and [*sft["eval_losses"]] == ["2", "3"]
    assert sft["eval_loss"] == sft["eval_losses"]["3"] > 0
    # Measuring keeps no checkpoints: there is the last one, as save_steps is 500.
    assert [path.name for path in Path(sft["details"]["run"]).glob("checkpoints/step_*")] == ["step_000003"]
    settings = read_yaml(Path(sft["details"]["run"]) / "config.yaml")
    assert settings["save_every"] == 500


def test_measuring_on_the_way_changes_nothing_of_what_is_learned(tool: RLTrainingTool, model: str) -> None:
    rows = {"custom_dataset": ROWS, "batch_size": 2, "num_epochs": 2, "save_steps": 3, "model_name": model}
    given = {"action": "train", "algorithm": "sft", **rows}
    measured = run(tool, given | {"eval_steps": 1, "output_dir": "models/measured"})
    plain = run(tool, given | {"custom_dataset": ROWS[:5], "output_dir": "models/plain"})
    assert [*measured["eval_losses"]] == ["1", "2", "3", "4", "5", "6"]
    assert measured["final_loss"] == plain["final_loss"]
    assert {p.name for p in Path(measured["details"]["run"]).glob("checkpoints/step_*")} == {
        "step_000003",
        "step_000006",
    }


def test_a_long_measurement_says_how_far_it_is(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(held_out, "SILENCE_S", -1.0)
    monkeypatch.setattr(held_out, "AT_ONCE", 1)
    given = {"custom_dataset": ROWS * 4, "model_name": model, "num_epochs": 1, "batch_size": 11, "eval_steps": 2}
    assert RLTrainingTool().train(algorithm="sft", **given)["status"] == "success"
    lines = [line for line in capsys.readouterr().out.splitlines() if "|" in line and "Loss:" not in line]
    assert lines[:2] == ["Step 2/2 | measured 0 of 2 held-out rows", "Step 2/2 | measured 1 of 2 held-out rows"]


def test_training_into_the_models_own_directory_keeps_what_the_adapter_sits_on(
    tool: RLTrainingTool, model: str
) -> None:
    data = {"action": "train", "algorithm": "sft", "output_dir": "models/one", **SMALL}
    run(tool, data | {"model_name": model, "use_lora": False})
    run(tool, data | {"model_name": "models/one", "use_lora": True})
    assert is_adapter(load_model("models/one").model)
    run(tool, data | {"model_name": "models/one", "use_lora": False})
    assert not is_adapter(load_model("models/one").model)


def test_a_model_that_was_not_trained_there_is_not_written_over(tool: RLTrainingTool, model: str) -> None:
    before = {file.name: file.read_bytes() for file in Path(model).iterdir()}
    said = error(tool, {"action": "train", "algorithm": "sft", "model_name": model, "output_dir": model, **SMALL})
    assert "not trained there; choose another directory" in said
    assert {file.name: file.read_bytes() for file in Path(model).iterdir()} == before


def test_a_built_in_model_without_a_chat_template_is_trained_on_plain_text(tool: RLTrainingTool) -> None:
    result = run(tool, {"action": "train", "model_name": "builtin:calculator", **SMALL})
    first = json.loads((Path(result["details"]["run"] + "-data") / "train.jsonl").read_text().splitlines()[0])
    assert first == {"prompt": ROWS[0]["question"], "completion": "it is 1.\n#### 1<eos>"}


# Data ------------------------------------------------------------------------------------------------------


def test_data_are_shown_in_their_three_forms(tool: RLTrainingTool, model: str) -> None:
    raw, sft, rl = (
        run(tool, {"action": "load_dataset", "format": form, "split": "train", "max_samples": 2})
        for form in ("raw", "sft", "rl")
    )
    assert (raw["num_samples"], raw["columns"]) == (2, ["question", "answer"])
    assert sft["samples"][0]["completion"] == "it is 1.\n#### 1"
    assert rl["columns"] == ["prompt", "ground_truth", "question", "full_answer"]
    assert rl["samples"][1]["ground_truth"] == "3"
    templated = run(tool, {"action": "load_dataset", "format": "rl", "model_name": model})
    assert templated["samples"][0]["prompt"] == "<bos>user\nwhat is 0 plus 1?<eos><bos>assistant\n"


def test_what_format_math_dataset_makes_is_trained_on_as_the_plain_question(model: str) -> None:
    tokenizer = load_model(model).tokenizer
    writer = Writer(tokenizer, chat=True)
    sft = format_math_dataset(ROWS[:1], format_type="sft", model_name=model)
    assert sft[0]["completion"].endswith("#### 1<eos>")
    assert writer.sft(sft) == [{"prompt": "what is 0 plus 1?", "completion": "it is 1.\n#### 1"}]
    (rl,) = writer.rl(format_math_dataset(ROWS[:1], format_type="rl", model_name=model))
    assert (rl["prompt"], rl["ground_truth"]) == ("what is 0 plus 1?", "1")
    with pytest.raises(DataError, match="<bos>, so it is in a chat template already"):
        writer.rl([{"prompt": "<bos>user\n1+1?<eos>", "ground_truth": "2"}])


@pytest.mark.parametrize(
    ("data", "said"), [([], "at least one row"), (7, "is a int"), ({"a": [1], "b": []}, "lengths")]
)
def test_data_of_the_wrong_kind_are_refused(data: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rows_of(data, "mine")


def test_a_single_row_cannot_be_split() -> None:
    with pytest.raises(DataError, match="there is one row"):
        split_off([{}])


# Rewards ---------------------------------------------------------------------------------------------------


def test_the_printed_arithmetic_of_the_combined_reward(tool: RLTrainingTool) -> None:
    # Right, 100 characters over, three steps: 1 - 0.1 + 0.3 = 1.2; weighted 1, 0.5, 0.3: 1 - 0.05 + 0.09 = 1.04.
    text = "Step 1: a\nStep 2: b\nStep 3: c\n#### 7".ljust(300)
    tried = {"action": "create_reward", "reward_type": "combined", "completions": [text], "ground_truth": ["7"]}
    assert run(tool, tried)["rewards"] == pytest.approx([1.04])
    ones = {"accuracy_weight": 1, "length_weight": 1, "step_weight": 1}
    assert run(tool, tried | {"reward_config": ones})["rewards"] == pytest.approx([1.2])


@pytest.mark.parametrize(
    ("parameters", "text", "value"),
    [
        ({"reward_type": "accuracy"}, "Final Answer: 72.0", 1.0),
        ({"reward_type": "length_penalty", "target_length": 200, "penalty_weight": 0.001}, "#### 72".ljust(500), 0.7),
        ({"reward_type": "step", "step_bonus": 0.1}, "Step 1: a\nStep 2: b\nStep 3: c\n#### 72", 1.3),
        ({"reward_type": "step", "reward_config": {"step_bonus": 0.1}}, "Step 1: a\n#### 71", 0.0),
        (
            {"reward_type": "length_penalty", "reward_config": {"max_length": 200, "penalty_weight": 0.001}},
            "#### 72".ljust(500),
            0.7,
        ),
        ({"reward_type": "format"}, "Step 1: a\nFinal Answer: 71", 1.0),
        ({"reward_type": "format"}, "it may be 72", 0.0),
    ],
)
def test_the_built_in_rewards_pay_as_printed(
    tool: RLTrainingTool, parameters: dict[str, Any], text: str, value: float
) -> None:
    tried = {"action": "create_reward", "completions": [text], "ground_truth": ["72"]}
    assert run(tool, tried | parameters)["rewards"] == pytest.approx([value])


def test_a_reward_is_made_once_and_used_by_its_name(tool: RLTrainingTool) -> None:
    run(tool, {"action": "create_reward", "reward_type": "step", "step_bonus": 0.5, "name": "steps"})
    tried = {"completions": ["Step 1: a\n#### 7"], "ground_truth": ["7"]}
    assert run(tool, {"action": "create_reward", "reward_type": "steps", **tried})["rewards"] == [1.5]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("acuracy", {}, "did you mean 'accuracy'"),
        ("combined", {"components": [{"type": "stp"}]}, "did you mean 'step'"),
        ("combined", {"components": [{"type": "step"}, {"type": "step"}]}, "twice"),
        ("step", {"components": [{"type": "step"}]}, "combined reward"),
        ("combined", {"components": "step"}, "give a list"),
        ("length_penalty", {"target_length": 9, "max_length": 8}, "target_length and max_length are one option"),
    ],
)
def test_a_reward_that_is_none_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reward_parts(kind, options, {})


# Mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "unknown action 'None'"),
        ({"action": "train", "learning_rte": 1e-5}, "unknown parameter 'learning_rte' (parameters): did you mean"),
        ({"action": "train", "algorithm": "grop"}, "algorithm = 'grop'"),
        ({"action": "train", "algorithm": "sft", "num_generations": 4}, "num_generations is not read by algorithm sft"),
        ({"action": "train", "use_lora": False, "lora_rank": 8}, "lora_rank is given and use_lora is false"),
        ({"action": "train", "wandb_project": "p"}, "set use_wandb"),
        ({"action": "train", "dataset": "gsm8"}, "did you mean 'gsm8k'"),
        ({"action": "evaluate", "metrics": ["accuracy"]}, "'model_path' is missing"),
        ({"action": "evaluate", "model_path": "m", "metrics": ["acc"]}, "unknown metric 'acc'"),
        ({"action": "evaluate", "model_path": "m", "metrics": ["accuracy_at_k"]}, "set k to 2 or more"),
        ({"action": "create_reward", "completions": ["1"]}, "give one for each"),
        ({"action": "train", "algorithm": "dpo"}, "needs `prompt`, `chosen` and `rejected`"),
    ],
)
def test_a_mistake_comes_back_as_one_line(
    tool: RLTrainingTool, model: str, parameters: dict[str, Any], said: str
) -> None:
    given = {"model_name": model, **parameters} if parameters.get("action") == "train" else parameters
    assert said in error(tool, given)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_told_by_the_parameter_that_asks_for_it(
    tool: RLTrainingTool, model: str
) -> None:
    said = error(tool, {"action": "train", "model_name": model, "use_wandb": True, **SMALL})
    assert said == "use_wandb needs the package wandb: pip install wandb, or set use_wandb to false"


def test_cf_003_a_group_that_does_not_divide_the_batch_is_told_the_numbers_that_would() -> None:
    with pytest.raises(ConfigError, match="set num_generations to 2 or 3 or 6, or batch_size to 4, 8 or 12"):
        read({"algorithm": "grpo", "batch_size": 6, "num_generations": 4}, TrainParameters)


def test_cf_002_a_group_of_one_teaches_grpo_nothing(tool: RLTrainingTool, model: str) -> None:
    alone = {"algorithm": "grpo", "num_generations": 1, "batch_size": 2}
    assert "at least 2" in error(tool, {"action": "train", "model_name": model, **alone})


@pytest.mark.parametrize(
    ("text", "said"), [("{", "are no JSON"), ("[]", "are a list"), ('{"action": "x"}', "action 'x'")]
)
def test_parameters_may_be_json_text(tool: RLTrainingTool, text: str, said: str) -> None:
    assert said in json.loads(tool.run(text))["error"]


def test_the_two_names_of_a_parameter_are_one() -> None:
    named = read({"lora_r": 4, "target_modules": ["q_proj"]}, TrainParameters)
    assert (named.lora_rank, named.lora_target_modules) == (4, ("q_proj",))
    assert read({"model_name": "m", "k": 4}, EvaluateParameters).model_path == "m"
