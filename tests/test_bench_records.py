"""The record files: merged by identity, and whole after a kill at any byte."""

from __future__ import annotations

import json

import pytest

from pctree.bench.records import IDENTITY, RecordFile, identity, read_records
from pctree.errors import UsageError


def record(**changes):
    return {"kind": "record", "environment": "e0", **dict.fromkeys(IDENTITY), "task": "gsm8k", "tokens": 5} | changes


ENVIRONMENT = {"kind": "environment", "environment": "e0", "cpu": "née"}


def test_files_and_folders_are_merged_and_the_first_record_wins(tmp_path):
    first, second = tmp_path / "run" / "records.jsonl", tmp_path / "run" / "records.rank1.jsonl"
    for path, lines in (
        (first, [ENVIRONMENT, record(repeat=0), record(repeat=1)]),
        (second, [ENVIRONMENT | {"environment": "e1"}, record(repeat=1, tokens=7), record(repeat=2)]),
    ):
        file = RecordFile(path)
        file.append(lines)
        file.close()
    records, environments = read_records([tmp_path / "run"])
    assert [(r["repeat"], r["tokens"]) for r in records] == [(0, 5), (1, 5), (2, 5)]
    assert environments.keys() == {"e0", "e1"}
    assert environments["e0"]["cpu"] == "née"
    assert len(read_records([second, first])[0]) == 3
    assert read_records([tmp_path]) == ([], {})


def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_is_mended(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.append([ENVIRONMENT, record(repeat=0), record(repeat=1)])
    file.close()
    whole = path.read_bytes()
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        assert len(read_records([path])[0]) == max(0, kept - 1)
        file = RecordFile(path)
        file.append([record(repeat=9)])
        file.close()
        lines = path.read_bytes().split(b"\n")
        assert len(lines) == kept + 2
        assert identity(json.loads(lines[kept])) == identity(record(repeat=9))


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    path = tmp_path / "records.jsonl"
    whole = json.dumps(record(repeat=0)).encode() + b"\n"
    path.write_bytes(whole + b"x" * 200_000)
    RecordFile(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(b"x" * 200_000)
    RecordFile(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"kind": "rec\n', "line 2 is not valid JSON"),
        (b"\xff\n", "line 2: byte 1 is not UTF-8"),
        (b'{"turns": ["a prompt"]}\n', "line 2 is of kind None"),
        (b'{"kind": "record", "environment": "e0", "target": "t"}\n', "line 2 lacks drafter, "),
        (b'{"kind": "environment"}\n', "line 2 lacks environment"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "records.jsonl"
    path.write_bytes(json.dumps(ENVIRONMENT).encode() + b"\n" + line + json.dumps(record()).encode() + b"\n")
    with pytest.raises(UsageError) as caught:
        read_records([path])
    assert f"{path}, {complaint}" in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_records([tmp_path / "none.jsonl"])
