# SPDX-License-Identifier: Apache-2.0
"""What a bench is given: models, processes that take turns, and the rows that come of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.limits import Ceilings, Limit, Shape
from bench.models import Prompt, checkpoint, prompts
from bench.rows import NOT_ASKED, Bar, Check, Record, Results, Row
from bench.table import said
from bench.workers import KINDS, Worker, WorkerError
from palestra.errors import UserError
from palestra.model import kernels
from palestra.registry import Registry

Suite = Literal["core", "full", "learn"]
Reply = dict[str, Any]
NO_BAR = Bar()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says. against: the peers that may be measured. threads: of every process."""

    models: Path
    logs: Path
    peers: Path | None = None
    against: tuple[str, ...] = ("hf", "trl", "vllm")
    repeats: int = 3
    quick: bool = False
    threads: int = 2


@dataclass(slots=True)
class Member:
    """One side of a comparison: the kind of its process, its configuration, and its request and warm-up where they are
    not the common ones. It is not measured once ``absent`` says why."""

    kind: str
    config: dict[str, Any]
    request: dict[str, Any] | None = None
    warm: dict[str, Any] | None = None
    absent: str | None = None
    worker: Worker | None = None

    def end(self) -> None:
        """End its process, if there is one."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()


@dataclass(frozen=True, slots=True)
class Measured:
    """Values by name, ``ours`` among them; who is missing and why; what was running."""

    runs: Mapping[str, Sequence[float]]
    absent: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replies:
    """What the members of a crew answered in their turns."""

    by: dict[str, list[Reply]]
    absent: dict[str, str]
    versions: dict[str, dict[str, str]]

    def values(self, value: Callable[[Reply], float], names: Mapping[str, str] | None = None) -> Measured:
        """One number of each reply. names: what a member is called in the row; all of them by their own, when left
        out."""
        called = names or {name: name for name in self.by}
        return Measured(
            {name: [value(reply) for reply in self.by[member]] for name, member in called.items()},
            {name: self.absent[member] for name, member in called.items() if member in self.absent},
            {name: self.versions[member] for name, member in called.items() if member in self.versions},
        )

    def last(self, key: str) -> dict[str, Any]:
        """One entry of everyone's last reply, where it has one."""
        return {name: found[-1][key] for name, found in self.by.items() if found and key in found[-1]}


@dataclass(slots=True)
class Crew:
    """The sides of a comparison. Processes are started when they are first asked. together: they stay loaded between
    their turns; otherwise each turn is a new process, warmed up again, because their memory does not fit beside
    each other."""

    members: dict[str, Member]
    settings: Settings
    together: bool = True
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def take_turns(self, request: Mapping[str, Any], *, warm: Mapping[str, Any] | None = None) -> Replies:
        """Ours, peer, ours, peer …, as many rounds as asked for, each warmed up before its first."""
        by: dict[str, list[Reply]] = {name: [] for name in self.members}
        for turn in range(self.settings.repeats):
            for name, member in self.members.items():
                if member.absent is not None:
                    continue
                asked = request if member.request is None else member.request
                lukewarm = warm if member.warm is None else member.warm
                try:
                    if turn == 0 or not self.together:
                        self.once(name, asked if lukewarm is None else lukewarm)
                    by[name].append(self.once(name, asked))
                except WorkerError as problem:
                    member.absent = f"failed: {problem}"
                if member.absent is not None or not self.together:
                    member.end()
        return Replies(by, self.absent(), dict(self.versions))

    def once(self, name: str, request: Mapping[str, Any]) -> Reply:
        """One request to one of them; its process is started when it is not there."""
        member = self.members[name]
        if member.worker is None:
            python = KINDS[member.kind].python(self.settings.peers)
            assert python is not None, "a member that is absent is not asked"
            config = {"threads": self.settings.threads, **member.config}
            log = self.settings.logs / f"{name.replace(' ', '-')}.log"
            member.worker = Worker(member.kind, python, config, log, peers=self.settings.peers)
            self.versions[name] = member.worker.versions
        return member.worker.ask(request)

    def absent(self) -> dict[str, str]:
        """Who is not measured, and why."""
        return {name: m.absent for name, m in self.members.items() if m.absent is not None}

    def close(self) -> None:
        """End every process."""
        for member in self.members.values():
            member.end()


@dataclass(slots=True)
class Lab:
    """Where benches are run."""

    settings: Settings
    results: Results
    ceilings: Ceilings | None = None
    resume: bool = False
    tell: Callable[[str], None] = print

    def model(self, name: str = "smollm2") -> str:
        """The checkpoint directory; with ``--quick`` the tiny model stands for the real one."""
        small = {"smollm2": "tiny", "hollow": "hollow-tiny"}
        return checkpoint(small.get(name, name) if self.settings.quick else name, self.settings.models)

    def prompts(self, model: str, count: int, length: int) -> list[Prompt]:
        return prompts(model, count, length)

    def limit(self, model: str, dtype: str, value: Callable[[Limit], float]) -> float | None:
        """``value`` of what the machine allows this model; None before the ceilings are known."""
        return None if self.ceilings is None else value(Limit(Shape.read(model), self.ceilings, dtype))

    def wants(self, work: str, dtype: str, *, samples: bool = False) -> bool:
        """Whether a row is still to be measured. One that stands is measured again when a peer that was missing has
        been installed, or when it was made under other settings. samples: it does nothing but sample, for which our
        kernels need no products in the weights' dtype."""
        if dtype == "bfloat16" and self._slow_bfloat16() and not (samples and kernels.library() is not None):
            self.tell(f"  {work} {dtype}: skipped, matrix products in bfloat16 are slower than in float32 here")
            return False
        old = self.results.find(work, dtype) if self.resume else None
        if old is None or old.get("settings") != self._stamp():
            return True
        return any(self._missing(name.split()[0]) is None for name in old["absent"])

    def _slow_bfloat16(self) -> bool:
        """True on a machine whose cores have no bfloat16: a row that trains would take hours and say nothing."""
        rates = self.ceilings.flops if self.ceilings is not None else {}
        return not self.settings.quick and rates.get("bfloat16", 0.0) < rates.get("float32", 0.0)

    @contextmanager
    def crew(self, members: Mapping[str, Member], *, together: bool = True) -> Iterator[Crew]:
        """The processes of a comparison, ended with the block."""
        there = dict(members)
        for member in there.values():
            member.absent = self._missing(member.kind)
        with contextlib.closing(Crew(there, self.settings, together)) as crew:
            yield crew

    def row(
        self,
        work: str,
        dtype: str,
        measured: Measured,
        *,
        unit: str,
        better: Literal["higher", "lower"] = "higher",
        limit: float | None = None,
        bar: Bar = NO_BAR,
        checks: Mapping[str, Check] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Row:
        """A row of the table. With ``--quick`` nothing is judged: a tiny model's numbers mean nothing."""
        if self.settings.quick:
            bar, checks = Bar(), {}
        facts = {"versions": {name: dict(v) for name, v in measured.versions.items()}, **(facts or {})}
        return Row(work, dtype, unit, measured.runs, better, limit, bar, checks or {}, measured.absent, facts)

    def file(self, row: Row) -> Record:
        """Write a row down and say it."""
        record = {**row.record(), "settings": self._stamp(), "measured_at": time.strftime("%Y-%m-%d %H:%M")}
        self.results.add(record)
        return record

    def _missing(self, kind: str) -> str | None:
        """Why a kind of process is not measured; None when it is."""
        if kind != "ours" and kind not in self.settings.against:
            return NOT_ASKED
        if kind not in KINDS:
            return "no process of its own"
        return None if KINDS[kind].python(self.settings.peers) else KINDS[kind].absent(self.settings.peers)

    def _stamp(self) -> dict[str, Any]:
        s = self.settings
        return {"repeats": s.repeats, "quick": s.quick, "threads": s.threads}


@dataclass(frozen=True, slots=True)
class Bench:
    """A named bench: the function that yields its rows, and the suite it belongs to."""

    rows: Callable[[Lab], Iterator[Row]]
    suite: Suite

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        return (self.rows.__doc__ or "").strip().splitlines()[0]


BENCHES: Registry[Bench] = Registry("bench")
"""Benches by name."""


def bench(name: str, *, suite: Suite = "core") -> Callable[[Callable[[Lab], Iterator[Row]]], Bench]:
    """Register a bench: a function from a :class:`Lab` to rows, each measured only when the lab wants it."""

    def add(rows: Callable[[Lab], Iterator[Row]]) -> Bench:
        return BENCHES.register(name)(Bench(rows, suite))

    return add


def run(lab: Lab, names: Sequence[str]) -> list[Record]:
    """Run benches one after the other; a bench that cannot run says why and the others go on."""
    made = []
    for name in names:
        lab.tell(f"{name}: {BENCHES[name].about}")
        try:
            for row in BENCHES[name].rows(lab):
                made.append(lab.file(row))
                lab.tell(said(made[-1]))
        except (UserError, WorkerError) as problem:
            lab.tell(f"  skipped: {problem}")
    return made
