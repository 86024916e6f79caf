"""`balancer-train plan`: what training would do, without training, without a process group, without a pixel."""

import itertools
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from balancer.cost_model import CostModel
from balancer.fit_report import Fit
from balancer.layout import Layout, ParallelSpec
from balancer.plan import StepPlan
from balancer.plan_sequence import PlanSequence
from balancer.printable import printable
from dataloaders.adjustment import cut_sample
from dataloaders.chat import encode_record
from dataloaders.tokenizer import ByteTokenizer, Special
from trainer.calibrated import RangeWatch, chosen_cost_model, memory_model
from trainer.comm import single_process
from trainer.config import PlanConfig
from trainer.data import MAX_LISTED, DataSide, capacities_of, notes, prepare, read_groups, split, training_side
from trainer.errors import ConfigError
from trainer.kernels import ready_planner
from trainer.mixture import last_step, mixture_selector, report_of
from trainer.model_source import ModelSource, cost_model_for, load_model_source, lookahead_cost_for
from trainer.progress import progress_bars

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


def run_plan(config: PlanConfig) -> int:
    """Print the statistics of the plans, or one sample with its labels."""
    console = Console()
    model = load_model_source(config.model)
    memory = memory_model(config, model, Layout(pp_size=config.pp_size))
    with progress_bars() as progress:
        side = training_side(config, model.processor, memory=memory, progress=progress)
        if config.eval_data is not None:  # so that what would stop the training stops here
            prepare(config, config.eval_data, model.processor, memory=memory, progress=progress)
    if config.show_sample is not None:
        return _show_sample(config, side, console)
    train_ids, held_out = split(side, share=0.0 if config.eval_data else config.eval_share, seed=config.seed)
    layout = Layout(dp_size=config.dp_size, pp_size=config.pp_size)
    spec = ParallelSpec.pipeline(
        dp_size=config.dp_size,
        pp_size=config.pp_size,
        encoder=config.encoder,
        num_chunks=config.num_chunks,
        num_microbatches=config.num_microbatches,
        min_num_microbatches=config.min_num_microbatches,
    )
    cost_model, fitted = _cost_model(config, model, layout, spec)
    plans = PlanSequence(
        index=side.index,
        ids=train_ids,
        global_batch_size=config.global_batch_size,
        layout=layout,
        cost_model=cost_model,
        capacities=capacities_of(config),
        schedule=config.schedule,
        policy=config.policy,
        parallel=spec,
        seed=config.seed,
        shuffle=config.shuffle,
        block_shards=config.shuffle_block_shards,
        groups=read_groups(side, config),
        selector=mixture_selector(side, train_ids, config),
        step_tokens=config.step_tokens,
        tail=config.tail,
        lookahead_steps=config.lookahead_steps,
        selection_cost=lookahead_cost_for(model.config),
        dropped=side.dropped,
    )
    num_steps = last_step(plans, config.num_steps(plans.steps_per_epoch))
    count = min(config.plan_steps or num_steps, num_steps, plans.steps_per_epoch)
    _print_data(side, train_ids, held_out, console)
    _print_mixture(plans, num_steps, console)
    for note in plans.selection_notes():
        console.print(f"note: {note}", markup=False)
    ready_planner(
        single_process(),
        lambda text: console.print(text, markup=False, highlight=False),
        pipeline=spec.num_ranks > 1,
    )
    made = [plans.plan(step) for step in range(count)]
    ranges = RangeWatch(fitted, lambda text: console.print(f"note: {text}", markup=False))
    for plan in made:
        ranges.look(plan, partial(plans.counts, plan.step))
    _print_plans(config, plans, made, num_steps, console)
    return 0


def _cost_model(
    config: PlanConfig, model: ModelSource, layout: Layout, spec: ParallelSpec
) -> tuple[CostModel, Fit | None]:
    """What the stages cost: as in training, or in closed form where training has no such stages."""
    if spec.stage_ranks == tuple(layout.stage_ranks()):
        return chosen_cost_model(config.cost_model, model, layout)
    if config.cost_model is not None:
        raise ConfigError(
            f"--cost-model {config.cost_model} was measured on stages of another layout than encoder={config.encoder}, "
            f"num_chunks={config.num_chunks}. Leave it out: the closed form covers every layout."
        )
    return cost_model_for(model.config, spec), None


def _print_data(side: DataSide, train_ids: np.ndarray, held_out: np.ndarray, console: Console) -> None:
    samples = side.index.samples
    table = Table(title=f"{len(side.index)} samples: {len(train_ids)} to train, {len(held_out)} held out")
    for column in ("per sample", "min", "p50", "p90", "p99", "max", "sum"):
        table.add_column(column, justify="left" if column == "per sample" else "right")
    for name in ("llm_tokens", "text_tokens", "visual_tokens", "label_tokens", "patches", "num_items"):
        values = samples[name][train_ids]
        quantiles = [f"{value:.0f}" for value in np.quantile(values, QUANTILES)] if len(values) else ["-"] * 5
        table.add_row(name.replace("_", " "), *quantiles, str(int(values.sum())))
    console.print(table)
    for note in notes(side):
        console.print(f"note: {note}", markup=False)
    for what, left_out in (("unusable", side.bad), ("left out", side.dropped)):
        if left_out:
            console.print(f"{len(left_out)} samples {what}:")
            for item in left_out[:MAX_LISTED]:
                console.print(f"  sample {item.sample_id}: {item.reason}", markup=False)


def _print_mixture(plans: PlanSequence, num_steps: int, console: Console) -> None:
    report = report_of(plans, num_steps)
    if report is not None:
        console.print(f"mixture over {num_steps} steps:")
        for line in (*report.lines(), *(f"note: {note}" for note in report.notes())):
            console.print(printable(line), markup=False)


def _print_plans(
    config: PlanConfig, plans: PlanSequence, made: list[StepPlan], num_steps: int, console: Console
) -> None:
    console.print(
        f"{num_steps} steps of {_step_size(config)} ({plans.steps_per_epoch} per epoch), "
        f"{plans.layout.dp_size} replicas x {plans.layout.pp_size} pipeline ranks, policy {config.policy}; "
        f"{len(made)} of them planned below. Times are predicted"
        f"{'.' if plans.cost_model.absolute else '; only their ratios mean something.'}"
    )
    table = Table(title="per step")
    for column in ("", "p50", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "micro-batches per rank": [float(plan.num_microbatches) for plan in made],
        "imbalance over ranks, sequential": [plan.imbalance_before for plan in made],
        "imbalance over ranks, planned": [plan.imbalance_after for plan in made],
        "makespan, sequential / planned": [plan.makespan_before_ns / max(plan.makespan_ns, 1) for plan in made],
        "makespan / lower bound": [plan.makespan_ns / max(plan.lower_bound_ns, 1) for plan in made],
        "largest pack, tokens": [float(plan.llm_tokens.max()) for plan in made],
        "largest pack, patches": [float(plan.patches.max()) for plan in made],
    }
    for name, values in rows.items():
        table.add_row(name, f"{np.median(values):.3g}", f"{max(values):.3g}")
    table.add_row("fill of used packs", f"{np.median([p.fill for p in made]):.3g}", f"{min(p.fill for p in made):.3g}")
    console.print(table)
    worst = max(made, key=lambda plan: plan.makespan_ns)
    console.print(f"slowest step: {worst.step + 1}; its largest sample is {_largest(plans, worst)}")


def _step_size(config: PlanConfig) -> str:
    if config.step_tokens is not None:
        return f"about {config.step_tokens} tokens"
    return f"{config.global_batch_size} samples"


def _largest(plans: PlanSequence, plan: StepPlan) -> str:
    counts = plans.counts(plan.step)
    cost = (plans.cost_model.forward_ns(counts) + plans.cost_model.backward_ns(counts)).sum(axis=1)
    row = int(cost.argmax())
    return (
        f"{int(counts.sample_ids[row])} ({int(counts.llm_tokens[row])} tokens, {int(counts.patches[row])} patches, "
        f"{cost[row] / max(int(cost.sum()), 1):.0%} of the step's work)"
    )


def _show_sample(config: PlanConfig, side: DataSide, console: Console) -> int:
    """One sample as the model sees it: text that carries labels is marked, media are shown by their size."""
    sample_id = config.show_sample or 0
    if sample_id >= len(side.index):
        raise ConfigError(f"show_sample={sample_id}: the index has samples 0 to {len(side.index) - 1}")
    for bad in side.bad:
        if bad.sample_id == sample_id:
            raise ConfigError(f"sample {sample_id} cannot be used: {bad.message}")
    record = side.source.record(sample_id)
    items = side.index.items
    encoded = encode_record(record, side.index.item_tokens(sample_id), train_on=config.train_on)
    adjustment = side.index.adjustment(sample_id)
    encoded = cut_sample(encoded, None if adjustment is None else adjustment.keep_tokens)
    console.print(printable(f"sample {sample_id}, {record.place}: {len(encoded.tokens)} LLM tokens"), markup=False)
    for number, j in enumerate(side.index.item_rows(sample_id)):
        console.print(
            f"  medium {number}: {items['width_px'][j]} x {items['height_px'][j]} px -> "
            f"{items['grid_t'][j]} x {items['grid_h'][j]} x {items['grid_w'][j]} patches, "
            f"{items['visual_tokens'][j]} tokens"
        )
    console.print(f"labels (train_on={config.train_on}) are underlined:")
    console.print(_marked(encoded.tokens.tolist(), encoded.labels.tolist()))
    return 0


def _marked(tokens: list[int], labels: list[int]) -> Text:
    """The sample as text; a token is underlined when the position before it is trained to predict it."""
    tokenizer, text = ByteTokenizer(), Text()
    trained = [False, *(label != -100 for label in labels[:-1])]
    pads = {int(Special.IMAGE_PAD), int(Special.VIDEO_PAD)}

    def kind(position: int) -> tuple[bool, bool]:
        return tokens[position] in pads, trained[position]

    for (is_media, is_trained), group in itertools.groupby(range(len(tokens)), key=kind):
        part = [tokens[position] for position in group]
        shown = f"[{len(part)} visual tokens]" if is_media else printable(tokenizer.decode(part))
        text.append(shown, style="underline" if is_trained else "dim" if is_media else "")
    return text
