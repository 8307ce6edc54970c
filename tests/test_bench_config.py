"""The matrix of cells: grids, normal forms, presets; and what is said about settings that cannot be used."""

from __future__ import annotations

import pytest
import yaml

from pctree.bench.config import PRESETS, BenchConfig, cell, preset_file
from pctree.errors import UsageError


def matrix(*cells, **settings):
    drafters = {"b7": "one", "b16": "two", "none": None}
    return BenchConfig.from_settings({"drafters": drafters, "cells": list(cells)} | settings).matrix()


def test_a_grid_is_the_product_of_its_lists():
    cells = matrix(
        {"method": "ar"}, {"drafter": "b7", "method": ["shared-markov", "pctree"], "top_k": [2, 4], "budget": [8, 16]}
    )
    assert len(cells) == 1 + 2 * 2 * 2
    assert [c.label for c in cells][:3] == ["ar", "shared-markov b7 k=2 N=8", "shared-markov b7 k=2 N=16"]


def test_fields_without_a_meaning_make_no_further_cells():
    wide = {"top_k": [2, 4], "budget": [8, 16], "frontier": ["capped", "exact"], "confidence_threshold": [0, 0.5]}
    labels = [c.label for c in matrix({"drafter": "b7", "method": ["ar", "dspark", "ddtree", "pctree"]} | wide)]
    assert labels == [
        "ar", "dspark b7", "dspark b7 c≥0.5", "ddtree b7 N=8", "ddtree b7 N=16", "pctree b7 k=2 N=8", "pctree b7 exact N=8",
        "pctree b7 k=2 N=16", "pctree b7 exact N=16", "pctree b7 k=4 N=8", "pctree b7 k=4 N=16",
    ]  # fmt: skip


def test_shortlists_and_automatic_budgets_are_cells_of_their_own():
    found = matrix({"drafter": "b7", "method": ["dspark", "ddtree", "pctree"], "budget": ["auto", 8], "candidates": [0, 256]})
    assert [c.label for c in found] == [
        "ar", "dspark b7", "dspark b7 C=256", "ddtree b7 N=auto", "ddtree b7 N=8", "pctree b7 k=4 N=auto",
        "pctree b7 k=4 N=auto C=256", "pctree b7 k=4 N=8", "pctree b7 k=4 N=8 C=256",
    ]  # fmt: skip
    assert found[-1].settings().candidates == 256
    assert found[-3].settings().budget == "auto"


def test_eagle3_with_one_child_a_parent_is_a_chain():
    cells = matrix({"drafter": "b7", "method": "eagle3", "top_k": [1, 4], "budget": [8, 32]})
    assert [c.label for c in cells] == ["ar", "eagle3 b7 chain", "eagle3 b7 k=4 N=8", "eagle3 b7 k=4 N=32"]
    assert cells[1].is_chain
    assert not cell("pctree", "b7", top_k=1).is_chain
    assert not cell("ar").is_chain


def test_plain_decoding_is_added_at_every_temperature():
    cells = matrix({"drafter": "b7", "method": "pctree", "temperature": [0, 0.7]}, {"method": "ar", "temperature": 0.7})
    assert [(c.method, c.temperature) for c in cells] == [("ar", 0.0), ("pctree", 0.0), ("pctree", 0.7), ("ar", 0.7)]


def test_cells_of_a_drafter_without_a_source_are_left_out():
    assert [c.label for c in matrix({"drafter": ["b7", "none"], "method": "dspark"})] == ["ar", "dspark b7"]
    with pytest.raises(UsageError, match="no cell is left"):
        matrix({"drafter": "none", "method": "dspark"})


def test_settings_alone_measure_the_shipped_pair():
    assert [c.label for c in BenchConfig().matrix()] == [
        "ar", "dspark smollm2", "shared-markov smollm2 k=4 N=32", "pctree smollm2 k=4 N=32",
    ]  # fmt: skip
    assert BenchConfig(dtype="bf16").dtype == BenchConfig(dtype="auto").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"colour": 1}, "unknown setting colour; the settings are target"),
        ({"tasks": []}, "tasks is"),
        ({"tasks": "gsm8k"}, "tasks is"),
        ({"drafters": ["b7"]}, "drafters is"),
        ({"drafters": {7: "a"}}, "drafters is"),
        ({"per_task": 0}, "per_task is 0"),
        ({"per_task": True}, "per_task is True"),
        ({"repeats": 1.5}, "repeats is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"prompts": 3}, "prompts is 3"),
        ({"cells": {"method": "ar"}}, "cells is"),
        ({"cells": ["ar"]}, "cells is"),
        ({"cells": []}, "no cell is left"),
        ({"cells": [{"drafter": "b7"}]}, "names no method"),
        ({"cells": [{"method": "magic"}]}, "the methods|it must be one of ar"),
        ({"cells": [{"method": {"a": 1}}]}, "method is"),
        ({"cells": [{"method": "pctree"}]}, "names no drafter"),
        ({"cells": [{"method": "pctree", "drafter": "b9"}]}, "'b9', but the drafters are b7"),
        ({"cells": [{"method": "pctree", "drafter": {"a": 1}}]}, "drafter is"),
        ({"cells": [{"method": "ar", "colour": 1}]}, "unknown field colour of a cell"),
        ({"cells": [{"method": "pctree", "drafter": "b7", "top_k": [1, 0]}]}, "top_k is 0"),
        ({"cells": [{"method": "pctree", "drafter": "b7", "budget": "many"}]}, "budget is 'many'"),
        ({"cells": [{"method": "pctree", "drafter": "b7", "frontier": "wide"}]}, "frontier is 'wide'"),
        ({"cells": [{"method": "ar", "temperature": -1}]}, "temperature is -1"),
        ({"cells": [{"method": "dspark", "drafter": "b7", "confidence_threshold": 1}]}, "confidence_threshold is 1"),
    ],
)
def test_bad_settings_are_named(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        BenchConfig.from_settings({"drafters": {"b7": "one"}} | settings).matrix()


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.stem)
def test_presets_make_matrices(file):
    settings = yaml.safe_load(file.read_text())
    config = BenchConfig.from_settings(settings)
    cells = config.matrix()
    assert cells[0].method == "ar"
    # The paper's presets wait for a drafter with blocks of 16, and make use of it.
    full = BenchConfig.from_settings(settings | {"drafters": {**config.drafters, "b16": "given"}}).matrix()
    assert (len(full) > len(cells)) == (file.stem.startswith("paper"))
    assert preset_file(file.stem) == file


def test_the_presets_are_listed():
    with pytest.raises(UsageError, match=r"the presets are paper-ablation, .*quick, shipped-ablation"):
        preset_file("best")
