"""The report on a benchmark: what it says, what it leaves out, and how it fails."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from functools import partial

import bench_records
import pytest
from bench_records import ENVIRONMENT, matrix, record

from pctree.bench import plots
from pctree.bench.claims import FAILS, HOLDS, IN_PART, claims
from pctree.bench.csv_files import cell_rows, csv_files, depth_rows, sweep_rows
from pctree.bench.records import read_records
from pctree.bench.report import build, html, markdown
from pctree.bench.study import studies
from pctree.errors import UsageError

ENVIRONMENTS = {ENVIRONMENT["environment"]: ENVIRONMENT}


@pytest.fixture(scope="module")
def whole():
    """The study of the whole matrix, made once: its summaries are kept."""
    return studies(matrix(), ENVIRONMENTS)[0]


@pytest.fixture
def run(run):
    """Call ``pctree report``; gives the exit code and both outputs."""
    return partial(run, "report")


def study_of(records):
    return studies(records, ENVIRONMENTS)[0]


def titles(records, **options) -> list[str]:
    return [s.title.split(":")[0] for chapter in build(records, ENVIRONMENTS, draw=False, **options) for s in chapter.sections]


# --- records ------------------------------------------------------------------------------------------------------------


def test_records_are_merged_and_the_first_of_a_kind_wins(tmp_path):
    one, two = record(index=0, prompt_tokens=7), record(index=1)
    text = record(index=2, finish_reason="a\u2028b")
    bench_records.write(tmp_path / "a", [one, text])
    bench_records.write(tmp_path / "b", [one | {"prompt_tokens": 8}, two])
    with (tmp_path / "b" / "records.jsonl").open("a") as file:
        file.write('{"kind": "record", "torn')  # a killed run
    records, environments = read_records([tmp_path / "a", tmp_path / "b" / "records.jsonl"])
    assert records == [one, text, two]
    assert environments == ENVIRONMENTS


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"kind": "other"}', b'{"kind": "record", "task": "x"}', b"\xff{}"])
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / "r.jsonl").write_bytes(
        json.dumps(record()).encode() + b"\n" + line + b"\n" + json.dumps(record()).encode() + b"\n"
    )
    with pytest.raises(UsageError, match=r"r\.jsonl,? line 2\b"):
        read_records([tmp_path])


# --- cells, sweeps, settings --------------------------------------------------------------------------------------------


def test_the_cell_nearest_to_the_papers_point_stands_for_a_method():
    records = [record("pctree", "b7", top_k=k, budget=n) for k, n in ((8, 64), (2, 16), (4, 16), (8, 16))]
    assert [cell.point for cell in study_of(records).main] == ["k = 4, N = 16"]


def test_sweeps_and_knees(whole):
    sweeps = {str(sweep): sweep for variable in "kN" for sweep in whole.sweeps(variable)}
    assert list(sweeps) == [
        "PCTree (b7, N = 32)", "EAGLE-3 tree (eagle3, N = 32)", "PCTree (b16, N = 32)",
        "PCTree (b7, k = 4)", "DDTree (dflash)", "PCTree (b16, k = 4)",
    ]  # fmt: skip
    eagle = sweeps["EAGLE-3 tree (eagle3, N = 32)"]
    assert [cell.name for cell in eagle.cells] == ["EAGLE-3 chain", "EAGLE-3 tree", "EAGLE-3 tree"]
    taus = dict(zip(sweeps["PCTree (b7, k = 4)"].cells, (2.0, 2.97, 3.0, 2.9), strict=True))
    knee = sweeps["PCTree (b7, k = 4)"].knee(taus.get)
    assert knee is not None
    assert knee.budget == 16
    assert sweeps["DDTree (dflash)"].knee(lambda cell: None) is None


def test_what_cannot_be_compared_is_kept_apart():
    gpu = ENVIRONMENT | {"environment": "b", "device": "NVIDIA H20"}
    records = [record(), record(index=1), record(dtype="float32"), record(environment="b"), record(temperature=0.7)]
    found = studies(records, ENVIRONMENTS | {"b": gpu})
    assert [(s.setting.dtype, s.setting.machine, s.setting.decoding, len(s.records)) for s in found] == [
        ("bfloat16", "Test CPU (2 threads)", "greedy", 2),
        ("bfloat16", "NVIDIA H20", "greedy", 1),
        ("float32", "Test CPU (2 threads)", "greedy", 1),
        ("bfloat16", "Test CPU (2 threads)", "temperature 0.7", 1),
    ]


def test_one_name_for_two_drafters_is_told_apart():
    records = [record("dspark", "b7"), record("dspark", "b7", drafter_source="other")]
    assert list(study_of(records).drafters) == ["b7 = other", "b7 = smollm2-b7"]


def test_variants_have_names():
    records = [
        record("pctree", "b7", frontier="exact"),
        record("dspark", "b7", confidence_threshold=0.4),
        record("eagle3", "eagle3", top_k=1),
        record("newest", "b7"),
    ]
    assert [str(cell) for cell in study_of(records).cells] == [
        "DSpark chain, threshold 0.4 (b7)", "PCTree, exact frontier (b7, N = 32)", "EAGLE-3 chain (eagle3)",
        "newest (b7, k = 4, N = 32)",
    ]  # fmt: skip


def test_shortlists_and_automatic_budgets_do_not_stand_for_a_method():
    records = [*matrix(), record("pctree", "b7", candidates=256), record("pctree", "b7") | {"budget": "auto"}]
    study = study_of(records)
    names = {cell.name for cell in study.cells}
    assert {"PCTree", "PCTree, 256 candidates", "PCTree, auto budget"} <= names
    assert all(cell.of_the_paper for cell in study.main)
    assert all(cell.of_the_paper for sweep in study.sweeps("N") for cell in sweep.cells)
    assert "auto" in markdown(build(records, ENVIRONMENTS, draw=False))


def test_a_confidence_threshold_has_a_section_of_its_own():
    records = [record("dspark", "b7", confidence_threshold=t) for t in (0.0, 0.4)] + [
        record("pctree", "b7"),
        record("dspark", "b16"),
    ]
    assert [str(cell) for cell in study_of(records).main] == [
        "DSpark chain (b7)",
        "PCTree (b7, k = 4, N = 32)",
        "DSpark chain (b16)",
    ]
    text = markdown(build(records, ENVIRONMENTS, draw=False))
    section = text[text.index("### Confidence threshold") : text.index("### Set-up")]
    assert re.findall(r"\n\| (DSpark[^|]*) \|", section) == ["DSpark chain (b7)", "DSpark chain, threshold 0.4 (b7)"]


# --- the paper's claims -------------------------------------------------------------------------------------------------


def test_every_claim_is_tested_on_the_whole_matrix(whole):
    found = claims(whole)
    assert len(found) == 7
    assert {claim.verdict for claim in found} <= {HOLDS, IN_PART, FAILS}
    assert all(claim.evidence for claim in found)


@pytest.mark.parametrize(("mbpp", "gsm8k", "verdict"), [(3, 4, HOLDS), (1, 4, IN_PART), (1, 1, FAILS)])
def test_a_claim_holds_on_every_task_in_the_mean_or_not(mbpp, gsm8k, verdict):
    lengths = {"dspark": (1, 1), "shared-markov": (2, 2), "pctree": (mbpp, gsm8k)}
    records = [
        record(method, "b7", task, index, lengths=[length])
        for method, pair in lengths.items()
        for task, length in zip(("mbpp", "gsm8k"), pair, strict=True)
        for index in range(2)
    ]
    claim = claims(study_of(records))[0]
    assert claim.verdict == verdict
    assert ("mbpp" in claim.evidence[0]) == (verdict != HOLDS)


def test_methods_on_different_tasks_test_no_claim():
    trees = [record("shared-markov", "b7", "mbpp"), record("pctree", "b7", "mbpp")]
    assert claims(study_of([record("dspark", "b7", "gsm8k"), *trees])) == []
    plain = [record("ar", task=task) for task in ("gsm8k", "mbpp")]
    assert claims(study_of([record("eagle3", "eagle3", "gsm8k"), *trees, *plain])) == []


def test_k_8_is_no_better_unless_the_interval_says_so():
    def swept(eight: list[int]):
        four = [2, 4, 3, 3]
        return study_of(
            [record("pctree", "b7", index=i, top_k=k, lengths=[n])
             for k, found in ((4, four), (8, eight)) for i, n in enumerate(found)]
        )  # fmt: skip

    assert claims(swept([3, 5, 4, 4]))[0].verdict == FAILS
    assert claims(swept([6, 2, 3, 3]))[0].verdict == HOLDS


def test_a_verdict_against_the_paper_says_why():
    """First drafts are accepted in 2 of 4 rounds at B = 7, in 1 of 4 at B = 16."""
    chains = [record("dspark", "b7", lengths=[1, 1, 3, 8]), record("dspark", "b16", lengths=[1, 1, 1, 3])]
    trees = [record("pctree", "b7", top_k=k, lengths=n, index=i) for k, n in ((4, [3]), (8, [5])) for i in range(2)]
    wide, long = claims(study_of([*chains, *trees]))
    assert (wide.verdict, long.verdict) == (FAILS, FAILS)
    assert "first draft is accepted in 50 % of its rounds" in wide.evidence[0]
    assert "25.0 % of the rounds accept all drafts" in long.evidence[0]
    assert "first draft is accepted in 50 % and 25 %" in long.evidence[0]


def test_a_loop_does_not_hide_the_order():
    """Shared-Markov's text parts at token 4 and goes on in a loop, which its tree guesses whole."""
    plain, loop = list(range(22)), [0, 1, 2, 3] + [5] * 18
    texts = {"dspark": (plain, [1] * 21), "shared-markov": (loop, [1, 2, 2, 8, 8]), "pctree": (plain, [3] * 7)}
    study = study_of([
        record(method, "b7", index=i, token_ids=ids, lengths=lengths,
               first_difference=4 if ids is loop else None, repeats_itself=ids is loop)
        for method, (ids, lengths) in texts.items() for i in range(2)
    ])  # fmt: skip
    claim = claims(study)[0]
    assert claim.verdict == FAILS
    assert "gsm8k: 1.00, 4.20, 3.00 (texts in a loop: 0, 2, 0)." in claim.evidence[0]
    assert "the same text the mean τ is 1.00, 1.67, 3.00; in this order on 1 of 1 tasks." in claim.evidence[0]


def test_ddtree_is_met_with_its_own_frontier():
    cells = [("ddtree", "dflash", None, "exact", (4, 1)), ("pctree", "b7", 4, "capped", (3, 3)),
             ("pctree", "b7", None, "exact", (5, 5))]  # fmt: skip
    claim = claims(study_of([
        record(method, drafter, task, index=i, top_k=k, frontier=frontier, lengths=[n])
        for method, drafter, k, frontier, lengths in cells
        for task, n in zip(("gsm8k", "mbpp"), lengths, strict=True) for i in range(2)
    ]))[-1]  # fmt: skip
    assert (claim.verdict, len(claim.evidence)) == (IN_PART, 1)
    assert "PCTree (b7, k = 4, N = 32): 3.00, difference +0.50" in claim.evidence[0]
    assert "PCTree, exact frontier (b7, N = 32): 5.00, difference +2.50" in claim.evidence[0]
    assert "On gsm8k 100 % of DDTree's rounds accept a draft of depth 1, and 100 % of PCTree's" in claim.evidence[0]


def test_eagle3_is_met_at_its_best():
    """The fastest cells of both are compared, whatever their N."""
    speeds = {("pctree", "b7", 4, 16): 20.0, ("pctree", "b7", 4, 32): 18.0,
              ("eagle3", "eagle3", 1, 8): 15.0, ("eagle3", "eagle3", 4, 32): 22.0}  # fmt: skip
    records = [record("ar", index=i, tokens_per_second=10.0) for i in range(2)] + [
        record(method, drafter, index=i, top_k=k, budget=n, lengths=[2], tokens_per_second=speed)
        for (method, drafter, k, n), speed in speeds.items() for i in range(2)
    ]  # fmt: skip
    claim = claims(study_of(records))[-1]
    assert "EAGLE-3" in claim.statement
    assert claim.verdict == FAILS
    assert "PCTree (b7, k = 4, N = 16): τ 2.00" in claim.evidence[0]
    assert "2.00×; EAGLE-3 tree (eagle3, k = 4, N = 32)" in claim.evidence[0]
    assert "2.20×" in claim.evidence[0]


# --- the report ---------------------------------------------------------------------------------------------------------


def test_every_section_of_the_whole_matrix():
    assert titles(matrix(prompts=2, repeats=2), with_paper=True) == [
        "At a glance", "Main table", "Sweep of k", "Sweep of N", "Time a round, by stage", "Acceptance by depth",
        "Decomposition", "All cells", "Beside the published figures", "Where this differs from the paper", "Flips", "Loops",
        "Calibration of the confidence head", "Do repeats agree?", "Set-up",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "records",
    [
        [record()],
        [record("pctree", "b7")],
        [record("pctree", "b7", lengths=[])],
        [record(), record("dspark", "b7", temperature=1.0)],
        [r for r in matrix(1, ("odd",)) if r["method"] != "ar"],
        [record(), record("newest", "b7"), record("pctree", None, top_k=None, budget=None)],
    ],
    ids=["ar-alone", "no-ar", "no-round", "other-temperature", "one-task", "unknown"],
)
def test_missing_pieces_shrink_the_report(records):
    chapters = build(records, {}, with_paper=True, draw=False)
    assert html(chapters)
    assert markdown(chapters)
    assert csv_files([chapter.study for chapter in chapters])["cells.csv"].count("\n") > 1


def test_cells_that_lack_prompts_are_named():
    text = markdown(build([record(), record(index=1), record("dspark", "b7")], ENVIRONMENTS, draw=False))
    assert "| DSpark chain (b7) | lacks 1 of the 2 prompts |" in text


def test_the_published_figures_stand_beside_ours():
    text = markdown(build(matrix(prompts=2), ENVIRONMENTS, with_paper=True, draw=False))
    for published in ("6.31 → 7.24 (+15 %)", "6.14× → 6.60× (+7 %)", "10.225", "10.850", "3.52", "| Qwen3-4B | **smollm2** |"):
        assert published in text
    assert "| gsm8k | 16 | 9.41 → 11.16 (+19 %) | " in text
    assert "Beside the published" not in markdown(build(matrix(prompts=1), ENVIRONMENTS, draw=False))


def test_texts_of_others_are_escaped():
    nasty = "<script>|**"
    chapters = build([record(task=nasty), record("pctree", "b7", task=nasty)], ENVIRONMENTS, draw=False)
    assert "<script>" not in html(chapters)
    assert "&lt;script&gt;" in html(chapters)
    assert "| <script>\\|** |" in markdown(chapters)


def test_csv_is_tidy_and_agrees_with_the_records(whole):
    rows = list(csv.DictReader(io.StringIO(csv_files([whole])["cells.csv"])))
    assert len(rows) == len(whole.cells) * (len(whole.tasks) + 1)
    row = next(r for r in rows if (r["method"], r["drafter"], r["task"]) == ("dspark", "b7", "gsm8k"))
    lengths = [n for r in whole.records if (r["method"], r["drafter"], r["task"]) == ("dspark", "b7", "gsm8k")
               for n in r["acceptance_lengths"]]  # fmt: skip
    assert float(row["tau"]) == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)
    assert float(row["tau_low"]) <= float(row["tau"]) <= float(row["tau_high"])
    assert len({tuple(r) for r in map(dict.keys, cell_rows(whole))}) == 1
    knees = [r for r in sweep_rows(whole) if r["knee_tau"]]
    assert len(knees) == 6
    for cell in whole.speculating:
        depths = [r for r in depth_rows(whole) if r["method"] == cell.method and r["drafter"] == cell.drafter
                  and (r["top_k"], r["budget"]) == (cell.top_k, cell.budget)]  # fmt: skip
        assert [r["depth"] for r in depths] == list(range(cell.block_size + 1))
        assert sum(r["exactly"] for r in depths) == pytest.approx(1)


def test_plots_are_inside_the_page_and_follow_its_colours(tmp_path, run):
    pytest.importorskip("matplotlib")
    folder = bench_records.write(tmp_path / "run", matrix(prompts=2, tasks=("gsm8k",)))
    code, out, err = run(folder)
    assert (code, err) == (0, "")
    assert "report.html" in out
    page = (folder / "report" / "report.html").read_text()
    assert len(re.findall("<figure", page)) == 8
    links = re.findall(r'(?:href|src)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    inside = page[page.index("<main>") :]
    assert "var(--pctree)" in inside
    assert "#0a8a6a" not in inside
    text = (folder / "report" / "report.md").read_text()
    named = re.findall(r"\]\((plots/[^)]*)\)", text)
    assert len(named) == 8
    for name in named:
        ElementTree.parse(folder / "report" / name)


def test_a_plot_is_the_same_every_time(whole):
    pytest.importorskip("matplotlib")
    one, two = (plots.draw(plots.depth, whole) for _ in range(2))
    assert one == two


def test_without_matplotlib_there_are_tables(tmp_path, run, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    folder = bench_records.write(tmp_path / "run", [record(), record("pctree", "b7")])
    code, _, err = run(folder / "records.jsonl", "--output", tmp_path / "out", "--paper")
    assert code == 0
    assert "pip install 'pctree[bench]'" in err.replace("\n", " ")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["cells.csv", "depth.csv", "report.html", "report.md", "sweeps.csv"]
    assert "<table>" in (tmp_path / "out" / "report.html").read_text()


def test_json_is_one_object(tmp_path, run, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    folder = bench_records.write(tmp_path / "run", matrix(prompts=1))
    code, out, _ = run(folder, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["files"][0].endswith("report.html")
    assert {row["method"] for row in found["settings"][0]["cells"]} >= {"ar", "pctree", "eagle3"}
    assert found["settings"][0]["claims"]


def test_bad_input_is_one_line(tmp_path, run):
    code, _, err = run(tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err
    code, _, err = run(bench_records.write(tmp_path / "empty", []))
    assert code == 2
    assert "no record" in err
    assert err.count("\n") == 1
