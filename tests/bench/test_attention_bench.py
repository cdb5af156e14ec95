"""The comparison's own parts on the CPU: inputs, layouts, gate, report. Times need a GPU."""

import json
import math
import shutil
import sys
from contextlib import nullcontext

import pytest
import torch

from specdeft.bench import attention, attention_measure, cuda_timing
from specdeft.bench.attention_measure import (
    WORST_ERROR,
    Outcome,
    exact_output,
    relative_error,
    worst_error,
)
from specdeft.bench.attention_methods import (
    BATCH_METHODS,
    FOREST_METHODS,
    METHODS,
    OURS,
    SPECULATION_ONLY,
    pages_of,
    pool_for,
    prepare,
)
from specdeft.bench.attention_report import make_report
from specdeft.bench.attention_workloads import (
    Workload,
    few_shot_forest,
    named_forest,
    parse_heads,
    random_inputs,
    random_tree,
    recorded_forest,
    shared_prefix,
    speculation,
)
from specdeft.bench.cuda_timing import COLD_BYTES, Ceilings, Timing, num_sets, time_rotated
from specdeft.bench.report import as_markdown
from specdeft.bench.run_folder import read_records
from specdeft.trees.token_tree import TokenTree

CPU = torch.device("cpu")
SHAPE = parse_heads("4/2/32", torch.float16)
WORKLOAD = speculation(SHAPE, 200, random_tree(9))
# name, parents, tokens: a prompt, two branches, one of them branched again.
NODES = [[6, -5, [1, 2]], [4, 1, [3, 4]], [9, 1, []], [3, 5, []], [8, 5, []]]
OUTCOME = Outcome("4/2/32", "200", 9, OURS, 1.0, 10**6, 1e-4, 8.0, 0.1, None)


def _error(method: str, workload: Workload, page_size: int = 32) -> float:
    torch.manual_seed(0)
    q, k, v = random_inputs(workload, CPU)
    prepared = prepare(method, workload, page_size, CPU)
    k_pool, v_pool = (pool_for(method, workload, kv, page_size) for kv in (k, v))
    return relative_error(prepared.run(q, k_pool, v_pool), exact_output(workload, q, k, v))


@pytest.mark.parametrize(
    "method", [m for m in METHODS if m != "flex" and not m.startswith("flashinfer")]
)
def test_every_method_passes_the_gate(method: str) -> None:
    assert _error(method, WORKLOAD) <= worst_error(method, torch.float16)


@pytest.mark.parametrize("method", [m for m in FOREST_METHODS if m != "flex"])
def test_forest_methods_pass_the_gate_on_a_recorded_tree(method: str) -> None:
    workload = Workload("recorded", SHAPE, recorded_forest(NODES))
    assert _error(method, workload) <= worst_error(method, torch.float16)


@pytest.mark.parametrize("method", BATCH_METHODS)
def test_methods_pass_the_gate_on_a_batch(method: str) -> None:
    workload = shared_prefix(SHAPE, 64, 37, 3, random_tree(5))
    assert workload.forest.num_queries == 3 * 5
    assert workload.forest.total_tokens == 64 + 3 * (37 + 5)
    visible = workload.forest.visible()
    assert visible[:, :64].all()
    assert not visible[:5, 64 + 42 :].any()
    assert torch.equal(visible[5:10, 64 + 42 + 37 : 64 + 2 * 42], random_tree(5).ancestors())
    assert _error(method, workload, 64) <= worst_error(method, torch.float16)


def test_a_batch_shares_full_pages_only() -> None:
    tree = random_tree(5)
    tables, slots = pages_of(shared_prefix(SHAPE, 64, 37, 3, tree), 32)
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2:].flatten().tolist())) == 3 * 2
    assert len(set(slots.tolist())) == 64 + 3 * 42
    with pytest.raises(ValueError, match="full pages of 32 tokens, not 65"):
        pages_of(shared_prefix(SHAPE, 65, 37, 3, tree), 32)
    with pytest.raises(ValueError, match="takes one sequence"):
        prepare("flashinfer", shared_prefix(SHAPE, 64, 37, 3, tree), 32, CPU)


def test_the_gate_refuses_nan_and_wrong_masks() -> None:
    q, k, v = random_inputs(WORKLOAD, CPU)
    exact = exact_output(WORKLOAD, q, k, v)
    assert relative_error(torch.full_like(q, float("nan")), exact) == float("inf")
    prepared = prepare("sdpa", speculation(SHAPE, 200, TokenTree.chain(8)), 32, CPU)
    wrong = relative_error(prepared.run(q, k, v), exact)
    assert wrong > WORST_ERROR[torch.float16]


def test_a_speculation_forest_sees_what_the_tree_sees() -> None:
    visible = WORKLOAD.forest.visible()
    assert visible[:, :200].all()
    assert torch.equal(visible[:, 200:], random_tree(9).ancestors())


def test_a_recorded_tree_at_its_widest_step() -> None:
    """Steps 5 to 7: node 2 and both children of node 1 grow; the first such step is taken."""
    forest = recorded_forest(NODES)
    assert forest.num_queries == 3
    assert sorted(forest.path_lengths().tolist()) == [6 + 4 + 1, 6 + 4 + 1, 6 + 5]
    assert forest.total_tokens == 6 + 4 + 1 + 1 + 5


def test_what_died_before_the_widest_step_is_gone() -> None:
    nodes = [[2, -1, [1, 2]], [3, 1, []], [4, 1, [3, 4]], [2, 5, []], [2, 5, []]]
    nodes[2][2] = [3, 4, 5]
    nodes.append([1, 5, []])
    forest = recorded_forest(nodes)
    assert forest.num_queries == 3
    assert forest.total_tokens == 2 + 4 + 1 + 1 + 1


def test_few_shot_forest() -> None:
    forest = few_shot_forest(10)
    assert forest.num_queries == 10
    assert forest.total_tokens == 4000 + 10 * 400
    assert set(forest.path_lengths().tolist()) == {4400}


def test_forests_by_name(tmp_path) -> None:
    path = tmp_path / "trees.json"
    trees = [{"incomplete": True, "nodes": [[1, 0, []]]}, {"incomplete": False, "nodes": NODES}]
    path.write_text(json.dumps({"trees": trees}))
    workload = named_forest(str(path), SHAPE)
    assert (workload.name, workload.forest.num_queries) == ("trees", 3)
    assert named_forest("few-shot-3", SHAPE).forest.num_queries == 3
    for name in ("few-shot-x", "few-shot-0", str(tmp_path / "none.json")):
        with pytest.raises(ValueError, match="--forests"):
            named_forest(name, SHAPE)


@pytest.mark.parametrize("method", SPECULATION_ONLY)
def test_forests_are_refused_by_methods_of_one_sequence(method: str) -> None:
    workload = Workload("recorded", SHAPE, recorded_forest(NODES))
    with pytest.raises(ValueError, match="one sequence with a token tree"):
        prepare(method, workload, 32, CPU)


@pytest.mark.parametrize("method", ["radix", "flash-decoding", "specinfer"])
def test_methods_that_read_everything_per_query_are_not_timed_on_large_trees(method: str) -> None:
    workload = speculation(SHAPE, 100_000, TokenTree.chain(50))
    with pytest.raises(ValueError, match="not timed: reads the tokens 51 times"):
        prepare(method, workload, 32, CPU)


def _table(report, title):
    return next(table for table in report.tables if table.title == title)


def test_report_lists_the_places_where_another_is_ahead() -> None:
    elsewhere = OUTCOME._replace(queries=64)
    outcomes = [
        OUTCOME,
        OUTCOME._replace(method="sdpa", median_us=7.0),
        OUTCOME._replace(method="medusa", median_us=9.0),
        OUTCOME._replace(method="flex", median_us=None, note="no valid configuration"),
        elsewhere,
        elsewhere._replace(method="sdpa", median_us=16.0),
        elsewhere._replace(method="medusa", median_us=8.0),
    ]
    report = make_report(outcomes, [], [Ceilings(4e12, 7e14)], {"git": None})
    assert _table(report, "Places where we are not ahead").rows == (
        ("4/2/32", "200", 9, "sdpa", 7.0, 8.0, 7.0 / 8.0),
        ("4/2/32", "200", 64, "medusa", 8.0, 8.0, 1.0),
    )
    assert report.remarks[0] == "specdeft is ahead of every other timed method at 0 of 2 places"
    assert report.remarks[1] == "flex has no time at 1 place: no valid configuration"
    assert report.tables[0].rows[0][-3:] == ("sdpa", 7.0, 7.0 / 8.0)
    assert _table(report, "Times ours, by method").rows[0] == (
        "sdpa", 2, 0, 7.0 / 8.0, "4/2/32, 200 x 9", (7.0 / 8.0 + 2.0) / 2, 2.0,
    )  # fmt: skip
    assert "no valid configuration" in as_markdown(report)
    assert report.data["outcomes"][3]["median_us"] is None


def test_our_own_ways_are_no_others_to_be_ahead_of() -> None:
    place = OUTCOME._replace(workload="64+37 x 3")
    outcomes = [
        place,
        place._replace(method="specdeft-apart", median_us=7.0),
        place._replace(method="specdeft-once", median_us=3.0),
        place._replace(method="specdeft-apart", median_us=14.0, repeat=2),
        place._replace(method="specdeft-once", median_us=7.0, repeat=2),
        place._replace(method="flatten", median_us=12.0),
    ]
    report = make_report(outcomes, [], [Ceilings(4e12, 7e14)], {})
    assert report.remarks == ("specdeft is ahead of every other timed method at 1 of 1 places",)
    (row,) = _table(report, "Common tokens of a batch").rows
    assert row == ("4/2/32", "64+37 x 3", 9, 10.5, 5.0, (3 / 7 + 1 / 2) / 2, 8.0)


def test_report_shows_a_grid_where_there_is_one() -> None:
    places = [
        OUTCOME._replace(workload=workload, queries=queries, method=method, median_us=us)
        for workload, queries, us in (("1024", 64, 9.0), ("64", 64, 5.0), ("64", 8, 4.0))
        for method, us in ((OURS, us), ("sdpa", 2 * us))
    ]
    forest = OUTCOME._replace(workload="few-shot-20", queries=20)
    report = make_report([*places, forest], [], [Ceilings(4e12, 7e14)], {})
    title = "4/2/32: us by nodes and context (nearest other method, times ours)"
    assert _table(report, title).columns == ("nodes", "64", "1024")
    assert _table(report, title).rows == (
        (8, "4.0 (2.00 sdpa)", None),
        (64, "5.0 (2.00 sdpa)", "9.0 (2.00 sdpa)"),
    )


def test_report_of_repeats_compares_within_each() -> None:
    """The device ran at half its rate in the second of three: all times doubled, no ratio did."""
    outcomes = [
        OUTCOME._replace(method=method, repeat=repeat, median_us=us * slow)
        for repeat, slow in ((1, 1.0), (2, 2.0), (3, 1.1))
        for method, us in ((OURS, 8.0), ("sdpa", 12.0))
    ]
    report = make_report(outcomes, [], [Ceilings(4e12, 7e14)], {})
    (row,) = report.tables[0].rows
    assert row[4] == pytest.approx(8.8)
    assert row[-2:] == pytest.approx((13.2, 1.5))
    assert report.remarks == ("specdeft is ahead of every other timed method at 1 of 1 places",)


def test_report_puts_the_papers_ratios_beside_ours() -> None:
    place = OUTCOME._replace(workload="few-shot-20", queries=20)
    outcomes = [
        place._replace(method="flatten", median_us=10.0),
        place._replace(method="radix", median_us=25.0),
        place._replace(method="flash-decoding", median_us=None, note="not timed"),
    ]
    ratios = _table(make_report(outcomes, [], [Ceilings(4e12, 7e14)], {}), "Forests")
    assert [row[-2:] for row in ratios.rows] == [(1.0, None), (2.5, 1.73), (None, 12.53)]


def test_sets_outlast_the_cache() -> None:
    assert num_sets(32 << 20) == 10
    assert num_sets(1 << 40) == 2
    assert num_sets(1) == 512
    # The smallest place of the grid: 9/3/64 over 1,024 tokens.
    assert num_sets(2 * 1025 * 3 * 64 * 2) * 2 * 1025 * 3 * 64 * 2 >= COLD_BYTES


@pytest.mark.parametrize("arguments", [["--batch", "1"], ["--batch", "2", "--own", "0"]])
def test_a_batch_of_one_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="give 2 sequences or more"):
        attention.main(arguments)


def test_repeats_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="--repeats is 0"):
        attention.main(["--repeats", "0"])


class _Device:
    """What `time_rotated` asks of torch.cuda, with a clock that a replay moves on."""

    def __init__(self, replay_ms: list[float]) -> None:
        self.now_ms, self.replay_ms = 0.0, replay_ms
        self.events: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Stream:
            def wait_stream(self, _other: object) -> None:
                device.events.append("wait")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_ms = device.now_ms

            def elapsed_time(self, stop: "Event") -> float:
                return stop.at_ms - self.at_ms

        class Graph:
            def capture_begin(self) -> None:
                device.events.append("begin")

            def capture_end(self) -> None:
                device.events.append("end")

            def replay(self) -> None:
                device.events.append("replay")
                device.now_ms += device.replay_ms.pop(0)

        for name, fake in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "stream": lambda _stream: nullcontext(),
            "synchronize": lambda: None,
            "current_device": lambda: 0,
            "current_stream": Stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        cuda_timing._side_stream.cache_clear()


@pytest.mark.parametrize(("far_above_us", "replays"), [(math.inf, 20), (1000.0, 20), (999.0, 5)])
def test_a_call_far_above_gets_few_replays(monkeypatch, far_above_us: float, replays: int) -> None:
    """Two calls a graph, 2 ms a replay; the first three replays only warm up."""
    device = _Device([50.0] * 3 + [2.0] * 20)
    device.install(monkeypatch)
    called: list[int] = []
    timing = time_rotated(called.append, 2, far_above_us=far_above_us)
    assert timing == Timing(1000.0, 0.0, replays)
    assert called == [0, 1, 0, 1]
    assert device.events == ["wait", "begin", "end", *["replay"] * (3 + replays)]
    cuda_timing._side_stream.cache_clear()


def test_a_call_that_cannot_be_captured_ends_the_capture(monkeypatch) -> None:
    device = _Device([])
    device.install(monkeypatch)

    def call(_index: int) -> None:
        if device.events[-1:] == ["begin"]:
            raise RuntimeError("not allowed while capturing")

    with pytest.raises(RuntimeError, match="while capturing"):
        time_rotated(call, 2)
    assert device.events[-1] == "end"
    cuda_timing._side_stream.cache_clear()


@pytest.mark.parametrize("text", ["32/8", "a/b/c", "32/5/64", "0/1/64"])
def test_malformed_heads_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--heads"):
        parse_heads(text, torch.bfloat16)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="on a machine with a GPU"):
        attention.main([])


def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The whole command with every clock replaced: each timed call runs once and takes 7 us."""
    timed: list[str] = []

    def rotated(call, sets, **_options):
        call(sets - 1)
        timed.append("call")
        return Timing(7.0, 0.5, 20)

    monkeypatch.setattr(attention, "_device", lambda: CPU)
    monkeypatch.setattr(attention, "measure_ceilings", lambda _device: Ceilings(4e12, 7e14))
    monkeypatch.setattr(attention_measure, "time_rotated", rotated)
    monkeypatch.setattr(attention_measure, "time_once", lambda _call: 50.0)
    monkeypatch.setattr(attention_measure, "num_sets", lambda _bytes: 2)
    return timed


SMALL = ["--heads", "4/2/32", "--context", "100", "--nodes", "5", "--dtype", "float16"]


def test_a_saved_run_is_resumed_and_not_measured_again(monkeypatch, tmp_path) -> None:
    timed = _on_the_cpu(monkeypatch)
    arguments = [*SMALL, "--methods", "specdeft", "sdpa", "flashinfer"]
    arguments += ["--page-size", "32", "--save-result", str(tmp_path)]
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    report = attention.main(arguments).report
    assert len(timed) == 2
    rows = _table(report, "Methods").rows
    assert [row[5] for row in rows] == [7.0, 7.0, None]
    assert "install flashinfer-python" in str(rows[2][-1])
    again = attention.main(arguments).report
    assert len(timed) == 2
    assert again.tables == report.tables
    assert json.loads((tmp_path / "report.json").read_text())["outcomes"][0]["median_us"] == 7.0


def test_a_place_half_measured_goes_on_with_what_the_first_method_took(
    monkeypatch, tmp_path
) -> None:
    timed = _on_the_cpu(monkeypatch)
    arguments = [*SMALL, "--methods", "specdeft", "sdpa", "--save-result", str(tmp_path)]
    attention.main(arguments)
    records = tmp_path / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:2]))  # the ceilings and ours
    limits: list[float] = []

    def rotated(call, sets, *, far_above_us):
        limits.append(far_above_us)
        return Timing(9.0, 0.5, 5)

    monkeypatch.setattr(attention_measure, "time_rotated", rotated)
    report = attention.main(arguments).report
    assert (len(timed), limits) == (2, [21.0])
    assert _table(report, "Methods").rows[1][5:8] == (9.0, 0.5, 5)


def test_repeats_take_turns_and_prepare_once(monkeypatch, tmp_path) -> None:
    _on_the_cpu(monkeypatch)
    prepared: list[str] = []

    def counted(method, *arguments):
        prepared.append(method)
        return prepare(method, *arguments)

    monkeypatch.setattr(attention_measure, "prepare", counted)
    arguments = ["--heads", "4/2/32", "--context", "90", "40", "--nodes", "5", "--dtype", "float16"]
    arguments += ["--methods", "specdeft", "sdpa", "--repeats", "2"]
    report = attention.main([*arguments, "--save-result", str(tmp_path)]).report
    records = read_records(tmp_path / "records.jsonl")
    assert list(records)[1:] == [
        f"4/2/32 {context} 5 {method}{repeat}"
        for context in (90, 40)
        for repeat in ("", " #2")
        for method in (OURS, "sdpa")
    ]
    assert prepared == [OURS, "sdpa"] * 2
    assert all("timing" in records[key]["host_s"] for key in list(records)[1:])
    assert [row[:3] for row in report.tables[0].rows] == [("4/2/32", "90", 5), ("4/2/32", "40", 5)]
    assert _table(report, "Seconds of the run").rows[0][:2] == (OURS, 4)


def test_runs_of_different_places_are_merged(monkeypatch, tmp_path) -> None:
    _on_the_cpu(monkeypatch)
    folders = [str(tmp_path / name) for name in ("a", "b", "both")]
    for folder, nodes in zip(folders, ("5", "7"), strict=False):
        places = ["--heads", "4/2/32", "--context", "100", "--nodes", nodes, "--dtype", "float16"]
        attention.main([*places, "--methods", "specdeft", "sdpa", "--save-result", folder])
    # The second was stopped before its report and in the middle of a line.
    (tmp_path / "b" / "report.json").unlink()
    with (tmp_path / "b" / "records.jsonl").open("a") as file:
        file.write('{"key": "4/2/32 100 7 me')
    monkeypatch.undo()
    merge = ["--merge", *folders[:2], "--save-result", folders[2]]
    report = attention.main(merge).report
    assert [row[2] for row in report.tables[0].rows] == [5, 7]
    assert [note.split(":")[0] for note in report.notes[:2]] == [
        "ceilings of run 1",
        "ceilings of run 2",
    ]
    assert [run["settings"]["nodes"] for run in report.data["runs"]] == [[5], [7]]
    stored = json.loads((tmp_path / "both" / "report.json").read_text())
    assert len(stored["outcomes"]) == 4
    assert attention.main(merge).report.tables == report.tables
    again = attention.main(["--merge", folders[2]]).report
    assert (again.tables, again.notes) == (report.tables, report.notes)
    assert again.data["runs"] == report.data["runs"]
    with pytest.raises(ValueError, match="which a folder before it holds already"):
        attention.main(["--merge", folders[0], folders[0]])
    with pytest.raises(ValueError, match="holds no run of bench attention"):
        attention.main(["--merge", folders[0], str(tmp_path)])


def test_runs_of_different_machines_are_not_merged(monkeypatch, tmp_path) -> None:
    _on_the_cpu(monkeypatch)
    folder = tmp_path / "a"
    attention.main([*SMALL, "--methods", "specdeft", "--save-result", str(folder)])
    other = shutil.copytree(folder, tmp_path / "b")
    manifest = json.loads((folder / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "device": "another"}))
    with pytest.raises(ValueError, match="differ in device"):
        attention.main(["--merge", str(folder), str(other)])


def test_a_method_many_times_slower_than_the_first_is_not_timed(monkeypatch) -> None:
    timed = _on_the_cpu(monkeypatch)
    arguments = [*SMALL, "--methods", "specdeft", "sdpa", "--slowest", "2"]
    rows = _table(attention.main(arguments).report, "Methods").rows
    assert len(timed) == 1
    assert rows[1][5] is None
    assert "not timed: a call takes 50 us" in str(rows[1][-1])


def test_forests_from_the_command(monkeypatch) -> None:
    _on_the_cpu(monkeypatch)
    arguments = ["--heads", "4/2/32", "--dtype", "float16", "--forests", "few-shot-2"]
    report = attention.main([*arguments, "--methods", "flatten", "radix", "sdpa"]).report
    assert [row[3:6] for row in report.tables[0].rows] == [
        ("flatten", 7.0, 1.0),
        ("radix", 7.0, 1.0),
        ("sdpa", 7.0, 1.0),
    ]
