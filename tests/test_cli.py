"""The command line as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer

from pctree.drafters import save_drafter

VOCAB = 260
ENDED = "<e>"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> dict[str, str]:
    """A target with a tokenizer, one without, and a drafter, saved as a user would have them."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny.target("qwen3", vocab=VOCAB, seed=2, max_length=200)
    model.save_pretrained(folder / "target")
    model.save_pretrained(folder / "bare")
    byte_tokenizer().save_pretrained(folder / "target")
    save_drafter(tiny.drafter(model), folder / "drafter", dtype=torch.float32)
    save_drafter(tiny.drafter(model, None), folder / "dflash", dtype=torch.float32)
    return {name: str(folder / name) for name in ("target", "bare", "drafter", "dflash")}


def generate(pair, *more: str, target: str = "target", drafter: str = "drafter") -> list[str]:
    return ["generate", "--target", pair[target], "--drafter", pair[drafter], "--dtype", "float32", "--max-new-tokens", "12",
            *more]  # fmt: skip


def test_json_is_one_object_with_the_promised_keys(run, pair):
    code, out, _ = run(*generate(pair, "--prompt", "Hello", "--json"))
    assert code == 0
    record = json.loads(out)
    assert {"text", "token_ids", "prompt_tokens", "method", "stats"} <= record.keys()
    assert {"rounds", "acceptance_length", "acceptance_lengths", "tree_nodes", "tokens_per_second",
            "time_to_first_token_ms", "stage_ms"} <= record["stats"].keys()  # fmt: skip
    assert record["stats"]["stage_ms"].keys() == {"draft", "tree", "verify", "commit"}
    assert len(record["token_ids"]) == 12
    assert record["method"] == "pctree"


def test_every_method_gives_the_same_tokens(run, pair):
    methods = ("ar", "dspark", "shared-markov", "pctree", "dflash", "ddtree")
    outputs = {m: json.loads(run(*generate(pair, "--prompt", "Hello", "--json", "--method", m))[1]) for m in methods}
    assert len({tuple(record["token_ids"]) for record in outputs.values()}) == 1
    exact = run(*generate(pair, "--prompt", "Hello", "--json", "--frontier", "exact", "--budget", "9"))[1]
    assert json.loads(exact)["token_ids"] == outputs["ar"]["token_ids"]


def test_token_ids_need_no_tokenizer(run, pair):
    code, out, _ = run(*generate(pair, "--prompt-ids", "5,6,7", "--json", target="bare"))
    assert code == 0
    record = json.loads(out)
    assert "text" not in record
    assert record["prompt_tokens"] == 3
    assert run(*generate(pair, "--prompt-ids", "5,6,7", target="bare"))[1].strip() == ",".join(map(str, record["token_ids"]))


def test_prompt_comes_from_a_flag_a_file_or_standard_input(run, pair, tmp_path):
    (tmp_path / "prompt.txt").write_text("Hello")
    flag = json.loads(run(*generate(pair, "--json", "--prompt", "Hello"))[1])
    file = json.loads(run(*generate(pair, "--json", "--prompt-file", str(tmp_path / "prompt.txt")))[1])
    piped = json.loads(run(*generate(pair, "--json"), stdin="Hello")[1])
    assert flag["token_ids"] == file["token_ids"] == piped["token_ids"]
    raw = json.loads(run(*generate(pair, "--json", "--prompt", "Hello", "--raw"))[1])
    assert raw["prompt_tokens"] == 5
    system = json.loads(run(*generate(pair, "--json", "--prompt", "Hello", "--system", "Be brief."))[1])
    assert system["prompt_tokens"] > flag["prompt_tokens"]


def test_streamed_text_is_the_text(run, pair):
    whole = run(*generate(pair, "--prompt", "Hello"))[1]
    streamed = run(*generate(pair, "--prompt", "Hello", "--stream"))[1]
    assert streamed == whole


def test_stats_go_to_standard_error(run, pair):
    _, out, err = run(*generate(pair, "--prompt", "Hello", "--stats"))
    assert "acceptance length" in err
    assert "acceptance length" not in out


def test_show_tree_marks_what_was_accepted(run, pair):
    """The accepted tokens (✓) and bonus tokens (★) of all rounds, put together, are the output."""
    code, out, _ = run(*generate(pair, "--prompt-ids", "5,6,7", "--show-tree", target="bare"))
    assert code == 0
    assert "round 1" in out
    assert "★" in out
    last = out.strip().splitlines()[-1]
    tokens = last.split(",")
    assert len(tokens) == 12
    starred = [line.split("★")[1].split()[0] for line in out.splitlines() if "★" in line]
    assert all(token in tokens for token in starred)


def test_inspect_says_it_in_words_and_in_json(run, pair):
    code, out, _ = run("inspect", pair["drafter"])
    assert code == 0
    assert "DSpark drafter" in out
    code, out, _ = run("inspect", pair["drafter"], "--json")
    facts = json.loads(out)
    assert facts["block_size"] == 7
    assert facts["markov_head"] == "vanilla"
    assert "pctree" in facts["methods"]
    facts = json.loads(run("inspect", pair["dflash"], "--json")[1])
    assert facts["method"] == "dflash"
    assert "pctree" not in facts["methods"]


def bad(pair, **changes: str) -> list[str]:
    """``generate`` with some flags changed."""
    flags = {"target": pair["target"], "drafter": pair["drafter"], "dtype": "float32", "prompt": "Hello"} | changes
    return ["generate", *(part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value))]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"budget": "0"}, 2, "budget is 0"),
        ({"top_k": "0"}, 2, "top_k is 0"),
        ({"top_k": "9999"}, 2, "vocabulary of 260"),
        ({"method": "magic"}, 2, "the methods are"),
        ({"frontier": "wide"}, 2, "capped, exact"),
        ({"prompt": " "}, 2, "the prompt is empty"),
        ({"prompt": "x" * 400}, 2, "context holds 200"),
        ({"prompt_ids": "1,2"}, 2, "give one of them"),
        ({"max_new_tokens": "0"}, 2, "max_new_tokens"),
        ({"max_new_tokens": "many"}, 2, "max-new-tokens"),
        ({"dtype": "int3"}, 2, "dtype"),
        ({"device": "abacus"}, 2, "device"),
        ({"target": "/no/such/model"}, 1, "does not exist"),
        ({"drafter": "/no/such/drafter"}, 1, "does not exist"),
        ({"prompt_file": "/no/such/file"}, 2, "give one of them"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(run, pair, changes, code, message):
    found, out, err = run(*bad(pair, **changes))
    assert found == code
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert out == ""
    if err.startswith("Error"):
        assert err.count("\n") == 1


def test_more_bad_input(run, pair, tmp_path):
    for arguments, code, message in (
        (generate(pair, "--prompt-ids", "1,x"), 2, "--prompt-ids"),
        (generate(pair, "--prompt-ids", "1,999"), 2, "token id 999"),
        (generate(pair, "--prompt-ids", "1,2", "--raw"), 2, "--raw"),
        (generate(pair, "--prompt", "a", "--json", "--stream"), 2, "--json"),
        (generate(pair, "--prompt", "a", "--raw", "--system", "b"), 2, "system"),
        (generate(pair, "--prompt", "a", target="bare"), 2, "token ids"),
        (generate(pair, "--prompt-file", "/no/such/file"), 2, "/no/such/file"),
        (generate(pair, "--prompt", "a", drafter="dflash"), 2, "needs a Markov head"),
        (["inspect", str(tmp_path)], 1, "config.json is missing"),
        (["nonsense"], 2, "nonsense"),
    ):
        found, out, err = run(*arguments)
        assert found == code, (arguments, err)
        assert message in err
        assert "Traceback" not in err
        assert out == ""


def test_a_drafter_for_another_target_is_refused(run, pair, tmp_path):
    other = tiny.target("llama", vocab=60, seed=1)
    save_drafter(tiny.drafter(other), tmp_path / "other", dtype=torch.float32)
    code, _, err = run(*bad(pair, drafter=str(tmp_path / "other")))
    assert code == 1
    assert "vocabulary is 60, the target's 260" in err


def test_synth_then_train_then_generate(run, pair, tmp_path):
    """The whole way on a tiny target: write data, go on with it, train, resume nothing, decode with the result."""
    data, output = tmp_path / "data.jsonl", tmp_path / "run"
    synth = ["synth", "--target", pair["target"], "--output", str(data), "--rows", "4", "--max-prompt", "6",
             "--max-answer", "12", "--dtype", "float32"]  # fmt: skip
    assert run(*synth, "--answer-tokens", "100")[0] == 0
    before = data.read_text()
    code, _, err = run(*synth, "--answer-tokens", "200")
    assert code == 0
    assert data.read_text().startswith(before)
    assert "answer tokens" in err
    config = tmp_path / "train.yaml"
    config.write_text("layers: 1\nmarkov_rank: 4\nmask_token_id: 3\nheld_out: 0.2\nwarmup_steps: 1\n")
    train = ["train", "--target", pair["target"], "--data", str(data), "--output", str(output), "--config", str(config),
             "--steps", "3", "--sequences", "2", "--anchors", "2"]  # fmt: skip
    code, _, err = run(*train)
    assert code == 0, err
    facts = json.loads(run("inspect", str(output / "drafter"), "--json")[1])
    assert facts["layers"] == 1
    assert not facts["own_output_head"]
    arguments = ["generate", "--target", pair["target"], "--prompt", "Hi", "--json", "--max-new-tokens", "9"]
    code, out, err = run(*arguments, "--drafter", str(output / "drafter"))
    assert code == 0, err
    assert json.loads(out)["token_ids"]
    code, _, err = run(*train[:-4], "--sequences", "3", "--anchors", "2")
    assert code == 2
    assert "sequences 2 → 3" in err


def test_bad_training_input(run, pair, tmp_path):
    config = tmp_path / "bad.yaml"
    config.write_text("colour: red\n")
    train = ["train", "--target", pair["target"], "--output", str(tmp_path / "run")]
    assert run(*train, "--data", "/no/such/data.jsonl")[0] == 2
    code, _, err = run(*train, "--data", "x", "--config", str(config))
    assert code == 2
    assert "colour" in err
    assert run(*train, "--data", "x", "--config", "/no/such.yaml")[0] == 2
    assert run("synth", "--target", pair["target"], "--output", str(tmp_path / "d.jsonl"), "--rows", "0")[0] == 2
    assert run("synth", "--target", pair["bare"], "--output", str(tmp_path / "d.jsonl"))[0] == 2
    assert not Path(tmp_path / "d.jsonl").exists()


def start(*arguments: str) -> subprocess.Popen:
    """``pctree`` in a process of its own, so that it can be interrupted as a user does it."""
    program = [sys.executable, "-c", "from pctree.cli import main; main()", *arguments]
    return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def interrupt_when(process: subprocess.Popen, ready) -> tuple[int, str]:
    """Send Ctrl-C as soon as ``ready()``; gives the exit code and standard error."""
    for _ in range(1200):
        if ready() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_ctrl_c_leaves_files_from_which_synth_and_train_resume(run, pair, tmp_path):
    data, output = tmp_path / "data.jsonl", tmp_path / "run"
    synth = ["synth", "--target", pair["target"], "--output", str(data), "--rows", "4", "--max-prompt", "6",
             "--max-answer", "12", "--dtype", "float32"]  # fmt: skip
    process = start(*synth, "--answer-tokens", "1000000000")
    code, err = interrupt_when(process, lambda: data.exists() and data.stat().st_size > 2000)
    assert code == 130
    assert "go on" in err
    assert "Traceback" not in err
    text = data.read_text()
    assert text.endswith("\n")
    written = sum(stop - start for line in text.splitlines() for start, stop in json.loads(line)["answers"])
    assert run(*synth, "--answer-tokens", str(written + 20))[0] == 0
    assert data.read_text().startswith(text)

    train = ["train", "--target", pair["target"], "--data", str(data), "--output", str(output), "--layers", "1",
             "--sequences", "2", "--anchors", "2", "--steps", "100000"]  # fmt: skip
    process = start(*train)
    code, err = interrupt_when(process, lambda: (output / "log.jsonl").exists() and (output / "log.jsonl").stat().st_size > 0)
    assert code == 130, err
    assert "Saved step" in err
    assert "Traceback" not in err
    step = torch.load(output / "checkpoint.pt", weights_only=True)["step"]
    assert step >= 20  # the first line of the log
    assert not (output / "drafter").exists()


def test_sampling_flags(run, pair):
    one = run(*generate(pair, "--prompt", "Hello", "--json", "--temperature", "1", "--seed", "3", "--top-p", "0.9"))
    two = run(*generate(pair, "--prompt", "Hello", "--json", "--temperature", "1", "--seed", "3", "--top-p", "0.9"))
    assert one[0] == 0
    assert json.loads(one[1])["token_ids"] == json.loads(two[1])["token_ids"]
    text = json.loads(run(*generate(pair, "--prompt", "Hello", "--json"))[1])["text"]
    stopped = json.loads(run(*generate(pair, "--prompt", "Hello", "--json", "--stop", text[4:6]))[1])
    assert stopped["text"] == text[: text.index(text[4:6])]
    for flags, message in (
        (("--temperature", "-1"), "temperature is -1"),
        (("--top-p", "0.5"), "top_p is 0.5 but temperature is 0"),
        (("--stop", ""), "stop is"),
    ):
        code, out, err = run(*generate(pair, "--prompt", "Hello", *flags))
        assert (code, out) == (2, "")
        assert message in err


def test_audit_and_its_exit_code(run, pair, monkeypatch, tmp_path):
    arguments = ["audit", "--target", pair["target"], "--drafter", pair["drafter"], "--dtype", "float32",
                 "--max-new-tokens", "10"]  # fmt: skip
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["methods"][1]["flips"] == []
    code, out, _ = run(*arguments)
    assert code == 0
    assert "Nothing that rounding does not explain" in out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    sampling = run(*arguments, "--prompts", str(prompts), "--temperature", "1.0", "--draws", "200", "--json")
    assert sampling[0] == 0
    assert json.loads(sampling[1])["prompts"][0]["draws"] == 200
    from pctree.batch import Batch

    def cheat(self, tree, ancestor_mask, logits):
        return logits.argmin(-1) if tree.nodes > 1 else logits.argmax(-1)  # plain decoding stays honest

    monkeypatch.setattr(Batch, "choose", cheat)
    code, out, _ = run(*arguments)
    assert code == 1
    assert "does NOT explain" in out
    assert "first flip of each prompt" in out


def test_chat_streams_undoes_and_starts_over(run, pair, monkeypatch):
    said = iter(["Hi", "/undo", "Hi", "/new", "Hi", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    arguments = ["chat", "--target", pair["target"], "--drafter", pair["drafter"], "--dtype", "float32",
                 "--max-new-tokens", "8", "--max-length", "150"]  # fmt: skip
    code, out, err = run(*arguments)
    assert code == 0, err
    assert err.count("tokens a round") == 3
    assert len(out) % 3 == 0
    assert out == out[: len(out) // 3] * 3  # three times the same answer
