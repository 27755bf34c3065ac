"""Errors that end a command early with one sentence instead of a traceback, and Ctrl-C and SIGTERM."""

import traceback
from collections.abc import Collection
from pathlib import Path

# 128 and the number of SIGINT, SIGPIPE and SIGTERM, as shells count.
INTERRUPTED = 130
READER_LEFT = 141
TERMINATED = 143

# Set where tracebacks are asked for, of the user's code and of lost processes: otherwise a sentence stands for them.
DEBUG_VARIABLE = "CS336SYS_DEBUG"


class UsageError(ValueError):
    """A request that makes no sense: the command exits with 2."""

    exit_code = 2


class CapabilityError(RuntimeError):
    """A request that this machine or installation cannot serve: the command exits with 3."""

    exit_code = 3


class UserCodeError(RuntimeError):
    """A function of the user (``--model``, ``--loss``, ...) cannot be used as it is; the message names its line."""

    exit_code = 1


class CaptureError(CapabilityError):
    """Work cannot be captured in a CUDA graph, as was noticed on the way: the process should compute nothing more."""


class LostProcessError(RuntimeError):
    """A process that this one works with died or hangs. The first line says which, and no traceback explains it."""


class OutputError(RuntimeError):
    """A result could not be written, to a file or to standard output: the command exits with 1."""

    exit_code = 1


class ReaderLeft(OutputError):
    """The end, without a word, of a command whose output nobody reads any more (``cs336sys ... | head -1``)."""

    exit_code = READER_LEFT


# Errors of one sentence that end a command.
SENTENCES = (UsageError, CapabilityError, UserCodeError, OutputError)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what Ctrl-C does, but for the exit code."""


def choose_from(value: str, names: Collection[str]) -> str:
    """Suggest names for a value that is none of them: ``choose from fp32, bf16; did you mean bf16?``"""
    return f"choose from {', '.join(names)}{did_you_mean(value, names)}"


def require_known(noun: str, value: str, names: Collection[str]) -> None:
    """Raise a UsageError for a value that is none of the names."""
    if value not in names:
        raise UsageError(f"unknown {noun} '{value}': {choose_from(value, names)}")


# What other programs, models and papers call options and their values; a comparison of letters would miss these.
SYNONYMS = {
    "context": "block-size context-length max-length max-seq-len n-ctx n-positions seq-len seqlen sequence-length",
    "batch-size": "batch bs bsz global-batch-size micro-batch-size per-device-batch-size",
    "d-model": "dim embed-dim hidden hidden-dim hidden-size model-dim n-embd width",
    "d-ff": "ffn-dim ffn-hidden-size intermediate-size mlp-dim n-inner",
    "num-layers": "depth layers n-layer n-layers num-blocks num-hidden-layers",
    "num-heads": "heads n-head n-heads num-attention-heads",
    "precision": "amp autocast dtype mixed-precision torch-dtype",
    "dtype": "precision torch-dtype",
    "world-size": "gpus n-gpus nproc nproc-per-node num-devices num-gpus num-processes ranks",
    "devices": "gpus n-gpus num-gpus ranks world-size",
    "learning-rate": "lr",
    "warmup": "num-warmup warmup-iters warmup-steps",
    "steps": "iterations iters max-steps num-iters num-steps repeats",
    "checkpoint": "activation-checkpointing checkpointing gradient-checkpointing recompute",
    "micro-batches": "accumulation grad-accum gradient-accumulation gradient-accumulation-steps",
    "mode": "strategy",
    "strategy": "mode",
    "bucket-mb": "bucket-cap-mb bucket-size",
    "cuda": "gpu nvidia",
    "fp32": "f32 float float32 full",
    "bf16": "amp b16 bfloat bfloat16",
    "fp16": "f16 float16 half",
    "flash": "fa2 flash-attention flash-attention-2 flash-attn",
}


def nearest_name(value: str, names: Collection[str]) -> str | None:
    """Return the name that a value most likely stands for: one of its :data:`SYNONYMS`, else one of similar letters."""
    import difflib

    by_word = {name.lower().lstrip("-").replace("_", "-"): name for name in names}
    word = value.lower().lstrip("-").replace("_", "-")
    nearest = [name for name in by_word if word in SYNONYMS.get(name, "").split()]
    nearest = nearest or difflib.get_close_matches(word, by_word, n=1)
    return by_word[nearest[0]] if nearest else None


def did_you_mean(value: str, names: Collection[str]) -> str:
    """Return ``; did you mean bf16?``, or nothing if no name is near."""
    return f"; did you mean {nearest}?" if (nearest := nearest_name(value, names)) else ""


def a_value(value: object) -> str:
    """Name a value by its type, for messages: ``a list``, ``an Identity``, ``None``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def lines_of(error: BaseException) -> list[tuple[Path, int]]:
    """Return the files and lines that an error, and before it its causes, came through, the innermost last."""
    cause = error.__cause__ or error.__context__
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        frames.append((error.filename, error.lineno or 0))
    lines = [(Path(name).absolute(), line) for name, line in frames if not name.startswith("<frozen")]
    return [*lines_of(cause), *lines] if cause else lines


def summary_of(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}: {next(iter(text.strip().splitlines()), 'no message')}"
