# SPDX-License-Identifier: Apache-2.0
"""Known answers about tokens: who wrote which, which of them train, what follows what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.chat.base import Rendered
from palestra.chat.plain import PlainRenderer
from palestra.data.dialogues import Dialogue
from palestra.data.preferences import Comparison, Encoded, encode, fit
from palestra.engine.base import SamplingParams
from palestra.engine.scripted import ScriptedEngine
from palestra.errors import DataError
from palestra.learn.advantage import AdvantageConfig, reinforce
from palestra.learn.batch import Rows, pack, token_weights
from palestra.selfcheck.given import Bools, Given, NotData, nested
from palestra.selfcheck.kinds import kind, make_sample
from palestra.train.sft import dialogue_samples
from palestra.types import Author, Message, Span, StopReason, Trajectory, Turn

AUTHORS = {"template": Author.TEMPLATE, "env": Author.ENV, "tool": Author.ENV, "prompt": Author.ENV}


def _trajectory(parts: Sequence[tuple[Sequence[int], Author]]) -> Trajectory:
    spans = []
    for ids, author in parts:
        own = author is Author.MODEL
        logprobs = np.full(len(ids), -1.0) if own else None
        spans.append(
            Span(np.asarray(ids, np.int32), author, "assistant", logprobs=logprobs, version=0 if own else None)
        )
    return Trajectory((Turn(tuple(spans), (), {"role": "assistant", "content": ""}, "eos"),), StopReason.ENV_TERMINATED)


def _author(word: str) -> Author:
    return Author.MODEL if word in ("sampled", "model") else AUTHORS.get(word, Author.ENV)


@kind("masking", "turn")
@kind("masking", "segments")
def of_parts(given: Given) -> dict[str, Any]:
    """A turn or more as [what, number of tokens, who wrote it] (sampled or model, template, env); [who, number] will
    do. → loss_mask, num_trained_tokens"""
    key = "turn" if "turn" in given else "segments"
    parts = given.get(key)
    if not isinstance(parts, list) or not all(isinstance(p, list) and len(p) in (2, 3) for p in parts):
        raise NotData(f"{key} is not a list of [what, tokens, author]")
    whole = _trajectory([([0] * int(p[1]), _author(str(p[-1] if len(p) == 3 else p[0]))) for p in parts])
    return {"loss_mask": whole.loss_mask.astype(int).tolist(), "num_trained_tokens": int(whole.loss_mask.sum())}


@kind("masking", "ids", "origin")
def of_origins(given: Given) -> dict[str, Any]:
    """Tokens and who wrote each. An end token inside ends a turn, not the row. → loss_mask"""
    given.get("eos_ids"), given.get("turns")
    ids = given.numbers("ids").astype(int)
    whole = _trajectory([([int(i)], _author(str(who))) for i, who in zip(ids, given.get("origin"), strict=True)])
    return {"loss_mask": whole.loss_mask.astype(int).tolist()}


@kind("masking", "completion_ids", "eos_ids")
def of_completion(given: Given) -> dict[str, Any]:
    """What a model would say, and its end tokens. Nothing after the first of them is kept. → completion_mask,
    stored_ids, finish_reason"""
    given.get("turns")
    ids, ends = given.numbers("completion_ids").astype(int).tolist(), given.numbers("eos_ids").astype(int).tolist()
    span, reason, _ = _sampled([str(i) for i in range(max(ids) + 1)], ids, stop_token_ids=tuple(ends))
    return {
        "completion_mask": [int(i < len(span)) for i in range(len(ids))],
        "stored_ids": span.tokens.tolist(),
        "finish_reason": reason,
    }


@kind("masking", "stop_string", "sampled_tokens")
def of_stop_string(given: Given) -> dict[str, Any]:
    """Token texts and a stop string. → stored_tokens, visible_text, finish_reason"""
    pieces = given.get("sampled_tokens")
    given.get("stop_detected_at_token")
    span, reason, text = _sampled(pieces, list(range(len(pieces))), stop=(given.text("stop_string"),))
    return {"stored_tokens": [pieces[i] for i in span.tokens], "visible_text": text, "finish_reason": reason}


@kind("masking", "sampled_ids")
def of_sampled(given: Given) -> dict[str, Any]:
    """What was sampled; whatever its text would encode to. → stored_ids, mask_len, logprob_len"""
    given.get("text_of_sampled"), given.get("encode_of_text")
    ids = given.numbers("sampled_ids").astype(int).tolist()
    span, _, _ = _sampled([str(i) for i in range(max(ids) + 1)], ids)
    logprobs = () if span.logprobs is None else span.logprobs
    whole = _trajectory([(span.tokens.tolist(), Author.MODEL)])
    return {"stored_ids": span.tokens.tolist(), "mask_len": int(whole.loss_mask.sum()), "logprob_len": len(logprobs)}


@kind("masking", "input_ids", "true_length")
def of_right_padding(given: Given) -> dict[str, Any]:
    """A padded row and how long it really is. → attention_mask, labels (aligned with the ids, -100 = none)"""
    ids, real = given.numbers("input_ids").astype(int), given.integer("true_length")
    given.get("pad_id"), given.get("eos_id"), given.get("train_all")
    return _padded(ids, np.arange(len(ids)) < real)


@kind("masking", "prompt_ids", "true_length")
def of_padding(given: Given) -> dict[str, Any]:
    """A padded prompt, ``padding_side`` left or right. → attention_mask"""
    ids, real = given.numbers("prompt_ids").astype(int), given.integer("true_length")
    given.get("pad_id"), given.get("eos_id")
    left = given.text("padding_side", "left") == "left"
    at = np.arange(len(ids))
    return _padded(ids, at >= len(ids) - real if left else at < real)


def _padded(ids: Any, own: Bools) -> dict[str, Any]:
    """Rows are stored without padding; this shows one as it would look with it."""
    row = make_sample(np.ones(own.sum() - 1))
    row.tokens[:] = ids[own]
    row.loss_mask[:] = True
    batch = pack(Rows((row,)), [np.ones(len(row.tokens))], [0])
    kept = batch.tokens[0].tolist() == ids[own].tolist() and batch.targets.tolist() == ids[own][1:].tolist()
    return {"attention_mask": (own & kept).astype(int).tolist(), "labels": np.where(own & kept, ids, -100).tolist()}


@kind("masking", "prompt_len", "response_len")
def of_lengths(given: Given) -> dict[str, Any]:
    """A prompt and a response. → label_is_ignored, predicting_positions, loss_terms"""
    given.get("convention")
    prompt, response = given.integer("prompt_len"), given.integer("response_len")
    row = make_sample(np.arange(1, prompt + response) >= prompt)
    batch = pack(Rows((row,)), token_weights([row], "token_mean"), [0])
    return {
        "label_is_ignored": (~row.loss_mask).tolist(),
        "predicting_positions": batch.predict.tolist(),
        "loss_terms": len(batch.targets),
    }


@kind("masking", "completions", "env_masks")
def of_truncated(given: Given) -> dict[str, Any]:
    """Completions ({ids, ended}) and which of their tokens the model wrote. → loss_mask, mean_trained_len,
    num_trained_tokens"""
    drop = given.flag("drop_truncated")
    samples = [
        make_sample(mask, episode=str(i), trained=bool(c["ended"]) or not drop)
        for i, (c, mask) in enumerate(zip(given.get("completions"), given.table("env_masks"), strict=True))
    ]
    counts = [s.trained_tokens for s in samples]
    return {
        "loss_mask": [(s.loss_mask[1:] & s.trained).astype(int).tolist() for s in samples],
        "mean_trained_len": float(np.mean(counts)),
        "num_trained_tokens": sum(counts),
    }


@kind("masking", "labels")
def of_labels(given: Given) -> dict[str, Any]:
    """Labels of dialogues, -100 where nothing trains. → status, trained_tokens"""
    given.get("stage")
    labels = given.table("labels")
    renderer: Any = _Written(
        [np.ones(len(row), int).tolist() for row in labels], [(row != -100).tolist() for row in labels]
    )
    dialogues = [Dialogue(({"role": "user", "content": str(i)},)) for i in range(len(labels))]
    try:
        samples = dialogue_samples(dialogues, renderer, max_length=max(map(len, labels)))
    except DataError:
        return {"status": "row_rejected_or_error", "trained_tokens": 0}
    status = "trained" if len(samples) == len(labels) else "row_rejected_or_error"
    return {"status": status, "trained_tokens": sum(s.trained_tokens for s in samples)}


@kind("masking", "steps", "trajectory_advantage")
def of_views(given: Given) -> dict[str, Any]:
    """Several rows of one episode, each with a response_mask. → advantages per token"""
    given.get("broadcast")
    value = given.number("trajectory_advantage")
    steps = given.get("steps")
    if not isinstance(steps, list) or not all(isinstance(s, dict) for s in steps):
        raise NotData("steps is not a list of objects")
    rows = Rows(tuple(make_sample(s["response_mask"], reward=value) for s in steps))
    return {"advantages": [a[1:].tolist() for a in reinforce(rows, AdvantageConfig())]}


@kind("tokenization", "prompt_ids", "sampled_ids")
def of_next_prompt(given: Given) -> dict[str, Any]:
    """A prompt, what was sampled, what a tool adds. → next_prompt_ids, property: the earlier ids are its beginning"""
    prompt, said, added = (
        given.numbers(k).astype(int).tolist() if k in given else []
        for k in ("prompt_ids", "sampled_ids", "tool_suffix_ids")
    )
    whole = _trajectory([(prompt, Author.ENV), (said, Author.MODEL), (added, Author.ENV)]).tokens.tolist()
    return {"next_prompt_ids": whole, "property": whole[: len(prompt) + len(said)] == prompt + said}


@kind("tokenization", "sampled_ids", "id_1")
def of_history(given: Given) -> dict[str, Any]:
    """Sampled tokens, special ones among them. → history_ids, observation_start"""
    given.get("id_1"), given.get("decode_for_history")
    ids = given.numbers("sampled_ids").astype(int).tolist()
    span, _, _ = _sampled([str(i) for i in range(max(ids) + 1)], ids)
    return {"history_ids": span.tokens.tolist(), "observation_start": len(span)}


@kind("tokenization", "sampled_ids", "decoded")
def of_drift(given: Given) -> dict[str, Any]:
    """Token texts that were sampled in each of some turns, whatever their text encodes to. → stored_equals_sampled,
    drift_detected"""
    given.get("decoded"), given.get("re_encoded")
    pieces, turns = [str(p) for p in given.get("sampled_ids")], given.integer("turns", 1)
    ids = list(range(len(pieces)))
    stored = [_sampled(pieces, ids)[0].tokens.tolist() for _ in range(turns)]
    whole = _trajectory([(part, Author.MODEL) for part in stored]).tokens.tolist()
    return {"stored_equals_sampled": whole == ids * turns, "drift_detected": whole != ids * turns}


@kind("tokenization", "eos_ids", "completion_tail", "length", "max_len")
def of_end(given: Given) -> dict[str, Any]:
    """How a completion of ``length`` tokens ends, and the model's end tokens. → finished, truncated"""
    given.get("tokenizer_eos")
    tail = given.numbers("completion_tail").astype(int).tolist()
    ids = [0] * (given.integer("length") - len(tail)) + tail
    ends = tuple(given.numbers("eos_ids").astype(int).tolist())
    engine = ScriptedEngine([ids], _Pieces([""] * (max(*ids, *ends) + 1)))
    asked = SamplingParams(max_new_tokens=min(len(ids), given.integer("max_len")), stop_token_ids=ends)
    reason = asyncio.run(engine.sample(np.zeros(1, np.int32), asked, session="s")).finish_reason
    return {"finished": reason == "eos", "truncated": reason == "length"}


@kind("tokenization", "row_len", "max_length")
def of_long_dialogue(given: Given) -> dict[str, Any]:
    """A dialogue of ``row_len`` tokens of which the last ends the turn. → kept_len, last_id_is_eos"""
    given.get("stage")
    length, end = given.integer("row_len"), given.integer("eos_id", 2)
    ids = [end + 1] * (length - 1) + [end]
    renderer: Any = _Written([ids], [[True] * length])
    (kept,) = dialogue_samples(
        [Dialogue(({"role": "user", "content": "0"},))], renderer, max_length=given.integer("max_length")
    )
    return {"kept_len": len(kept.tokens), "last_id_is_eos": bool(kept.tokens[-1] == end)}


@kind("tokenization", "toy_vocab", "prompt", "chosen", "rejected")
def of_pair(given: Given) -> dict[str, Any]:
    """A vocabulary (text → id, the longest match wins), a prompt and two replies. → prompt_ids, chosen_ids,
    rejected_ids, shared_prompt"""
    vocabulary = given.get("toy_vocab")
    if not isinstance(vocabulary, dict):
        raise NotData("toy_vocab is not a mapping of texts to ids")
    prompt, chosen, rejected = (given.text(k) for k in ("prompt", "chosen", "rejected"))
    user: Message = {"role": "user", "content": prompt}
    replies = [({"role": "assistant", "content": text},) for text in (chosen, rejected)]
    pair = Comparison((user,), replies[0], replies[1])  # type: ignore[arg-type]
    ((found,), _) = encode([pair], PlainRenderer(_Greedy(vocabulary)), max_length=10_000)
    ids = [reply.tolist() for reply in found.replies]
    return {
        "prompt_ids": found.prompt.tolist(),
        "chosen_ids": ids[0],
        "rejected_ids": ids[1],
        "shared_prompt": True,  # one array holds it for both
    }


@kind("tokenization", "prompt_len", "chosen_len", "rejected_len")
def of_pair_budget(given: Given) -> dict[str, Any]:
    """Lengths of a pair and max_length. → chosen_kept, rejected_kept, prompt_kept, budget_per_side"""
    given.get("truncate")
    prompt, lengths = given.integer("prompt_len"), [given.integer(k) for k in ("chosen_len", "rejected_len")]
    replies = tuple(np.arange(n, dtype=np.int32) for n in lengths)
    one = Encoded(np.arange(prompt, dtype=np.int32), replies, tuple(np.ones(n, np.bool_) for n in lengths))
    limit = given.integer("max_length")
    kept = fit(one, limit, "cut")
    if kept is None:
        return {"chosen_kept": 0, "rejected_kept": 0, "prompt_kept": 0, "budget_per_side": max(0, limit - prompt)}
    chosen, rejected = (len(r) for r in kept.replies)
    return {
        "chosen_kept": chosen,
        "rejected_kept": rejected,
        "prompt_kept": len(kept.prompt),
        "budget_per_side": limit - prompt,
    }


@kind("tokenization", "attention_mask")
def of_positions(given: Given) -> dict[str, Any]:
    """A padded row. → position_ids"""
    own = given.numbers("attention_mask").astype(np.bool_)
    row = make_sample(np.ones(own.sum() - 1))
    positions = np.zeros(len(own), np.int64)
    positions[own] = pack(Rows((row,)), [np.ones(len(row.tokens))], [0]).positions[0].numpy()
    return {"position_ids": nested(positions)}


@kind("tokenization", "template_output", "bos_id")
@kind("tokenization", "prompt", "bos_id")
@kind("tokenization", "bos_token", "text")
def of_start_token(given: Given) -> dict[str, Any]:
    """A text (a template's output, a raw prompt) and the id of the start token, written ``bos_token`` ("<s>"); null =
    there is none. → ids, first_id, bos_count, contains_none"""
    for key in ("encode_adds_bos_by_default", "raw_string", "model_requires_bos"):
        given.get(key)
    text = given.text(next(k for k in ("template_output", "prompt", "text") if k in given))
    bos = given.get("bos_token", "<s>")
    start = None if bos is None else given.integer("bos_id", 1)
    letters = list(dict.fromkeys(text))
    vocabulary = {c: i for i, c in zip((i for i in range(len(letters) + 1) if i != start), letters, strict=False)}
    tokenizer = _Greedy(vocabulary if start is None else {**vocabulary, bos: start})
    tokenizer.bos_token_id = start
    ids = PlainRenderer(tokenizer).render([{"role": "user", "content": text}]).token_ids
    return {"ids": ids, "first_id": ids[0], "bos_count": sum(i == start for i in ids), "contains_none": None in ids}


class _Pieces:
    """A tokenizer whose tokens are the given texts."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._pieces[i] for i in ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [self._pieces.index(c) for c in text]


class _Greedy(_Pieces):
    """A tokenizer that takes the longest piece of a vocabulary at each place, and adds nothing."""

    bos_token_id: int | None = None
    eos_token_id = None
    bos_token = eos_token = chat_template = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        super().__init__([""] * (max(vocabulary.values(), default=0) + 1))
        self._vocabulary = vocabulary

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            piece = max((p for p in self._vocabulary if text.startswith(p)), key=len)
            ids.append(self._vocabulary[piece])
            text = text[len(piece) :]
        return ids


class _Written:
    """A renderer whose tokens are already there: message "0" is the first row, and so on."""

    def __init__(self, ids: list[list[int]], masks: list[list[bool]]) -> None:
        self._ids, self._masks = ids, masks

    def render(self, messages: Sequence[Message], **_: Any) -> Rendered:
        at = int(str(messages[0]["content"]))
        return Rendered(self._ids[at], [0] * len(self._ids[at]), self._masks[at])


def _sampled(pieces: Sequence[str], ids: list[int], **params: Any) -> tuple[Span, str, str]:
    """What an engine stores of a model that would say ``ids``."""
    engine = ScriptedEngine([ids], _Pieces(pieces))
    asked = SamplingParams(max_new_tokens=len(ids), **params)
    done = asyncio.run(engine.sample(np.zeros(1, np.int32), asked, session="s"))
    return done.spans[0], done.finish_reason, done.text
