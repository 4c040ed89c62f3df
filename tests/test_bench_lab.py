# SPDX-License-Identifier: Apache-2.0
"""How ours and the peers take turns, what becomes of a peer that is missing or fails, and the command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.__main__ import _chosen, app
from bench.lab import Lab, Member, Settings
from bench.rows import Bar, Results
from bench.workers import KINDS, Kind, Worker, WorkerError, environment

MakeLab = Callable[..., Lab]
HERE = Path(__file__).parent


@pytest.fixture
def make_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLab:
    """Labs whose processes are the test's own small worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    for name in ("ours", "hf"):
        monkeypatch.setitem(KINDS, name, Kind("bench_worker"))

    def make(**changes: Any) -> Lab:
        settings = Settings(**({"models": tmp_path, "logs": tmp_path / "logs", "repeats": 2} | changes))
        return Lab(settings, Results(None), tell=lambda _: None)

    return make


def member(kind: str, tmp_path: Path, seconds: float = 1.0, **more: Any) -> Member:
    config = {"name": more.pop("name", kind), "seconds": seconds, "diary": str(tmp_path / "diary"), **more}
    return Member(kind, config)


def diary(tmp_path: Path) -> list[str]:
    return (tmp_path / "diary").read_text(encoding="utf-8").split("\n")[:-1]


def rate(reply: dict[str, Any]) -> float:
    return float(reply["tokens"] / reply["seconds"])


def test_ours_and_peer_alternate_after_one_warm_up_each(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab()
    with lab.crew({"ours": member("ours", tmp_path, 1.0), "hf": member("hf", tmp_path, 4.0)}) as crew:
        replies = crew.take_turns({"what": "run"}, warm={"what": "warm"})
    assert diary(tmp_path) == ["ours warm", "ours run", "hf warm", "hf run", "ours run", "hf run"]
    assert len({reply["pid"] for reply in replies.by["ours"]}) == 1
    record = lab.row("w", "float32", replies.values(rate), unit="tokens/s", bar=Bar({"hf": 4.0})).record()
    assert (record["ours"], record["peers"], record["ratio"], record["met"]) == (100.0, {"hf": 25.0}, {"hf": 4.0}, True)


def test_what_does_not_fit_into_memory_together_is_a_new_process_each_turn(make_lab: MakeLab, tmp_path: Path) -> None:
    members = {"ours": member("ours", tmp_path), "hf": member("hf", tmp_path)}
    with make_lab().crew(members, together=False) as crew:
        replies = crew.take_turns({"what": "run"})
    assert diary(tmp_path) == ["ours run", "ours run", "hf run", "hf run"] * 2
    assert len({reply["pid"] for found in replies.by.values() for reply in found}) == 4


def test_a_member_may_have_a_request_of_its_own(make_lab: MakeLab, tmp_path: Path) -> None:
    other = member("ours", tmp_path, name="lock-step")
    other.request = {"what": "longest"}
    with make_lab(repeats=1).crew({"ours": member("ours", tmp_path), "lock-step": other}) as crew:
        crew.take_turns({"what": "run"}, warm={"what": "warm"})
    assert diary(tmp_path) == ["ours warm", "ours run", "lock-step warm", "lock-step longest"]


def test_a_peer_that_is_not_installed_is_named_with_how_to_get_it(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(peers=tmp_path / "peers")
    with lab.crew({"ours": member("ours", tmp_path), "trl": member("trl", tmp_path)}) as crew:
        replies = crew.take_turns({})
    record = lab.row("w", "float32", replies.values(rate), unit="tokens/s", bar=Bar({"trl": 2.0})).record()
    assert record["absent"]["trl"].startswith(f"not installed: python3.11 -m venv {tmp_path}/peers/trl && ")
    assert "pip install torch==2.13.0 trl==1.16.0" in record["absent"]["trl"]
    assert (record["peers"], record["ratio"], record["met"]) == ({}, {}, None)


def test_a_peer_that_is_not_asked_for_is_left_alone(make_lab: MakeLab, tmp_path: Path) -> None:
    with make_lab(against=()).crew({"ours": member("ours", tmp_path), "hf": member("hf", tmp_path)}) as crew:
        crew.take_turns({"what": "run"})
    assert set(diary(tmp_path)) == {"ours run"}


def test_a_peer_that_fails_does_not_stop_ours(make_lab: MakeLab, tmp_path: Path) -> None:
    dying = member("hf", tmp_path, name="hf")
    dying.request = {"die": True}
    broken = member("hf", tmp_path, name="broken", broken=True)
    with make_lab().crew({"ours": member("ours", tmp_path), "hf": dying, "broken": broken}) as crew:
        replies = crew.take_turns({"what": "run"}, warm={"what": "warm"})
    assert [len(replies.by[name]) for name in ("ours", "hf", "broken")] == [2, 0, 0]
    assert replies.absent["hf"].startswith("failed: hf ended without an answer; see ")
    assert replies.absent["broken"].startswith("failed: ValueError: no such model; see ")
    assert "Traceback" in (tmp_path / "logs" / "broken.log").read_text()


def test_a_process_that_hangs_is_ended(make_lab: MakeLab, tmp_path: Path) -> None:
    make_lab()
    config = member("hf", tmp_path).config
    with Worker("hf", sys.executable, config, tmp_path / "log") as worker:
        began = time.perf_counter()
        with pytest.raises(WorkerError, match="ended without an answer"):
            worker.ask({"sleep": 60}, wait_s=0.1)
        assert time.perf_counter() - began < 30


def test_a_process_that_says_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "hf", Kind("this"))  # which recites a poem
    with pytest.raises(WorkerError, match="where an answer was due"):
        Worker("hf", sys.executable, {}, tmp_path / "log")


def test_ours_spins_as_the_command_line_does_and_peers_have_their_own_defaults(
    make_lab: MakeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with make_lab(repeats=1).crew({"ours": member("ours", tmp_path), "hf": member("hf", tmp_path)}) as crew:
        replies = crew.take_turns({})
    assert {name: found[0]["spin"] for name, found in replies.by.items()} == {"ours": "20000", "hf": None}
    assert "OMP_WAIT_POLICY" not in environment("ours")


def test_a_peer_gets_the_libraries_its_makers_want_loaded_first(tmp_path: Path) -> None:
    library = tmp_path / "vllm" / "lib" / "libiomp5.so"
    assert "LD_PRELOAD" not in environment("vllm", tmp_path)
    library.parent.mkdir(parents=True)
    library.touch()
    assert environment("vllm", tmp_path)["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in environment("trl", tmp_path)


def test_quick_rows_are_not_judged(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(quick=True)
    with lab.crew({"ours": member("ours", tmp_path, 9.0), "hf": member("hf", tmp_path, 1.0)}) as crew:
        values = crew.take_turns({}).values(rate)
    record = lab.row("w", "float32", values, unit="tokens/s", bar=Bar({"hf": 2.5})).record()
    assert (record["bar"], record["met"]) == ("", None)


# The command line ------------------------------------------------------------------------------------------


def test_suites_and_names_become_benches_with_the_ceilings_first() -> None:
    assert _chosen(["tools", "sampling", "tools"]) == ["ceilings", "tools", "sampling"]
    core, full, learn = (_chosen([suite]) for suite in ("core", "full", "learn"))
    assert {"sampling", "ragged", "tools", "grpo", "sft", "tiny", "slow-tool", "import"} < set(core)
    assert set(full) - set(core) == {"dpo", "scaling", "growth"}
    assert set(learn) == {"ceilings", "demo", "learn", "learn-bf16"}


def test_every_bench_says_what_it_measures() -> None:
    shown = CliRunner().invoke(app, ["--list"])
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert all(len(line.split(maxsplit=2)) == 3 for line in lines)
    assert any(line.split()[:2] == ["sampling", "core"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["smapling"], "did you mean 'sampling'?"), (["import", "--against", "vlm"], "did you mean 'vllm'?")],
)
def test_a_wrong_name_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output and result.output.count("\n") == 1
