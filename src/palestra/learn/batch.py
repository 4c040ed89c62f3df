# SPDX-License-Identifier: Apache-2.0
"""From groups to rows to tensors: what one step learns from.

Conventions, everywhere in this room: index i of any per-token array belongs to *token i* (never to the
logits that predict it); ``loss_mask`` True = counts; log-probs in nats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from palestra.learn.payments import turn_rewards
from palestra.learn.picks import Picks
from palestra.learn.tree import Piece, layout, shared_beginnings
from palestra.model.attention import attend
from palestra.types import BoolArray, FloatArray, Group, IntArray, Trajectory

PerToken = npt.NDArray[np.floating[Any]]
"""One number per token of a sample, float32 or float64 [T]."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training row: one trajectory's tokens with what the sampler recorded (seed 1's StepSample).

    tokens int32[T]; loss_mask bool[T]; logprobs float32[T], the sampler's; versions int32[T].
    group, episode: whose row it is (credit is given by name, never by position). reward: the episode's.
    turn_ends: index of the last sampled token of each turn. trained: False for rows that only serve the
    baseline (stale ones). turn_rewards: what each of those turns earned; over an episode's rows they sum to its reward.
    truncated: a limit ended the episode, not the task.
    """

    tokens: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    group: str
    episode: str
    reward: float
    turn_ends: tuple[int, ...] = ()
    trained: bool = True
    turn_rewards: tuple[float, ...] = ()
    truncated: bool = False

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum()) if self.trained else 0


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's samples with what was computed about them; per-token lists run parallel to ``samples``.

    advantages, old, ref: float64/float32 [T] each, or None until computed. ``old`` are the log-probs that the
    ratio is taken against; ``ref`` the reference policy's. With a critic: ``values`` float64[T], V of the state before
    each token the model wrote; ``after``, per sample V of the state behind its last token; ``returns`` float64[T], what
    V is pulled towards, ``value_counts`` float64[T], how many tokens that stands for.
    """

    samples: tuple[Sample, ...]
    advantages: tuple[PerToken, ...] | None = None
    old: tuple[PerToken, ...] | None = None
    ref: tuple[PerToken, ...] | None = None
    values: tuple[PerToken, ...] | None = None
    after: tuple[float, ...] | None = None
    returns: tuple[PerToken, ...] | None = None
    value_counts: tuple[PerToken, ...] | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    def with_(self, **changes: object) -> Rows:
        """A copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def only(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices`` alone, with all that was computed about them."""
        held = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "counts"}
        return self.with_(**{k: v if v is None else tuple(v[i] for i in indices) for k, v in held.items()})


def rows(groups: Iterable[Group], *, min_group: int = 2, unscored: bool = False) -> Rows:
    """Every scored trajectory with at least one sampled token as a row.

    Left out, and counted: episodes that failed (``errors``), were never scored (``unscored``) or sampled
    nothing (``empty``); whole groups with fewer than ``min_group`` usable episodes (``groups_dropped``). ``unscored``
    keeps those that were never scored, with a reward of 0: for what learns from no reward.
    """
    kept: list[Sample] = []
    counts = {"errors": 0, "unscored": 0, "empty": 0, "groups_dropped": 0, "stale": 0}
    for group in groups:
        usable = []
        for episode in group.episodes:
            if episode.error is not None:
                counts["errors"] += 1
            elif episode.reward is None and not unscored:
                counts["unscored"] += 1
            elif not any(t.sampled_tokens for t in episode.trajectories):
                counts["empty"] += 1
            else:
                usable.append(episode)
        if len(usable) < min_group:
            counts["groups_dropped"] += 1
            continue
        for episode in usable:
            stale = bool(episode.info.get("stale", False))
            counts["stale"] += stale
            name = f"{group.id}/{episode.member}"
            reward = float(episode.reward or 0.0)
            kept += [
                _sample(t, group.id, name, reward, trained=not stale, paid=paid)
                for t, paid in zip(episode.trajectories, turn_rewards(episode), strict=True)
                if t.sampled_tokens
            ]
    return Rows(tuple(kept), counts=counts)


def _sample(
    trajectory: Trajectory, group: str, episode: str, reward: float, *, trained: bool, paid: tuple[float, ...]
) -> Sample:
    mask = trajectory.loss_mask
    ends, at = [], 0
    for turn in trajectory.turns:
        sampled = np.flatnonzero(mask[at : at + sum(len(s) for s in turn.spans)])
        if len(sampled):
            ends.append(at + int(sampled[-1]))
        at += sum(len(s) for s in turn.spans)
    return Sample(
        trajectory.tokens,
        mask,
        trajectory.logprobs,
        trajectory.versions,
        group,
        episode,
        reward,
        tuple(ends),
        trained,
        paid,
        trajectory.stop.truncated,
    )


Reduction = Literal["sequence_mean", "token_mean", "constant"]


def token_weights(samples: Sequence[Sample], reduction: Reduction, *, divisor: float | None = None) -> list[PerToken]:
    """The weight w of every token, so that a step's loss is Σ w·ℓ over all its tokens, however it is cut.

    ``sequence_mean``: mean over each episode's trained tokens, then over episodes (an episode that trains as
    several rows still counts once). ``token_mean``: mean over all trained tokens. ``constant``: sum over
    tokens / ``divisor`` (Dr. GRPO: episodes × token limit). Without trained tokens all weights are 0.

    >>> one = Sample(*(np.zeros(3, t) for t in (np.int32, bool, np.float32, np.int32)), "g", "a", 0.0)
    >>> rows_ = [replace(one, loss_mask=np.array([False, True, True])),
    ...          replace(one, episode="b", loss_mask=np.array([False, False, True]))]
    >>> [w.tolist() for w in token_weights(rows_, "sequence_mean")]
    [[0.0, 0.25, 0.25], [0.0, 0.0, 0.5]]
    """
    per_episode: dict[str, int] = {}
    for s in samples:
        per_episode[s.episode] = per_episode.get(s.episode, 0) + s.trained_tokens
    episodes = sum(n > 0 for n in per_episode.values())
    total = sum(per_episode.values())
    if reduction == "constant" and not divisor:
        raise ValueError("reduction 'constant' needs a positive divisor")

    def weight(sample: Sample) -> float:
        if not sample.trained_tokens:
            return 0.0
        if reduction == "sequence_mean":
            return 1.0 / (per_episode[sample.episode] * episodes)
        return 1.0 / (total if reduction == "token_mean" else float(divisor or 0.0))

    return [np.where(s.loss_mask, weight(s), 0.0) for s in samples]


# Packing ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Segment:
    """Rows of the flat batch that attend together: ``query`` (S, Lq) to ``keys`` (S, Lk), both picked from the flat
    tokens, -1 where padded."""

    query: Picks
    keys: Picks
    causal: bool
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, positions: Tensor) -> Tensor | None:
        """bool (S, 1, Lq, Lk), True = may look; None where plain causal attention does (padding sits at the
        end, so no real query sees it)."""
        if window not in self.masks:
            if self.causal and window is None:
                self.masks[window] = None
            else:
                q, k = self.query(positions)[:, :, None], self.keys(positions)[:, None, :]
                seen = (k <= q) & (self.keys.index >= 0)[:, None, :]
                if window is not None:
                    seen &= k > q - window
                seen[:, :, 0] |= self.query.index < 0  # a padded query looks somewhere, so that it stays finite
                self.masks[window] = seen[:, None]
        return self.masks[window]


@dataclass(slots=True, eq=False)
class Batch:
    """One micro-batch as a single flat sequence without padding.

    tokens, positions (1, N). Episodes of a group that begin with the same tokens share them: those rows occur
    once and their keys serve all members. ``predict`` (M,): flat row whose logits predict each trained token, and
    ``scored`` (U,) those rows once each, ``score_at`` (M,) where in ``scored`` a token finds its own; ``targets``
    (M,): that token; ``weights``, ``advantages``, ``old``, ``ref``, ``values``, ``returns``, ``value_counts`` (M,): per
    trained token; ``sequence`` (M,): index of its sample within the batch; ``last`` (S,): flat row of each sample's
    last token. The batch is an ``AttentionPlan``.
    """

    tokens: Tensor
    positions: Tensor
    segments: list[Segment]
    unpad: Picks
    predict: Tensor
    scored: Tensor
    score_at: Tensor
    targets: Tensor
    sequence: Tensor
    weights: Tensor
    last: Tensor
    advantages: Tensor | None = None
    old: Tensor | None = None
    ref: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    value_counts: Tensor | None = None
    indices: tuple[int, ...] = ()
    dropout: bool = False

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float,
    ) -> Tensor:
        # (N, heads, D); as [0] their gradients would be copied into zeros.
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        outs = []
        for segment in self.segments:
            mixed = attend(
                segment.query(q).transpose(1, 2),
                segment.keys(k).transpose(1, 2),
                segment.keys(v).transpose(1, 2),
                segment.mask(window, self.positions[0]),
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                dropout=dropout if self.dropout else 0.0,
            )
            outs.append(mixed.transpose(1, 2).flatten(0, 1))
        return self.unpad(torch.cat(outs))[None]


def pack(
    data: Rows,
    weights: Sequence[PerToken],
    indices: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Batch:
    """The samples at ``indices`` as one flat micro-batch, shared prompts stored once."""
    pieces, order, row_of = layout(data.samples, indices)
    count = sum(len(p.tokens) for p in pieces)
    segments, unpad = _segments(pieces, count, device)
    tokens = np.concatenate([p.tokens for p in pieces])
    positions = np.concatenate([np.arange(len(p.prefix), len(p.prefix) + len(p.tokens)) for p in pieces])

    def gather(values: Sequence[PerToken] | None) -> Tensor | None:
        if values is None:
            return None
        flat = [values[i][data.samples[i].loss_mask & _not_first(data.samples[i])] for i in order]
        return torch.as_tensor(np.concatenate(flat), dtype=dtype, device=device)

    predict, targets, sequence = [], [], []
    for at, (i, flat_rows) in enumerate(zip(order, row_of, strict=True)):
        sample = data.samples[i]
        where = np.flatnonzero(sample.loss_mask & _not_first(sample))
        predict.append(np.asarray(flat_rows, np.int64)[where - 1])
        targets.append(sample.tokens[where].astype(np.int64))
        sequence.append(np.full(len(where), at))
    weight = gather(weights)
    assert weight is not None

    def ints(parts: Sequence[npt.NDArray[Any]]) -> Tensor:
        return torch.as_tensor(np.concatenate(parts), dtype=torch.long, device=device)

    predicting = ints(predict)
    scored, score_at = torch.unique(predicting, return_inverse=True)
    return Batch(
        tokens=torch.as_tensor(tokens, dtype=torch.long, device=device)[None],
        positions=torch.as_tensor(positions, dtype=torch.long, device=device)[None],
        segments=segments,
        unpad=unpad,
        predict=predicting,
        scored=scored,
        score_at=score_at,
        targets=ints(targets),
        sequence=ints(sequence),
        weights=weight,
        last=ints([np.array([flat_rows[-1] for flat_rows in row_of])]),
        advantages=gather(data.advantages),
        old=gather(data.old),
        ref=gather(data.ref),
        values=gather(data.values),
        returns=gather(data.returns),
        value_counts=gather(data.value_counts),
        indices=tuple(order),
    )


def _not_first(sample: Sample) -> BoolArray:
    """Nothing predicts the first token of a sequence."""
    return np.arange(len(sample.tokens)) > 0


def _segments(pieces: Sequence[Piece], count: int, device: torch.device | str) -> tuple[list[Segment], Picks]:
    """Pieces of like shape as padded blocks, and the index that turns their concatenation flat again."""
    buckets: dict[tuple[int, int, bool], list[Piece]] = {}
    for piece in pieces:
        width = _bucket(len(piece.tokens))
        buckets.setdefault((width, _bucket(len(piece.prefix)), bool(piece.prefix)), []).append(piece)
    segments: list[Segment] = []
    unpad = np.zeros(count, np.int64)
    at = 0
    for (_, _, has_prefix), members in sorted(buckets.items(), key=lambda kv: kv[0]):
        lq = max(len(p.tokens) for p in members)
        lk = max(len(p.tokens) + len(p.prefix) for p in members)
        query = np.full((len(members), lq), -1, np.int64)
        keys = np.full((len(members), lk), -1, np.int64)
        for i, p in enumerate(members):
            n = len(p.tokens)
            own = np.arange(p.start, p.start + n)
            query[i, :n] = own
            keys[i, : len(p.prefix) + n] = np.concatenate([np.asarray(p.prefix, np.int64), own])
            unpad[own] = at + i * lq + np.arange(n)
        at += len(members) * lq
        picked, seen = (Picks(index, rows=count, device=device) for index in (query, keys))
        segments.append(Segment(picked, seen, not has_prefix))
    return segments, Picks(unpad, rows=at, device=device)


def _bucket(n: int) -> int:
    """Lengths within about an eighth of each other share a bucket: little padding, few kernels."""
    return n if n <= 8 else -(-n // (step := max(8, 1 << (n.bit_length() - 3)))) * step


def micro_batches(samples: Sequence[Sample], indices: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut ``indices`` into runs of at most ``max_tokens`` tokens (a longer sample goes alone). Groups stay
    together as far as they fit, so that their prompt is computed once; a shared prompt is counted once per
    group, so the budget bounds what is really computed."""
    batch: list[int] = []
    size = 0
    trunk, groups = shared_beginnings(samples, indices) if len(indices) else (0, [])
    for prompt, members in groups:
        opened = False
        for i in members:
            shared = prompt if opened else trunk if batch else 0
            cost = len(samples[i].tokens) - shared
            if batch and size + cost > max_tokens:
                yield batch
                batch, size, cost = [], 0, len(samples[i].tokens)
            batch.append(i)
            size += cost
            opened = True
    if batch:
        yield batch
