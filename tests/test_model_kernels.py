# SPDX-License-Identifier: Apache-2.0
"""The kernels: the numbers of the plain operations, bits that depend on nobody beside, and a plain way without them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.model import kernels
from palestra.model.kernels.build import library

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference, in the size of the largest number."""
    return float((got.double() - want.double()).abs().max().detach() / want.double().abs().max().detach())


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def test_a_norm_and_its_gradient() -> None:
    x, weight, grad, scale = torch.randn(37, 72), torch.randn(72), torch.randn(37, 72), torch.empty(37)
    out = kernels.rms_norm(x, weight, 1e-5, scale=scale)
    wide, by = x.double().requires_grad_(), weight.double().requires_grad_()
    want = rms_norm(wide, by)
    want.backward(grad.double())  # type: ignore[no-untyped-call]
    dx, dw = kernels.rms_norm_backward(grad, x, weight, scale, wants_weight=True)
    assert dw is not None and wide.grad is not None and by.grad is not None
    assert off(out, want) < 1e-6 and off(dx, wide.grad) < 1e-6 and off(dw, by.grad) < 1e-6
    assert kernels.rms_norm_backward(grad, x, weight, scale, wants_weight=False)[1] is None


def test_a_gated_activation_and_its_gradient_also_where_the_exponential_ends() -> None:
    both = torch.randn(9, 48) * 30
    both[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = (x.contiguous() for x in both.chunk(2, -1))
    wide = [x.double().requires_grad_() for x in (gate, up)]
    want = F.silu(wide[0]) * wide[1]
    assert off(kernels.silu_times(gate, up), want) < 1e-6
    grad = torch.randn(9, 24)
    want.backward(grad.double())
    got = kernels.silu_times_backward(grad, gate, up)
    assert all(w.grad is not None and off(g, w.grad) < 1e-6 for g, w in zip(got, wide, strict=True))


@pytest.mark.parametrize("width", [5000, 1003, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_log_probs_their_entropy_and_their_gradient(width: int, temperature: float) -> None:
    logits = torch.randn(20, width) * 4
    logits[3, 1] = -torch.inf  # a banned token
    at, targets = torch.randint(0, 20, (50,)), torch.randint(2, width, (50,))
    grads = torch.randn(50)
    wide = logits.double().requires_grad_()
    logp = (wide / temperature).log_softmax(-1)
    top, total, entropy = kernels.log_sums(logits, 1 / temperature, entropy=True)
    assert entropy is not None
    torch.testing.assert_close(top / temperature + total, (wide / temperature).logsumexp(-1).float())
    torch.testing.assert_close(entropy, -(logp.exp() * logp).nan_to_num(0.0).sum(-1).float())
    (logp[at, targets] * grads.double()).sum().backward()
    order = torch.argsort(at, stable=True)
    starts = torch.searchsorted(at[order], torch.arange(21))
    kernels.log_sums_backward(logits, top, total, grads, targets, order, starts, 1 / temperature)
    assert wide.grad is not None and off(logits, wide.grad) < 1e-6


def test_a_product_of_any_size_and_a_row_of_it_beside_any_number_of_others() -> None:
    weight, bias, x = torch.randn(101, 72), torch.randn(101), torch.randn(300, 72)
    packed, wide = kernels.pack(weight, bias)
    whole = kernels.product(x, packed, wide, 101)
    assert off(whole, x.double() @ weight.double().T + bias.double()) < 1e-6
    assert all(torch.equal(kernels.product(x[:n].contiguous(), packed, wide, 101), whole[:n]) for n in range(1, 40))
    assert torch.equal(kernels.product(x[250:].contiguous(), packed, wide, 101), whole[250:])


def test_a_weight_in_bfloat16_is_widened_and_nothing_else_is_rounded() -> None:
    """The bits are those of the product with the same numbers in float32."""
    weight, bias, x = torch.randn(101, 72).bfloat16(), torch.randn(101).bfloat16(), torch.randn(41, 72)
    narrow, wide = kernels.pack(weight, bias), kernels.pack(weight.float(), bias.float())
    for n in range(1, 42):
        few = x[:n].contiguous()
        assert torch.equal(kernels.product(few, *narrow, 101), kernels.product(few, *wide, 101))


@pytest.mark.parametrize("width", [3, 196, 256, 1000])
def test_a_draw_is_where_the_cumulative_distribution_passes_its_noise(width: int) -> None:
    logits, rows = torch.randn(5, width) * 3, torch.randint(5, (400,))
    logits[:, 1] = -torch.inf  # a token that cannot be
    factors, noise = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0]), torch.rand(400)
    noise[:3] = torch.tensor([0.0, 1 - 2**-24, -1.0])
    tokens, logprobs = kernels.draw(logits, factors, rows, noise)
    probs = (logits.double() * factors.double()[:, None]).softmax(-1)
    upper = probs.cumsum(-1)[rows, tokens]
    assert (upper > noise - 1e-6).all() and (upper - probs[rows, tokens] <= noise.clamp(min=0) + 1e-6)[noise >= 0].all()
    assert int(tokens[2]) == int(logits[rows[2]].argmax()) and (tokens != 1).all()
    assert off(logprobs, probs[rows, tokens].log()) < 1e-6


def test_a_draw_depends_on_neither_threads_nor_other_rows() -> None:
    logits, noise = torch.randn(40, 500), torch.rand(40)
    ones, rows = torch.ones(40), torch.arange(40)
    tokens, logprobs = kernels.draw(logits, ones, rows, noise)
    for i in range(40):
        alone = kernels.draw(logits[i : i + 1], ones[:1], rows[:1], noise[i : i + 1])
        assert torch.equal(alone[0], tokens[i : i + 1]) and torch.equal(alone[1], logprobs[i : i + 1])


def attended(q: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, scale: float) -> Tensor:
    """One row, in double precision: q (H, D) against keys (Hkv, L, D)."""
    first = max(0, position - window + 1) if window else 0
    group = len(q) // len(keys)
    seen = [x.double()[:, first : position + 1].repeat_interleave(group, 0) for x in (keys, values)]
    weights = (torch.einsum("hd,hld->hl", q.double(), seen[0]) * scale).softmax(-1)
    return torch.einsum("hl,hld->hd", weights, seen[1])


class World:
    """Rows of six slots with some keys in them already; the fifth begins like the fourth."""

    def __init__(self, width: int, value_width: int, heads: int, key_heads: int) -> None:
        self.keys, self.values = torch.randn(6, key_heads, 64, width), torch.randn(6, key_heads, 64, value_width)
        self.keys[5, :, :20], self.values[5, :, :20] = self.keys[4, :, :20], self.values[4, :, :20]
        self.slot = torch.tensor([1, 1, 2, 3, 4, 5])
        self.position = torch.tensor([9, 10, 40, 0, 25, 33])
        self.query = torch.randn(heads, 6, width).transpose(0, 1)
        self.key = torch.randn(key_heads, 6, width).transpose(0, 1)
        self.value = torch.randn(key_heads, 6, value_width).transpose(0, 1)

    def attend(self, which: list[int], *, window: int | None, share: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.tensor(which)
        keys, values = self.keys.clone(), self.values.clone()
        prefix = torch.where(self.slot == 5, 20, 0) if share else torch.zeros(6, dtype=torch.long)
        if share:
            keys[5, :, :16] = (
                torch.nan
            )  # nobody may look here: whole blocks of the prefix are read where they came from
        of = kernels.Pass(
            None, self.slot[rows], self.position[rows], self.slot[rows], self.position[rows],
            torch.full_like(rows, 4), prefix[rows],
        )  # fmt: skip
        given = [x[rows] for x in (self.query, self.key, self.value)]
        return kernels.attend(*given, keys, values, of, scale=0.3, window=window), keys, values


SHAPES = [(64, 64, 9, 3), (32, 32, 4, 4), (24, 40, 4, 2), (8, 16, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 5, 16])
def test_attention_over_slots(shape: tuple[int, int, int, int], window: int | None) -> None:
    world = World(*shape)
    out, keys, values = world.attend(list(range(6)), window=window)
    for n, (slot, position) in enumerate(zip(world.slot.tolist(), world.position.tolist(), strict=True)):
        assert torch.equal(keys[slot, :, position], world.key[n]) and torch.equal(
            values[slot, :, position], world.value[n]
        )
        want = attended(world.query[n], keys[slot], values[slot], position, window, 0.3)
        assert off(out[n], want) < 1e-6
        # Rows that come later write keys that this one does not see, so alone it has the same bits.
        alone, *_ = world.attend(list(range(n + 1)), window=window)
        assert torch.equal(alone[n], out[n])


@pytest.mark.parametrize("window", [None, 25])
def test_a_prefix_is_read_where_it_came_from_with_the_same_bits(window: int | None) -> None:
    world = World(32, 32, 4, 2)
    apart, *_ = world.attend(list(range(6)), window=window)
    shared, *_ = world.attend(list(range(6)), window=window, share=True)
    assert torch.equal(apart, shared)


def test_the_number_of_threads_changes_no_bit() -> None:
    world, threads = World(32, 32, 4, 2), torch.get_num_threads()
    weight, x = torch.randn(100, 64), torch.randn(50, 64)
    packed, _ = kernels.pack(weight, None)
    told = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            told.append((world.attend(list(range(6)), window=None)[0], kernels.product(x, packed, None, 100)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in told[1:] for a, b in zip(told[0], other, strict=True))


def test_wider_panels_for_wider_vectors_give_the_same_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What AVX-512 would run, by narrower vectors."""
    made = tmp_path / "wide.so"
    source = Path(kernels.__file__).with_name("product.c")
    subprocess.run(
        ["cc", "-O2", "-std=gnu11", "-w", "-DPANEL=32", "-fopenmp", "-shared", "-fPIC", source, "-o", made, "-lm"],
        check=True,
    )
    wide = ctypes.CDLL(str(made))
    assert wide.panel() == 32
    monkeypatch.setattr(kernels, "_lib", lambda: wide)
    weight, x = torch.randn(70, 24), torch.randn(13, 24)
    packed, _ = kernels.pack(weight, None)
    assert torch.equal(packed, F.pad(weight, (0, 0, 0, 26)).view(3, 32, 24).transpose(1, 2))
    assert off(kernels.product(x, packed, None, 70), x.double() @ weight.double().T) < 1e-6
    narrow, _ = kernels.pack(weight.bfloat16(), None)
    again, _ = kernels.pack(weight.bfloat16().float(), None)
    assert torch.equal(kernels.product(x, narrow, None, 70), kernels.product(x, again, None, 70))


# With and without a compiler ------------------------------------------------------------------------------------


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is compiled yet, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield monkeypatch
    library.cache_clear()


def test_they_are_compiled_once_and_kept(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library() is not None
    (kept,) = (tmp_path / "palestra").iterdir()  # and nothing half-made beside it
    assert kept.suffix == ".so"
    library.cache_clear()
    anew.setenv("CC", "/bin/false")
    assert library() is not None, "no compiler is needed any more"


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_compiler_there_is_a_plain_way_and_one_is_told(anew: pytest.MonkeyPatch, compiler: str) -> None:
    anew.setenv("CC", compiler)
    with pytest.warns(UserWarning, match="kernels could not be built .* install a C compiler"):
        assert library() is None
    assert not kernels.available(torch.ones(8)), "once is enough"


def test_who_wants_none_gets_none_without_a_word(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("PALESTRA_KERNELS", "0")
    assert library() is None and not kernels.available(torch.ones(8))


def test_a_folder_that_cannot_be_written_is_passed_over(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "palestra").write_text("not a folder")
    assert library() is not None


def test_without_a_home_they_are_compiled_all_the_same(anew: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    anew.delenv("XDG_CACHE_HOME")
    anew.setattr(Path, "home", homeless)
    assert library() is not None


def test_a_kept_file_that_does_not_load_is_passed_over(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library() is not None
    (kept,) = (tmp_path / "palestra").iterdir()
    library.cache_clear()
    kept.unlink()  # what is mapped already must stay whole
    kept.write_bytes(b"made elsewhere")
    assert library() is not None


def test_torchs_default_dtype_changes_nothing() -> None:
    world, x, weight, ones = World(8, 8, 2, 1), torch.randn(5, 8), torch.randn(3, 8), torch.ones(5)

    def all_of_them() -> list[Tensor]:
        grads = kernels.rms_norm_backward(x, x, x[0], ones, wants_weight=True)
        assert grads[1] is not None
        packed, _ = kernels.pack(weight, None)
        return [world.attend([0, 1], window=None)[0], kernels.product(x, packed, None, 3), kernels.silu_times(x, x),
                kernels.rms_norm(x, x[0], 1e-5), *(g for g in grads if g is not None)]  # fmt: skip

    want = all_of_them()
    torch.set_default_dtype(torch.float64)
    try:
        got = all_of_them()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_other_dtypes_and_layouts_are_not_taken() -> None:
    fit: Any = kernels.available
    assert fit(torch.ones(4, 8)) and fit(torch.ones(8, 8)[::2])
    takes: Any = kernels.multiplies
    half = torch.ones(4, 8, dtype=torch.bfloat16)
    assert takes(torch.ones(4, 8)) and not takes(torch.ones(4, 8), half) and not takes(half.half())
    assert not fit(half) and takes(half) != kernels.bfloat16_products()
    assert not fit(torch.ones(4, 8).T) and not fit(torch.ones(4, 8), torch.ones(8, dtype=torch.float64))
