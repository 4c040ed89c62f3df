# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files through the command line: done (0) or one line and 2, in bounded time, nothing written."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import DONE, MORE, StepsEnv, play
from typer.testing import CliRunner

from palestra import cli
from palestra import config as configuration
from palestra.data.rows import load_jsonl
from palestra.data.tables import read_table
from palestra.errors import ConfigError, DataError, RunError, UserError, unknown
from palestra.rollout.dump import read_rollouts, write_rollouts
from palestra.run.files import read_json
from palestra.run.view import read_groups
from palestra.types import Group, Task

EXAMPLES = Path(__file__).parents[1] / "examples"


def told(*words: str | Path) -> str:
    """What a command says when it is refused with one line, or "" when it did what it was asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(cli.app, [str(w) for w in words])
    assert isinstance(result.exception, SystemExit | None), result.exception
    said = result.stderr
    assert result.exit_code in (0, 2), (words, result.exit_code, said)
    assert "Traceback" not in result.output
    if result.exit_code == 2:
        assert said.startswith("error: ") and said.count("\n") == 1, said
    return said if result.exit_code == 2 else ""


def everything(folder: Path) -> dict[str, Any]:
    """All files under a folder with their bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# Configs ---------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "1e-5", "ünï\U0001f600", "a" * 5000, "${HOME}", "../../etc"),
    *([], [[]], [1, "x"], {}, {"name": "x"}, {"": 1}, {1: 2}, [None]),
]
CONFIGS = {
    "calculator.yaml": "rl",
    "tools_smollm2.yaml": "rl",
    "self_refine_gsm8k.yaml": "rl",
    "prefer_calculator.yaml": "prefer",
    "reward_model_calculator.yaml": "reward-model",
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a tree."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(tree: Any, chance: random.Random) -> Any:
    """One to three changes: another value, a misspelt key, a key gone, a new one, two values swapped."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randint(1, 3)):
        all_places = list(places(tree))
        if not all_places:
            return tree
        *parents, key = chance.choice(all_places)
        node = tree
        for part in parents:
            node = node[part]
        how = chance.randrange(5)
        if how <= 1:
            node[key] = chance.choice(ODD)
        elif how == 2 and isinstance(node, dict):
            node[str(key)[:-1] + chance.choice("xyz")] = node.pop(key)
        elif how == 3:
            del node[key]
        elif isinstance(node, dict):
            node[chance.choice(["seed", "x", "train", "format", "model"])] = chance.choice(ODD)
    return tree


def plan_of_a_mutated_config(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    name = chance.choice(sorted(CONFIGS))
    tree = mutated(yaml.safe_load((EXAMPLES / name).read_text()), chance)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True))
    before = everything(folder)
    told(CONFIGS[name], file, f"out={folder / 'run'}", "--dry-run")
    assert everything(folder) == before


@pytest.mark.parametrize("seed", range(8))
def test_a_mutated_config_gives_a_plan_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    plan_of_a_mutated_config(tmp_path, seed)


def test_a_number_where_a_name_belongs_is_an_unknown_name() -> None:
    assert unknown("mistake", -1, ["wrong_last"]).startswith("unknown mistake -1")  # type: ignore[arg-type]


@pytest.mark.slow  # a thousand plans
def test_a_thousand_mutated_configs_give_a_plan_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(1000, 2000):
        plan_of_a_mutated_config(tmp_path, seed)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
HOSTILE = {
    "aliases that multiply": (BOMB, "values, aliases written out"),
    "an alias of itself": ("a: &a [*a]\n", "nested too deeply"),
    "a mapping of itself": ("a: &a\n  b: *a\n", "nested too deeply"),
    "deep lists": ("a: " + "[" * 20_000, "nested too deeply"),
    "deep and closed": ("a: " + "[" * 200 + "]" * 200, "nested too deeply"),
    "a tag that does not fit": ("a: !!bool maybe\n", "does not fit its tag"),
    "an empty tagged number": ("a: !!float ''\n", "does not fit its tag"),
    "a wrong date": ("a: !!timestamp x\n", "does not fit its tag"),
    "an object": ("a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    "tabs": ("train:\n\tsteps: 1\n", "not valid YAML"),
    "two documents": ("a: 1\n---\na: 2\n", "not valid YAML"),
    "a million digits": ("seed: " + "9" * 1_000_000, "not valid YAML"),
    "a NUL": ("seed: \0", "not valid YAML"),
    "a key twice": ("seed: 1\nseed: 2\n", "appears twice"),
    "a list as a key": ("? [a]\n: 1\n", "not valid YAML"),
    "a merge of a number": ("<<: 3\n", "not valid YAML"),
    "only a comment": ("# nothing\n", "is empty"),
    "a list": ("- 1\n", "holds a list"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    text, says = HOSTILE[case]
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    said = told("rl", file, "--dry-run")
    assert says in said and str(file) in said and len(said) < 1000


def test_a_config_may_still_use_aliases_and_fifty_levels() -> None:
    shared = configuration._parse_yaml("a: &a [1, 2]\nb: *a\nc: [*a, *a]\n", "x")
    assert shared == {"a": [1, 2], "b": [1, 2], "c": [[1, 2], [1, 2]]}
    assert configuration._parse_yaml("[" * 49 + "]" * 49, "x")
    with pytest.raises(ConfigError, match="at most 50 levels"):
        configuration._parse_yaml("[" * 51 + "]" * 51, "x")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_a_config_in_another_encoding_is_read_or_refused(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: ü\n", encoding=encoding)
    said = told("rl", file, "--dry-run")
    assert ("not UTF-8" in said) == (encoding != "utf-8-sig")


# Data ------------------------------------------------------------------------------------------------------

GOOD = '{"question": "2+2?", "answer": "4"}\n'
LINES = {
    "a NUL": ('{"question": "2\\u0000+2?", "answer": "4"}\n', None),
    "a raw NUL": ('{"question": "a\0b", "answer": "4"}\n', "not valid JSON"),
    "a byte order mark": ("\ufeff" + GOOD, "BOM"),
    "windows line ends": (GOOD.replace("\n", "\r\n"), None),
    "a million digits": ('{"question": "q", "answer": ' + "9" * 1_000_000 + "}\n", "too long"),
    "deep nesting": ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "too deep"),
    "NaN": ('{"question": "q", "answer": NaN}\n', None),
    "a key twice": ('{"question": "q", "question": "r", "answer": "1"}\n', None),
    "half a line": ('{"question": "q", "ans', "not valid JSON"),
    "a list": ("[1]\n", "a list instead of an object"),
    "a number as question": ('{"question": 5}\n', "give a text or a list of messages"),
    "an empty question": ('{"question": " \\n"}\n', "is empty"),
    "messages that are none": ('{"prompt": [5]}\n', "data.jsonl:2"),
    "no field": ("{}\n", "no field 'prompt' or 'question'"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_strange_line_is_read_or_named(tmp_path: Path, case: str) -> None:
    line, says = LINES[case]
    file = tmp_path / "data.jsonl"
    file.write_text(GOOD + line, encoding="utf-8", newline="")
    if says is None:
        assert len(load_jsonl(file)) == 2
        return
    with pytest.raises(DataError, match=r"data\.jsonl:2") as refused:
        load_jsonl(file)
    assert says in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("what", ["empty", "directory", "absent", "utf-16", "locked"])
def test_what_is_no_data_file_is_named(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data.jsonl"
    if what == "directory":
        file.mkdir()
    elif what != "absent":
        file.write_text("" if what == "empty" else GOOD, encoding="utf-16" if what == "utf-16" else "utf-8")
    if what == "locked":  # the super-user may read what nobody may
        monkeypatch.setattr("builtins.open", _no_permission)
    with pytest.raises(DataError, match=r"data\.jsonl"):
        load_jsonl(file)


def _no_permission(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Cut, with some bytes changed, with a piece doubled, or with junk inside."""
    at = chance.randrange(len(data) + 1)
    how = chance.randrange(5)
    if how == 0:
        return data[:at]
    if how == 1:
        changed = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if how == 2:
        return data[:at] + data[max(0, at - chance.randrange(60)) :]
    junk = (b"\0", b"\n{}\n", b"\xff\xfe", b"null", b"Infinity", b'"', b"[" * 3000, b"9" * 5000, b"\n5\n", b"}")
    return data[:at] + chance.choice(junk) + (data[at:] if how == 3 else data[at + 5 :])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_damaged_tables_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i), "level": i} for i in range(5)]
    text = {
        ".jsonl": "".join(json.dumps(r) + "\n" for r in rows),
        ".json": json.dumps(rows),
        ".csv": "question,answer,level\n" + "".join(f'"{r["question"]}",{r["answer"]},{r["level"]}\n' for r in rows),
    }[suffix]
    file = tmp_path / f"data{suffix}"
    refused = 0
    for seed in range(200):
        file.write_bytes(damaged(text.encode(), random.Random(seed)))
        try:
            list(read_table(file))
        except UserError as error:
            assert "\n" not in str(error) and file.name in str(error)
            refused += 1
    assert refused > 10


# Runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `view`, `doctor` and `profile` read of a run of three steps."""
    from palestra.train.config import RLConfig

    run = tmp_path_factory.mktemp("whole") / "run"
    (run / "rollouts").mkdir(parents=True)
    settings = configuration.load(EXAMPLES / "calculator.yaml", [], RLConfig)
    (run / "config.yaml").write_text(configuration.dump(settings))
    (run / "run.json").write_text(json.dumps({"format": 1, "seed": 0}))
    (run / "summary.json").write_text(json.dumps({"format": 1, "accuracy_after": 0.5, "seconds": 3.0}))
    names = ("train/reward", "train/kl", "train/loss", "time/step_s", "time/rollout_s", "rollout/sampled_tokens")
    rows = [{"step": i, "phase": "rl", "at": 1.0, **dict.fromkeys(names, 0.1 * i)} for i in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    episodes = tuple(play(StepsEnv(MORE, DONE), ["he", "he llo"]) for _ in range(2))
    groups = [Group(Task(str(i), "go", "hello"), i, episodes) for i in range(3)]
    write_rollouts(run / "rollouts" / "step_000003.jsonl.zst", groups)
    return run


VERBS: list[Callable[[Path], str]] = [
    lambda run: told("view", run),
    lambda run: told("view", run, "--html", run.parent / "page.html"),
    lambda run: told("doctor", run),
    lambda run: told("profile", run),
]


def look_at_a_damaged_run(whole_run: Path, folder: Path, seed: int) -> list[str]:
    """Damage one file of a run and read it with every verb."""
    chance = random.Random(seed)
    run = Path(shutil.copytree(whole_run, folder / "run"))
    file = chance.choice(sorted(p for p in run.rglob("*") if p.is_file()))
    how = chance.randrange(8)
    if how == 0:
        file.unlink()
    elif how == 1:
        file.unlink()
        file.mkdir()
    elif how == 2:
        file.write_bytes(b"")
    else:
        file.write_bytes(damaged(file.read_bytes(), chance))
    before = everything(run)
    said = [verb(run) for verb in VERBS]
    assert everything(run) == before, "readers write nothing into a run"
    shutil.rmtree(run)
    return said


def test_a_whole_run_is_read(whole_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole_run, tmp_path / "run"))
    assert [verb(run) for verb in VERBS] == ["", "", "", ""]


def test_a_damaged_run_is_read_as_far_as_it_goes_or_refused_in_one_line(whole_run: Path, tmp_path: Path) -> None:
    said = [line for seed in range(12) for line in look_at_a_damaged_run(whole_run, tmp_path, seed)]
    assert 3 < sum(map(bool, said)) < len(said)


@pytest.mark.parametrize("what", ["a directory", "not an object", "deep nesting"])
@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_a_file_of_a_run_that_is_no_object_of_json_is_named(
    whole_run: Path, tmp_path: Path, name: str, what: str
) -> None:
    file = Path(shutil.copytree(whole_run, tmp_path / "run")) / name
    file.unlink()
    if what == "a directory":
        file.mkdir()
    else:
        file.write_text("[5]" if what == "not an object" else "[" * 100_000)
    with pytest.raises(RunError, match=rf"{re.escape(str(file))} .*; remove it"):
        read_json(file, "remove it")
    said = [verb(file.parent) for verb in VERBS]
    reads = {"run.json": [2, 3], "summary.json": [] if what == "a directory" else [1]}[name]
    assert [i for i, line in enumerate(said) if str(file) in line] == reads


@pytest.mark.slow  # a thousand runs, each read four times
def test_a_thousand_damaged_runs_are_read_or_refused_in_one_line(whole_run: Path, tmp_path: Path) -> None:
    for seed in range(1000, 2000):
        look_at_a_damaged_run(whole_run, tmp_path, seed)


def test_a_field_that_the_page_needs_and_a_rollouts_file_lacks_is_named(whole_run: Path, tmp_path: Path) -> None:
    (group, *_) = read_groups(whole_run / "rollouts" / "step_000003.jsonl.zst")
    del group["episodes"][0]["trajectories"][0]["turns"][0]["finish_reason"]
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(group) + "\n")
    said = told("view", file, "--html", tmp_path / "page.html")
    assert str(file) in said and "finish_reason" in said and not (tmp_path / "page.html").exists()


def test_a_rollouts_file_that_is_cut_anywhere_says_so(whole_run: Path, tmp_path: Path) -> None:
    """zstandard itself reads a stream that is cut off as one that ends."""
    whole = (whole_run / "rollouts" / "step_000003.jsonl.zst").read_bytes()
    file = tmp_path / "cut.jsonl.zst"
    file.write_bytes(whole + whole)
    assert len(list(read_rollouts(file))) == 6, "two frames"
    for end in range(0, len(whole), 1 + len(whole) // 40):
        file.write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"cut\.jsonl\.zst is (cut off|not zstandard)"):
            list(read_rollouts(file))


def test_a_torn_last_line_of_the_metrics_is_left_out_and_any_other_is_named(whole_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole_run, tmp_path / "run"))
    metrics = run / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text[:-20])
    assert told("doctor", run) == told("profile", run) == ""
    metrics.write_text(text[20:])
    assert "metrics.jsonl:1" in told("doctor", run)
    metrics.write_text(text.replace('"step": 2', '"step": Infinity'))
    assert "metrics.jsonl:2" in told("doctor", run)
