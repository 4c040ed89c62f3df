# SPDX-License-Identifier: Apache-2.0
"""A safety classifier: harm has a price and never pays, and no length hides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from palestra.errors import ConfigError, ModelError
from palestra.reward.build import make_rubric
from palestra.reward.safety import safety

WORDS = ("<pad>", "<cls>", "<unk>", "nice", "bomb", "insult", "walk")


def classifier(folder: Path, *, labels: dict[int, str], kind: str | None = None) -> Path:
    """A classifier whose first label is likely where ``bomb`` stands, its second where ``insult`` does: one layer
    without attention's or the feed-forward part's doing, so that a text's logits are the sum of its words'."""
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    core.post_processor = TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 1)])
    made: Any = hf.PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=core, pad_token="<pad>", cls_token="<cls>", unk_token="<unk>")
    config = hf.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
        problem_type=kind,
        pad_token_id=0,
    )
    model = hf.BertForSequenceClassification(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.zero_()
            if name.endswith("LayerNorm.weight"):
                p.fill_(1.0)
        words = model.bert.embeddings.word_embeddings.weight
        words[WORDS.index("bomb"), 0] = 9.0  # the first feature: a bomb, the second: an insult
        words[WORDS.index("insult"), 1] = 9.0
        layer = model.bert.encoder.layer[0]
        layer.attention.self.value.weight.copy_(torch.eye(8))
        layer.attention.output.dense.weight.copy_(8.0 * torch.eye(8))
        model.bert.pooler.dense.weight.copy_(4.0 * torch.eye(8))
        model.classifier.weight[0, 0] = 6.0
        model.classifier.weight[1, 1] = 6.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weapons, insults, and neither."""
    labels = {0: "weapons", 1: "Insults", 2: "fine"}
    return classifier(tmp_path_factory.mktemp("safety") / "three", labels=labels)


TEXTS = ["nice walk", "bomb", "insult nice", ""]


def test_the_probabilities_of_unsafe_labels_add_up_and_harm_is_seen(three: Path) -> None:
    both = safety(str(three), ["weapons", "insults"])(completions=TEXTS)
    weapons = safety(str(three), ["weapons"])(completions=TEXTS)
    insults = safety(str(three), ["INSULTS"], batch_size=1)(completions=TEXTS)
    assert both == pytest.approx([(w or 0) + (i or 0) for w, i in zip(weapons, insults, strict=True)], abs=1e-6)
    assert weapons[1] > 0.9 > 0.1 > insults[1]
    assert insults[2] > 0.9 > 0.1 > weapons[2]
    assert both[3] == 0.0, "a blank reply is safe"


def test_probabilities_are_those_of_the_model_itself(three: Path) -> None:
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(three)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(three)
    with torch.no_grad():
        want = [float(model(**tokenizer(t, return_tensors="pt")).logits.softmax(-1)[0, 0]) for t in TEXTS[:3]]
    assert safety(str(three), ["weapons"])(completions=TEXTS[:3]) == pytest.approx(want, abs=1e-6)


def test_a_threshold_makes_it_zero_or_one(three: Path) -> None:
    assert safety(str(three), ["weapons"], threshold=0.5)(completions=TEXTS) == [0.0, 1.0, 0.0, 0.0]


def test_harm_behind_many_words_is_still_found(three: Path) -> None:
    hidden = " ".join(["walk"] * 60 + ["bomb"] + ["nice"] * 60)
    assert safety(str(three), ["weapons"], threshold=0.5)(completions=[hidden, "walk " * 121]) == [1.0, 0.0]


def test_all_that_the_model_wrote_is_read_and_not_what_it_was_shown(three: Path) -> None:
    turns = [{"role": "assistant", "content": "bomb"}, {"role": "user", "content": "nice"}]
    shown = [{"role": "assistant", "content": "nice"}, {"role": "tool", "content": "bomb"}]
    end = [{"role": "assistant", "content": "walk"}]
    assert safety(str(three), ["weapons"], threshold=0.5)(completions=[[*turns, *end], [*shown, *end]]) == [1.0, 0.0]


def test_labels_that_do_not_exclude_each_other_have_a_probability_each(tmp_path: Path) -> None:
    labels = {0: "weapons", 1: "insults"}
    folder = classifier(tmp_path / "multi", labels=labels, kind="multi_label_classification")
    both = safety(str(folder), ["weapons"])(completions=["bomb insult", "nice"])
    assert both[0] > 0.5 and both[1] == pytest.approx(0.5)  # a logit of 0


def test_its_weight_is_a_price(three: Path) -> None:
    options = {"path": str(three), "labels": ["weapons"]}
    rubric = make_rubric({"safety": {**options, "weight": -2.0}}, chat=False)
    assert rubric.functions["safety"][1] == -2.0
    for weight in ({"weight": 0.5}, {}):
        with pytest.raises(ConfigError, match="negative weight"):
            make_rubric({"harm": {"function": "safety", **options, **weight}}, chat=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels": ["weapon"]}, "did you mean 'weapons'"),
        ({"labels": []}, "not none and not all"),
        ({"labels": ["weapons", "insults", "fine"]}, "not none and not all"),
        ({"labels": ["weapons"], "threshold": 0.0}, "threshold"),
        ({"labels": ["weapons"], "batch_size": 0}, "batch_size"),
    ],
)
def test_options_are_checked(three: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        safety(str(three), **options)


def test_a_directory_without_a_trained_classifier_is_refused(three: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        safety(str(tmp_path / "none"), ["weapons"])
    headless = tmp_path / "headless"
    model: Any = hf.AutoModel.from_pretrained(three)
    model.save_pretrained(headless)
    hf.AutoTokenizer.from_pretrained(three).save_pretrained(headless)
    with pytest.raises(ModelError, match="no trained classifier") as caught:
        safety(str(headless), ["LABEL_0"])
    assert "\n" not in str(caught.value)
