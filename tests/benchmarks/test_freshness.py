"""The registered study: its runs, how it goes on where it was cut off, and its verdicts against values by hand."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.study import freshness, puzzles, recompute, selection_bias
from benchmarks.study import freshness_figures as figures
from benchmarks.study.freshness import Cell
from sortedrl.records import Batch, Prompt, Sample, Segment
from sortedrl.tasks.knights import KnightsTask, is_heldout


def run_record(arm: str, seed: int, accuracies: list[float], *, share: float = 1.0, stage: str = "a") -> dict[str, Any]:
    """A run that is evaluated every 128 samples."""
    points = [{"samples": 128 * at, "accuracy": a, "greedy": a, "length": 5.0} for at, a in enumerate(accuracies)]
    updates = {"size": [16], "length": [10.0], "staleness": [1.0], "reward": [0.5], "share": [share], "norm": [0.1]}
    return {
        **asdict(Cell(stage=stage, arm=arm)),
        "seed": seed,
        "curve": points,
        "updates": updates,
        "idle_slot_steps": 0.5,
    }


def test_every_registered_run_has_a_configuration_that_loads(tmp_path: Path) -> None:
    for stage, count in (("a", 50), ("b", 140), ("c", 150), ("d", 50)):
        assert len(freshness.runs(stage)) == count
        assert len({cell.name for cell in freshness.cells(stage)}) == len(freshness.cells(stage))
        for cell in freshness.cells(stage):
            knobs = freshness.config_of((cell, 0), tmp_path).knobs
            assert knobs.exact_batch
            assert knobs.update_batch == 16
            assert (knobs.max_staleness == 0) == (
                cell.arm.startswith(("sync", "replay", "sorted-replay", "async")) and "large" not in cell.arm
            )


def test_the_amended_order_has_every_registered_run_once() -> None:
    order = freshness.in_order()
    assert len(order) == len(set(order)) == 390
    assert set(order) == {run for stage in "abcd" for run in freshness.runs(stage)}
    # Stage a with ten seeds, then 180 runs in the blocks of the amendments, then the seeds that they cut.
    assert {cell.stage for cell, _ in order[:50]} == {"a"}
    assert [len(names) for _, _, names in freshness.BLOCKS[1:]] == [5, 2, 4, 3, 5, 4, 2, 11]
    assert all(seed < 5 for _, seed in order[50:165])
    assert {(cell.name, seed) for cell, seed in order[165:175]} == {
        (f"{arm}, rate 0.0006", seed) for arm in ("sync-large", "sorted-replay") for seed in range(5, 10)
    }
    assert all(seed < 5 for _, seed in order[175:230])
    assert all(seed >= 5 for _, seed in order[230:])
    assert order[50][0].name == "sync-large, cohort 4"
    assert order[85][0].name == "sync, rate 0.0006", "block 4 follows 50 + 25 + 10 runs"


def test_a_study_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    assert len(freshness.missing("a", tmp_path)) == 50
    freshness.append(run_record("sync", 0, [0.1]), tmp_path)
    with freshness.path_of("a", tmp_path).open("a", encoding="utf-8") as file:
        file.write('{"stage": "a", "arm": "sync-la')  # the process died here
    freshness.append(run_record("replay, shuffled", 0, [0.1]), tmp_path)
    left = [(cell.arm, seed) for cell, seed in freshness.missing("a", tmp_path)]
    assert len(left) == 48
    assert ("sync", 0) not in left
    assert left[0] == ("sync-large", 0), "seed by seed"
    assert [json.loads(line)["arm"] for line in freshness.path_of("a", tmp_path).read_text().splitlines()[::2]] == [
        "sync",
        "replay, shuffled",
    ]


def test_held_out_puzzles_are_none_that_tuning_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puzzles, "NUM_TUNING", 30)
    task = puzzles.FreshPuzzles(seed=3)
    held = [row["prompt"] for row in task.heldout(20)]
    tuning = {row["prompt"] for row in KnightsTask(people={5: 1.0}).heldout(30)}
    assert len(held) == 20
    assert not tuning & set(held)
    assert all(is_heldout(prompt) for prompt in held)
    assert not is_heldout(task.train.row(0)["prompt"])


def test_figures_of_a_run() -> None:
    run = run_record("sync", 0, [0.1, 0.4, 0.6, 0.6, 0.7, 0.8, 0.9])
    assert figures.early(run) == pytest.approx(0.5)  # after 128 and 256 samples
    assert figures.final(run) == pytest.approx(0.8)
    run["updates"] = {"size": [16, 16], "length": [10.0, 30.0], "staleness": [0.0, 2.0], "reward": [0.0, 0.5]}
    assert figures.staleness(run) == pytest.approx(1.5)  # three tokens of four are two versions old
    assert figures.flat_share(run) == 0.5
    # An update without a learned token has no share: none in new lines, 1 and a gradient of 0 in older ones.
    run["updates"] = {"share": [0.5, 1.0, None, 0.7], "norm": [0.1, 0.0, 0.0, 0.2]}
    assert figures.share(run) == pytest.approx(0.6)
    assert recompute.effective_share(run) == pytest.approx(0.6)


def test_verdicts_follow_the_registered_rules() -> None:
    assert figures.above((0.1, 0.05, 0.2), 0.0, complete=True) == "yes"
    assert figures.above((0.1, -0.05, 0.2), 0.0, complete=True) == "undecided"
    assert figures.above((0.1, 0.05, 0.2), 0.0, complete=False) == "undecided", "a run is missing"
    assert figures.equal((0.01, -0.02, 0.04), 0.05, complete=True) == "yes"
    assert figures.equal((0.02, 0.01, 0.03), 0.05, complete=True) == "yes", "within the margin"
    assert figures.equal((-0.06, -0.09, -0.03), 0.05, complete=True) == "no"
    assert figures.equal((-0.03, -0.09, 0.03), 0.05, complete=True) == "undecided"


def test_stage_a_needs_ten_seeds_and_later_stages_five() -> None:
    arms = {"first": [run_record("sync", seed, [0.1]) for seed in range(9)]}
    arms["late"] = [run_record("sync-large, cohort 4", seed, [0.1], stage="b") for seed in range(5)]
    cells = {name: {run["seed"]: run for run in runs} for name, runs in arms.items()}
    assert not figures.has_seeds(cells, "first")
    assert figures.has_seeds(cells, "first", "late")
    del cells["late"][4]
    assert not figures.has_seeds(cells, "first", "late")
    assert not figures.has_seeds(cells, "nothing")


def test_hypotheses_are_judged_from_paired_runs() -> None:
    records = []
    for seed in freshness.SEEDS:
        luck = 0.02 * seed
        records += [run_record("sync", seed, [0.2, 0.4 + luck, 0.5 + luck, 0.7, 0.7, 0.7])]
        records += [run_record("sync-large", seed, [0.2, 0.3 + luck, 0.4 + luck, 0.6, 0.6, 0.6], share=0.5)]
        records += [run_record("replay, shuffled", seed, [0.2, 0.4 + luck, 0.5 + luck, 0.7, 0.7, 0.7])]
        records += [run_record("replay, shortest first", seed, [0.2, 0.2 + luck, 0.3 + luck, 0.7, 0.7, 0.7])]
    verdicts = {(v.name, v.says): v for v in figures.hypotheses(figures.collect(records))}
    assert verdicts["H1a", "sync > sync-large, early"].found == pytest.approx((0.1, 0.1, 0.1))
    assert verdicts["H1a", "sync > sync-large, early"].answer == "yes"
    pair = "replay, shortest first = replay, shuffled"
    assert (verdicts["H2a", f"{pair}, early"].answer, verdicts["H2a", f"{pair}, final"].answer) == ("no", "yes")
    assert verdicts["H3a", "replay, shuffled = sync, early"].answer == "yes"
    assert verdicts["H3b", "sorted-replay = sync, early"].answer == "undecided"
    page = figures.markdown(figures.collect(records))
    assert "| sync-large | 10 | .50 |" in page


def batch(*lengths: int) -> Batch:
    samples = []
    for number, length in enumerate(lengths):
        segment = Segment(version=0, tokens=[1] * length, logprobs=[0.0] * length)
        samples.append(Sample(number, Prompt("p", (1,), ""), number, 0, 0, 0, 512))
        samples[-1].segments.append(segment)
    return Batch(update=0, version=0, samples=tuple(samples))


def test_the_weight_of_long_answers() -> None:
    # Ten batches of one answer of 10 tokens, and one of 40: its token has a quarter of the weight.
    assert selection_bias.token_weight([*[batch(10)] * 10, batch(40)]) == pytest.approx(0.25)
    assert selection_bias.token_weight([batch(*[10] * 10, 40)]) == pytest.approx(1.0)


def test_gradients_are_compared_with_the_whole() -> None:
    whole = np.array([1.0, 1.0])
    found = selection_bias.compare([np.array([2.0, 0.0]), np.array([0.0, 2.0]), np.zeros(2)], whole)
    assert found["cosine"] == pytest.approx(0.5**0.5)  # of the two that have a gradient
    assert found["without_signal"] == pytest.approx(1 / 3)
    assert found["epoch_cosine"] == pytest.approx(1.0)
    assert found["epoch_error"] == pytest.approx(0.0, abs=1e-12), "only the direction counts"


def test_the_page_shows_the_tables_of_the_results_in_the_tree() -> None:
    records = [record for stage in figures.STAGES for record in freshness.read(stage)]
    page = figures.PAGE.read_text(encoding="utf-8")
    tables = figures.markdown(figures.collect(records))
    assert figures.with_tables(page, tables) == page, "run python -m benchmarks.study.freshness_figures --write"


def test_an_independent_recomputation_gives_the_same_tables() -> None:
    tally = recompute.recompute()
    assert tally.compared > 500
    assert not tally.wrong
    source = Path(recompute.__file__).read_text(encoding="utf-8")
    assert "import benchmarks" not in source, "it must not use the analysis that it checks"
    assert "from benchmarks" not in source


def check_pages(folder: Path, freshness_page: str, results_page: str) -> list[str]:
    (folder / "freshness.md").write_text(freshness_page, encoding="utf-8")
    (folder / "results.md").write_text(results_page, encoding="utf-8")
    return recompute.recompute(folder).wrong


def test_the_recomputation_finds_what_was_removed(tmp_path: Path) -> None:
    first, second = ((recompute.PAGES / f"{name}.md").read_text(encoding="utf-8") for name in ("freshness", "results"))
    lines = first.splitlines()
    starts = ("| H3a | replay, shuffled = sync, final", "| against `sync` | idle", "| sorted-partial | 5 |")
    kept = "\n".join(line for line in lines if not line.startswith(starts))
    wrong = check_pages(tmp_path, kept, second)
    assert [line.partition(" is on the page")[0] for line in wrong] == [
        "the row of the arm 'sorted-partial'",
        "the row of the hypothesis 'H3a: replay, shuffled = sync, final'",
        "the row of the claim 'against `sync`: idle slot-steps cut by half'",
    ]
    grpo = second.partition("| GRPO | final accuracy")
    wrong = check_pages(tmp_path, first, grpo[0] + grpo[2].partition("\n\n")[2])
    assert len(wrong) == 13, "twelve arms, and the sorted ones together"
    assert all(line.startswith("the row 'GRPO: ") for line in wrong)


def test_tables_are_not_put_into_a_page_without_both_marks() -> None:
    page = f"before {figures.BEGIN} old {figures.END} after"
    assert figures.with_tables(page, "new") == f"before {figures.BEGIN}\n\nnew\n\n{figures.END} after"
    for mark in (figures.BEGIN, figures.END):
        with pytest.raises(AssertionError, match="lacks the mark"):
            figures.with_tables(page.replace(mark, ""), "new")


def test_a_failed_run_does_not_lose_those_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    both_began, has_failed, kept = threading.Barrier(2), threading.Event(), list[Any]()

    def train(run: freshness.Run) -> dict[str, Any]:
        if run[1] < 2:
            both_began.wait(10)
        if run[1] == 0:
            has_failed.set()
            raise ValueError("this run fails")
        assert has_failed.wait(10)
        return {"seed": run[1]}

    monkeypatch.setattr(freshness, "train", train)
    monkeypatch.setattr(freshness, "append", kept.append)
    monkeypatch.setattr(freshness, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    with pytest.raises(ValueError, match="this run fails"):
        freshness.make([(freshness.cells("a")[0], seed) for seed in range(2)], jobs=2)
    assert kept == [{"seed": 1}]


def test_the_recomputation_finds_a_changed_figure(tmp_path: Path) -> None:
    page = (recompute.PAGES / "freshness.md").read_text(encoding="utf-8")
    (tmp_path / "freshness.md").write_text(page.replace("+.188 [", "+.189 ["), encoding="utf-8")
    (tmp_path / "results.md").write_text((recompute.PAGES / "results.md").read_text(encoding="utf-8"), encoding="utf-8")
    wrong = recompute.recompute(tmp_path).wrong
    assert wrong
    assert all("'+.189 [" in line for line in wrong)
