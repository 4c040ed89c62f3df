# SPDX-License-Identifier: Apache-2.0
"""Models on kernels: the log-probs and gradients of the plain model, in training and in the engine."""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from small_models import VOCABULARY
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from palestra.engine.base import SamplingParams
from palestra.engine.flat import flatten
from palestra.engine.local import EngineConfig, LocalEngine
from palestra.errors import EngineError
from palestra.learn.scores import scores
from palestra.model import kernels
from palestra.model.fused import FAMILIES, fuse, recomputed

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no kernels here")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip
MADE: dict[str, Any] = {
    "LlamaForCausalLM": hf.LlamaConfig(**SIZES),
    "MistralForCausalLM": hf.MistralConfig(**SIZES, sliding_window=5),
    "Qwen2ForCausalLM": hf.Qwen2Config(**SIZES),
    "Qwen3ForCausalLM": hf.Qwen3Config(**SIZES),
}


def make(family: str, **changes: Any) -> Any:
    config = copy.deepcopy(MADE[family])
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)  # norms and biases that show
    assert type(model).__name__ == family
    return model


def gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    at = torch.arange(len(tokens) - 1)
    logp, entropy = scores(logits, at, tokens[1:], 0.7, entropy=True)
    assert entropy is not None and not entropy.requires_grad
    (logp * torch.linspace(-1, 1, len(at))).sum().backward()  # type: ignore[no-untyped-call]
    return {"logp": logp.detach(), "entropy": entropy} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", sorted(MADE))
def test_a_fused_model_has_the_gradients_of_the_plain_one_in_double_precision(family: str) -> None:
    tokens = torch.arange(3, 40) % VOCABULARY
    model = make(family)
    want = gradients(copy.deepcopy(model).double(), tokens)
    fuse(model)
    fuse(model)  # harmless to repeat
    got = gradients(model, tokens)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert norms and all("forward" in vars(m) for m in norms)
    for name, value in want.items():
        assert (got[name] - value).abs().max() < 1e-5 * value.abs().max().clamp(min=1), name


def test_what_is_worked_out_again_is_not_kept_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make("Qwen3ForCausalLM"), torch.arange(5, 30)
    fuse(model)
    want, outputs = gradients(model, tokens), list[weakref.ref[Tensor]]()

    def watched(name: str) -> None:
        plain = getattr(kernels, name)

        def kernel(*given: Any, **options: Any) -> Tensor:
            out: Tensor = plain(*given, **options)
            outputs.append(weakref.ref(out))
            return out

        monkeypatch.setattr(kernels, name, kernel)

    watched("rms_norm"), watched("silu_times")
    model.zero_grad()
    with recomputed():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    forward = len(outputs)
    assert forward == 2 * (4 + 1) + 1 and not any(ref() is not None for ref in outputs), "nobody keeps one"
    at = torch.arange(len(tokens) - 1)
    logp, _ = scores(logits, at, tokens[1:], 0.7, entropy=False)
    (logp * torch.linspace(-1, 1, len(at))).sum().backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(p.grad, want[name]) for name, p in model.named_parameters())
    used = 2 * (2 + 1) + 1  # the norms before products and the gates; those of heads go on to be turned
    assert len(outputs) - forward == used, "each once, however many products read it"


def test_memory_that_was_given_away_is_not_taken_for_what_lay_there() -> None:
    """A norm's numbers are forgotten with the tensor: another one in the same place is kept as it is."""
    model = make("LlamaForCausalLM")
    fuse(model)
    norm, x = model.model.norm, torch.randn(6, 32)
    with recomputed():
        place = norm(x.clone().requires_grad_()).data_ptr()
        for _ in range(50):
            y = (x * 2).requires_grad_()
            square = y * y  # keeps y
            if y.data_ptr() == place:
                break
        square.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(y.grad, 2 * y.detach())


def test_a_copy_of_a_fused_model_runs_on_its_own_parameters() -> None:
    model = make("LlamaForCausalLM")
    fuse(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        tokens = torch.tensor([[5, 6, 7]])
        before = twin(input_ids=tokens, use_cache=False).logits
        for p in model.parameters():
            p.zero_()
        assert torch.equal(twin(input_ids=tokens, use_cache=False).logits, before)


def test_what_kernels_do_not_take_goes_the_modules_own_way() -> None:
    model = make("LlamaForCausalLM")
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        want = copy.deepcopy(model).double()(input_ids=tokens, use_cache=False).logits
        fuse(model)
        assert torch.equal(model.double()(input_ids=tokens, use_cache=False).logits, want)
        half = model.bfloat16()(input_ids=tokens, use_cache=False).logits
        assert half.dtype == torch.bfloat16 and (half.double() - want).abs().max() < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.float()(input_ids=tokens, use_cache=False).logits
        mixed.float().sum().backward()  # type: ignore[no-untyped-call]


def test_logits_are_not_used_again_unnoticed_once_they_hold_their_gradient() -> None:
    logits = torch.randn(3, 7, requires_grad=True) * 1.0
    squares = logits.square().sum()  # made first, its backward pass comes second
    both = squares + scores(logits, torch.arange(3), torch.arange(3), 1.0, entropy=False)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()  # type: ignore[no-untyped-call]


def test_which_models_the_engine_runs_without_their_modules() -> None:
    """A test that notices when a family is put together otherwise in a newer transformers."""
    assert {f"{family}ForCausalLM" for family in FAMILIES} == set(MADE)
    assert all(flatten(make(family)) is not None for family in MADE)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"head_dim": 12}, {"intermediate_size": 44}, {"torch_dtype": torch.float16}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_put_together_otherwise_keeps_its_own_forward_pass(change: dict[str, Any]) -> None:
    model = make("LlamaForCausalLM", **change)
    assert flatten(model.to(change.get("torch_dtype", torch.float32))) is None


@pytest.mark.skipif(kernels.bfloat16_products(), reason="the processor's own products are quicker")
@pytest.mark.parametrize("family", sorted(MADE))
def test_an_engine_in_bfloat16_rounds_weights_and_nothing_else(family: str) -> None:
    """It samples, to the bit, what an engine in float32 does on the rounded weights: less is lost than where all that
    lies between the layers is rounded too."""
    model = make(family)
    rounded = copy.deepcopy(model).bfloat16().float()
    told = []
    for given, dtype in ((model, "bfloat16"), (rounded, "auto")):
        engine = LocalEngine(given, lambda tokens: "", EngineConfig(dtype=dtype))
        said = asyncio.run(engine.sample(np.arange(5, 40, dtype=np.int32), SamplingParams(20, seed=3), session="s"))
        told.append([(list(span.tokens), list(span.logprobs)) for span in said.spans])
        engine.close()
    assert told[0] == told[1]


def test_a_hook_is_not_passed_over() -> None:
    model = make("LlamaForCausalLM")
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert flatten(model) is None


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Louder(LlamaAttention):
    """Attention of one's own under a well-known name elsewhere."""


def other_linear(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = Scaled(48, 32)


def other_class(model: Any) -> None:
    model.model.layers[1].self_attn.__class__ = Louder


def other_forward(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def narrower_layer(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(32, 40), nn.Linear(32, 40), nn.Linear(40, 32)


def other_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize(
    "change", [other_linear, other_class, other_forward, narrower_layer, other_epsilon, other_activation, fewer_layers]
)
def test_a_model_that_was_changed_is_not_passed_over(change: Callable[[Any], None]) -> None:
    model = make("LlamaForCausalLM")
    change(model)
    assert flatten(model) is None


def test_a_model_converted_under_the_engine_is_told() -> None:
    decoder = flatten(model := make("LlamaForCausalLM"))
    assert decoder is not None
    model.to(torch.bfloat16)
    with pytest.raises(EngineError, match="moved or converted"):
        decoder._laid_out()


def test_a_target_that_is_no_token_is_refused() -> None:
    with pytest.raises(IndexError, match="target -100 is no token"):
        scores(torch.randn(2, 7), torch.arange(2), torch.tensor([3, -100]), 1.0, entropy=False)
