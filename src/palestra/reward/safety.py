# SPDX-License-Identifier: Apache-2.0
"""A safety classifier as a penalty: ``rewards: {safety: {path: DIR, labels: [toxic], weight: -1.0}}``.

Its value is how unsafe a reply is, so its weight is negative; a positive one would pay for harm and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import ConfigError, ModelError, unknown
from palestra.reward.base import FACTORIES, PENALTIES
from palestra.reward.functions import Completion, written

if TYPE_CHECKING:
    import torch

OVERLAP = 32
"""Tokens that two neighbouring windows of a long reply share, so that no sentence is torn in both."""


class SafetyClassifier:
    """Scores what the model wrote with a Hugging Face sequence classifier.

    model, tokenizer: as transformers makes them. unsafe: indices of the labels that count as unsafe. Probabilities are
    a softmax over the labels, and those of unsafe labels add up; a model whose ``problem_type`` is
    ``multi_label_classification`` (or that has one label) has a sigmoid for each, and the largest counts. threshold:
    pay 1.0 from this probability on and 0.0 below, instead of the probability itself. A reply longer than
    ``max_length`` tokens is read in windows, and its worst window counts; a blank reply is safe.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        unsafe: Sequence[int],
        *,
        threshold: float | None = None,
        batch_size: int = 16,
        max_length: int = 512,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.unsafe = list(unsafe)
        self.threshold = threshold
        self.batch_size = batch_size
        self.max_length = max_length
        config = model.config
        self._apart = config.num_labels == 1 or config.problem_type == "multi_label_classification"

    def __call__(self, completions: Sequence[Completion], **_: Any) -> list[float | None]:
        probabilities = self.unsafe_probabilities([written(c) for c in completions])
        if self.threshold is None:
            return list(probabilities)
        return [float(p >= self.threshold) for p in probabilities]

    def unsafe_probabilities(self, texts: Sequence[str]) -> list[float]:
        """How likely each text is unsafe, 0 to 1."""
        worst = [0.0] * len(texts)
        windows = [(i, ids) for i, text in enumerate(texts) if text.strip() for ids in self._windows(text)]
        for start in range(0, len(windows), self.batch_size):
            batch = windows[start : start + self.batch_size]
            for (i, _), p in zip(batch, self._scores([ids for _, ids in batch]), strict=True):
                worst[i] = max(worst[i], p)
        return worst

    def _windows(self, text: str) -> list[list[int]]:
        options = {"truncation": True, "max_length": self.max_length, "stride": min(OVERLAP, self.max_length // 4)}
        cut: Any = self.tokenizer(text, return_overflowing_tokens=True, **options)["input_ids"]
        return [ids for ids in (cut if cut and isinstance(cut[0], list) else [cut]) if ids]

    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        import torch

        padded = self.tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt")
        device = next(self.model.parameters()).device
        with torch.no_grad():
            asked = {name: padded[name].to(device) for name in ("input_ids", "attention_mask")}
            logits: torch.Tensor = self.model(**asked).logits.float()
        chosen = (logits.sigmoid() if self._apart else logits.softmax(-1))[:, self.unsafe]
        values: list[float] = (chosen.amax(-1) if self._apart else chosen.sum(-1).clamp(max=1.0)).tolist()
        return values


@FACTORIES.register("safety")
def safety(
    path: str,
    labels: Sequence[str],
    threshold: float | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    device: str = "auto",
) -> SafetyClassifier:
    """How unsafe a reply is, by a classifier from a local directory (:class:`SafetyClassifier`); give it a negative
    weight.

    labels: the classifier's labels that count as unsafe. threshold: a reply is unsafe from this probability on (1.0,
    else 0.0); left out, the probability itself. max_length: tokens that are read at once (default: as many as the model
    takes, 512 at most). Nothing is downloaded; ModelError where the path holds no trained classifier.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ConfigError(f"safety: threshold is {threshold}: give a probability above 0, at most 1")
    for name, value in (("batch_size", batch_size), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ConfigError(f"safety: {name} is {value}; it must be at least 1")
    model, tokenizer = _load(path, device)
    names = {str(label).casefold(): index for index, label in model.config.id2label.items()}
    wanted = [labels] if isinstance(labels, str) else list(labels)
    for label in wanted:
        if str(label).casefold() not in names:
            raise ConfigError(f"safety: {unknown('label', str(label), map(str, model.config.id2label.values()))}")
    if not wanted or len({str(w).casefold() for w in wanted}) == len(names) > 1:
        raise ConfigError("safety: name some of the classifier's labels in `labels`, not none and not all of them")
    longest = min(512, getattr(model.config, "max_position_embeddings", 512), tokenizer.model_max_length)
    return SafetyClassifier(
        model,
        tokenizer,
        [names[str(label).casefold()] for label in wanted],
        threshold=threshold,
        batch_size=batch_size,
        max_length=min(longest, max_length or longest),
    )


PENALTIES.add("safety")


def _load(path: str, device: str) -> tuple[Any, Any]:
    """The classifier in evaluation mode, and its tokenizer with a padding token."""
    import transformers as hf

    from palestra.model.loading import one_line, pick_device, quiet

    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"safety: {path!r} is no directory of a Hugging Face model (no config.json)")
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            auto: Any = hf.AutoModelForSequenceClassification
            model, info = auto.from_pretrained(folder, output_loading_info=True, **local)
            tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder, **local)
    except Exception as error:  # transformers raises many types for what is wrong with a directory
        raise ModelError(f"safety: {path!r} cannot be loaded as a classifier: {one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"safety: {path!r} holds no trained classifier: it has no weights {', '.join(missing[:3])}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.to(pick_device(device)).eval().requires_grad_(False), tokenizer
