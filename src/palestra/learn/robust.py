# SPDX-License-Identifier: Apache-2.0
"""Optimiser steps that survive what goes wrong in them: numbers that are not finite, memory that does not suffice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from palestra.errors import PalestraError
from palestra.learn.batch import Rows
from palestra.learn.masters import holders

T = TypeVar("T")
U = TypeVar("U")
Cut = Callable[[int], Iterable[Sequence[int]]]
"""(tokens) → which units go through one forward and backward pass together; a longer unit goes alone."""

_SAID = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


class TrainingError(PalestraError):
    """Training cannot go on; the message says why and what to change."""


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """An optimiser step that was not taken. reason: what was not finite. rows: the batch it was to learn from."""

    reason: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Update:
    """What became of one optimiser step: its loss, the gradient's norm before clipping, and whether it was taken."""

    loss: float
    norm: float
    taken: bool


@dataclass(slots=True, eq=False)
class Guard:
    """What the optimiser steps of one training share, so that a fault in one does not end it.

    tokens: of one forward and backward pass; halved when memory runs out, and it stays so. max_nonfinite: steps in a
    row whose loss or gradient is not finite, after which :meth:`check` raises. tell: hears what was lowered. remedies:
    what to change where one sample alone does not fit. whole: nothing is half done, so what a checkpoint would hold is
    the end of a step; an update takes it away, and whoever has counted and logged the step gives it back.

    >>> guard, weight = Guard(8, tell=print), torch.nn.Parameter(torch.ones(()))
    >>> sgd = torch.optim.SGD([weight], lr=1.0)
    >>> def backward(part):
    ...     if len(part) > 2:
    ...         raise torch.OutOfMemoryError("CUDA out of memory")
    ...     (loss := len(part) * weight).backward()
    ...     return loss.item()
    >>> cut = lambda tokens: [range(i, min(i + tokens, 4)) for i in range(0, 4, tokens)]
    >>> guard.update(sgd, [weight], cut, backward, rows=Rows(()), max_grad_norm=9.0)
    out of memory: passes of 2 tokens from here on, in the place of 8; the result is the same
    Update(loss=4.0, norm=4.0, taken=True)
    """

    tokens: int
    max_nonfinite: int = 3
    tell: Callable[[str], None] = warnings.warn
    remedies: str = "set gradient_checkpointing=true or compute_dtype=bfloat16, train an adapter (lora)"
    in_a_row: int = 0
    whole: bool = True
    faults: list[Fault] = field(default_factory=list)
    _configured: int = field(init=False)

    def __post_init__(self) -> None:
        self._configured = self.tokens

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        cut: Cut,
        backward: Callable[[Sequence[int]], float],
        *,
        rows: Rows,
        max_grad_norm: float,
        begin: Callable[[], None] = lambda: None,
    ) -> Update:
        """One optimiser step on the gradients that ``backward`` adds up over the parts of ``cut``.

        backward: takes the units of a part and returns its share of the loss. begin: puts back what ``backward`` noted
        elsewhere; called before the first part, again whenever the parts are begun anew. A step whose loss or gradient
        is not finite is not taken, and ``faults`` has its ``rows``. Raises TrainingError when one unit alone does not
        fit into memory, or the optimiser's own numbers do not. What ends it before the weights change leaves ``whole``
        as it was.
        """

        def anew() -> None:
            optimizer.zero_grad(set_to_none=True)
            begin()

        loss = sum(self.in_parts(cut, backward, begin=anew))
        held = holders(optimizer, parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(held, max_grad_norm))
        reasons = [f"the {what} is {value}" for what, value in (("loss", loss), ("gradient's norm", norm))
                   if not math.isfinite(value)]  # fmt: skip
        self.whole = False
        if reasons:
            self.in_a_row += 1
            self.faults.append(Fault(", ".join(reasons), rows))
        else:
            self.in_a_row = 0
            self._apply(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return Update(loss, norm, taken=not reasons)

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step. Memory that runs out in it cannot be had by smaller parts, and may have struck between
        two parameters."""
        try:
            optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(f"out of memory in the optimiser's own step; {self.remedies}") from error

    def in_parts(
        self, cut: Cut, work: Callable[[Sequence[int]], T], *, begin: Callable[[], None] = lambda: None
    ) -> list[T]:
        """``work`` on every part; when memory runs out all is begun anew in smaller parts, from the same random state,
        so that the result is that of a run which had the smaller parts from the start. Whatever ends it leaves the
        random state as it found it."""
        random = _random_state()
        while True:
            begin()
            done: list[T] = []
            parts = [list(part) for part in cut(self.tokens)]
            try:
                while len(done) < len(parts):
                    if not (result := _tried(work, parts[len(done)])):
                        break
                    done += result
                else:
                    return done
            except BaseException:
                _set_random_state(random)
                raise
            _set_random_state(random)
            if len(parts[len(done)]) == 1:
                raise self._too_long()
            self._lower(partial(_is_cut_into, parts, cut))

    def retried(self, work: Callable[[int], T]) -> T:
        """``work`` with as many tokens at a time as fit into memory, from the same random state in each try."""
        random = _random_state()
        while not (result := _tried(work, self.tokens)):
            _set_random_state(random)
            if self.tokens == 1:
                raise self._too_long()
            self._lower(lambda _: False)
        return result[0]

    def _too_long(self) -> TrainingError:
        return TrainingError(f"out of memory: one sample alone does not fit through the model; {self.remedies}")

    def _lower(self, futile: Callable[[int], bool]) -> None:
        """Half the tokens, or the half of that, until it makes a difference; and tell it."""
        before = self.tokens
        self.tokens //= 2
        while futile(self.tokens):
            self.tokens //= 2
        self.tell(
            f"out of memory: passes of {self.tokens} tokens from here on, in the place of {before}; the result is the "
            "same"
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Raises TrainingError when too many steps in a row were not finite."""
        if self.in_a_row >= self.max_nonfinite:
            raise TrainingError(
                f"{self.in_a_row} optimiser steps in a row had a loss or gradient that is not finite; lower the "
                "learning rate, or look at the batch"
            )

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs."""
        return {"configured": self._configured, "tokens": self.tokens, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on as the state was; the tokens of another configuration are not taken over."""
        self.in_a_row = state["in_a_row"]
        if state["configured"] == self._configured:
            self.tokens = state["tokens"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: on CUDA an error class of its own, elsewhere a RuntimeError known by its text.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    True
    >>> is_out_of_memory(RuntimeError("MPS backend out of memory")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)


def _is_cut_into(parts: list[list[int]], cut: Cut, tokens: int) -> bool:
    return [list(part) for part in cut(tokens)] == parts


def _tried(work: Callable[[U], T], what: U) -> list[T]:
    """[result], or [] where memory did not suffice. The error must not outlive this call: its traceback holds the
    tensors that filled the memory."""
    try:
        return [work(what)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return []


def _random_state() -> dict[str, Any]:
    """torch's generators, from which dropout draws."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])


__all__ = ["Cut", "Fault", "Guard", "TrainingError", "Update", "is_out_of_memory"]
