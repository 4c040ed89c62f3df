# SPDX-License-Identifier: Apache-2.0
"""The whole of agent RL in one flat file: a language model learns to use a calculator. For reading; torch only.

    env       CalculatorEnv                what the model acts on: a call gets an observation, an answer ends it
    rollout   Episode, rollout             the model says a piece, the environment says a piece, until it is over
    mask      Episode.mask                 who wrote which token; only the model's own tokens are trained on
    reward    reward                       the right answer, and a little for the form
    GRPO      grpo_advantages, grpo_loss   better than the group's mean = make likelier; clipped, kept near a reference
    loop      main                         warm-up on noisy demonstrations, then: roll out, reward, update

The library does the same, faster and for any model; a test compares its losses and gradients with these. On two
cores ``python examples/nano_agent_rl.py`` takes a few minutes, and success goes from about 0.5 to 0.9.
"""

import argparse
import copy
import random
import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEMPERATURE = 1.0  # one number for sampling and training: log-probs are those of softmax(logits / T) in both

# ---------------------------------------------------------------------------------------------------- tokens
# Tags are one token each, all else is spelled out. Entry 0 pads.
TAGS = ["<call>", "</call>", "<obs>", "</obs>", "<answer>", "</answer>", "\\boxed{", "}", "add", "mul"]
VOCABULARY = ["", *TAGS, *"0123456789+*(),-: \nabcdefghijklmnopqrstuvwxyz"]
ID_OF = {token: i for i, token in enumerate(VOCABULARY)}
TOKEN_RE = re.compile("|".join(map(re.escape, TAGS)) + r"|[\s\S]")


def encode(text: str) -> list[int]:
    return [ID_OF[token] for token in TOKEN_RE.findall(text)]


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[i] for i in ids)


def pad(rows: list[list[float]], dtype: torch.dtype = torch.long) -> Tensor:  # (B, T)
    return nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


# ---------------------------------------------------------------------------------------------------- env
OPS = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b}
SIGN = {"add": "+", "mul": "*"}


class Problem(NamedTuple):
    text: str  # "(3+4)*5\n" or "5*(3+4)\n"
    ops: list[str]  # ["add", "mul"]
    numbers: list[int]  # [3, 4, 5]: mul(add(3, 4), 5)
    answer: int  # 35


def make_problem(rng: random.Random) -> Problem:
    op1, op2 = rng.choices(["add", "mul"], k=2)
    a, b, c = (rng.randint(1, 20) for _ in range(3))
    bracket, sign = f"({a}{SIGN[op1]}{b})", SIGN[op2]
    text = f"{bracket}{sign}{c}\n" if rng.random() < 0.5 else f"{c}{sign}{bracket}\n"
    return Problem(text, [op1, op2], [a, b, c], OPS[op2](OPS[op1](a, b), c))


class CalculatorEnv:
    """``<call>op(a,b)</call>`` gets ``<obs>…</obs>``; ``<answer>\\boxed{N}</answer>`` ends; 4 calls at most."""

    def __init__(self, max_steps: int = 4) -> None:
        self.max_steps, self.steps, self.final = max_steps, 0, None

    def step(self, text: str) -> tuple[str, bool]:
        """What the model just said → (observation, is it over). A mistake is an observation, not an exception."""
        if answer := re.search(r"<answer>\\boxed\{(-?\d+)\}</answer>", text):
            self.final = int(answer[1])
            return "", True
        call = re.search(r"<call>(add|mul)\((-?\d+),(-?\d+)\)</call>", text)
        result = OPS[call[1]](int(call[2]), int(call[3])) if call else "error: no call or answer"
        self.steps += 1  # a failed call counts as well: otherwise a model that babbles never comes to an end
        return f"<obs>{result}</obs>", self.steps >= self.max_steps


# ---------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: Tensor, cache: list[Tensor] | None) -> Tensor:  # x (B, T, C)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        pairs = torch.view_as_complex(qkv[:2].unflatten(-1, (-1, 2)).contiguous())
        query, key, value = *torch.view_as_real(pairs * rotation).flatten(-2), qkv[2]  # (B, H, T, D) each
        if cache is not None:  # the token's key and value join those of all tokens before it
            cache[:] = [torch.cat([*cache, torch.stack([key, value])], dim=3)]
            key, value = cache[0]
        # Causal: padding on the right is never seen by a real token, so no mask is needed anywhere.
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Tokens (B, T) → logits (B, T, V). About 0.34 M parameters, rotary positions, head tied to the embedding."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 6) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(len(VOCABULARY), width), nn.RMSNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.frequency = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))

    def forward(self, ids: Tensor, start: int = 0, caches: list[list[Tensor]] | None = None) -> Tensor:
        """With ``caches`` (one per block) ids is the single column (B, 1) at position ``start``."""
        angle = torch.outer(torch.arange(start, start + ids.shape[1]), self.frequency)
        x, rotation = self.embed(ids), torch.polar(torch.ones_like(angle), angle)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, rotation, cache)
        return self.norm(x) @ self.embed.weight.T


def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """(B, T) → (B, T - 1): entry t is log π(ids[t + 1] | ids[: t + 1])."""
    return F.log_softmax(model(ids)[:, :-1] / TEMPERATURE, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------- rollout
class Episode:
    """Token ids are the truth; text is only decoded to look at. Who wrote a token is noted when it is written."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.env, self.done = problem, CalculatorEnv(), False
        self.ids, self.mask, self.logprobs = [], [], []  # mask 1 = the model wrote it; elsewhere its log-prob is 0
        self.hear(problem.text)

    def write(self, ids: list[int], ours: int, logprobs: list[float]) -> None:
        self.ids += ids
        self.mask += [ours] * len(ids)
        self.logprobs += logprobs

    def hear(self, text: str) -> None:
        ids = encode(text)
        self.write(ids, 0, [0.0] * len(ids))
        self.turn = len(self.ids)  # from here on the model speaks


@torch.no_grad()
def rollout(model: TinyGPT, problems: list[Problem], rng: torch.Generator, max_turn: int = 24) -> list[Episode]:
    """All episodes side by side, position by position: the next token is known (prompt, observation) or sampled."""
    episodes, caches, position = [Episode(problem) for problem in problems], [[] for _ in model.blocks], 0
    while not all(e.done for e in episodes):
        column = torch.tensor([[e.ids[position] if position < len(e.ids) else 0] for e in episodes])
        logprobs = F.log_softmax(model(column, position, caches)[:, 0] / TEMPERATURE, dim=-1)  # (B, V)
        sampled = torch.multinomial(logprobs.exp(), 1, generator=rng)
        chosen = logprobs.gather(-1, sampled)
        position += 1
        for episode, token, logprob in zip(episodes, sampled[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            if episode.done or len(episode.ids) > position:
                continue
            episode.write([token], 1, [logprob])
            said = decode(episode.ids[episode.turn :])  # stops are text: a tokenizer may cut a tag anywhere
            if "</call>" in said or "</answer>" in said or len(episode.ids) - episode.turn == max_turn:
                observation, episode.done = episode.env.step(said)
                if not episode.done:
                    episode.hear(observation)
    return episodes


def reward(episode: Episode) -> float:
    """1 for the right answer, 0.1 for any answer in the right form: more would teach the form alone."""
    # What the environment received counts, not what searching the text finds: prompt and observations hold numbers too.
    return 1.0 * (episode.env.final == episode.problem.answer) + 0.1 * (episode.env.final is not None)


# ---------------------------------------------------------------------------------------------------- GRPO
def grpo_advantages(rewards: Tensor) -> Tensor:
    """(groups, G): how far each reward is above its own group's mean, in sample deviations; all alike → all 0."""
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def grpo_loss(
    new: Tensor, old: Tensor, ref: Tensor, mask: Tensor, advantages: Tensor, clip: float = 0.2, kl_coef: float = 0.02
) -> Tensor:
    """Log-probs (B, T) by the policy now, when sampled, and by the frozen reference; mask (B, T); advantages (B,)."""
    ratio, advantages = (new - old).exp(), advantages[:, None]
    # The smaller of the two: beyond the clip there is nothing more to win, but always something to lose.
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
    # k3 (Schulman 2020), never negative: r - log r - 1 with r = π_ref / π.
    k3 = (ref - new).exp() - (ref - new) - 1
    per_token = (kl_coef * k3 - surrogate) * mask
    # A mean over each sequence's own tokens, then over sequences: dividing by T would count observations too.
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


# ---------------------------------------------------------------------------------------------------- warm-up
def demonstration(problem: Problem, rng: random.Random, noise: float) -> list[tuple[int, str]]:
    """Pieces (1 = by the model, text) of a worked problem; with probability ``noise`` one *choice* in it is wrong.

    From random weights no episode would ever earn anything, so all groups would be flat. Noisy digits would
    teach bad copying, which RL can hardly undo; noisy choices leave it something to choose between.
    """
    slip = rng.choice(["op1", "op2", "early", "operand"]) if rng.random() < noise else None
    (op1, op2), (a, b, c), other = problem.ops, problem.numbers, {"add": "mul", "mul": "add"}
    op1, op2 = other[op1] if slip == "op1" else op1, other[op2] if slip == "op2" else op2
    inner = OPS[op1](a, b)
    outer = OPS[op2](inner, c)
    answer = {"early": inner, "operand": c}.get(slip, outer)
    pieces = [(0, problem.text), (1, f"<call>{op1}({a},{b})</call>"), (0, f"<obs>{inner}</obs>")]
    if slip != "early":
        pieces += [(1, f"<call>{op2}({inner},{c})</call>"), (0, f"<obs>{outer}</obs>")]
    return [*pieces, (1, f"<answer>\\boxed{{{answer}}}</answer>")]


def warm_up(model: TinyGPT, rng: random.Random, steps: int, noise: float = 0.4, batch: int = 32) -> None:
    """Supervised: cross-entropy on the tokens that the model is to write itself, in all turns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for i in range(steps):
        demos = [demonstration(make_problem(rng), rng, noise) for _ in range(batch)]
        ids = pad([[token for _, text in demo for token in encode(text)] for demo in demos])
        mask = pad([[ours for ours, text in demo for _ in encode(text)] for demo in demos])[:, 1:]
        loss = -(token_logprobs(model, ids) * mask).sum() / mask.sum()
        descend(model, optimizer, loss)
        schedule.step()
        if i % 50 == 0 or i == steps - 1:
            print(f"warm-up {i:4d}  loss {loss.item():.3f}", flush=True)


# ---------------------------------------------------------------------------------------------------- loop
def main(seed: int, steps: int, warm_up_steps: int, groups: int = 12, group_size: int = 8) -> list[float]:
    """Train from random weights and print the curve; returns the share of right answers before each update."""
    torch.manual_seed(seed)
    rng, dice, model = random.Random(seed), torch.Generator().manual_seed(seed), TinyGPT()
    warm_up(model, rng, warm_up_steps)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    curve = []
    for i in range(steps):
        # Fresh problems each time, so what is printed is success on problems never seen before.
        problems = [problem for problem in (make_problem(rng) for _ in range(groups)) for _ in range(group_size)]
        episodes = rollout(model, problems, dice)
        advantages = grpo_advantages(torch.tensor([reward(e) for e in episodes]).view(groups, group_size)).flatten()
        ids, mask = pad([e.ids for e in episodes]), pad([e.mask for e in episodes])[:, 1:]
        old, ref = pad([e.logprobs for e in episodes], torch.float32)[:, 1:], token_logprobs(reference, ids)
        for _ in range(2):  # in the second step on the same episodes the ratio is no longer 1: now the clip matters
            loss = grpo_loss(token_logprobs(model, ids), old, ref, mask, advantages)
            descend(model, optimizer, loss)
        curve.append(sum(e.env.final == e.problem.answer for e in episodes) / len(episodes))
        print(f"step {i:3d}  right {curve[-1]:.2f} |{'#' * round(40 * curve[-1]):<40}|  loss {loss:+.3f}", flush=True)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="agent RL in one file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50, help="GRPO steps")
    parser.add_argument("--warm-up-steps", type=int, default=400, help="steps of supervised warm-up before")
    main(**vars(parser.parse_args()))
