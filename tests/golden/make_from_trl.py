# SPDX-License-Identifier: Apache-2.0
"""Makes trl.json: what TRL's own code computes from given log-probs, masks and rewards.

    python tests/golden/make_from_trl.py

Run it where TRL is installed (made with 1.16); the suite reads the JSON only.

Each trainer's loss method is called as it stands, on a stand-in for the trainer that holds its settings, and with a
stand-in for the model that returns the log-probs. Advantages stand in the middle of a long method of the trainer;
those lines are taken from its source and run.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import trl
from torch import Tensor
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import nanstd

OUT = Path(__file__).with_name("trl.json")
SEED = torch.Generator().manual_seed(20)


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Numbers with four decimals, so that the JSON holds them exactly."""
    drawn = torch.randn(shape, generator=SEED, dtype=torch.float64) * scale + shift
    return (drawn * 1e4).round() / 1e4


def trainer(**settings: Any) -> MagicMock:
    """What a loss method asks of ``self``: one process, evaluation mode (nothing accumulated), and the settings."""
    same = lambda x, *_, **__: x  # noqa: E731
    made = MagicMock()
    made.accelerator = SimpleNamespace(
        gather=same, gather_for_metrics=same, reduce=same, num_processes=1, process_index=0, sync_gradients=True,
        device=torch.device("cpu"), autocast=contextlib.nullcontext, parallelism_config=None,
    )  # fmt: skip
    made.model.training = False
    made.aux_loss_enabled = False
    made._metrics = defaultdict(lambda: defaultdict(list))
    made._tp_size, made._total_train_tokens = 1, 0
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def plain(values: dict[str, Any]) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return one(value.detach().tolist())
        if isinstance(value, list):
            return [one(v) for v in value]
        return float(f"{value:.12g}") if isinstance(value, float) else value

    return {key: one(value) for key, value in values.items()}


# Policy gradients ------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_kl": {"beta": 0.1},
    "grpo_kl_corrected": {"beta": 0.1, "corrected": True},
    "grpo_clip_higher": {"epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "gspo": {"level": "sequence", "epsilon_low": 0.003, "epsilon_high": 0.004},
    "gspo_wide": {"level": "sequence"},
    "two_sided": {"delta": 1.4},
}


def policy_gradients() -> dict[str, Any]:
    rows, tokens = 4, 6
    completion = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]])
    tools = torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    old = normal(rows, tokens, scale=0.8, shift=-1.5).clamp(max=-0.01)
    now, ref = ((old + normal(rows, tokens, scale=s)).clamp(max=-0.01) for s in (0.25, 0.4))
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.1], dtype=torch.float64)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long), "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, tokens, dtype=torch.long), "completion_mask": completion,
        "tool_mask": tools, "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": (completion * tools).sum(),
    }  # fmt: skip
    cases = {}
    for name, s in SETTINGS.items():
        leaf = now.clone().requires_grad_()
        made = trainer(
            loss_type=s.get("loss_type", "grpo"), importance_sampling_level=s.get("level", "token"),
            epsilon_low=s.get("epsilon_low", 0.2), epsilon_high=s.get("epsilon_high", 0.2), beta=s.get("beta", 0.0),
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
            max_completion_length=8,
        )  # fmt: skip
        made.args.delta, made.args.use_bias_correction_kl = s.get("delta"), s.get("corrected", False)
        made._get_per_token_logps_and_entropies = MagicMock(return_value=(leaf, torch.zeros_like(leaf), None))
        loss = GRPOTrainer._compute_loss(made, made.model, dict(inputs))
        (gradient,) = torch.autograd.grad(loss, leaf)
        cases[name] = plain({**s, "loss": loss.detach().item(), "gradient": gradient})
    given = {"mask": completion * tools, "old": old, "now": now, "ref": ref, "advantages": advantages}
    return {"given": plain(given), "max_completion_length": 8, "cases": cases}


def lines(method: Any, first: str, last: str) -> str:
    """The lines of a method from ``first`` to the last line before ``last``, as a program."""
    source = inspect.getsource(method)
    start = source.index(first)
    start = source.rindex("\n", 0, start) + 1
    return textwrap.dedent(source[start : source.index(last, start)])


def advantages() -> dict[str, Any]:
    rewards = [[2.0, 0.0, 1.0, 1.0], [0.3, 0.9, 0.3, 0.3], [0.5, 0.5, 0.5, 0.5]]
    flat = torch.tensor(rewards, dtype=torch.float64).view(-1)
    held = {"torch": torch, "nanstd": nanstd, "num_generations": 4, "device": "cpu"}
    held |= {"unscorable_mask": torch.zeros(12, dtype=torch.bool)}
    grpo = lines(
        GRPOTrainer._generate_and_score_completions,
        'if self.multi_objective_aggregation == "sum_then_normalize"',
        "# Unscorable completions (every",
    )
    found = {}
    for scale in ("group", "batch", "none"):
        made = trainer(multi_objective_aggregation="sum_then_normalize", scale_rewards=scale)
        made.reward_weights = torch.ones(1, dtype=torch.float64)
        names = {**held, "self": made, "rewards_per_func": flat[:, None]}
        exec(grpo, names)
        found[f"grpo_{scale}"] = names["advantages"].view(3, 4)
    rloo = lines(
        RLOOTrainer._generate_and_score_completions, "grouped_rewards = rewards.view", "# Unscorable completions carry"
    )
    names = {**held, "self": trainer(normalize_advantages=False), "rewards": flat}
    exec(rloo, names)
    found["rloo"] = names["advantages"].view(3, 4)
    return {"rewards": rewards, **plain(found)}


# Preferences, supervised learning, rewards -----------------------------------------------------------------


class Outputs:
    """What a forward pass gives: these log-probs; whatever else is asked for, for metrics, is 0."""

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs, self.label_mask = log_probs, log_probs != 0

    def __getattr__(self, name: str) -> Tensor:
        return torch.zeros_like(self.log_probs, dtype=torch.bool if name.startswith("is_") else None)


def forward(per_token: Tensor) -> Any:
    """A model whose forward pass gives these log-probs."""
    return MagicMock(side_effect=lambda **_: Outputs(per_token))


def masks(lengths: list[int], width: int) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


def preferences() -> dict[str, Any]:
    lengths, pairs = [3, 5, 2, 4, 2, 5], 3
    mask = masks(lengths, 5)
    logps = (normal(6, 5, scale=0.6, shift=-1.2).clamp(max=-0.05)) * mask
    ref = (logps + normal(6, 5, scale=0.5) * mask).sum(1)
    whole = torch.cat([torch.zeros(6, 1, dtype=torch.long), mask], 1)  # a prompt of one token before each reply
    inputs = {
        "input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole,
        "ref_chosen_logps": ref[:pairs], "ref_rejected_logps": ref[pairs:],
    }  # fmt: skip
    cases: dict[str, Any] = {}
    for name, settings in (
        ("dpo", {"loss": "sigmoid", "beta": 0.1}),
        ("dpo_beta", {"loss": "sigmoid", "beta": 0.5}),
        ("ipo", {"loss": "ipo", "beta": 0.3}),
    ):
        leaf = logps.clone().requires_grad_()
        made = trainer(
            beta=settings["beta"], loss_types=[settings["loss"]], loss_weights=[1.0], label_smoothing=0.0,
            f_divergence_type="reverse_kl", ld_alpha=None, precompute_ref_logps=True, use_weighting=False,
        )  # fmt: skip
        loss = DPOTrainer._compute_loss(made, forward(leaf), dict(inputs), False)
        cases[name] = {"beta": settings["beta"], "loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0]}
    leaf = logps.clone().requires_grad_()
    ratios = leaf.sum(1) - ref  # DPO's labels are never smoothed there; CPO's are, and its loss is the same of ratios
    made = trainer(loss_type="sigmoid", simpo_gamma=0.0, beta=0.1, alpha=0.0, label_smoothing=0.2)
    loss = CPOTrainer.cpo_loss(made, ratios[:pairs], ratios[pairs:])[0].mean()
    gradient = torch.autograd.grad(loss, leaf)[0]
    cases["cdpo"] = {"beta": 0.1, "label_smoothing": 0.2, "loss": loss, "gradient": gradient}
    means = logps.sum(1) / mask.sum(1)
    leaf = means.clone().requires_grad_()
    made = trainer(loss_type="simpo", simpo_gamma=0.5, beta=2.0, alpha=0.0, label_smoothing=0.0)
    loss = CPOTrainer.cpo_loss(made, leaf[:pairs], leaf[pairs:])[0].mean()
    cases["simpo"] = {"beta": 2.0, "gamma": 0.5, "loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0]}
    leaf = means.clone().requires_grad_()
    loss = ORPOTrainer.odds_ratio_loss(trainer(beta=0.2), leaf[:pairs], leaf[pairs:])[0].mean()
    cases["orpo_odds"] = {"beta": 0.2, "loss": -loss, "gradient": -torch.autograd.grad(loss, leaf)[0]}
    given = {"logps": logps, "mask": mask, "ref": ref}
    return {"given": plain(given), "cases": {name: plain(case) for name, case in cases.items()}}


def kto() -> dict[str, Any]:
    mask = masks([3, 5, 2, 4], 5)
    logps = (normal(4, 5, scale=0.6, shift=-1.2).clamp(max=-0.05)) * mask
    ref = (logps + normal(4, 5, scale=0.5) * mask).sum(1)
    kl, ref_kl = normal(4, shift=-6.0), normal(4, shift=-6.5)
    label = torch.tensor([True, False, True, False])
    whole = torch.cat([torch.zeros(4, 1, dtype=torch.long), mask], 1)
    inputs = {
        "input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole,
        "label": label, "ref_logps": ref, "ref_KL_logps": ref_kl,
    }  # fmt: skip
    leaf = logps.clone().requires_grad_()
    made = trainer(
        beta=0.3, loss_type="kto", calculate_KL=True, precompute_ref_logps=True, desirable_weight=1.0,
        undesirable_weight=1.5,
    )  # fmt: skip
    made._compute_kl_logps = MagicMock(return_value=kl)
    loss = KTOTrainer._compute_loss(made, forward(leaf), inputs, False)
    gradient = torch.autograd.grad(loss, leaf)[0]
    given = {"logps": logps, "ref": ref, "kl": kl, "ref_kl": ref_kl, "label": label}
    return {
        "given": plain(given),
        "beta": 0.3,
        "undesirable_weight": 1.5,
        **plain({"loss": loss, "gradient": gradient}),
    }


def sft() -> dict[str, Any]:
    mask = masks([3, 5, 1], 5)
    logps = (normal(3, 5, scale=0.6, shift=-1.2).clamp(max=-0.05)) * mask
    leaf = logps.clone().requires_grad_()
    made = trainer(compute_loss_func=None, label_smoother=None)
    made.args.loss_type, made.args.average_tokens_across_devices = "nll", False
    inputs = {"input_ids": torch.zeros(3, 6), "attention_mask": torch.ones(3, 6), "labels": torch.zeros(3, 6)}
    loss = SFTTrainer.compute_loss(made, forward(leaf), inputs)
    return plain({"logps": logps, "mask": mask, "loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0]})


def reward_model() -> dict[str, Any]:
    rewards = normal(8)
    found: dict[str, Any] = {"rewards": rewards}
    for name, centre in (("plain", None), ("centred", 0.05)):
        leaf = rewards.clone().requires_grad_()
        made = trainer()
        made.args.center_rewards_coefficient = centre
        model = MagicMock(side_effect=lambda leaf=leaf, **_: SimpleNamespace(logits=leaf[:, None]))
        loss = RewardTrainer.compute_loss(made, model, {"attention_mask": torch.ones(8, 2)})
        found[name] = plain({"centre": centre or 0.0, "loss": loss, "gradient": torch.autograd.grad(loss, leaf)[0]})
    return plain(found)


def main() -> None:
    found = {
        "trl": trl.__version__,
        "advantages": advantages(),
        "policy_gradients": policy_gradients(),
        "preferences": preferences(),
        "kto": kto(),
        "sft": sft(),
        "reward_model": reward_model(),
    }
    parts = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    OUT.write_text(f"{{\n{parts}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
