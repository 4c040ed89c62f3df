# SPDX-License-Identifier: Apache-2.0
"""Rows and packing: what is computed together equals what is computed alone, and every token keeps its own numbers."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from small_models import eight_samples, make_model, plain_logprobs, sample
from torch import Tensor

from palestra.learn.advantage import AdvantageConfig, group_mean
from palestra.learn.batch import Batch, Reduction, Rows, Sample, micro_batches, pack, rows, token_weights
from palestra.learn.policy import Policy
from palestra.learn.update import Sums, UpdateConfig, policy_loss
from palestra.types import Author, Episode, Group, RewardTerm, Span, StopReason, Task, Trajectory, Turn

FAMILIES = ["llama", "mistral", "gemma2", "gpt2", "qwen3"]


def packed(
    samples: list[Sample], indices: Any = None, dtype: torch.dtype = torch.float64, weights: Any = None
) -> Batch:
    weights = weights if weights is not None else [np.zeros(len(s.tokens)) for s in samples]
    return pack(Rows(tuple(samples)), weights, range(len(samples)) if indices is None else indices, dtype=dtype)


def per_sample(batch: Batch, values: Tensor) -> dict[int, Tensor]:
    """Sample index → its values in token order."""
    return {i: values[batch.sequence == at] for at, i in enumerate(batch.indices)}


def trained(s: Sample) -> Any:
    return np.flatnonzero(s.loss_mask & (np.arange(len(s.tokens)) > 0))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


# Log-probs and gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_equal_the_models_own_forward_pass_of_each_sequence(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = make_model(family, dtype)
    samples = eight_samples()
    with torch.no_grad():
        want = [plain_logprobs(model, s.tokens) for s in samples]
        batch = packed(samples, dtype=dtype)
        got = per_sample(batch, Policy(model).logprobs(batch)[0])
    assert len(batch.tokens[0]) == sum(len(s.tokens) for s in samples) - 2 * 9 - 5 - 2, "shared prompts are stored once"
    for i, s in enumerate(samples):
        scale = float(want[i].abs().max())
        torch.testing.assert_close(got[i], want[i][trained(s)], rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_those_of_the_models_own_forward_pass(family: str) -> None:
    plain = make_model(family, torch.float64)
    model = copy.deepcopy(plain)
    samples, rng = eight_samples(), np.random.default_rng(1)
    weights = [np.where(s.loss_mask, rng.normal(size=len(s.tokens)), 0.0) for s in samples]
    for s, w in zip(samples, weights, strict=True):
        (torch.from_numpy(w)[1:] * plain_logprobs(plain, s.tokens)[1:]).sum().backward()
    batch = packed(samples, weights=weights)
    (batch.weights * Policy(model).logprobs(batch)[0]).sum().backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None
        if float(want.grad.norm()) > 1e-12:  # GPT-2's key biases have no gradient but rounding
            assert relative(got.grad, want.grad) < 1e-9, name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_of_one_sample_reaches_another(family: str) -> None:
    policy, samples = Policy(make_model(family)), eight_samples()
    before = packed(samples, dtype=torch.float32)
    changed = samples[1].tokens.copy()
    changed[9:] = 60 - changed[9:] // 2  # all that A1 wrote and heard; the shared prompt stays
    samples[1] = replace(samples[1], tokens=changed)
    after = packed(samples, dtype=torch.float32)
    with torch.no_grad():
        one, two = (per_sample(b, policy.logprobs(b)[0]) for b in (before, after))
    for i in one:
        assert torch.equal(one[i], two[i]) == (i != 1), f"sample {i}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_beginning_that_all_groups_have_in_common_is_stored_once_and_leaks_nothing(family: str) -> None:
    model, long = make_model(family, torch.float64), [3 + i % 50 for i in range(40)]
    samples = [
        replace(
            s,
            tokens=np.array([*long, *s.tokens], np.int32),
            loss_mask=np.array([False] * 40 + [*s.loss_mask]),
            logprobs=np.zeros(40 + len(s.tokens), np.float32),
            versions=np.zeros(40 + len(s.tokens), np.int32),
        )
        for s in eight_samples()
    ]
    batch = packed(samples)
    assert len(batch.tokens[0]) < sum(len(s.tokens) for s in samples) - 6 * 40
    with torch.no_grad():
        want = [plain_logprobs(model, s.tokens) for s in samples]
        got = per_sample(batch, Policy(model).logprobs(batch)[0])
    for i, s in enumerate(samples):
        torch.testing.assert_close(got[i], want[i][trained(s)], rtol=1e-9, atol=1e-9)
    for part in micro_batches(samples, range(8), 150):
        assert len(part) == 1 or len(packed(samples, part).tokens[0]) <= 150


def test_groups_with_a_short_common_beginning_share_nothing() -> None:
    first = sample([5, 6, 7, 8], [0, 0, 1, 1], group="A", episode="A0")
    second = replace(first, group="B", episode="B0")
    assert packed([first, second]).tokens.tolist() == [[5, 6, 7, 8, 5, 6, 7, 8]]
    assert packed([first, replace(second, group="A")]).tokens.tolist() == [[5, 6, 7, 8]]


def test_what_members_wrote_alike_is_shared_too_and_each_of_them_keeps_its_own_targets() -> None:
    one = sample([5, 6, 7, 8], [0, 0, 0, 1], episode="a")
    two = sample([5, 6, 7, 9], [0, 1, 1, 1], episode="b")
    batch = packed([one, two])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 3]]
    assert batch.targets.tolist() == [8, 6, 7, 9]
    assert batch.predict.tolist() == [2, 0, 1, 2], "each target is predicted by the row before it in its own sequence"
    assert batch.scored.tolist() == [0, 1, 2] and batch.score_at.tolist() == [2, 0, 1, 2], "no row is scored twice"


def forked(rng: np.random.Generator, dialogues: int = 9) -> list[Sample]:
    """A group that parts in many places: at the first sampled token, late, never, or where one member simply ends."""
    base = rng.integers(3, 60, 90)
    found = []
    for i in range(dialogues):
        at, length = int(rng.choice([8, 30, 31, 60, 90])), int(rng.integers(61, 91))
        tokens = np.concatenate([base[:at], rng.integers(3, 60, 90 - at)])[: length if at < 90 else 80 + i % 2]
        mask = (np.arange(len(tokens)) >= 8) & (np.arange(len(tokens)) % 7 > 1)
        found.append(sample(tokens.tolist(), mask.tolist(), episode=f"e{i}"))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_stored_as_a_tree_gives_the_log_probs_and_gradients_of_its_members_alone(family: str) -> None:
    plain = make_model(family, torch.float64)
    model = copy.deepcopy(plain)
    rng = np.random.default_rng(5)
    samples = forked(rng)
    weights = [np.where(s.loss_mask, rng.normal(size=len(s.tokens)), 0.0) for s in samples]
    batch = packed(samples, weights=weights)
    assert len(batch.tokens[0]) < 0.75 * sum(len(s.tokens) for s in samples)
    logprobs = Policy(model).logprobs(batch)[0]
    for i, s in enumerate(samples):
        want = plain_logprobs(plain, s.tokens)
        torch.testing.assert_close(per_sample(batch, logprobs)[i], want[trained(s)], rtol=1e-9, atol=1e-9)
        (torch.from_numpy(weights[i])[1:] * want[1:]).sum().backward()
    (batch.weights * logprobs).sum().backward()
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and got.grad is not None
        if float(expected.grad.norm()) > 1e-12:
            assert relative(got.grad, expected.grad) < 1e-9, name


def test_the_gradient_of_a_long_shared_prompt_is_the_same_bits_every_time() -> None:
    """Large enough that torch would add up the members' gradients with several threads, as they come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    rng, sizes = np.random.default_rng(0), {"hidden_size": 192, "intermediate_size": 192, "head_dim": 64}
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, vocab_size=48, **sizes)
    )
    beginning = rng.integers(3, 48, 300)
    samples = [sample([*beginning, *rng.integers(3, 48, 60)], [0] * 300 + [1] * 60) for _ in range(8)]
    batch = packed(samples, dtype=torch.float32, weights=[np.where(s.loss_mask, 1.0, 0.0) for s in samples])
    assert len(batch.tokens[0]) < 8 * 360 - 7 * 300 + 60, "stored once"

    def gradient() -> bytes:
        model.zero_grad()
        (Policy(model).logprobs(batch)[0] * batch.weights).sum().backward()
        return b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)

    seen = {gradient() for _ in range(8)}
    torch.set_num_threads(threads)
    assert len(seen) == 1


def test_equal_members_are_computed_once() -> None:
    one = sample([5, 6, 7, 8], [0, 0, 1, 1], episode="a")
    batch = packed([one, replace(one, episode="b")])
    assert (batch.tokens.tolist(), batch.targets.tolist()) == ([[5, 6, 7, 8]], [7, 8, 7, 8])


# Reductions and cuts ---------------------------------------------------------------------------------------

REDUCTIONS: list[Reduction] = ["sequence_mean", "token_mean", "constant"]


def by_definition(model: Any, data: Rows, reduction: str) -> Tensor:
    """The step's clipped loss with k3, written out over sequences."""
    assert data.advantages is not None and data.old is not None and data.ref is not None
    sums = []
    for i, s in enumerate(data.samples):
        new, m = plain_logprobs(model, s.tokens), torch.from_numpy(s.loss_mask)
        a, old, ref = (torch.from_numpy(np.asarray(x[i], np.float64)) for x in (data.advantages, data.old, data.ref))
        ratio, gap = (new - old).exp(), ref - new
        surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        sums.append(((surrogate + 0.05 * (gap.exp() - gap - 1)) * m).sum())
    lengths = [int(s.loss_mask.sum()) for s in data.samples]
    if reduction == "sequence_mean":
        return sum(x / n for x, n in zip(sums, lengths, strict=True)) / len(sums)  # type: ignore[return-value]
    return sum(sums) / (sum(lengths) if reduction == "token_mean" else 100.0)  # type: ignore[return-value]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ls_003_the_gradient_does_not_depend_on_how_a_step_is_cut(reduction: Reduction) -> None:
    model, samples, rng = make_model("llama", torch.float64), eight_samples(), np.random.default_rng(2)
    with torch.no_grad():
        base = [plain_logprobs(model, s.tokens).numpy() for s in samples]
    data = Rows(
        tuple(samples),
        advantages=tuple(np.where(s.loss_mask, rng.normal(), 0.0) for s in samples),
        old=tuple(b + rng.normal(0, 0.2, len(b)) for b in base),
        ref=tuple(b + rng.normal(0, 0.2, len(b)) for b in base),
    )
    loss = by_definition(model, data, reduction)
    loss.backward()  # type: ignore[no-untyped-call]
    names = [n for n, _ in model.named_parameters()]
    want = [p.grad for p in model.parameters()]
    weights = token_weights(samples, reduction, divisor=100.0)
    policy, config = Policy(model), UpdateConfig(kl_coef=0.05)
    for cuts in ([8], [4, 4], [2] * 4, [1] * 8, [3, 1, 4]):
        model.zero_grad(set_to_none=True)
        total = 0.0
        edges = [0, *itertools.accumulate(cuts)]
        for a, b in itertools.pairwise(edges):
            batch = pack(data, weights, range(a, b), dtype=torch.float64)
            part = policy_loss(policy, batch, config, 1.0, Sums({}), first=False)
            part.backward()  # type: ignore[no-untyped-call]
            total += float(part.detach())
        assert total == pytest.approx(float(loss.detach()), rel=1e-9)
        for name, p, g in zip(names, model.parameters(), want, strict=True):
            assert relative(p.grad, g) < 1e-9, (cuts, name)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ls_003_in_float32_the_cuts_differ_by_rounding_alone(reduction: Reduction) -> None:
    model, samples, rng = make_model("llama"), eight_samples(), np.random.default_rng(2)
    with torch.no_grad():
        base = [plain_logprobs(model, s.tokens).numpy() for s in samples]
    data = Rows(
        tuple(samples),
        advantages=tuple(np.where(s.loss_mask, rng.normal(), 0.0) for s in samples),
        old=tuple(b + rng.normal(0, 0.2, len(b)) for b in base),
    )
    weights = token_weights(samples, reduction, divisor=100.0)
    policy, config = Policy(model), UpdateConfig(kl_coef=0.0)
    found = []
    for size in (8, 4, 2, 1):
        model.zero_grad(set_to_none=True)
        for start in range(0, 8, size):
            batch = pack(data, weights, range(start, start + size))
            policy_loss(policy, batch, config, 1.0, Sums({}), first=False).backward()  # type: ignore[no-untyped-call]
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        assert max(relative(g, w) for g, w in zip(other, found[0], strict=True)) < 1e-5


def test_ls_022_an_episode_cut_into_two_rows_counts_once() -> None:
    # Episode a: rows of 3 and 1 tokens, together 7 nats over 4 tokens; b: 2 nats over 2. (7/4 + 2/2) / 2 = 1.375.
    samples = [
        sample([4] * 4, [0, 1, 1, 1], episode="a"),
        sample([4] * 2, [0, 1], episode="a"),
        sample([4] * 3, [0, 1, 1], episode="b"),
    ]
    losses = [np.array([0, 2.0, 2.0, 2.0]), np.array([0, 1.0]), np.array([0, 1.0, 1.0])]
    weights = token_weights(samples, "sequence_mean")
    assert sum(float((w * x).sum()) for w, x in zip(weights, losses, strict=True)) == 1.375


def test_token_weights_by_hand() -> None:
    samples = [sample([4] * 4, [0, 1, 1, 1], episode="a"), sample([4] * 3, [0, 1, 0], episode="b")]
    assert [w.tolist() for w in token_weights(samples, "token_mean")] == [[0, 0.25, 0.25, 0.25], [0, 0.25, 0]]
    assert [w.tolist() for w in token_weights(samples, "constant", divisor=8)] == [[0] + [0.125] * 3, [0, 0.125, 0]]
    sequence = token_weights(samples, "sequence_mean")
    np.testing.assert_allclose(np.concatenate(sequence), [0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0], rtol=1e-15)
    with pytest.raises(ValueError, match="divisor"):
        token_weights(samples, "constant")


def test_without_a_trained_token_every_weight_is_zero() -> None:
    for reduction in REDUCTIONS:
        weights = token_weights([sample([4, 5], [0, 0])], reduction, divisor=1.0)
        assert [w.tolist() for w in weights] == [[0.0, 0.0]]


def test_mk_017_ls_024_numbers_on_masked_tokens_change_nothing() -> None:
    model, samples = make_model("llama", torch.float64), eight_samples()[:2]
    policy, config = Policy(model), UpdateConfig()
    weights = token_weights(samples, "sequence_mean")

    def gradient(junk: float) -> list[Tensor]:
        def filled(value: float) -> Any:
            return tuple(np.where(s.loss_mask, value, junk) for s in samples)

        data = Rows(tuple(samples), advantages=filled(0.5), old=filled(-4.0), ref=filled(-4.1))
        model.zero_grad(set_to_none=True)
        batch = pack(data, weights, [0, 1], dtype=torch.float64)
        assert len(batch.targets) == 6 + 12
        policy_loss(policy, batch, config, 1.0, Sums({}), first=True).backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradient(-1.0), gradient(float("nan")))), "masked numbers are not even looked at"


def test_a_step_is_cut_into_micro_batches_within_the_token_budget() -> None:
    samples = eight_samples()  # lengths 15 29 10 | 17 9 | 12 7 | 3; shared 9 | 5 | 2
    cut = list(micro_batches(samples, range(8), 40))
    assert [i for part in cut for i in part] == list(range(8)), "none lost, none twice"
    # A: 15 + 20 = 35, and A2 adds 1 (prompt shared): 36. B0 would make 53. B: 17 + 4, C0 12 → 33, C1 adds 5 → 38.
    assert cut == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert [len(packed(samples, part).tokens[0]) for part in cut] == [36, 38, 3]
    assert list(micro_batches(samples, [1, 0], 5)) == [[1], [0]], "what is longer than the budget goes alone"
    for budget in range(1, 110, 7):
        for part in micro_batches(samples, range(8), budget):
            assert len(part) == 1 or len(packed(samples, part).tokens[0]) <= budget


# Alignment -------------------------------------------------------------------------------------------------


def test_mk_006_nm_009_the_first_answer_token_is_predicted_by_the_last_prompt_token() -> None:
    batch = packed([sample([11, 12, 13, 14, 15], [0, 0, 0, 1, 1])])
    assert (batch.predict.tolist(), batch.targets.tolist()) == ([2, 3], [14, 15])
    values = [np.array([0.0, 0.1, 0.2])]
    data = Rows((sample([7, 8, 9], [0, 1, 1]),), advantages=tuple(values), old=tuple(values), ref=tuple(values))
    batch = pack(data, values, [0], dtype=torch.float64)
    for field in (batch.weights, batch.advantages, batch.old, batch.ref):
        assert field is not None and field.tolist() == [0.1, 0.2], "index i belongs to token i, in every field"
    assert batch.targets.tolist() == [8, 9]


def test_the_very_first_token_is_never_trained_on_because_nothing_predicts_it() -> None:
    batch = packed([sample([7, 8, 9], [1, 1, 0])])
    assert (batch.predict.tolist(), batch.targets.tolist()) == ([0], [8])


def test_mk_004_mk_005_a_token_whose_id_pads_elsewhere_is_a_token_like_any_other() -> None:
    model = make_model("llama", torch.float64)
    model.config.pad_token_id = 2
    first = sample([2, 2, 7, 2, 8, 2, 2], [0, 0, 0, 0, 1, 1, 1], episode="a")
    other = sample([2, 2, 7, 2, 8, 9, 10, 11, 12], [0] * 5 + [1] * 4, episode="b")
    with torch.no_grad():
        want = [plain_logprobs(model, s.tokens) for s in (first, other)]
        batch = packed([first, other])
        got = per_sample(batch, Policy(model).logprobs(batch)[0])
    assert batch.targets.tolist()[:3] == [8, 2, 2], "both end tokens are trained on"
    torch.testing.assert_close(got[0], want[0][4:], rtol=0, atol=1e-9)
    torch.testing.assert_close(got[1], want[1][5:], rtol=0, atol=1e-9)


def test_tk_010_positions_start_at_zero_in_every_sequence() -> None:
    batch = packed([sample([5, 6, 7], [0, 0, 1], group="x"), sample([5, 6, 7, 8], [0, 1, 1, 1], group="y")])
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]


# From groups to rows ---------------------------------------------------------------------------------------


def turn(ask: list[int], say: list[int], finish: str = "eos") -> Turn:
    spans = [Span(np.array(ask), Author.ENV, "user")] if ask else []
    if say:
        spans.append(Span(np.array(say), Author.MODEL, "assistant", "", logprobs=-np.ones(len(say)), version=7))
    return Turn(tuple(spans), (), {"role": "assistant", "content": ""}, finish)


def episode(*trajectories: list[Turn], reward: float | None = 1.0, member: int = 0, **more: Any) -> Episode:
    paid = {"accuracy": RewardTerm(reward)}
    views = tuple(Trajectory(tuple(t), StopReason.ENV_TERMINATED, rewards=paid) for t in trajectories)
    return Episode(Task("t", "?"), views, member=member, **more)


def group(*episodes: Episode, draw: int = 0) -> Group:
    return Group(Task("t", "?"), draw, tuple(replace(e, member=i) for i, e in enumerate(episodes)))


def test_mk_008_an_end_token_inside_closes_a_turn_not_the_row() -> None:
    one = episode([turn([], [4, 2]), turn([8], [5, 2])])
    made = rows([group(one, one)]).samples[0]
    assert made.tokens.tolist() == [4, 2, 8, 5, 2]
    assert made.loss_mask.tolist() == [True, True, False, True, True]
    assert made.turn_ends == (1, 4)


def test_what_learning_cannot_use_is_left_out_and_counted() -> None:
    good = episode([turn([3], [4, 2])])
    failed = episode([turn([3], [4, 2])], error="env.step: TimeoutError: gone")
    unscored = episode([turn([3], [4, 2])], reward=None)
    silent = episode([turn([3], [])])
    made = rows([group(good, failed, unscored, silent, good), group(good, failed, draw=1)])
    assert [s.episode for s in made.samples] == ["0:t/0", "0:t/4"]
    assert made.counts == {"errors": 2, "unscored": 1, "empty": 1, "groups_dropped": 1, "stale": 0}


def test_rw_014_an_answer_without_tokens_is_excluded_and_does_not_shift_its_sibling() -> None:
    silent, spoke = episode([turn([3, 3, 3], [])], reward=4.0), episode([turn([], [5, 6]), turn([3], [])], reward=0.0)
    made = rows([group(silent, spoke)], min_group=1)
    assert (made.counts["empty"], [s.episode for s in made.samples]) == (1, ["0:t/1"])
    assert [a.tolist() for a in group_mean(made, AdvantageConfig())] == [[0.0, 0.0, 0.0]]
    assert rows([group(silent, spoke)]).counts["groups_dropped"] == 1, "alone it has nobody to be compared with"


def test_et_022_a_stale_sibling_serves_the_baseline_and_is_not_trained_on() -> None:
    fresh = episode([turn([3], [4])], reward=1.0, info={"stale": False})
    stale = episode([turn([3], [5])], reward=0.0, info={"stale": True})
    made = rows([group(fresh, stale)])
    assert [a[1] for a in group_mean(made, AdvantageConfig())] == [0.5, -0.5]
    assert [s.trained for s in made.samples] == [True, False]
    assert [w.tolist() for w in token_weights(made.samples, "sequence_mean")] == [[0, 1], [0, 0]]
    assert made.counts["stale"] == 1


def test_mk_014_every_view_of_an_episode_gets_its_advantage_on_its_own_tokens() -> None:
    two_views = episode([turn([3, 3], [4, 5])], [turn([3], [4, 5, 6])], reward=1.4)
    other = episode([turn([3], [4])], reward=0.0)
    made = rows([group(two_views, other)])
    advantages = [a.tolist() for a in group_mean(made, AdvantageConfig())]
    assert advantages[:2] == [[0, 0, 0.7, 0.7], [0, 0.7, 0.7, 0.7]]


def test_the_same_task_drawn_twice_makes_two_groups() -> None:
    one = episode([turn([3], [4])])
    assert {s.group for s in rows([group(one, one, draw=0), group(one, one, draw=1)]).samples} == {"0:t", "1:t"}
