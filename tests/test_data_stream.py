# SPDX-License-Identifier: Apache-2.0
"""Streaming: every row once an epoch, in an order that the cursor alone decides, with one buffer in memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from palestra.data import blocks as module
from palestra.data.blocks import MappedBlocks, ParquetBlocks
from palestra.data.source import Cursor, make_source
from palestra.data.stream import StreamSource, block_rows
from palestra.errors import ConfigError, DataError


def file(tmp_path: Path, rows: int) -> Path:
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"prompt": f"p{i} ü", "answer": i}, ensure_ascii=False) for i in range(rows)]
    path.write_text("\n".join(lines[: rows // 2]) + "\n\n  \n" + "\n".join(lines[rows // 2 :]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("rows", "buffer"), [(1, 1), (7, 1), (7, 3), (40, 16), (97, 33), (100, 1000)])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_epoch_has_every_row_once_and_any_cursor_continues_exactly(
    tmp_path: Path, rows: int, buffer: int, seed: int | None
) -> None:
    path = file(tmp_path, rows)
    whole = StreamSource(path, shuffle_seed=seed, buffer=buffer).take(Cursor(), 3 * rows)[0]
    for epoch in range(3):
        assert Counter(t.answer for t in whole[epoch * rows : (epoch + 1) * rows]) == Counter(range(rows))
    for at in sorted({0, 1, rows // 3, rows - 1, rows, rows + rows // 2}):
        _, cursor = StreamSource(path, shuffle_seed=seed, buffer=buffer).take(Cursor(), at)
        again = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
        rest, _ = StreamSource(path, shuffle_seed=seed, buffer=buffer).take(again, 3 * rows - at)
        assert [t.id for t in rest] == [t.id for t in whole[at:]]


def test_rows_are_named_by_their_line_and_unshuffled_ones_keep_their_order(tmp_path: Path) -> None:
    source = StreamSource(file(tmp_path, 6), shuffle_seed=None, buffer=2)
    tasks, _ = source.take(Cursor(), 6)
    assert [t.answer for t in tasks] == [0, 1, 2, 3, 4, 5]
    assert [t.id for t in tasks] == ["1", "2", "3", "6", "7", "8"]  # lines 4 and 5 are blank


def test_shuffling_reaches_over_the_whole_file_and_changes_with_seed_and_epoch(tmp_path: Path) -> None:
    path = file(tmp_path, 400)

    def order(seed: int, epoch: int = 0) -> list[int]:
        return [t.answer for t in StreamSource(path, shuffle_seed=seed, buffer=64).take(Cursor(epoch, 0), 400)[0]]

    assert order(0) == order(0) != order(1)
    assert order(0) != order(0, epoch=1)
    first = order(0)[:64]
    assert max(first) - min(first) > 200  # one buffer mixes rows from far apart


def test_only_one_buffer_of_rows_is_parsed_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    read = module.parse_line
    monkeypatch.setattr(module, "parse_line", lambda line, where: parsed.append(where) or read(line, where))
    source = make_source("stream", path=str(tmp_path if file(tmp_path, 1000) else ""), buffer=32)
    assert parsed == []  # the pass at the start looks at line breaks only
    _, cursor = source.take(Cursor(0, 600), 4)
    assert len(parsed) == 32
    source.take(cursor, 4)
    assert len(parsed) == 32  # still in the buffer


def test_a_bad_row_an_empty_and_a_missing_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt"\n')
    with pytest.raises(DataError, match=r"train.jsonl:2: not UTF-8"):
        StreamSource(path, shuffle_seed=None, buffer=1).take(Cursor(0, 1), 1)
    with pytest.raises(DataError, match=r"train.jsonl:3: not valid JSON"):
        StreamSource(path, shuffle_seed=None, buffer=1).take(Cursor(0, 2), 1)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="empty"):
        StreamSource(path)
    with pytest.raises(DataError, match="does not exist"):
        StreamSource(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"data.buffer is 0"):
        StreamSource(path, buffer=0)
    source = StreamSource(file(tmp_path, 10))
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="become shorter"):
        source.take(Cursor(), 5)


# Parquet and the Hub ---------------------------------------------------------------------------------------


def parquet(path: Path, rows: range, group: int) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"prompt": f"p{i}", "answer": i, "level": None} for i in rows])
    writer.write_table(table, path, row_group_size=group)
    return path


@pytest.mark.parametrize(("rows", "buffer", "group"), [(1, 1, 1), (40, 16, 7), (97, 33, 1000), (100, 1000, 10)])
def test_parquet_streams_as_jsonl_does(tmp_path: Path, rows: int, buffer: int, group: int) -> None:
    path = parquet(tmp_path / "train.parquet", range(rows), group)
    whole = StreamSource(path, buffer=buffer).take(Cursor(), 2 * rows)[0]
    for epoch in range(2):
        assert Counter(t.answer for t in whole[epoch * rows : (epoch + 1) * rows]) == Counter(range(rows))
    for at in sorted({0, rows // 3, rows - 1, rows, rows + rows // 2}):
        _, cursor = StreamSource(path, buffer=buffer).take(Cursor(), at)
        rest, _ = StreamSource(path, buffer=buffer).take(cursor, 2 * rows - at)
        assert [t.id for t in rest] == [t.id for t in whole[at:]]
    plain = StreamSource(path, shuffle_seed=None, buffer=buffer).take(Cursor(), rows)[0]
    assert [(t.id, t.answer) for t in plain] == [(str(i + 1), i) for i in range(rows)]


def test_shards_of_a_split_are_one_data_set(tmp_path: Path) -> None:
    for shard, rows in enumerate((range(5), range(5, 12), range(12, 13))):
        parquet(tmp_path / f"train-{shard:05d}-of-00003.parquet", rows, 4)
    source = make_source("stream", path=str(tmp_path), buffer=4, shuffle=False)
    assert [t.answer for t in source.take(Cursor(), 13)[0]] == list(range(13))
    assert source.size == 13
    with pytest.raises(DataError, match=r"no test.jsonl or test.parquet; there is: train-00000-of-00003.parquet"):
        make_source("stream", path=str(tmp_path), split="test")


def test_a_block_of_parquet_decodes_its_row_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ParquetBlocks([parquet(tmp_path / "a.parquet", range(100), 10)], 4)
    assert blocks.sizes == [4, 4, 2] * 10
    asked: list[tuple[int, ...]] = []
    file = blocks._parquet.ParquetFile
    real = file.iter_batches

    def watched(self: object, **options: object) -> object:
        asked.append(tuple(options["row_groups"]))  # type: ignore[arg-type]
        return real(self, **options)

    monkeypatch.setattr(file, "iter_batches", watched)
    assert [(n, row["answer"]) for n, row in blocks.read(4)] == [(15, 14), (16, 15), (17, 16), (18, 17)]
    assert asked == [(1,)]


def test_a_data_set_of_the_hub_is_read_where_the_cursor_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class OnDisk:
        """Rows by number, as a mapped data set gives them."""

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, n: int) -> dict[str, object]:
            seen.append(n)
            return {"question": f"q{n}", "answer": str(n)}

    monkeypatch.setattr("palestra.data.stream.hub_rows", lambda name, subset, split, hint: OnDisk())
    source = make_source("stream", hub="someone/data", buffer=32)
    assert (source.size, seen) == (1000, [])
    tasks = source.take(Cursor(0, 600), 4)[0]
    assert len(seen) == 32
    assert {t.prompt for t in tasks} == {f"q{t.answer}" for t in tasks}
    again, _ = make_source("stream", hub="someone/data", buffer=32).take(Cursor(0, 602), 2)
    assert [t.id for t in again] == [t.id for t in tasks[2:]]
    assert MappedBlocks(OnDisk(), "d", block_rows(32)).sizes == [2] * 500


def test_a_stream_is_of_one_thing_and_a_mark_at_its_beginning_is_no_fault(tmp_path: Path) -> None:
    for given in ({}, {"path": "a", "hub": "b"}):
        with pytest.raises(ConfigError, match=r"give either data\.path or data\.hub"):
            make_source("stream", **given)
    (tmp_path / "train.jsonl").write_text('\ufeff{"prompt": "p"}\n', encoding="utf-8")
    assert make_source("stream", path=str(tmp_path)).take(Cursor(), 1)[0][0].prompt == "p"
    (tmp_path / "bad.parquet").write_text("no")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a Parquet file"):
        make_source("stream", path=str(tmp_path / "bad.parquet"))
