# SPDX-License-Identifier: Apache-2.0
"""Configs: read from YAML, overridden, and every mistake told in one line that says where and what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.config import Config, dump, load
from palestra.errors import ConfigError


class Optim(Config):
    learning_rate: float = 1e-5
    steps: int = 100
    name: str = "adamw"


class Part(Config):
    weight: float = 1.0
    mode: str | None = None


class Root(Config):
    out: str = "runs/a"
    seed: int = 0
    train: Optim = Optim()
    group_size: int = pydantic.Field(8, alias="num_generations", ge=2)
    parts: Mapping[str, Part] = pydantic.Field(default_factory=dict)
    rewards: tuple[Part, ...] = ()
    target: Annotated[str, pydantic.Field(min_length=1)] | list[str] = "attention"


class Needy(Config):
    model: str


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def refusal(source: Any, *overrides: str, cls: type[Config] = Root) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides, cls)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_file_sets_what_it_names_and_leaves_the_rest_at_its_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, "format: 1\nseed: 3\ntrain:\n  learning_rate: 1e-4\n"), [], Root)
    assert config == Root(seed=3, train=Optim(learning_rate=0.0001))


def test_without_a_source_everything_is_at_its_default() -> None:
    assert load(None, [], Root) == Root()


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-05", "+1e-5"])
def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    class Open(Config):
        value: Any = None

    assert load(write(tmp_path, f"value: {text}\n"), [], Open).value == 0.00001
    assert load(None, [f"value={text}"], Open).value == 0.00001


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("no", "no"), ("on", "on"), ("2024-01-31", "2024-01-31"), ("12:30", "12:30"), ("010", 10), ("1_000", 1000)],
        *[("true", True), ("null", None), ("~", None), ("'1e-5'", "1e-5"), ("e5", "e5"), ("-.inf", float("-inf"))],
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    class Open(Config):
        value: Any = "unset"

    assert load(write(tmp_path, f"value: {text}\n"), [], Open).value == value


def test_cf_001_an_unknown_key_names_the_nearest_right_one_and_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  learning_rte: 1e-6\n")
    assert refusal(path) == f"unknown key 'learning_rte' in train ({path}): did you mean 'learning_rate'?"


def test_cf_001_an_unknown_key_at_the_root_of_a_mapping_is_refused_too() -> None:
    assert refusal({"learning_rte": 1e-6}, cls=Optim) == (
        "unknown key 'learning_rte' (config): did you mean 'learning_rate'?"
    )


def test_an_unknown_key_that_resembles_nothing_lists_what_is_known() -> None:
    assert refusal({"zzzz": 1}, cls=Optim) == "unknown key 'zzzz' (config): known: learning_rate, name, steps"


class Deep(Config):
    """Sections that share a key."""

    seed: int = 0
    first: Optim = Optim()
    second: Optim | None = None
    inner: dict[str, Optim] = pydantic.Field(default_factory=dict)


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"stpes": 1}, "did you mean 'first.steps' or 'second.steps'?"),  # in every section that has it
        ({"sed": 1}, "did you mean 'seed'?"),  # here before elsewhere
        ({"first": {"sede": 1}}, "did you mean 'seed' at the top level?"),  # elsewhere is also further up
        ({"wheels": 1}, "known: first, inner, second, seed"),  # too far from everything
    ],
)
def test_an_unknown_key_names_the_right_one_of_another_section(keys: dict[str, Any], hint: str) -> None:
    assert refusal(keys, cls=Deep).endswith(f": {hint}")


def test_a_key_inside_a_named_part_is_checked_but_the_parts_name_is_free() -> None:
    assert load({"parts": {"wieght": {"weight": 2}}}, [], Root).parts["wieght"].weight == 2.0
    assert "in parts.form" in refusal({"parts": {"form": {"wieght": 2}}})
    assert "did you mean 'weight'?" in refusal({"rewards": [{"wieght": 2}]})


def test_an_override_wins_over_the_file_and_the_last_one_over_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  steps: 5\n  name: sgd\n")
    config = load(path, ["train.steps=6", "train.steps=7"], Root)
    assert (config.train.steps, config.train.name) == (7, "sgd")


def test_an_override_may_be_a_list_a_mapping_or_hold_an_equals_sign() -> None:
    config = load(None, ["target=[q, v]", "parts={a: {weight: 2}}", "out=runs/x=1"], Root)
    assert (config.target, config.parts["a"].weight, config.out) == (["q", "v"], 2.0, "runs/x=1")


def test_a_number_in_an_override_indexes_a_list() -> None:
    assert load({"rewards": [{}, {}]}, ["rewards.1.weight=3"], Root).rewards[1].weight == 3.0
    assert "rewards is a list of 1" in refusal({"rewards": [{}]}, "rewards.1.weight=3")


def test_a_mistyped_override_is_blamed_on_the_command_line_not_on_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\n")
    assert refusal(path, "train.stpes=3") == "unknown key 'stpes' in train (command line): did you mean 'steps'?"
    assert refusal(path, "train.steps=many").startswith(
        "train.steps = 'many' (command line): should be a valid integer"
    )


@pytest.mark.parametrize("override", ["steps", "=3", "train..steps=3", ".a=1"])
def test_an_override_without_key_and_value_is_refused(override: str) -> None:
    assert refusal(None, override) == f"override {override!r} is not of the form key.sub=value"


def test_an_override_below_a_plain_value_is_refused() -> None:
    assert refusal({"seed": 3}, "seed.x=1") == "override 'seed.x=1': seed is 3, not a section with keys"


def test_an_overrides_value_must_be_yaml() -> None:
    assert "override 'target=[q'" in refusal(None, "target=[q")


def test_an_alias_sets_the_field_and_an_override_by_its_name_replaces_it(tmp_path: Path) -> None:
    path = write(tmp_path, "num_generations: 4\n")
    assert load(path, [], Root).group_size == 4
    assert load(path, ["group_size=6"], Root).group_size == 6
    assert load({"group_size": 4}, ["num_generations=6"], Root).group_size == 6


def test_a_field_given_under_both_its_names_is_refused() -> None:
    assert "'group_size' is given twice" in refusal({"num_generations": 4, "group_size": 6})


def test_a_wrong_type_shows_the_key_the_value_and_what_was_wanted() -> None:
    assert refusal({"train": {"learning_rate": "fast"}}) == (
        "train.learning_rate = 'fast' (config): should be a valid number, unable to parse string as a number"
    )
    assert refusal({"group_size": 1}) == "group_size = 1 (config): should be greater than or equal to 2"
    assert refusal({"target": 5}) == "target = 5 (config): should be a valid string or a valid list"
    assert refusal({"train": 3}).startswith("train = 3 (config): should be a valid dictionary")


def test_several_mistakes_come_in_one_line_unknown_keys_first() -> None:
    said = refusal({"modle": "x"}, cls=Needy)
    assert said == (
        "unknown key 'modle' (config): did you mean 'model'?; key 'model' is missing (config); it has no default"
    )


def test_a_rule_of_the_config_itself_is_told_in_its_own_words() -> None:
    class Even(Config):
        n: int = 2

        @pydantic.model_validator(mode="after")
        def _even(self) -> Even:
            if self.n % 2:
                raise ConfigError(f"n is {self.n}; it must be even")
            return self

    assert refusal({"n": 3}, cls=Even) == "config: n is 3; it must be even"


@pytest.mark.parametrize("version", ["2", "'1'", "true", "1.0"])
def test_a_format_that_is_not_known_is_refused(tmp_path: Path, version: str) -> None:
    assert "this version reads format 1" in refusal(write(tmp_path, f"format: {version}\nseed: 1\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- 1\n- 2\n", "holds a list"),
        ("seed: 1\nseed: 2\n", ":2:1: key 'seed' appears twice"),
        ("train:\n  steps: 1\n  steps: 2\n", ":3:3: key 'steps' appears twice"),
        ("seed: [1\nout: x\n", ":2:4:"),
        ("out: a: b\n", ":1:7:"),
        ("seed: !!python/object/apply:os.system ['true']\n", ":1:7:"),
        ("out: \x01\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    message = refusal(path)
    assert said in message and str(path) in message


def test_a_missing_file_a_directory_and_binary_data_are_told_apart(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nope.yaml")
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(tmp_path / "model.gguf")


def test_a_dumped_config_loads_back_equal(tmp_path: Path) -> None:
    config = Root(
        train=Optim(learning_rate=3e-6, name="1e-5"),
        parts={"no": Part(mode="null"), "x": Part(mode=None, weight=1e300)},
        rewards=(Part(weight=0.1),),
        target=["2024-01-31", "yes", "a: b", "ü\n"],
    )
    text = dump(config)
    assert text.startswith("format: 1\n")
    assert load(write(tmp_path, text), [], Root) == config


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_a_number_must_be_finite(tmp_path: Path, value: str) -> None:
    message = refusal(write(tmp_path, f"train: {{learning_rate: {value}}}\n"))
    assert "train.learning_rate" in message and "finite number" in message


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False), st.integers())
def test_any_text_and_number_survive_dump_and_load(text: str, number: float, whole: int) -> None:
    config = Optim(name=text, learning_rate=number, steps=whole)
    with tempfile.TemporaryDirectory() as directory:
        assert load(write(Path(directory), dump(config)), [], Optim) == config


class Choice(Config):
    shorthand = "name"
    name: str
    max_steps: int = 4


class World(Config):
    env: Choice = Choice(name="calculator")
    optional: Choice | None = None


def test_a_plain_value_may_stand_for_a_section_and_be_refined_by_an_override(tmp_path: Path) -> None:
    path = write(tmp_path, "env: search\noptional: x\n")
    config = load(path, ["env.max_steps=2", "optional.max_steps=3"], World)
    assert config == World(env=Choice(name="search", max_steps=2), optional=Choice(name="x", max_steps=3))
    assert load(path, ["env=other", "env.max_steps=1"], World).env == Choice(name="other", max_steps=1)
    assert World.model_validate({"env": "search"}).env.name == "search"


def test_a_rule_of_a_section_is_told_with_its_name() -> None:
    class Pair(Config):
        low: int = 0
        high: int = 1

        @pydantic.model_validator(mode="after")
        def _ordered(self) -> Pair:
            if self.low > self.high:
                raise ConfigError("low is above high")
            return self

    class Outer(Config):
        pair: Pair = Pair()

    assert refusal({"pair": {"low": 3}}, cls=Outer) == "pair (config): low is above high"


def test_a_config_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        Root().seed = 1  # type: ignore[misc]
