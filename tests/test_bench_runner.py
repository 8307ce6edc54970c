"""Runs of the harness on tiny models: what is recorded, resumed and shared, and how the command behaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby

import pytest
import tiny
import torch
import yaml
from byte_tokenizer import ascii_tokenizer, byte_tokenizer

from pctree.bench.config import BenchConfig
from pctree.bench.machine import Shard
from pctree.bench.records import identity, read_records
from pctree.bench.runner import Bench, repeats_itself
from pctree.bench.summary import acceptance_length
from pctree.cli.common import out as console
from pctree.drafters import save_drafter
from pctree.economy import Economy
from pctree.errors import CheckpointError, UsageError
from pctree.profiles import Profile

PROMPTS = {"alpha": ["Hello", "Good day"], "beta": ["1+1"]}
CELLS = [
    {"drafter": "b7", "method": ["dspark", "pctree"], "top_k": 3, "budget": 12},
    {"drafter": "dflash", "method": ["dflash", "ddtree"], "budget": 12},
]
METHODS = ["ar", "dspark", "pctree", "dflash", "ddtree"]
TOKENS = 6
ALL = len(METHODS) * 3  # decodings of a whole run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, two drafters and two tasks, saved as a user would have them."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny.target("qwen3", vocab=260, seed=2, max_length=120)
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    save_drafter(tiny.drafter(model, confidence=True), folder / "b7", dtype=torch.float32)
    save_drafter(tiny.drafter(model, None, block_size=4), folder / "dflash", dtype=torch.float32)
    for task, prompts in PROMPTS.items():
        lines = "".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts)
        (folder / f"{task}.jsonl").write_text(lines)
    return folder


def config(models, **changes):
    settings = {
        "target": str(models / "target"), "drafters": {"b7": str(models / "b7"), "dflash": str(models / "dflash")},
        "tasks": ["alpha", "beta"], "prompts": str(models), "max_new_tokens": TOKENS, "dtype": "float32", "device": "cpu",
        "cells": CELLS,
    }  # fmt: skip
    return BenchConfig.from_settings(settings | changes)


def measured(record):
    """A record without what differs from one time to the next."""
    timing = ("seconds", "tokens_per_second", "time_to_first_token_ms", "stage_ms", "peak_memory_mb", "environment")
    return {name: value for name, value in record.items() if name not in timing}


def by_identity(records):
    return sorted((measured(record) for record in records), key=lambda record: json.dumps(record, sort_keys=True))


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """The folder of a whole run, in one process."""
    output = tmp_path_factory.mktemp("finished")
    bench = Bench(config(models), output)
    assert bench.run()
    return output


def test_the_confidence_of_whole_chains_is_recorded(finished):
    for record in read_records([finished])[0]:
        if record["method"] != "dspark":
            assert record["confidences"] is None
            continue
        assert len(record["confidences"]) == record["rounds"]
        assert {len(chain) for chain in record["confidences"]} == {record["block_size"]}
        assert all(0 <= chance <= 1 for chain in record["confidences"] for chance in chain)


def test_a_threshold_shortens_the_chain(models, tmp_path):
    cells = [{"drafter": "b7", "method": "dspark", "confidence_threshold": [0.0, 0.9]}]
    bench = Bench(config(models, cells=cells), tmp_path)
    assert bench.run()
    records = [record for record in read_records([tmp_path])[0] if record["method"] == "dspark"]
    nodes = {record["confidence_threshold"]: record["tree_nodes"] for record in records}
    assert nodes[0.9] < nodes[0.0]


def test_an_automatic_budget_takes_its_costs_from_a_profile(models, tmp_path):
    cells = [{"drafter": "b7", "method": "pctree", "budget": "auto"}]
    with pytest.raises(UsageError, match=r"pctree tune"):
        Bench(config(models, cells=cells, profile="off"), tmp_path / "run")
    settings = {"method": "pctree", "top_k": 4, "budget": 8, "frontier": "capped", "candidates": 0}
    Profile({}, settings, Economy({1: 1.0, 2: 1e6}, 1.0)).save(tmp_path / "dear.json")
    bench = Bench(config(models, cells=cells, profile=str(tmp_path / "dear.json")), tmp_path / "run")
    assert bench.run()
    records = [record for record in read_records([tmp_path / "run"])[0] if record["method"] == "pctree"]
    assert {record["budget"] for record in records} == {"auto"}
    assert {record["tree_nodes"] for record in records} == {1.0}  # rows this dear do not pay
    assert all(record["first_difference"] is None for record in records)


def test_every_cell_decodes_every_prompt_with_the_tokens_of_plain_decoding(models, finished):
    records, environments = read_records([finished])
    assert len(records) == ALL
    assert [(line["dtype"], line["device"]) for line in environments.values()] == [("float32", "cpu")]
    assert all(line["git_commit"] is None or len(line["git_commit"]) == 40 for line in environments.values())
    plain = {(r["task"], r["index"]): r["token_ids"] for r in records if r["method"] == "ar"}
    assert {task: sum(key[0] == task for key in plain) for task in PROMPTS} == {"alpha": 2, "beta": 1}
    for record in records:
        assert record["environment"] in environments
        assert record["token_ids"] == plain[record["task"], record["index"]]
        assert (record["first_difference"], record["margin"]) == (None, None)
        assert record["tokens"] == len(record["token_ids"]) == TOKENS
        assert record["finish_reason"] == "length"
        assert record["repeats_itself"] is False
        assert record["seconds"] > 0
        assert record["peak_memory_mb"] > 1
        assert record["rounds"] == len(record["acceptance_lengths"]) > 0
        assert len(record["prompt_sha256"]) == 16
        assert record["stage_ms"].keys() == {"draft", "tree", "verify", "commit"}
        assert record["target"] == str(models / "target")
    assert len({record["prompt_sha256"] for record in records}) == 3


def test_records_say_how_they_were_decoded(finished, models):
    found = {
        (r["method"], r["drafter"], r["block_size"], r["top_k"], r["budget"], r["frontier"])
        for r in read_records([finished])[0]
    }
    assert found == {
        ("ar", None, None, None, None, None),
        ("dspark", "b7", 7, 1, 8, None),
        ("pctree", "b7", 7, 3, 12, "capped"),
        ("dflash", "dflash", 4, 1, 5, None),
        ("ddtree", "dflash", 4, None, 12, None),
    }
    assert {r["drafter_source"] for r in read_records([finished])[0]} == {None, str(models / "b7"), str(models / "dflash")}


def test_all_cells_take_a_prompt_before_the_next_in_an_order_that_rotates(finished):
    records = read_records([finished])[0]
    groups = [list(group) for _, group in groupby(records, key=lambda r: (r["task"], r["index"]))]
    assert [(group[0]["task"], group[0]["index"]) for group in groups] == [
        ("alpha", 0), ("beta", 0), ("alpha", 1),
    ]  # fmt: skip
    for number, group in enumerate(groups):
        assert [record["method"] for record in group] == METHODS[number:] + METHODS[:number]


def test_a_finished_run_has_nothing_to_do(models, finished):
    before = (finished / "records.jsonl").read_bytes()
    assert Bench(config(models), finished).run(lambda *_: pytest.fail("decoded again"))
    assert (finished / "records.jsonl").read_bytes() == before


def test_cells_added_later_are_compared_with_what_is_there(models, finished, tmp_path):
    (tmp_path / "records.jsonl").write_bytes((finished / "records.jsonl").read_bytes())
    more = Bench(config(models, cells=[{"drafter": "b7", "method": "pctree", "frontier": "exact", "budget": 6}]), tmp_path)
    count = []
    assert more.run(lambda cell, prompt: count.append(cell.label))
    assert count == ["pctree b7 exact N=6"] * 3
    assert len(read_records([tmp_path])[0]) == ALL + 3


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_a_run_killed_in_the_middle_of_a_line_resumes(models, finished, tmp_path, share):
    whole = (finished / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole[: int(share * len(whole))])
    kept = whole[: int(share * len(whole))].count(b"\n")
    assert Bench(config(models), tmp_path).run()
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").open()]
    identities = [identity(line) for line in lines if line["kind"] == "record"]
    assert len(identities) == len(set(identities)) == ALL
    assert (tmp_path / "records.jsonl").read_bytes().startswith(b"\n".join(whole.split(b"\n")[:kept]))
    assert by_identity(read_records([tmp_path])[0]) == by_identity(read_records([finished])[0])


def test_an_interrupted_run_keeps_finished_prompts_and_resumes(models, finished, tmp_path):
    decoded = []
    stopped = Bench(config(models), tmp_path)
    assert not stopped.run(lambda *step: decoded.append(step), lambda: len(decoded) == 8)
    assert len(read_records([tmp_path])[0]) == len(METHODS)  # of the second prompt, three were decoded and none is kept

    def kill(*step):
        decoded.append(step)
        if len(decoded) == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Bench(config(models), tmp_path).run(kill)
    assert len(read_records([tmp_path])[0]) == 2 * len(METHODS)
    assert Bench(config(models), tmp_path).run()
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").open()]
    assert sum(line["kind"] == "record" for line in lines) == ALL
    assert by_identity(read_records([tmp_path])[0]) == by_identity(read_records([finished])[0])


def test_repeats_and_sampling_have_their_own_seeds(models, tmp_path):
    sampled = config(models, tasks=["alpha"], repeats=2, drafters={"b7": str(models / "b7")},
                     cells=[{"drafter": "b7", "method": "pctree", "temperature": 1.0}])  # fmt: skip
    for folder in ("one", "two"):
        assert Bench(sampled, tmp_path / folder).run()
    one, two = (read_records([tmp_path / folder])[0] for folder in ("one", "two"))
    assert by_identity(one) == by_identity(two)
    assert len(one) == 2 * 2 * 2
    texts = {(r["method"], r["index"], r["repeat"]): tuple(r["token_ids"]) for r in one}
    assert len({texts["pctree", 0, 0], texts["pctree", 0, 1], texts["pctree", 1, 0]}) == 3
    assert all(r["first_difference"] is None and r["temperature"] == 1.0 for r in one)


def test_a_difference_from_plain_decoding_is_noted(models, tmp_path, monkeypatch):
    bench = Bench(config(models, tasks=["beta"], cells=CELLS[:1]), tmp_path)
    generate = bench._generate

    def other(cell, prompt, repeat, count):
        result, confidences = generate(cell, prompt, repeat, count)
        if cell.method == "dspark":
            result.token_ids[3] = (result.token_ids[3] + 1) % 260
        if cell.method == "pctree":
            del result.token_ids[5:]
        return result, confidences

    monkeypatch.setattr(bench, "_generate", other)
    assert bench.run()
    for record in read_records([tmp_path])[0]:
        position = {"ar": None, "dspark": 3, "pctree": 5}[record["method"]]
        assert record["first_difference"] == position
        assert (record["margin"] is not None) == (record["method"] == "dspark")
        assert record["margin"] is None or record["margin"] > 0


def test_equal_prompts_of_a_task_are_decoded_once(models, tmp_path):
    file = tmp_path / "twice.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("one", "two", "one")))
    bench = Bench(config(models, tasks=[str(file)], cells=[{"method": "ar"}]), tmp_path / "run")
    assert [(prompt.task, prompt.index) for prompt in bench.prompts] == [("twice", 0), ("twice", 1)]


def test_nothing_is_written_when_something_cannot_be_used(models, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text('{"turns": ["short"]}\n{"turns": ["%s"]}\n' % ("x" * 120))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"turns": ["short"]}\n{"turns": \n')
    other = tiny.target("llama", vocab=60, seed=1)
    save_drafter(tiny.drafter(other), tmp_path / "other", dtype=torch.float32)
    for changes, error, complaint in (
        ({"tasks": ["alpha", str(long)]}, UsageError, "prompt 1 of task long has .* context holds 120"),
        ({"tasks": ["alpha", str(broken)]}, UsageError, "broken.jsonl, line 2"),
        ({"drafters": {"b7": str(tmp_path / "other"), "dflash": "x"}, "cells": CELLS[:1]}, CheckpointError, "vocabulary is 60"),
        ({"cells": [{"drafter": "dflash", "method": "pctree"}]}, UsageError, "cell pctree dflash .*needs a Markov head"),
        ({"target": str(tmp_path / "none"), "cells": [{"method": "ar"}]}, CheckpointError, "does not exist"),
        ({"device": "abacus"}, UsageError, "device is 'abacus'"),
    ):
        with pytest.raises(error, match=complaint):
            Bench(config(models, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_loops_at_the_end_of_a_text():
    words = list(range(100))
    assert not repeats_itself(words)
    assert repeats_itself([*words, *[7] * 48])
    assert not repeats_itself([*words, *[7] * 47])
    assert repeats_itself([*words, *list(range(16)) * 3])
    assert not repeats_itself([*words, *list(range(17)) * 3])
    assert repeats_itself([1, 2, 3] * 16)
    assert not repeats_itself([1, 2, 3] * 15)
    assert not repeats_itself([])


def test_the_share_of_a_process():
    assert Shard.from_environment({}) == Shard(0, 1, 0)
    second = Shard.from_environment({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"})
    assert [number for number in range(7) if second.takes(number)] == [1, 4]
    assert second.file_name == "records.rank1.jsonl"
    assert second.device("cpu") == "cpu"
    assert second.device("cuda") == "cuda:1"
    assert second.device("cuda:0") == "cuda:0"
    assert Shard().device("cuda") == "cuda"
    for wrong in ({"RANK": "3", "WORLD_SIZE": "3"}, {"RANK": "one"}, {"WORLD_SIZE": "0"}):
        with pytest.raises(UsageError, match="RANK="):
            Shard.from_environment(wrong)


def test_another_number_of_processes_goes_on_with_a_run(models, finished, tmp_path):
    decoded = []
    assert Bench(config(models), tmp_path, Shard(1, 2)).run(lambda *step: decoded.append(step))
    assert [file.name for file in tmp_path.iterdir()] == ["records.rank1.jsonl"]
    assert len(decoded) == len(METHODS)
    assert Bench(config(models), tmp_path).run()
    assert by_identity(read_records([tmp_path])[0]) == by_identity(read_records([finished])[0])
    assert sum(len(file.read_text().split('"record"')) - 1 for file in tmp_path.iterdir()) == ALL


def command(models, output, *more):
    return ["bench", "--target", str(models / "target"), "--drafter", f"b7={models / 'b7'}", "--prompts", str(models),
            "--task", "alpha", "--task", "beta", "--max-new-tokens", str(TOKENS), "--budget", "12", "--dtype", "float32",
            "--device", "cpu", "--output", str(output), *more]  # fmt: skip


def test_two_processes_give_the_totals_of_one(models, run, tmp_path, monkeypatch):
    second = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    program = [sys.executable, "-c", "from pctree.cli import main; main()", *command(models, tmp_path / "two")]
    process = subprocess.Popen(program, env=second, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setenv("WORLD_SIZE", "2")  # this process is the first
    code, out, err = run(*command(models, tmp_path / "two"))
    monkeypatch.delenv("WORLD_SIZE")
    assert code == 0, err
    assert "3 prompts × 1 repeats = 12 decodings, 8 to do of the first of 2 processes" in err
    assert process.communicate(timeout=120) == ("", "")  # the first one speaks for all
    assert process.returncode == 0

    code, out, err = run(*command(models, tmp_path / "one", "--json"))
    assert code == 0, err
    one, two = (read_records([tmp_path / folder])[0] for folder in ("one", "two"))
    assert {file.name for file in (tmp_path / "two").iterdir()} == {"records.jsonl", "records.rank1.jsonl"}
    assert len(two) == 12
    assert by_identity(one) == by_identity(two)
    summary = json.loads(out)
    assert (summary["complete"], summary["records"], summary["decodings"]) == (True, 12, 12)
    row = next(row for row in summary["cells"] if row["method"] == "dspark")
    mine = [r for r in one if r["method"] == "dspark" and r["task"] == "alpha"]
    assert row["tasks"]["alpha"]["acceptance_length"] == pytest.approx(acceptance_length(mine), abs=1e-4)
    assert row["tasks"]["alpha"]["records"] == 2
    assert summary["cells"][0]["speedup"] == 1.0


def test_the_command_shows_the_matrix_a_table_and_what_is_next(models, run, tmp_path, monkeypatch):
    arguments = command(models, tmp_path, "--method", "dspark,pctree", "--top-k", "1,3", "--per-task", "1")
    code, out, err = run(*arguments, "--dry-run")
    assert code == 0
    assert out.split("\n")[:4] == ["ar", "dspark b7", "pctree b7 k=1 N=12", "pctree b7 k=3 N=12"]
    assert not list(tmp_path.iterdir())
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "4 cells × 2 prompts × 1 repeats = 8 decodings, 8 to do" in err
    assert f"pctree report {tmp_path}" in err
    for heading in ("alpha", "beta", "mean", "pctree b7 k=3 N=12", "1.00×"):
        assert heading in out
    monkeypatch.setattr(console, "width", 50)
    code, out, err = run(*arguments)
    assert code == 0
    assert "8 decodings, 0 to do" in err
    assert "alpha" not in out
    assert "mean over tasks" in out  # all that a narrow terminal can show


def test_flags_win_over_a_file(models, run, tmp_path):
    file = tmp_path / "bench.yaml"
    grids = [{"drafter": ["b7", "b16"], "method": ["dspark", "pctree"]}, {"drafter": "dflash", "method": "ddtree"}]
    settings = {"drafters": {"b7": "x", "b16": None, "dflash": "y"}, "tasks": ["alpha"], "repeats": 3, "cells": grids}
    file.write_text(yaml.safe_dump(settings))

    def dry(*flags):
        code, out, err = run("bench", "--config", str(file), "--dry-run", "--json", *flags)
        assert code == 0, err
        facts = json.loads(out)
        return facts, [cell["label"] for cell in facts["cells"]], err

    facts, labels, err = dry("--drafter", "dflash=z")
    assert labels == ["ar", "dspark b7", "pctree b7 k=4 N=32", "ddtree dflash N=32"]
    assert facts["drafters"] == {"b7": "x", "b16": None, "dflash": "z"}
    assert "--drafter b16=SOURCE" in err
    assert len(dry("--drafter", "b16=a/b")[1]) == 6
    assert dry("--drafter", "dflash=")[1] == ["ar", "dspark b7", "pctree b7 k=4 N=32"]
    assert dry("--budget", "8,16", "--temperature", "0.7")[1] == [
        "ar T=0.7", "dspark b7 T=0.7", "pctree b7 k=4 N=8 T=0.7", "pctree b7 k=4 N=16 T=0.7", "ddtree dflash N=8 T=0.7",
        "ddtree dflash N=16 T=0.7",
    ]  # fmt: skip
    assert dry("--method", "dflash")[1] == ["ar", "dflash b7", "dflash dflash"]
    assert dry("--task", "beta")[0]["tasks"] == ["beta"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--config", "a.yaml", "--preset", "quick"], "give one of them"),
        (["--preset", "best"], "the presets are"),
        (["--top-k", "1,many"], "--top-k is '1,many'"),
        (["--method", "magic"], "method is 'magic'"),
        (["--task", "gsm9k"], "the tasks are gsm8k"),
        (["--preset", "quick", "--drafter", "b9=x"], "no cell uses b9"),
        (["--preset", "paper-main", "--drafter", "x"], "says not which it is"),
        (["--per-task", "0"], "per_task is 0"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_bad_flags_are_one_line_and_an_exit_code(run, tmp_path, flags, complaint):
    code, out, err = run("bench", "--output", str(tmp_path / "run"), *flags)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_ctrl_c_says_how_to_go_on(models, run, tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "run", lambda self, decoded, should_stop: False)
    code, _, err = run(*command(models, tmp_path))
    assert code == 130
    assert "Run the same command again" in err


@pytest.mark.slow
def test_tau_of_every_chain_is_deepspecs(golden, tmp_path):
    """The harness over the golden prompts finds the mean acceptance lengths that the official evaluators found."""
    target = tmp_path / "target"
    target.mkdir()
    for file in (golden / "target").iterdir():
        (target / file.name).symlink_to(file)
    ascii_tokenizer().save_pretrained(target)
    names = ("dspark_vanilla_b7", "dspark_gated_b7", "dspark_rnn_b7", "dspark_vanilla_b16", "dflash_b7", "dflash_zlab_b8",
             "eagle3_ttt7")  # fmt: skip
    chains = {name: name.split("_")[0] for name in names}
    expected = {name: json.loads((golden / f"{name}.expected.json").read_text()) for name in chains}
    prompts = [bytes(case["prompt_ids"]).decode("ascii") for case in expected["dflash_b7"]["cases"]]
    task = tmp_path / "golden.jsonl"
    task.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in prompts))
    settings = {
        "target": str(target), "drafters": {name: str(golden / name) for name in chains}, "tasks": [str(task)],
        # DeepSpec's limit of 96 leaves out the pending token that ours counts.
        "max_new_tokens": 97, "dtype": "float32", "device": "cpu",
        "cells": [{"drafter": name, "method": method, "top_k": 1} for name, method in chains.items()],
    }  # fmt: skip
    assert Bench(BenchConfig.from_settings(settings), tmp_path / "run").run()
    records = read_records([tmp_path / "run"])[0]
    assert all(record["first_difference"] is None for record in records)
    for name in chains:
        theirs = [
            length
            for case in expected[name]["cases"]
            for length in case.get("acceptance_lengths", case.get("chain_acceptance_lengths"))
        ]
        tau = acceptance_length(record for record in records if record["drafter"] == name)
        assert tau == pytest.approx(sum(theirs) / len(theirs))
        assert tau == pytest.approx(expected[name].get("deepspec_tau", tau), abs=5e-5)
