"""Prompts of tasks: DeepSpec's wording, order and selection; and what is said about a file that cannot be used."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace

import pytest

from pctree.bench import tasks
from pctree.bench.tasks import HUB, read_file, read_task, read_tasks, select
from pctree.errors import UsageError

REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FENCE, CODE = "```python\n", "\n```\n\n### Answer: (use the provided format with backticks)"


def write(folder, name, *prompts):
    file = folder / f"{name}.jsonl"
    lines = [json.dumps({"turns": [prompt]}, ensure_ascii=False) for prompt in prompts]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def between(text, start, end):
    """What stands between two strings that open and close a text (or follow each other in it)."""
    return text[text.index(start) + len(start) : text.rindex(end)]


def row_of(task, prompt):
    """The row of the data set that a worded prompt was made from."""
    if task == "gsm8k":
        return {"question": prompt.removesuffix(REASONING)}
    if task in ("math500", "aime25"):
        return {"problem": prompt.removesuffix(REASONING)}
    if task == "humaneval":
        return {"prompt": between(prompt, FENCE, "\n```")}
    if task == "livecodebench":
        starter = between(prompt[prompt.rindex("\n\n### Format: ") :], FENCE, CODE)
        question = between(prompt, "### Question:\n", "\n\n### Format: ")
        return {"question_content": question, "starter_code": "" if starter == "# YOUR CODE HERE" else starter}
    return {"prompt": [prompt] if task == "mt-bench" else prompt}


@pytest.mark.parametrize("task", [task for task in HUB if task != "alpaca"])
def test_wording_gives_deepspecs_own_prompts(task_files, task):
    prompts = read_task(task, str(task_files))
    assert prompts
    for prompt in prompts:
        assert HUB[task].word(row_of(task, prompt)) == prompt


def test_wording_of_rows_written_by_hand():
    assert HUB["gsm8k"].word({"question": "1+1?", "answer": "2"}) == "1+1?" + REASONING
    assert HUB["aime25"].word({"problem": "1+1?"}) == "1+1?" + REASONING
    assert HUB["alpaca"].word({"instruction": "Add.", "input": ""}) == "Add."
    assert HUB["alpaca"].word({"instruction": "Add.", "input": "1, 2"}) == "Add.\n\nInput:\n1, 2"
    assert HUB["mt-bench"].word({"prompt": ["first", "second"]}) == "first"
    assert "```python\ndef f():\n```" in HUB["humaneval"].word({"prompt": "def f():"})
    with_code = HUB["livecodebench"].word({"question_content": "Sort.", "starter_code": "class Solution:"})
    assert "### Format: Use the following code structure:\n```python\nclass Solution:\n```" in with_code
    assert "# YOUR CODE HERE" in HUB["livecodebench"].word({"question_content": "Sort.", "starter_code": ""})


def test_selection_is_deepspecs(task_files):
    rows = [json.loads(line)["turns"][0] for line in (task_files / "gsm8k.jsonl").open(encoding="utf-8")]
    assert read_task("gsm8k", str(task_files)) == rows
    random.Random(980406).shuffle(rows)
    chosen = read_tasks(["gsm8k", "aime25"], prompts=str(task_files))
    assert chosen["gsm8k"] == rows[:500]
    assert len(chosen["aime25"]) == 30
    assert read_tasks(["gsm8k"], prompts=str(task_files), per_task=3)["gsm8k"] == rows[:3]


def test_selection_keeps_the_order_where_all_are_taken():
    prompts = ["a", "b", "c", "d"]
    assert select(prompts, None) == select(prompts, 4) == select(prompts, 9) == prompts
    assert select(prompts, 2, seed=1) == select(prompts, 3, seed=1)[:2]


def test_sources_in_their_order(tmp_path):
    file = write(tmp_path, "mine", "one", "two")
    assert read_tasks([file]) == {"mine": ["one", "two"]}
    assert read_tasks(["mine"], prompts=str(tmp_path)) == {"mine": ["one", "two"]}
    write(tmp_path, "gsm8k", "of the folder")
    assert read_task("gsm8k", str(tmp_path)) == ["of the folder"]
    builtin = read_task("builtin", str(tmp_path))
    assert len(builtin) == len(set(builtin)) == 24
    write(tmp_path, "builtin", "of the folder too")
    assert read_task("builtin", str(tmp_path)) == ["of the folder too"]
    with pytest.raises(UsageError, match="given twice"):
        read_tasks([file, "mine"], prompts=str(tmp_path))


def test_text_with_other_line_ends_is_one_prompt(tmp_path):
    file = tmp_path / "odd.jsonl"
    text = "one\u2028two\u0085three"
    file.write_text(json.dumps({"turns": [text, "later"]}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_file(file) == [text]


GOOD = b'{"turns": ["fine"]}\n'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (GOOD + b'{"turns": ["bro\n', "line 2 is not valid JSON"),
        (GOOD + b"[1]\n", "line 2 holds a JSON list"),
        (GOOD + GOOD + b'{"turn": ["x"]}\n', "line 3 has no field turns"),
        (b'{"turns": []}\n', "line 1: turns is"),
        (b'{"turns": "text"}\n', "line 1: turns is"),
        (b'{"turns": ["x", 3]}\n', "line 1: turns is"),
        (b'{"turns": [" "]}\n', "line 1: the first turn is blank"),
        (GOOD + b'{"turns": ["caf\xe9"]}\n', "line 2: byte 16 is not UTF-8"),
        (b"\n \n", "holds no prompts"),
        (b"", "holds no prompts"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, content, complaint):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_tasks(["builtin", str(file)])
    assert str(file) in str(caught.value)
    assert complaint in str(caught.value)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path, "mine", "one")
    for arguments, complaint in (
        (("gsm9k", str(tmp_path)), "gsm8k, math500, .*builtin, mine"),
        (("gsm9k", None), "task gsm9k is not known"),
        ((str(tmp_path / "no.jsonl"), None), "no.jsonl cannot be read"),
        (("gsm8k", str(tmp_path / "none")), "no folder"),
        (("gsm8k", str(tmp_path / "mine.jsonl")), "name it as a task: --task .*mine.jsonl"),
        (("gsm8k", str(tmp_path)), "pctree.bench.*--prompts"),
    ):
        with pytest.raises(UsageError, match=complaint):
            read_task(*arguments)


def test_the_hub_is_asked_for_what_is_nowhere_else(monkeypatch):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        if names[0] == "openai/gsm8k":
            return [{"question": "1+1?", "answer": "2"}]
        if names[0] == "json":
            return [{"question_content": "Sort.", "starter_code": ""}]
        if names[0] == "tatsu-lab/alpaca":
            return [{"text": "other fields"}]
        raise ConnectionError("no network\nhere")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_task("gsm8k") == ["1+1?" + REASONING]
    assert asked[0] == (("openai/gsm8k", "main"), {"split": "test"})
    assert "Sort." in read_task("livecodebench")[0]
    files = asked[1][1]["data_files"]
    assert files[0] == "hf://datasets/livecodebench/code_generation_lite/test.jsonl"
    assert len(files) == 6
    with pytest.raises(UsageError, match="row 1 has the fields text"):
        read_task("alpaca")
    with pytest.raises(UsageError, match=r"math500: .*no network here.*--prompts"):
        read_task("math500")


def test_all_nine_tasks_are_known():
    assert {name: task.count for name, task in HUB.items()} == {
        "gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500, "mt-bench": 80,
        "alpaca": 500, "arena-hard-v2": 500,
    }  # fmt: skip
    assert tasks.SEED == 980406
