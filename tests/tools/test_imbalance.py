"""The benchmark of imbalance: steps are what they say, the judge equals hand examples, the command runs."""

import json
import math
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from balancer.layout import Meet
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities
from balancer.policies import PlacementProblem, policy_names
from tools.benchmarks import imbalance as command
from tools.benchmarks.baseline_step import Placed
from tools.benchmarks.imbalance_baselines import BALANCERS
from tools.benchmarks.imbalance_cases import LAYOUTS, LayoutCase, Step, finely_cut, largest_share, make_step
from tools.benchmarks.imbalance_judge import Verdict, judge, lay
from tools.benchmarks.imbalance_ours import columns_of, our_policies, placed_by, planned, users_balancer
from tools.benchmarks.imbalance_own_terms import own_terms
from tools.benchmarks.imbalance_rows import Bound, Row, Setting, best_baseline, quantiles
from tools.benchmarks.imbalance_run import MEETS, RunOptions, run, tasks
from tools.benchmarks.imbalance_small import optimum_ns, small_step
from tools.benchmarks.imbalance_tables import Results, markdown
from tools.benchmarks.imbalance_targets import imbalance_targets
from tools.benchmarks.partition_rows import MAX_TOKENS
from tools.benchmarks.real_tables import REAL_TABLES
from tools.benchmarks.workloads import WORKLOADS, Workload, limited, workload

COLOCATED, TWO_RANKS, FOUR_RANKS, SPREAD = LAYOUTS[:4]
SAMPLE_TOKENS = (400, 300, 200, 100)
SAMPLE_PATCHES = (0, 800, 0, 400)


def samples_by_hand() -> Workload:
    """Four samples; the second and the last have one picture each."""
    tokens, patches = np.array(SAMPLE_TOKENS, np.int64), np.array(SAMPLE_PATCHES, np.int64)
    return Workload(
        name="by hand",
        real=False,
        tokens=tokens,
        text=tokens - patches // 4,
        images=(patches > 0).astype(np.int64),
        patches=patches,
        patch_squares=patches * patches,
    )


def step_by_hand(num_ranks: int, num_microbatches: int, capacity: int = 1_000) -> Step:
    return Step(
        samples=samples_by_hand(),
        group="coarse",
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        seed=0,
        capacity=capacity,
    )


def cells(*pairs: tuple[int, int]) -> Placed:
    return Placed(cells=np.array(pairs, np.int64))


def judged(step: Step, layout: LayoutCase, placed: Placed, meet: Meet = "step") -> Verdict:
    problem = step.problem(layout, meet)
    return judge(problem, lay(problem, placed), meet)


# Steps


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_sample_of_a_fine_step_is_more_than_a_quarter_of_a_micro_batch(name: str) -> None:
    step = make_step(workload(name, 8 * 4 * 16, 1), "fine", 8, 4, 1)
    assert largest_share(step.samples, step.num_cells) <= 0.25
    assert step.samples.tokens.max() <= step.capacity
    longest = int(step.samples.tokens.max())
    longer = limited(workload(name, 8 * 4 * 16, 1), longest + longest // 32 + 1)
    if longest < MAX_TOKENS and int(longer.tokens.max()) > longest:
        assert largest_share(longer, step.num_cells) > 0.25


def test_too_few_samples_a_micro_batch_cannot_be_fine() -> None:
    with pytest.raises(ValueError, match=r"no length makes each sample at most 0\.25 of a mean micro-batch; give more"):
        finely_cut(workload("text", 8 * 3), 8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_spreads_the_same_work_over_its_stages(layout: LayoutCase) -> None:
    step = step_by_hand(2, 2)
    work = {
        found.name: int((problem.forward_ns + problem.backward_ns).sum())
        for found in (COLOCATED, layout)
        for problem in [step.problem(found, "step")]
    }
    assert work[layout.name] == pytest.approx(work[COLOCATED.name], rel=1e-6)
    grid = step.grid(step.problem(layout, "step"))
    assert grid.rank_forward.shape == (4, layout.pp_size)
    assert grid.costs.sum() == work[layout.name]


# The judge


def test_the_judge_adds_up_times_of_ranks_that_meet_once() -> None:
    step = step_by_hand(2, 2)
    problem = step.problem(COLOCATED, "step")
    time = (problem.forward_ns + problem.backward_ns).sum(axis=1).tolist()
    verdict = judged(step, COLOCATED, cells((0, 0), (0, 1), (1, 0), (1, 1)))
    assert verdict.makespan_ns == time[0] + time[1]
    assert verdict.bubble == pytest.approx(1 - sum(time) / (2 * (time[0] + time[1])))
    assert verdict.rank_ratio == pytest.approx(2 * (time[0] + time[1]) / sum(time))
    labels = [400, 300 - 200, 200, 100 - 100]
    assert verdict.label_ratio == pytest.approx(2 * (labels[0] + labels[1]) / sum(labels))
    assert verdict.is_clean


def test_the_judge_takes_the_slowest_rank_of_every_act_where_ranks_meet_in_micro_batches() -> None:
    step = step_by_hand(2, 2)
    problem = step.problem(COLOCATED, "microbatch")
    forward, backward = problem.forward_ns, problem.backward_ns
    # Micro-batch 0 holds samples 0 and 2, micro-batch 1 samples 1 and 3: stage by stage the larger of the two.
    placed = cells((0, 0), (1, 1), (1, 0), (0, 1))
    pairs = ([0, 2], [1, 3])
    expected = sum(int(times[pair].max(axis=0).sum()) for times in (forward, backward) for pair in pairs)
    assert judged(step, COLOCATED, placed, "microbatch").makespan_ns == expected
    assert judged(step, COLOCATED, placed).makespan_ns < expected


def test_the_judge_runs_1f1b_on_two_pipeline_ranks() -> None:
    step = step_by_hand(1, 2)
    problem = step.problem(TWO_RANKS, "step")
    # Micro-batch 0: samples 1 and 0, micro-batch 1: samples 3 and 2; all have pictures.
    pairs = ([0, 1], [2, 3])
    (e0, l0), (e1, l1) = (problem.forward_ns[pair].sum(axis=0).tolist() for pair in pairs)
    (be0, bl0), (be1, bl1) = (problem.backward_ns[pair].sum(axis=0).tolist() for pair in pairs)
    # Rank 0: E0 E1 then its backwards as they come. Rank 1: F0 B0 F1 B1.
    b0 = e0 + l0 + bl0
    b1 = max(b0, e0 + e1) + l1 + bl1
    rank0 = max(max(e0 + e1, b0) + be0, b1) + be1
    assert judged(step, TWO_RANKS, cells((0, 0), (0, 0), (0, 1), (0, 1))).makespan_ns == rank0


def test_media_that_are_encoded_elsewhere_count_there_and_all_ranks_wait() -> None:
    step = step_by_hand(2, 1)
    problem = step.problem(COLOCATED, "step")
    encoder = (problem.forward_ns + problem.backward_ns)[:, 0]
    llm = (problem.forward_ns + problem.backward_ns)[:, 1]
    placed = cells((0, 0), (1, 0), (1, 0), (0, 0))
    assert judged(step, COLOCATED, placed).makespan_ns == max(
        int(llm[[0, 3]].sum() + encoder[3]), int(llm[[1, 2]].sum() + encoder[1])
    )
    moved = replace(placed, encoder_cells=np.array([[0, 0], [0, 0], [0, 0], [1, 0]]))
    slowest = max(int(encoder[1]), int(encoder[3]))
    expected = slowest + max(int(llm[[0, 3]].sum()), int(llm[[1, 2]].sum()))
    assert judged(step, COLOCATED, moved).makespan_ns == expected


def test_lost_samples_and_broken_capacities_are_counted() -> None:
    step = step_by_hand(2, 2, capacity=450)
    verdict = judged(step, COLOCATED, cells((0, 0), (-1, -1), (1, 0), (1, 0)))
    assert (verdict.lost, verdict.cells_above, verdict.is_clean) == (1, 0, False)
    verdict = judged(step, COLOCATED, cells((0, 0), (0, 0), (1, 0), (1, 1)))
    assert (verdict.lost, verdict.cells_above) == (0, 1)
    assert verdict.worst_load == pytest.approx(700 / 450)
    verdict = judged(step, COLOCATED, cells((0, 0), (0, 1), (1, 2), (1, 0)))
    assert verdict.num_microbatches == 3
    assert judged(step, COLOCATED, cells(*[(-1, -1)] * 4)).lost == 4


def test_micro_batches_left_empty_count_where_replicas_meet_in_each() -> None:
    step = step_by_hand(2, 2, capacity=10_000)
    uneven = cells((0, 0), (0, 0), (1, 0), (1, 1))
    for meet, expected in (("step", 0), ("microbatch", 1), ("unit", 1)):
        problem = step.problem(COLOCATED, meet)
        verdict = judge(problem, lay(problem, uneven), meet)
        assert (verdict.cells_short, verdict.is_clean) == (expected, expected == 0)
    problem = step_by_hand(4, 2, capacity=10_000).problem(COLOCATED, "microbatch")
    one_each = judge(problem, lay(problem, cells((0, 0), (1, 0), (2, 0), (3, 0))), "microbatch")
    assert one_each.cells_short == 0


def test_a_rank_that_does_not_exist_is_refused() -> None:
    step = step_by_hand(2, 2)
    with pytest.raises(ValueError, match="sample 3 is on rank 2, micro-batch 0; ranks are 0 to 1"):
        judged(step, COLOCATED, cells((0, 0), (0, 1), (1, 0), (2, 0)))
    with pytest.raises(ValueError, match="cells has shape"):
        judged(step, COLOCATED, cells((0, 0)))


@pytest.mark.parametrize("meet", MEETS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_judge_agrees_with_the_plans_it_does_not_read(layout: LayoutCase, meet: Meet) -> None:
    step = make_step(workload("vlm", 4 * 4 * 8, 2), "coarse", 4, 4, 2)
    problem = step.problem(layout, meet)
    for policy in our_policies():
        plan = planned(step, layout, meet, policy)
        verdict = judge(problem, lay(problem, placed_by(plan, problem)), meet)
        assert verdict.makespan_ns == plan.makespan_ns
        assert verdict.is_clean
        assert verdict.makespan_ns >= plan.lower_bound_ns


# Exact optimum


@pytest.mark.parametrize("meet", MEETS)
@pytest.mark.parametrize("layout", [COLOCATED, TWO_RANKS], ids=lambda layout: layout.name)
def test_the_optimum_is_the_least_that_the_judge_sees_of_any_placement(layout: LayoutCase, meet: Meet) -> None:
    step = step_by_hand(2, 2, capacity=600)
    problem = step.problem(layout, meet)
    verdicts = [
        judge(problem, lay(problem, cells(*pairs)), meet)
        for pairs in product([(0, 0), (0, 1), (1, 0), (1, 1)], repeat=4)
    ]
    assert optimum_ns(problem, meet) == min(verdict.makespan_ns for verdict in verdicts if verdict.is_clean)


def test_no_plan_beats_the_optimum() -> None:
    for seed in range(3):
        step = small_step("vlm", RunOptions(), seed)
        for meet in MEETS:
            problem = step.problem(FOUR_RANKS, meet)
            plan = planned(step, FOUR_RANKS, meet, our_policies()[-1])
            assert plan.makespan_ns >= optimum_ns(problem, meet) >= plan.lower_bound_ns


# Rows, targets, tables


def row(method: str, kind: str, makespans: list[int], *, lost: int = 0, meet: Meet = "step") -> Row:
    setting = Setting(
        workload="text", real=False, group="fine", num_ranks=8, num_microbatches=4, layout="colocated", meet=meet
    )
    verdicts = tuple(
        Verdict(
            makespan_ns=makespan,
            bubble=0.1,
            rank_ratio=1.0,
            sync_ratio=1.0,
            label_ratio=1.0,
            num_microbatches=4,
            lost=lost,
            cells_above=0,
            worst_load=1.0,
        )
        for makespan in makespans
    )
    bounds = tuple(Bound(lower_ns=100, work_ns=100, largest_share=0.2) for _ in makespans)
    seeds = tuple(range(len(makespans)))
    return Row(
        setting=setting,
        method=method,
        kind=kind,  # type: ignore[arg-type]
        system="",
        seeds=seeds,
        bounds=bounds,
        verdicts=verdicts,
        cpu_ms=tuple(1.0 for _ in makespans),
    )


def test_the_best_baseline_keeps_every_sample_and_exchanges_nothing() -> None:
    rows = [
        row("joint", "ours", [101, 103]),
        row("loses", "baseline", [90, 90], lost=1),
        row("exchanges", "exchanges", [95, 95]),
        row("slow", "baseline", [150, 150]),
        row("good", "baseline", [110, 104]),
    ]
    best = best_baseline(rows)
    assert best is not None
    assert best.method == "good"
    assert rows[4].over(rows[0]) == pytest.approx([110 / 101, 104 / 103])
    assert quantiles([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.8, 2.98, 2.0))
    assert all(math.isnan(value) for value in quantiles([]))


def results_of(rows: list[Row]) -> Results:
    targets = imbalance_targets(rows, [], [], "joint")
    return Results(policy="joint", rows=rows, targets=targets, times=[], optima=[], own_terms=[])


def test_targets_name_the_setting_that_misses() -> None:
    good = results_of([row("joint", "ours", [101, 102]), row("other", "baseline", [110, 110])])
    verdicts = {target.name: target.verdict for target in good.targets if target.num_rows}
    assert verdicts["fine, colocated, meet step: makespan / lower bound"] == "PASS"
    assert verdicts["makespan / that of the best baseline"] == "PASS"
    assert "None of 1." in markdown(good, ["note"])
    bad = results_of([row("joint", "ours", [101, 120]), row("other", "baseline", [101, 110])])
    missed = {target.name: target for target in bad.targets if target.verdict == "MISS"}
    assert missed["fine, colocated, meet step: makespan / lower bound"].worst == pytest.approx(1.2)
    assert "text, fine, 8 x 4, colocated, meet step: other" in missed["makespan / that of the best baseline"].where
    assert "1 of 1 settings." in markdown(bad, ["note"])
    lost = results_of([row("joint", "ours", [101], lost=2)])
    assert {target.name for target in lost.targets if target.verdict == "MISS"} == {
        "samples lost, capacities broken, steps without a plan"
    }


# The command


def test_all_tasks_make_rows_of_all_methods() -> None:
    options = RunOptions(workloads=("text",), groups=("coarse",), num_steps=((2, 2),), num_microbatches=(1, 2))
    assert [(task.num_ranks, task.num_microbatches, task.num_samples) for task in tasks(options)] == [
        (2, 1, 16),
        (2, 2, 32),
    ]
    rows = run(options)
    methods = {*BALANCERS, *our_policies()}
    assert len(rows) == len(methods) * 2 * len(MEETS) * 4
    assert {found.method for found in rows} == methods
    assert all(len(found.seeds) == 2 and not found.failed for found in rows)


def test_two_processes_give_the_rows_of_one() -> None:
    options = RunOptions(
        workloads=("text",),
        groups=("coarse",),
        num_steps=((2, 1),),
        num_microbatches=(1, 2),
        layouts=("colocated",),
        policies=("lpt",),
    )
    alone = [replace(found, cpu_ms=()) for found in run(options)]
    assert alone == [replace(found, cpu_ms=()) for found in run(replace(options, processes=2))]


def test_own_terms_compare_time_per_work() -> None:
    lines = own_terms(RunOptions(workloads=("text",), layouts=("colocated",)), "lpt", quick=True)
    assert {line.what for line in lines} == {"WLB-LLM outlier delay", "Megatron hybrid CP"}
    for line in lines:
        assert line.ours >= 0.999
        assert line.theirs >= 0.999
        assert 0 <= line.waiting <= line.late <= 1


PLUGIN = """
import numpy as np


def round_robin(counts, num_ranks, num_microbatches, capacity):
    position = np.argsort(np.argsort(-counts["llm_ns"], kind="stable"), kind="stable")
    return position % num_ranks, position // num_ranks % num_microbatches


def outside(counts, num_ranks, num_microbatches, capacity):
    return np.full(len(counts["llm_ns"]), num_ranks), np.zeros(len(counts["llm_ns"]), np.int64)


def broken(counts, num_ranks, num_microbatches, capacity):
    return np.zeros(3), np.zeros(3)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "balancer_of_a_user.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "balancer_of_a_user", raising=False)
    return "balancer_of_a_user"


def test_the_command_judges_a_users_balancer_beside_the_others(
    plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "tables.md", tmp_path / "numbers.json"
    command.main(
        [
            *("--quick", "--ranks", "2", "--microbatches", "2", "--workloads", "text", "vlm", "--no-times"),
            *("--layouts", "colocated", "own-p2", "--policies", "lpt"),
            *("--balancer", f"{plugin}:round_robin", "--output", str(files[0]), "--json", str(files[1])),
        ]
    )
    printed = capsys.readouterr().out
    assert printed == files[0].read_text(encoding="utf-8")
    for title in ("## Targets", "## Makespan over the lower bound", "## Gain of lpt", "## Every method", "## Notes"):
        assert title in printed
    document = json.loads(files[1].read_text(encoding="utf-8"))
    mine = [found for found in document["rows"] if found["method"] == f"{plugin}:round_robin"]
    assert len(mine) == 2 * 2 * 2 * 2  # workloads, groups, layouts, meeting rules
    assert all(found["kind"] == "yours" and found["steps"][0]["lost"] == 0 for found in mine)


def test_a_balancer_that_is_not_there_or_gives_nonsense_is_refused(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "--balancer", "no_such_module:place"])
    assert "No module named 'no_such_module'; is its folder on PYTHONPATH?" in capsys.readouterr().err
    with pytest.raises(ValueError, match="give module:function, for example my_balancer:place"):
        users_balancer("module")
    step = step_by_hand(2, 2)
    grid = step.grid(step.problem(COLOCATED, "step"))
    with pytest.raises(ValueError, match=r"expected two arrays of integers of shape \(4,\): rank and micro-batch"):
        users_balancer(f"{plugin}:broken").place(grid)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (["--workloads", "text", "nope"], "--workloads nope: there is no such workload; available: .*text, .*vlm"),
        (["--workloads", "real_internvl"], "--workloads real_internvl: a real table, give the folder .* --data"),
        (["--layouts", "own-p3"], "--layouts own-p3: there is no such layout; available: colocated, own-p2, .*, all"),
        (["--policies", "magic"], "--policies magic: there is no such policy; available: .*joint"),
        (["--ranks", "0"], "argument --ranks: invalid number above 0 value: '0'"),
        (["--microbatches", "four"], "argument --microbatches: invalid number above 0 value: 'four'"),
    ],
)
def test_what_does_not_exist_is_a_usage_error_that_lists_what_does(
    added: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--quick", *added])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_help_lists_every_workload_layout_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    printed = re.sub(r"-\s+", "-", capsys.readouterr().out)  # argparse breaks lines after a dash
    for name in (*WORKLOADS, *REAL_TABLES, *(layout.key for layout in LAYOUTS), *policy_names()):
        assert name in printed


def test_layouts_have_short_names_that_need_no_quotes() -> None:
    keys = [layout.key for layout in LAYOUTS]
    assert len({*keys}) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)
    assert not {*keys} & {layout.name for layout in LAYOUTS if layout.name != layout.key}


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("broken", r"expected two arrays of integers of shape \((16|32),\): rank and micro-batch"),
        ("outside", r"cells: sample 0 is on rank 2, micro-batch 0; ranks are 0 to 1"),
    ],
)
def test_a_users_mistake_ends_the_command_with_its_message_alone(
    plugin: str, function: str, said: str, processes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--ranks", "2", "--microbatches", "1", "--workloads", "text", "--layouts", "colocated", "--no-times"]
    with pytest.raises(SystemExit) as ended:
        command.main(["--quick", *size, "--processes", processes, "--balancer", f"{plugin}:{function}"])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith(f"error: --balancer {plugin}:{function}")
    assert re.search(said, last)


def test_a_users_function_gets_columns_it_may_change() -> None:
    step = step_by_hand(2, 2)
    grid = step.grid(step.problem(TWO_RANKS, "step"))
    columns = columns_of(grid)
    assert {"llm_tokens", "patches", "encoder_ns", "llm_ns", "forward_ns_1", "backward_ns_0"} <= set(columns)
    columns["llm_tokens"][:] = 0
    assert grid.sizes.tolist() == list(SAMPLE_TOKENS)


def test_a_problem_of_the_benchmark_is_one_of_the_planner() -> None:
    step = step_by_hand(2, 2)
    same = placement_problem(
        step.counts,
        parallel=SPREAD.parallel(2, 2, "step"),
        cost_model=SPREAD.cost_model(),
        capacities=Capacities(tokens=1_000),
        schedule="nested",
    )
    found: PlacementProblem = step.problem(SPREAD, "step")
    assert np.array_equal(found.forward_ns, same.forward_ns)
    assert found.capacity == same.capacity == (1_000,)
