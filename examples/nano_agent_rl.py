# SPDX-License-Identifier: Apache-2.0
"""The whole of agent RL in one flat file: a language model learns to use a calculator. For reading; torch only.

    env       CalculatorEnv                what the model acts on: a call gets an observation, an answer ends it
    rollout   Episode, rollout             the model says a piece, the environment says a piece, until it is over
    reward    reward                       the right answer, and a little for the form
    mask      Episode.mask                 who wrote which token; only the model's own tokens are trained on
    GRPO      grpo_advantages, grpo_loss   better than the group's mean = make likelier; clipped, kept near a reference
    loop      main                         warm-up on noisy demonstrations, then: roll out, reward, update

The library does the same, faster and for any model; a test compares its losses and gradients with these.

    python examples/nano_agent_rl.py --seed 0     (a few minutes on two cores; success goes from about 0.5 to 0.9)
"""

from __future__ import annotations

import argparse
import copy
import random
import re
from dataclasses import dataclass, field

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


# ---------------------------------------------------------------------------------------------------- env
OPS = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b}
SIGN = {"add": "+", "mul": "*"}


@dataclass(frozen=True)
class Problem:
    """``op2(op1(a, b), c)``, written with the bracket on the left or on the right."""

    op1: str
    a: int
    b: int
    op2: str
    c: int
    left: bool

    @property
    def text(self) -> str:
        bracket, sign = f"({self.a}{SIGN[self.op1]}{self.b})", SIGN[self.op2]
        return f"{bracket}{sign}{self.c}\n" if self.left else f"{self.c}{sign}{bracket}\n"

    @property
    def answer(self) -> int:
        return OPS[self.op2](OPS[self.op1](self.a, self.b), self.c)


def make_problem(rng: random.Random) -> Problem:
    op1, op2 = rng.choices(["add", "mul"], k=2)
    return Problem(op1, rng.randint(1, 20), rng.randint(1, 20), op2, rng.randint(1, 20), rng.random() < 0.5)


class CalculatorEnv:
    """``<call>op(a,b)</call>`` gets ``<obs>…</obs>``; ``<answer>\\boxed{N}</answer>`` ends; 4 calls at most."""

    CALL_RE = re.compile(r"<call>(\w+)\(([^)]*)\)</call>")
    ANSWER_RE = re.compile(r"<answer>\\boxed\{(-?\d+)\}</answer>")
    STOP_TAGS = ("</call>", "</answer>")

    def __init__(self, max_steps: int = 4) -> None:
        self.max_steps, self.steps, self.final = max_steps, 0, None

    def step(self, text: str) -> tuple[str, bool]:
        """What the model just said → (observation, is it over). A mistake is an observation, not an exception."""
        if found := self.ANSWER_RE.search(text):
            self.final = int(found.group(1))
            return "", True
        # A failed call counts as well: otherwise a model that babbles never comes to an end.
        self.steps += 1
        return f"<obs>{self._call(text)}</obs>", self.steps >= self.max_steps

    def _call(self, text: str) -> str:
        if not (found := self.CALL_RE.search(text)):
            return "error: no call or answer"
        op, arguments = found.groups()
        if op not in OPS:
            return f"error: unknown op {op}"
        if not re.fullmatch(r"-?\d+,-?\d+", arguments):
            return "error: invalid args"
        return str(OPS[op](*map(int, arguments.split(","))))


# ---------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, rotation: Tensor, cache: dict[str, Tensor] | None) -> Tensor:  # x (B, T, C)
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        pairs = torch.view_as_complex(parts[:2].unflatten(-1, (-1, 2)).contiguous())
        query, key = torch.view_as_real(pairs * rotation).flatten(-2)  # (B, H, T, D)
        value = parts[2]
        if cache is not None:
            key = cache["key"] = torch.cat([cache["key"], key], 2) if "key" in cache else key
            value = cache["value"] = torch.cat([cache["value"], value], 2) if "value" in cache else value
        # Causal: padding on the right is never seen by a real token, so no mask is needed anywhere.
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Tokens (B, T) → logits (B, T, V). About 0.34 M parameters, rotary positions, head tied to the embedding."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 6, max_length: int = 256) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(len(VOCABULARY), width), nn.RMSNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        frequency = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angle = torch.outer(torch.arange(max_length), frequency)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angle), angle))

    def forward(self, ids: Tensor, start: int = 0, caches: list[dict[str, Tensor]] | None = None) -> Tensor:
        """With ``caches`` (one per block) ids is the single column (B, 1) at position ``start``."""
        x, rotation = self.embed(ids), self.rotation[start : start + ids.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, rotation, cache)
        return self.norm(x) @ self.embed.weight.T


def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """(B, T) → (B, T - 1): entry t is log π(ids[t + 1] | ids[: t + 1])."""
    return F.log_softmax(model(ids)[:, :-1] / TEMPERATURE, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def pad(rows: list[list[float]], dtype: torch.dtype = torch.long) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)  # (B, T)


# ---------------------------------------------------------------------------------------------------- rollout
@dataclass
class Episode:
    """Token ids are the truth; text is only decoded to look at. Who wrote a token is noted when it is written."""

    problem: Problem
    env: CalculatorEnv = field(default_factory=CalculatorEnv)
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 = the model wrote it
    logprobs: list[float] = field(default_factory=list)  # as sampled; 0 where the model did not write
    turn: list[int] = field(default_factory=list)  # what the model has said since it was last answered
    done: bool = False

    def __post_init__(self) -> None:
        self.hear(self.problem.text)

    def hear(self, text: str) -> None:
        ids = encode(text)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def speak(self, token: int, logprob: float, max_turn: int) -> None:
        """One more token by the model; when it ends the model's turn, the environment answers."""
        for row, entry in ((self.ids, token), (self.mask, 1), (self.logprobs, logprob), (self.turn, token)):
            row.append(entry)
        # Stops are looked for in the decoded text: a tokenizer may cut a tag anywhere.
        said = decode(self.turn)
        if any(tag in said for tag in CalculatorEnv.STOP_TAGS) or len(self.turn) >= max_turn:
            observation, self.done = self.env.step(said)
            self.turn = []
            if not self.done:
                self.hear(observation)


@torch.no_grad()
def rollout(model: TinyGPT, problems: list[Problem], rng: torch.Generator, max_turn: int = 24) -> list[Episode]:
    """All episodes side by side, position by position: the next token is known (prompt, observation) or sampled."""
    episodes = [Episode(problem) for problem in problems]
    caches: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    position = 0
    while not all(e.done for e in episodes):
        column = torch.tensor([[e.ids[position] if position < len(e.ids) else 0] for e in episodes])
        logprobs = F.log_softmax(model(column, position, caches)[:, 0] / TEMPERATURE, dim=-1)  # (B, V)
        sampled = torch.multinomial(logprobs.exp(), 1, generator=rng)
        chosen = logprobs.gather(-1, sampled)
        position += 1
        for episode, token, logprob in zip(episodes, sampled[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            if not episode.done and len(episode.ids) == position:
                episode.speak(token, logprob, max_turn)
    return episodes


def reward(episode: Episode) -> float:
    """1 for the right answer, 0.1 for any answer in the right form: more would teach the form alone.

    Judged by what the environment received, never by searching the text: prompt and observations hold numbers too.
    """
    final = episode.env.final
    return 1.0 * (final == episode.problem.answer) + 0.1 * (final is not None)


# ---------------------------------------------------------------------------------------------------- GRPO
def grpo_advantages(rewards: Tensor) -> Tensor:
    """Rewards (groups, G) → advantages (groups, G): how far above its own group, in sample deviations.

    A group whose members all got the same teaches nothing: its advantages are 0.
    """
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def grpo_loss(
    logprobs_new: Tensor,  # (B, T) of the policy now, with gradient
    logprobs_old: Tensor,  # (B, T) recorded when the tokens were sampled
    logprobs_ref: Tensor,  # (B, T) of the frozen reference
    mask: Tensor,  # (B, T) 1 = the model wrote it
    advantages: Tensor,  # (B,)
    clip: float = 0.2,
    kl_coef: float = 0.02,
) -> Tensor:
    ratio = (logprobs_new - logprobs_old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    # The smaller of the two: beyond the clip there is nothing more to win, but always something to lose.
    surrogate = torch.minimum(advantages[:, None] * ratio, advantages[:, None] * clipped)
    # k3 (Schulman 2020), never negative: r - log r - 1 with r = π_ref / π.
    log_r = logprobs_ref - logprobs_new
    k3 = log_r.exp() - log_r - 1
    per_token = (kl_coef * k3 - surrogate) * mask
    # A mean over each sequence's own tokens, then over sequences: dividing by T would count observations too.
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def update(model: nn.Module, reference: nn.Module, optimizer: torch.optim.Optimizer, episodes: list[Episode],
           advantages: Tensor) -> float:  # fmt: skip
    """Two steps on the same episodes: in the second the ratio is no longer 1, and the clip begins to matter."""
    ids, mask = pad([e.ids for e in episodes]), pad([e.mask for e in episodes])[:, 1:]
    old = pad([e.logprobs for e in episodes], torch.float32)[:, 1:]
    with torch.no_grad():
        ref = token_logprobs(reference, ids)
    for _ in range(2):
        loss = grpo_loss(token_logprobs(model, ids), old, ref, mask, advantages)
        step(model, optimizer, loss)
    return loss.item()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------- warm-up
def demonstration(problem: Problem, rng: random.Random, noise: float) -> list[tuple[int, str]]:
    """Pieces (1 = by the model, text) of a worked problem; with probability ``noise`` one *choice* in it is wrong.

    From random weights no episode would ever earn anything, so all groups would be flat. Noisy digits would
    teach bad copying, which RL can hardly undo; noisy choices leave it something to choose between.
    """
    slip = rng.choice(["op1", "op2", "early", "operand"]) if rng.random() < noise else None
    other = {"add": "mul", "mul": "add"}
    op1 = other[problem.op1] if slip == "op1" else problem.op1
    op2 = other[problem.op2] if slip == "op2" else problem.op2
    inner = OPS[op1](problem.a, problem.b)
    outer = OPS[op2](inner, problem.c)
    pieces = [(0, problem.text), (1, f"<call>{op1}({problem.a},{problem.b})</call>"), (0, f"<obs>{inner}</obs>")]
    if slip != "early":
        pieces += [(1, f"<call>{op2}({inner},{problem.c})</call>"), (0, f"<obs>{outer}</obs>")]
    answer = {"early": inner, "operand": problem.c}.get(slip, outer)
    return [*pieces, (1, f"<answer>\\boxed{{{answer}}}</answer>")]


def warm_up(model: nn.Module, rng: random.Random, steps: int, noise: float = 0.4, batch: int = 32) -> None:
    """Supervised: cross-entropy on the tokens that the model is to write itself, in all turns."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    for i in range(steps):
        demos = [demonstration(make_problem(rng), rng, noise) for _ in range(batch)]
        ids = pad([[token for _, text in demo for token in encode(text)] for demo in demos])
        mask = pad([[ours for ours, text in demo for _ in encode(text)] for demo in demos])[:, 1:]
        loss = -(token_logprobs(model, ids) * mask).sum() / mask.sum()
        step(model, optimizer, loss)
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
    curve: list[float] = []
    for i in range(steps):
        # Fresh problems each time, so what is printed is success on problems never seen before.
        problems = [problem for problem in (make_problem(rng) for _ in range(groups)) for _ in range(group_size)]
        episodes = rollout(model, problems, dice)
        rewards = torch.tensor([reward(e) for e in episodes]).view(groups, group_size)
        loss = update(model, reference, optimizer, episodes, grpo_advantages(rewards).flatten())
        curve.append(sum(e.env.final == e.problem.answer for e in episodes) / len(episodes))
        print(f"step {i:3d}  right {curve[-1]:.2f} |{'#' * round(40 * curve[-1]):<40}|  loss {loss:+.3f}", flush=True)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="agent RL in one file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50, help="GRPO steps")
    parser.add_argument("--warm-up", type=int, default=400, help="steps of supervised warm-up")
    options = parser.parse_args()
    main(options.seed, options.steps, options.warm_up)
