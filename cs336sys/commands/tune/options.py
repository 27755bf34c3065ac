"""``cs336sys tune``: the fastest configuration that fits, predicted for thousands, proved by measuring the best few."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cs336sys.accounting.checkpointing import kept_blocks, parse_checkpointing
from cs336sys.accounting.hardware import datasheet
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.step_time.choice import STRATEGIES, Candidate, Choice, Space, choose, evaluate, refusal
from cs336sys.accounting.step_time.prediction import StepConfiguration, ranged_quantities
from cs336sys.accounting.step_time.rates import GPUS, UNMEASURED, Exposure, Rates, rates_of, read_rates
from cs336sys.accounting.step_time.work import CountedModel
from cs336sys.command_line.faults import say
from cs336sys.command_line.options import training as options
from cs336sys.command_line.options.output import OutputOptions, SweepOptions
from cs336sys.command_line.options.reading import (
    among,
    choice,
    is_given,
    read_memory_limit,
    reads_file,
    setting,
    writes_file,
)
from cs336sys.errors import CapabilityError, UsageError
from cs336sys.findings import sentence
from cs336sys.results.model import Cell, configuration_key
from cs336sys.run.sweep import in_rounds, run_sweep
from cs336sys.settings.fields import MEASURING, OUTPUT, WHAT_RUNS
from cs336sys.settings.parallel import ParallelWorkload
from cs336sys.settings.training import Workload

if TYPE_CHECKING:
    from cs336sys.run.cells import Outcome
    from cs336sys.tables.table import Table

# Of a GPU's memory, what tensors may take: the rest is the context's and what the allocator cannot use.
_USABLE_SHARE = 0.95

# What a rank on a CPU is assumed to send: Gloo's all-reduce of large messages between two processes of one machine
# (docs/results/allreduce-gloo-h200).
_GLOO_BYTES_PER_S = 1e9

_MOST_ROUNDS = 12  # Rounds of measuring, at most: the fewest that can decide are four.
_MOST_RESERVES = 10  # So many of the next best stand in for candidates that do not run.

# Settings of the implementation that have one value each; the optimizer has its state's dtype with it.
_SINGLE_SETTINGS = ("compile", "attention", "kernels", "cuda_graph")

_PYTORCH_OPTIMIZERS = [("course", "fp32"), ("fused", "fp32")]  # Each with its state's dtype.


@dataclass(frozen=True)
class SearchOptions:
    """The configurations to choose among, and the GPUs to choose for."""

    checkpoint: Annotated[
        Sequence[str],
        setting(
            help="Only these: none, block, every=K, keep=N.",
            rich_help_panel=WHAT_RUNS,
            autocompletion=among(("none", "block", "every=", "keep=")),
            parser=lambda text: text if kept_blocks(text) is not None else parse_checkpointing(text),
        ),
    ] = ()
    micro_batch: Annotated[
        Sequence[int], setting(help="Micro-batch sizes of a rank. Default: 1, 2, ... 64.", min=1)
    ] = ()
    tokens_per_step: Annotated[
        int | None, setting(help="Tokens of a step on all ranks. Default: one micro-batch.", min=1)
    ] = None
    world_size: Annotated[int, options.option_of(StepConfiguration, "world_size", help="Number of GPUs.", max=64)] = 1
    strategy: Annotated[
        Sequence[str], choice(dict.fromkeys(name for name, _ in STRATEGIES), rich_help_panel=WHAT_RUNS)
    ] = ()
    gradient_dtype: Annotated[
        str | None, choice(("fp32", "bf16"), "What buckets are sent in: fp32, bf16. Default: both.")
    ] = None
    memory: Annotated[str | None, setting(help="Memory limit of a rank: 80GiB. Default: 95 % of the GPU.")] = None
    gpu: Annotated[
        str | None, choice(GPUS, f"Predict for {', '.join(GPUS)}. Default: this machine's GPU, or h200.")
    ] = None
    rates: Annotated[Path | None, reads_file(help="Rates of your GPU, from doctor --ceilings.")] = None
    launch_us: Annotated[float | None, setting(help="CPU microseconds of a kernel launch.", min=0, max=1e4)] = None
    lines: Annotated[int, setting(help="Print PyTorch code for this many of the best.", min=0, max=10)] = 1
    measure: Annotated[
        int, setting(help="Measure this many of the best, and yours.", min=0, max=100, rich_help_panel=MEASURING)
    ] = 0
    budget: Annotated[
        float, setting(help="Stop measuring after this many seconds.", min=1, rich_help_panel=MEASURING)
    ] = 600.0

    def is_on_cpu(self, device: str) -> bool:
        """Return whether configurations are of this machine's CPU: asked for, or measured where there is no GPU."""
        from cs336sys.machine.system import gpu_name

        if device == "cpu" and self.gpu is not None:
            raise UsageError(f"--gpu {self.gpu}: --device cpu has none; leave one of them out")
        return device == "cpu" or (bool(self.measure) and gpu_name(device) is None)

    def limit_bytes(self, device: str) -> float:
        """Return the bytes that tensors of a rank may take."""
        from cs336sys.machine.system import capacity, gpu_capacity, gpu_name

        if self.memory is not None:
            return read_memory_limit(self.memory, "--memory")
        if device == "cpu":
            cpu = capacity(device)
            memory_gib = 4.0 if cpu is None else cpu.memory_gib  # As of a small machine, where it is not known.
            return _USABLE_SHARE * memory_gib * GIB
        local_gpu = gpu_capacity(device) if self.gpu is None else None
        if local_gpu is not None:
            return _USABLE_SHARE * local_gpu.memory_gib * GIB
        # As --gpu's help says.
        name = self.gpu or gpu_name(device) or ("h200" if self.rates is None else read_rates(self.rates).gpu)
        sheet = datasheet(GPUS.get(name.lower(), name))  # By torch's name, which --rates has already.
        if sheet is None:
            raise UsageError(f"the memory of {name} is not known: give --memory, such as 80GiB")
        return _USABLE_SHARE * sheet.memory_bytes

    def fixed_settings(
        self, ctx: typer.Context, implementation: options.ImplementationOptions, *, on_cpu: bool
    ) -> dict[str, Sequence[Any]]:
        """Return the values that the user, or the device, has fixed, by setting."""
        if (self.strategy or self.gradient_dtype) and self.world_size == 1:
            raise UsageError("--strategy and --gradient-dtype: one rank shares nothing; add --world-size")
        fixed: dict[str, Sequence[Any]] = {
            name: list(getattr(implementation, name)) for name in _SINGLE_SETTINGS if is_given(ctx, name)
        }
        if is_given(ctx, "optimizer") or is_given(ctx, "state_dtype"):
            implementations = implementation.combinations(Workload)
            fixed["optimizer"] = list(dict.fromkeys((way["optimizer"], way["state_dtype"]) for way in implementations))
        if is_given(ctx, "update"):
            raise UsageError("--update: tune updates in a step of its own; leave it out")
        if on_cpu:
            # Neither graphs nor kernels of Triton run there, of which optimizer adamw is made.
            fixed = {"cuda_graph": ["off"], "kernels": ["reference"]} | fixed  # What the user gives wins.
            fixed.setdefault("optimizer", _PYTORCH_OPTIMIZERS)
        if self.checkpoint:
            fixed["checkpointing"] = list(self.checkpoint)
        if self.micro_batch:
            fixed["micro_batch"] = list(self.micro_batch)
        if self.world_size > 1:
            # Pairs of a strategy and the dtype in which it sends gradients: bf16 for buckets alone.
            chosen = [(name, dtype) for name, dtype in STRATEGIES if not self.strategy or name in self.strategy]
            fixed["strategy"] = [(name, dtype) for name, dtype in chosen if self.gradient_dtype in (None, dtype)]
            if not fixed["strategy"]:
                option = f"--gradient-dtype {self.gradient_dtype}"
                raise UsageError(f"{option}: buckets alone have the choice; choose bucketed")
        return fixed

    def step_tokens(self, base_workload: Workload, batch_sizes: Sequence[int]) -> int | None:
        """Return the tokens of a step of all ranks, as in other commands those of ``--batch-size``; None: not fixed."""
        if not batch_sizes or self.micro_batch:
            return self.tokens_per_step
        return (
            self.tokens_per_step or batch_sizes[0] * base_workload.size.context
        )  # One: _base_workload() refuses more.

    def gpu_rates(self, device: str, base_workload: Workload, *, on_cpu: bool) -> Rates:
        """Return the rates of ``--gpu``, of this machine's GPU, or of its CPU, which are measured first."""
        from cs336sys.machine.system import gpu_name

        measured = None if self.rates is None else read_rates(self.rates)
        if on_cpu:
            return measured or _cpu_rates(base_workload)
        if self.gpu is not None:
            return rates_of(self.gpu, measured)
        local_gpu = gpu_name(device)
        if local_gpu is None:
            return measured or rates_of("h200")  # As --gpu's help says.
        if measured is not None and local_gpu.endswith(" MIG") and measured.gpu.startswith(local_gpu):
            return measured  # nvidia-smi does not tell which slice it is.
        if measured is None and datasheet(local_gpu) is None:
            remedy = "run doctor --ceilings mine.json, and give --rates mine.json"
            raise CapabilityError(f"{local_gpu}: its rates are not known; {remedy}")
        return rates_of(local_gpu, measured)


def tune(
    ctx: typer.Context,
    training: options.TrainingOptions = options.TrainingOptions(warmup=[3], steps=5),
    search: SearchOptions = SearchOptions(),
    plot: Annotated[Path | None, writes_file(help="Draw tokens/s over memory.", rich_help_panel=OUTPUT)] = None,
    sweeping: SweepOptions = SweepOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Find the fastest configuration that fits: predict thousands, and measure the best few. Options you give are kept.

    cs336sys tune --size xl --bf16 --memory 80GiB

    cs336sys tune --size 2.7b --bf16 --world-size 2 --tokens-per-step 65536 --plot front.png

    cs336sys tune --size tiny --batch-size 4 --measure 3 --save tuned.jsonl
    """
    from cs336sys.commands.tune.tables import choice_tables, plot_front

    base_workload = _base_workload(training)
    output.check(plot=plot)
    if sweeping.save is not None and not search.measure:
        raise UsageError(f"--save {sweeping.save}: nothing is measured; add --measure")
    on_cpu = search.is_on_cpu(training.device)
    if on_cpu:
        base_workload = replace(base_workload, device="cpu")
    limit_bytes = search.limit_bytes(training.device)
    fixed_settings = search.fixed_settings(ctx, training, on_cpu=on_cpu)
    if not base_workload.is_ours and fixed_settings.get("kernels", ["reference"]) != ["reference"]:
        raise UsageError("--kernels: tune predicts --model with reference only: leave it out, or measure with bench")
    counted_model = None if base_workload.is_ours else _counted_model(base_workload)
    if counted_model is not None:
        fixed_settings = _fixed_for_user_model(fixed_settings, counted_model, search.world_size)
    space = Space(
        base_workload, search.world_size, fixed_settings, search.step_tokens(base_workload, training.batch_size)
    )
    rates = search.gpu_rates(training.device, base_workload, on_cpu=on_cpu)
    launch_s = None if search.launch_us is None else search.launch_us / 1e6
    choose_for = partial(choose, rates=rates, limit=limit_bytes, launch_s=launch_s, counted_model=counted_model)
    choices = choose_for(space)
    if not choices.fitting:
        smallest = min((candidate.memory / GIB for candidate in choices.predicted), default=None)
        reasons = choices.unknown or choices.refused  # Said where no configuration has a predicted time.
        facts = {"limit_gib": choices.limit / GIB, "smallest_gib": smallest, "reasons": reasons}
        raise UsageError(sentence(__package__, "nothing fits", **facts))
    with_one_more_gpu = None if on_cpu or search.measure else _with_one_more_gpu(choices, space, choose_for)
    predicted = choice_tables(choices, rates, with_one_more_gpu, lines_of=search.lines, is_ours=base_workload.is_ours)
    if plot is not None:
        plot_front(choices, plot)
    if not search.measure:
        output.emit(predicted)
        return
    predict = partial(evaluate, rates=rates, launch_s=launch_s, counted_model=counted_model)
    chosen = _with_plain_configuration(choices.fitting[: search.measure], space, limit_bytes, predict)
    next_best = [best for best in choices.fitting[search.measure :] if best not in chosen]
    race = _Race(chosen, next_best[:_MOST_RESERVES], count=search.measure, budget_s=search.budget)
    race.run(predicted, sweeping, output)


def _base_workload(training: options.TrainingOptions) -> Workload:
    """Return the one model and batch to choose for; its implementations, which are chosen, are the defaults."""
    workloads = replace(training, **asdict(options.ImplementationOptions())).workloads()
    if len(workloads) > 1:
        raise UsageError("tune chooses for one model: give one --size, --context, --batch-size and --precision")
    return workloads[0]


def _measured_in_worker(measure: str, workload: Workload, timeout_s: float | None = None) -> "Outcome":
    """Call ``module:function`` with a workload's settings in a process of its own."""
    from cs336sys.run.cells import Worker

    with contextlib.closing(Worker(measure)) as worker:
        return worker.measure(workload.configuration(), timeout_s=timeout_s, progress=lambda stage: None)


def _counted_model(base_workload: Workload) -> CountedModel:
    """Count the user's model, in a process of its own that imports torch."""
    outcome = _measured_in_worker("cs336sys.training.operation_counting:count_model", base_workload)
    if outcome.status != "ok":
        raise CapabilityError(str(outcome.reason))
    return CountedModel.from_columns(outcome.derived)


def _fixed_for_user_model(
    fixed: Mapping[str, Sequence[Any]], counted_model: CountedModel, world_size: int
) -> dict[str, Sequence[Any]]:
    """Return the fixed settings, and of the others the choices that a user's model has."""
    attention = ["sdpa", "flash"] if counted_model.attention else ["sdpa"]  # Without calls, flash changes nothing.
    optimizers = [*_PYTORCH_OPTIMIZERS, ("adamw", "fp32"), ("adamw", "bf16")]  # Its "split" needs --kernels fused.
    defaults: dict[str, Sequence[Any]] = {"attention": attention, "kernels": ["reference"], "optimizer": optimizers}
    chosen = defaults | {"checkpointing": list(counted_model.peaks)} | dict(fixed)  # Ways whose peak was counted.
    unknown = [name for name in chosen["checkpointing"] if name not in counted_model.peaks]
    if unknown:
        raise UsageError(f"--checkpoint {unknown[0]}: of a model of yours none and block are predicted; choose one")
    if world_size > 1:
        # Its work and memory are counted for ranks that each hold all of the model: sharding strategies differ.
        chosen["strategy"] = [(name, dtype) for name, dtype in chosen["strategy"] if name == "bucketed"]
        if not chosen["strategy"]:
            raise UsageError("--strategy: of a model of yours bucketed is predicted; choose it, or measure by shard")
    return chosen


def _cpu_rates(base_workload: Workload) -> Rates:
    """Measure this CPU's rates on the workload's own shapes: predictions for these need no range of measured shapes."""
    from cs336sys.machine.system import cpu_model

    outcome = _measured_in_worker("cs336sys.commands.tune.measure:measure_rates", base_workload, timeout_s=120.0)
    if outcome.status != "ok":
        raise CapabilityError(f"the rates of this CPU cannot be measured: {outcome.reason}")
    return Rates(
        gpu=cpu_model() or "this CPU",
        seconds=outcome.derived["seconds"],
        launch_s=0.0,  # Operations run where they are launched.
        usual_launch_s=0.0,
        exposures={strategy: Exposure(_GLOO_BYTES_PER_S, exposed=1.0) for strategy, _ in STRATEGIES},  # No overlap.
        ranges=dict.fromkeys(ranged_quantities(StepConfiguration(base_workload)), (0.0, math.inf)),
        kinds=UNMEASURED,  # Rates not of one kind of step: they serve all.
    )


def _with_one_more_gpu(choices: Choice, space: Space, choose_for: Callable[[Space], Choice]) -> Choice | None:
    """Return the choice with one more GPU, for settings of the fastest; None if so many cannot share a step."""
    best = choices.fitting[0].configuration.training
    # Strategy and checkpoints are chosen again: another GPU may change which of them fit, and which are fastest.
    fixed = {name: values for name, values in space.fixed.items() if name not in ("strategy", "checkpointing")}
    fixed |= {name: [getattr(best, name)] for name in _SINGLE_SETTINGS}
    # Some strategies refuse our AdamW (choice.refusal()), all take torch's.
    fixed.setdefault("optimizer", [(best.optimizer, best.state_dtype), ("fused", "fp32")])
    try:
        return choose_for(replace(space, world_size=space.world_size + 1, fixed=fixed))
    except UsageError:
        return None


def _with_plain_configuration(
    best: Sequence[Candidate], space: Space, limit_bytes: float, predict: Callable[..., list[Candidate]]
) -> list[Candidate]:
    """Return the best, and the user's options with the defaults of other commands, if that runs and fits."""
    training = space.training
    defaults = {name: Workload.settings()[name].default for name in _SINGLE_SETTINGS}
    defaults |= {} if training.is_ours else {"attention": "sdpa"}  # Which a user's model calls.
    defaults |= {"optimizer": ("course", "fp32"), "strategy": (None, "fp32"), "checkpointing": "none"}
    # Of several values that the user gives, the first.
    settings = {name: (space.fixed.get(name) or [default])[0] for name, default in defaults.items()}
    (strategy, gradient_dtype), checkpointing = settings.pop("strategy"), settings.pop("checkpointing")
    settings["optimizer"], settings["state_dtype"] = settings["optimizer"]
    micro_batches = dict(space.micro_batches)  # By the size of a micro-batch: how many of them a step has.
    batch = training.size.batch_size if training.size.batch_size in micro_batches else max(micro_batches)
    sized = replace(training, size=replace(training.size, batch_size=batch), **settings)
    sharing = strategy, space.world_size, gradient_dtype
    plain = StepConfiguration(sized, checkpointing, micro_batches[batch], *sharing)
    if refusal(plain) is not None or plain in [candidate.configuration for candidate in best]:
        return list(best)
    (candidate,) = predict([plain])
    if candidate.memory <= limit_bytes:
        return [*best, candidate]
    say(f"the plain configuration needs {candidate.memory / GIB:.1f} GiB and is not measured")
    return list(best)


def _measured_configuration(configuration: StepConfiguration) -> dict[str, Any]:
    """Return the configuration of the cell that measures a predicted step: of ``bench``, or of ranks."""
    if configuration.world_size == 1:
        return configuration.configuration()
    training, strategy = configuration.training, configuration.strategy_record
    # Its batch is one rank's, a ParallelWorkload's that of all ranks together.
    size = replace(training.size, batch_size=training.size.batch_size * configuration.world_size)
    return ParallelWorkload(
        replace(training, size=size),
        strategy=str(configuration.strategy),  # Several ranks have one: never None.
        world_size=configuration.world_size,
        bucket_mb="block" if strategy.has_buckets else None,  # As predicted, like prefetch.
        gradient_dtype=configuration.gradient_dtype,
        prefetch=1 if strategy.gathers_ahead else None,
        checkpointing=configuration.checkpointing,
    ).configuration()


class _Race:
    """Candidates that are measured in rounds until one is the fastest by ``compare``'s statistic, or time is over.

    ``chosen`` are the ``count`` best, and maybe the plain configuration; ``reserves``, the next best, are measured in
    place of candidates that do not run or compute something else. After ``budget_s`` no more is measured.
    """

    def __init__(self, chosen: Sequence[Candidate], reserves: Sequence[Candidate], *, count: int, budget_s: float):
        self.ranks = chosen[0].configuration.world_size
        if self.ranks > 1 and any(candidate.configuration.accumulation > 1 for candidate in chosen):
            raise UsageError("--measure: several ranks measure one micro-batch a step; leave out --tokens-per-step")
        candidates = [*chosen, *reserves]
        self.configurations = [_measured_configuration(candidate.configuration) for candidate in candidates]
        keys = [configuration_key(configuration) for configuration in self.configurations]
        self.count, self.chosen_keys = count, keys[: len(chosen)]
        self.ranked_keys = {*keys[:count], *keys[len(chosen) :]}  # All but the plain configuration: it has no rank.
        self.predictions: dict[str, dict[str, float | None]] = {}
        for key, candidate in zip(keys, candidates, strict=True):
            predicted_ms = None if candidate.time.unknown else 1e3 * candidate.time.step_s
            self.predictions[key] = {"predicted_ms": predicted_ms, "predicted_gib": candidate.memory / GIB}
        self.end_s = time.monotonic() + budget_s

    def is_wanted(self, configuration: Mapping[str, Any], cells: Sequence[Cell]) -> bool:
        """Return whether this candidate is measured in this round: the first finds who runs, later ones the fastest."""
        from cs336sys.commands.tune.tables import compared_to_best, fastest, fully_measured, is_decided
        from cs336sys.tables.titles import by_configuration

        key = configuration_key(configuration, ignore=("round",))
        if configuration["round"] == 1:
            ran = self.ranked_keys & fully_measured(by_configuration(cells)).keys()
            return key in self.chosen_keys or len(ran) < self.count  # A reserve, while too few of the best ran.
        if time.monotonic() > self.end_s:
            return False
        groups = by_configuration([cell for cell in cells if cell.configuration["round"] < configuration["round"]])
        best = fastest(groups)
        if best is None:
            return False
        device, comparisons = configuration["device"], compared_to_best(groups, best)  # On a CPU rounds differ more.
        undecided = {other for other, comparison in comparisons.items() if not is_decided(comparison, device)}
        return bool(undecided) and key in {best, *undecided}

    def run(self, predicted: Sequence["Table"], sweeping: SweepOptions, output: OutputOptions) -> None:
        """Measure, and print the measured tables before the predicted ones."""
        from cs336sys.commands.tune.tables import tune_tables

        on_one_device = "cs336sys.commands.tune.measure:measure_configuration"
        on_ranks = "cs336sys.commands.rank_training.measure:measure_parallel_training"
        run_sweep(
            "tune",
            on_one_device if self.ranks == 1 else on_ranks,
            in_rounds(self.configurations, _MOST_ROUNDS),
            sweeping,
            across_ranks=self.ranks > 1,
            is_wanted=self.is_wanted,
            predictions=self.predictions,
        ).report(lambda cells, run: [*tune_tables(cells, run), *predicted], output)
