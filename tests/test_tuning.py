"""Tuning: predictions against decoding itself, and a profile that is found, used and refused."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from byte_tokenizer import byte_tokenizer
from replay import record

from pctree import SpeculativeDecoder, UsageError
from pctree.drafters import save_drafter
from pctree.economy import Economy
from pctree.methods import DraftSettings
from pctree.profiles import Profile, find_profile, profile_key, profile_path
from pctree.tuning import Reading, predict, read, readings_for, tune


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PCTREE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    model = tiny.target(vocab=260, seed=2, max_length=400)
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    save_drafter(tiny.drafter(model), folder / "drafter", dtype=torch.float32)
    return str(folder / "target"), str(folder / "drafter")


def test_one_decoding_says_what_every_budget_commits():
    """With the future known in part, each budget's prediction from the largest tree is near what that budget commits."""
    model = tiny.target(seed=3)
    prompt = tiny.prompt(1, 8)
    future, _ = tiny.plain(model, prompt, 300)
    draft = tiny.drafter(model, seed=2)
    draft.future, draft.boost = prompt + future, 2.5
    decoder = tiny.decoder(model, draft)
    reading = read(decoder, DraftSettings("pctree", top_k=3, budget=64), [prompt], 300)
    assert reading.committed[0] == 1.0  # the bonus token
    assert reading.committed == sorted(reading.committed)
    for budget in (4, 8, 16, 32):
        real = decoder.with_settings(top_k=3, budget=budget).generate(prompt, max_new_tokens=300).stats.acceptance_length
        assert reading.committed[budget - 1] == pytest.approx(real, rel=0.15)


def test_dear_rows_make_small_trees_and_cheap_ones_large():
    committed = [2 - 0.5**node for node in range(64)]
    reading = Reading(DraftSettings("pctree", budget=64), committed, overhead_ms=5.0)
    rows = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert predict(reading, dict.fromkeys(rows, 20.0))[0][1].budget == 64
    assert predict(reading, {n: 20.0 * n for n in rows})[0][1].budget == 2
    rate, settings = predict(reading, {n: 20.0 + n for n in rows})[0]
    assert rate == pytest.approx(1e3 * committed[settings.budget - 1] / (25 + settings.budget))


def test_every_drafter_has_a_chain_and_trees():
    model = tiny.target()
    for draft, methods in ((tiny.drafter(model), {"dspark", "pctree"}), (tiny.drafter(model, None), {"dflash", "ddtree"})):
        settings = readings_for(tiny.decoder(model, draft, "dflash"))
        assert {each.method for each in settings} == methods
        for each in settings:
            each.validate(draft)


def test_what_is_chosen_was_the_fastest(pair, monkeypatch):
    decoder = SpeculativeDecoder.from_pretrained(*pair, dtype="float32", device="cpu")
    stages = []
    found = tune(decoder, ["Hello", "1+1"], max_new_tokens=6, progress=lambda stage, done, total: stages.append(stage))
    assert found.confirmed[0].settings.method == "ar"
    assert found.confirmed[1].settings.method == "dspark"
    assert found.best.tokens_per_second == max(each.tokens_per_second for each in found.confirmed[1:])
    assert found.confirmed[-1].settings.budget == "auto"
    assert list(dict.fromkeys(stages)) == ["costs", "acceptance", "confirming"]


def test_the_command_writes_a_profile_that_others_use(run, pair):
    target, drafter = pair
    where = ["--target", target, "--drafter", drafter, "--dtype", "float32", "--device", "cpu"]
    code, shown, _ = run("tune", *where, "--count", "1", "--max-new-tokens", "4")
    assert code == 0
    assert "Chosen: " in shown
    assert "Why: " in shown
    path = profile_path(profile_key(target, drafter, "float32", "cpu", "auto"))
    assert path.exists()
    profile = Profile.load(path)
    profile.settings |= {"method": "pctree", "top_k": 3, "budget": "auto", "frontier": "exact", "candidates": 0}
    profile.save(path)

    def settings(**chosen):
        loaded = SpeculativeDecoder.from_pretrained(*pair, dtype="float32", device="cpu", **chosen).settings
        return loaded.method, loaded.top_k, loaded.budget, loaded.frontier

    assert settings() == ("pctree", 3, "auto", "exact")
    assert settings(budget=9) == ("pctree", 3, 9, "exact")
    assert settings(method="dspark") == ("dspark", 4, 32, "capped")
    assert settings(profile="off") == ("pctree", 4, 32, "capped")
    assert find_profile("auto", target, drafter, "bfloat16", "cpu", "auto") is None  # another number format

    asked = ("generate", *where, "--prompt", "Hi", "--max-new-tokens", "4", "--json")
    tuned, plain = (json.loads(run(*asked, *more)[1]) for more in ((), ("--method", "ar")))
    assert (tuned["method"], plain["method"]) == ("pctree", "ar")
    assert tuned["token_ids"] == plain["token_ids"]
    assert run(*asked, "--budget", "auto", "--profile", "off")[0] == 2
    assert "budget is auto" in run(*asked, "--budget", "auto", "--profile", "off")[2]


def test_other_modes_are_tried_and_kept(pair, monkeypatch):
    decoder = SpeculativeDecoder.from_pretrained(*pair, dtype="float32", device="cpu")
    other = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, decoder.settings, record=record)
    found = tune(decoder, ["Hello", "1+1"], max_new_tokens=6, others={"graphs": other})
    assert [each.compile for each in found.confirmed] == [None] * (len(found.confirmed) - 1) + ["graphs"]
    path = profile_path(profile_key(*pair, "float32", "cpu", "auto"))
    settings = dict.fromkeys(("top_k", "budget", "candidates"), 4) | {"method": "pctree", "frontier": "capped"}
    Profile({}, settings, found.economy, compile="off").save(path)
    modes = []
    monkeypatch.setattr("pctree.decoder.recorder", modes.append)
    for compile in ("auto", "off"):
        SpeculativeDecoder.from_pretrained(*pair, dtype="float32", device="cpu", compile=compile)
    assert modes == ["off", "off"]


def test_a_profile_survives_its_file(tmp_path):
    economy = Economy({1: 2.0, 8: 3.5}, 1.25, [(-2.0, 0.1), (-0.1, 0.9)], [1.0, 1.5], 0.4)
    settings = {"method": "pctree", "top_k": 4, "budget": 16, "frontier": "capped", "candidates": 256}
    Profile({"target": "t"}, settings, economy, {"prompts": 2}).save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded.settings == settings
    assert loaded.economy.cost(4) == pytest.approx(economy.cost(4))
    assert loaded.economy.floor(1) == economy.floor(1)
    assert torch.equal(loaded.economy.chances(torch.tensor([[-1.0]])), economy.chances(torch.tensor([[-1.0]])))


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("{", "is damaged"), ('{"key": {}}', "is damaged")])
def test_a_bad_profile_is_named(tmp_path, text, message):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        find_profile(str(path), "smollm2", "smollm2", "auto", "cpu", "auto")
