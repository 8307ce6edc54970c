"""The prompts of a task: from a file of JSON lines, a folder of them, our own small set, or the Hugging Face hub.

Wording, order and selection are those of DeepSpec's evaluator (its ``eval.py`` and ``eval_datasets``), which words the tasks
as DFlash's benchmark does: the first turn of each conversation, shuffled with seed 980406 where fewer than all are taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pctree.bench.json_lines import read_json_lines
from pctree.errors import UsageError

SEED = 980406
BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).parent / "prompts" / "builtin.jsonl"
EXPECTED = 'expected {"turns": ["a prompt"]}'
Row = Mapping[str, Any]


def _reasoned(question: str) -> str:
    return f"{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def word_gsm8k(row: Row) -> str:
    return _reasoned(row["question"])


def word_math(row: Row) -> str:
    return _reasoned(row["problem"])


def word_humaneval(row: Row) -> str:
    instruction = "Write a solution to the following problem and make sure that it passes the tests:"
    return f"{instruction}\n```python\n{row['prompt']}\n```"


def word_prompt(row: Row) -> str:
    return row["prompt"]


def word_first_turn(row: Row) -> str:
    return row["prompt"][0]


def word_alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]


def word_livecodebench(row: Row) -> str:
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
        "for the program"
    )
    if row["starter_code"]:
        how, code = "Use the following code structure:", row["starter_code"]
    else:
        how, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return (
        f"{role}\n\n### Question:\n{row['question_content']}\n\n### Format: {how}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


@dataclass(frozen=True)
class HubTask:
    """Where a task is on the hub, how a row of it is worded, and how many prompts DeepSpec takes."""

    count: int
    repository: str
    word: Callable[[Row], str]
    split: str = "test"
    subset: str | None = None
    files: tuple[str, ...] = ()  # of a repository that is not a data set by itself


HUB = {
    "gsm8k": HubTask(500, "openai/gsm8k", word_gsm8k, subset="main"),
    "math500": HubTask(500, "HuggingFaceH4/MATH-500", word_math),
    "aime25": HubTask(30, "MathArena/aime_2025", word_math, split="train"),
    "humaneval": HubTask(164, "openai/openai_humaneval", word_humaneval),
    "mbpp": HubTask(256, "google-research-datasets/mbpp", word_prompt, subset="sanitized"),
    "livecodebench": HubTask(
        500,
        "livecodebench/code_generation_lite",
        word_livecodebench,
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
    ),
    "mt-bench": HubTask(80, "HuggingFaceH4/mt_bench_prompts", word_first_turn, split="train"),
    "alpaca": HubTask(500, "tatsu-lab/alpaca", word_alpaca, split="train"),
    "arena-hard-v2": HubTask(500, "lmarena-ai/arena-hard-auto", word_prompt, files=("data/arena-hard-v2.0/question.jsonl",)),
}


def task_name(task: str) -> str:
    """What a task is called in records: its name, or that of its file."""
    return Path(task).stem if task.endswith(".jsonl") else task


def read_tasks(
    tasks: Sequence[str], *, prompts: str | None = None, per_task: int | None = None, seed: int = SEED
) -> dict[str, list[str]]:
    """The chosen prompts of every task.

    Args:
        tasks: names, ``builtin``, or paths of ``.jsonl`` files.
        prompts: a folder that is searched for ``NAME.jsonl`` before the hub is asked.
        per_task: prompts to take; None is DeepSpec's own number, and all of a task that it does not know.

    Raises:
        UsageError: a task is unknown or given twice, or a file is damaged; file and line are named.
    """
    chosen: dict[str, list[str]] = {}
    for task in tasks:
        name = task_name(task)
        if name in chosen:
            raise UsageError(f"task {name} was given twice; records could not tell them apart, so rename a file or drop one")
        count = per_task or (HUB[name].count if name in HUB else None)
        chosen[name] = select(read_task(task, prompts), count, seed)
    return chosen


def select(prompts: Sequence[str], count: int | None, seed: int = SEED) -> list[str]:
    """The first ``count`` prompts after a shuffle; all of them, in their order, where there are no more than that."""
    if count is None or count >= len(prompts):
        return list(prompts)
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def read_task(task: str, folder: str | None = None) -> list[str]:
    """All prompts of a task, from the first of its sources that has it."""
    if task.endswith(".jsonl"):
        return read_file(Path(task).expanduser())
    if folder is not None:
        root = Path(folder).expanduser()
        if root.is_file():
            raise UsageError(f"prompts is {folder}, a file; give the folder it lies in, or name it as a task: --task {folder}")
        if not root.is_dir():
            raise UsageError(f"prompts is {folder}, which is no folder; give one that holds {task}.jsonl")
        if (root / f"{task}.jsonl").exists():
            return read_file(root / f"{task}.jsonl")
    if task == BUILTIN:
        return read_file(BUILTIN_FILE)
    if task in HUB:
        return read_hub(task)
    known = [*HUB, BUILTIN, *(sorted(file.stem for file in Path(folder).expanduser().glob("*.jsonl")) if folder else ())]
    raise UsageError(
        f"task {task} is not known; the tasks are {', '.join(dict.fromkeys(known))}, and any path to a .jsonl file"
    )


def read_file(file: Path) -> list[str]:
    """First turns of a file with one conversation a line."""
    prompts = [_first_turn(line.get("turns"), f"{file}, line {number}") for number, line in read_json_lines(file)]
    if not prompts:
        raise UsageError(f"{file} holds no prompts; {EXPECTED}, one a line")
    return prompts


def _first_turn(turns: Any, where: str) -> str:
    if turns is None:
        raise UsageError(f"{where} has no field turns; {EXPECTED}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UsageError(f"{where}: turns is {str(turns)[:60]!r}; {EXPECTED}, a list of one or more texts")
    if not turns[0].strip():
        raise UsageError(f"{where}: the first turn is blank; {EXPECTED}")
    return turns[0]


def read_hub(task: str) -> list[str]:
    """All prompts of a task of the Hugging Face hub, in DeepSpec's wording."""
    source = HUB[task]
    elsewhere = f"give a folder that holds {task}.jsonl with --prompts"
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(
            f"task {task} comes from the hub and needs the package datasets; pip install 'pctree[bench]', or {elsewhere}"
        ) from None
    try:
        if source.files:
            files = [f"hf://datasets/{source.repository}/{file}" for file in source.files]
            rows = load_dataset("json", data_files=files, split="train")
        else:
            rows = load_dataset(source.repository, source.subset, split=source.split)
    except Exception as error:  # network, hub and format errors alike mean that it is not to be had
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UsageError(f"task {task}: the hub did not give {source.repository} ({reason}); {elsewhere}") from None
    prompts = []
    for number, row in enumerate(rows, 1):
        where = f"{source.repository}, row {number}"
        try:
            worded = source.word(row)
        except (KeyError, IndexError, TypeError):
            raise UsageError(f"{where} has the fields {', '.join(row)}, which task {task} cannot word; {elsewhere}") from None
        prompts.append(_first_turn([worded], where))
    if not prompts:
        raise UsageError(f"{source.repository} holds no prompts; {elsewhere}")
    return prompts
