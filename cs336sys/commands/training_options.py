"""The options that say which model is trained and how, shared by every command that trains one."""

import shutil
from dataclasses import replace
from itertools import product
from typing import Annotated

import typer

from cs336sys.commands.options import at_least, one_of, split_list
from cs336sys.errors import UsageError
from cs336sys.sizes import PRECISIONS, SIZES, ModelSize, choose_size
from cs336sys.workload import ATTENTION, COMPILE_MODES, DEVICES, MODES, OPTIMIZERS, Workload

_OWN = "Default: the size's own."

SizeOption = Annotated[list[str], typer.Option("--size", help=f"Model sizes: {', '.join(SIZES)}.")]
ContextOption = Annotated[list[str], typer.Option("--context", help=f"Context lengths. {_OWN}", show_default=False)]
BatchSizeOption = Annotated[list[str], typer.Option("--batch-size", help=f"Batch sizes. {_OWN}", show_default=False)]
VocabSizeOption = Annotated[int | None, typer.Option("--vocab-size", help=f"Vocabulary. {_OWN}", show_default=False)]
DModelOption = Annotated[int | None, typer.Option("--d-model", help=f"Model width. {_OWN}", show_default=False)]
DFfOption = Annotated[int | None, typer.Option("--d-ff", help=f"Feed-forward width. {_OWN}", show_default=False)]
NumLayersOption = Annotated[int | None, typer.Option("--num-layers", help=f"Blocks. {_OWN}", show_default=False)]
NumHeadsOption = Annotated[int | None, typer.Option("--num-heads", help=f"Heads. {_OWN}", show_default=False)]
ModeOption = Annotated[str, typer.Option("--mode", help=f"Phases of a step: {', '.join(MODES)}.")]
PrecisionOption = Annotated[
    list[str], typer.Option("--precision", help=f"{', '.join(PRECISIONS)} (autocast). {_OWN}", show_default=False)
]
Bf16Option = Annotated[bool, typer.Option("--bf16", help="Short for --precision bf16.")]
Fp16Option = Annotated[bool, typer.Option("--fp16", help="Short for --precision fp16.")]
CompileOption = Annotated[
    list[str],
    typer.Option("--compile", help="off; block: one block, reused by all, and the loss; model: the whole model."),
]
AttentionOption = Annotated[list[str], typer.Option("--attention", help=f"{', '.join(ATTENTION)}.")]
OptimizerOption = Annotated[
    list[str], typer.Option("--optimizer", help="course: AdamW of cs336_basics; fused: torch's fused AdamW.")
]
WarmupOption = Annotated[list[str], typer.Option("--warmup", help="Warm-up steps; several make a warm-up study.")]
StepsOption = Annotated[int, typer.Option("--steps", help="Measured steps.")]
DeviceOption = Annotated[str, typer.Option("--device", help=f"{', '.join(DEVICES)}.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of weights and batch.")]
Tf32Option = Annotated[bool, typer.Option("--tf32/--no-tf32", help="Let fp32 matrix products use TF32.")]
SynchronizeOption = Annotated[
    str, typer.Option("--synchronize", help="step: wait for the GPU after every step; none: only at the end.")
]


def expand_sizes(
    *, size: list[str], context: list[str], batch_size: list[str], **fields: int | None
) -> list[ModelSize]:
    """Every combination of sizes, contexts and batch sizes, in their order.

    Args:
        fields: single numbers in the place of the sizes' own, see :func:`cs336sys.sizes.choose_size`.

    Raises:
        UsageError: a value is none of the choices, or a size cannot be.
    """
    return [
        choose_size(name, context=tokens, batch_size=sequences, **fields)
        for name, tokens, sequences in product(
            split_list(size, "--size", one_of(SIZES)),
            split_list(context, "--context", at_least(1)) if context else [None],
            split_list(batch_size, "--batch-size", at_least(1)) if batch_size else [None],
        )
    ]


def default_size(device: str) -> str:
    """The model of a command whose default must end soon anywhere: ``small``, and ``tiny`` where there is no GPU."""
    return "tiny" if device == "cpu" or shutil.which("nvidia-smi") is None else "small"


def expand_workloads(
    *,
    size: list[str],
    context: list[str],
    batch_size: list[str],
    vocab_size: int | None,
    d_model: int | None,
    d_ff: int | None,
    num_layers: int | None,
    num_heads: int | None,
    mode: str,
    precision: list[str],
    bf16: bool,
    fp16: bool,
    compile: list[str],
    attention: list[str],
    optimizer: list[str],
    warmup: list[str],
    steps: int,
    device: str,
    seed: int,
    tf32: bool,
    synchronize: str,
) -> list[Workload]:
    """Every combination of the list options, in their order.

    Raises:
        UsageError: a value is none of the choices, or a size cannot be.
    """
    if bool(precision) + bf16 + fp16 > 1:
        raise UsageError("--precision, --bf16 and --fp16: give one of them (--precision bf16,fp16 runs both)")
    precision = ["bf16"] if bf16 else ["fp16"] if fp16 else precision
    shape = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
    sizes = expand_sizes(size=size, context=context, batch_size=batch_size, vocab_size=vocab_size, **shape)
    common = {"mode": mode, "steps": steps, "device": device, "seed": seed, "tf32": tf32, "synchronize": synchronize}
    axes = {
        "precision": split_list(precision, "--precision", one_of(PRECISIONS)) if precision else [None],
        "compile": split_list(compile, "--compile", one_of(COMPILE_MODES)),
        "attention": split_list(attention, "--attention", one_of(ATTENTION)),
        "optimizer": split_list(optimizer, "--optimizer", one_of(OPTIMIZERS)),
        "warmup": split_list(warmup, "--warmup", at_least(0)),
    }
    workloads = []
    for chosen_size in sizes:
        own = Workload(chosen_size, precision=chosen_size.precision, **common)
        for values in product(*axes.values()):
            choice = {name: value for name, value in zip(axes, values, strict=True) if value is not None}
            workloads.append(replace(own, **choice))
    return workloads
