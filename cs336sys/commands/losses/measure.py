"""One cell of ``losses``: training on text, with the loss of every step."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cs336sys.errors import UsageError
from cs336sys.machine.device import choose_device
from cs336sys.parity.step import check_few_blocks
from cs336sys.results.model import Samples
from cs336sys.run.cells import Outcome, Progress
from cs336sys.settings.profiling import LossWorkload, read_text
from cs336sys.training.model import build_model, build_optimizer
from cs336sys.training.step import TrainStep, set_matmul_precision, training_warnings, with_notes
from cs336sys.training.user_models import telling_user_errors


def text_batches(workload: LossWorkload) -> list[tuple[Tensor, Tensor]]:
    """Draw a batch of pieces of the text for each step: inputs and targets, token ids (batch_size, context) each.

    Batches are the same for all workloads of one text, size and seed.

    Raises:
        UsageError: the text is shorter than the context, or has bytes beyond the vocabulary.
    """
    training = workload.training
    text = torch.frombuffer(bytearray(read_text(workload.text)), dtype=torch.uint8).long()
    size = training.size
    if len(text) <= size.context:
        raise UsageError(f"--text: {len(text)} bytes are too few for a context of {size.context} and the byte after it")
    if text.max() >= size.vocab_size:
        raise UsageError(f"--vocab-size {size.vocab_size}: the text has a byte {text.max()}; give 256 or more")
    seeded = torch.Generator().manual_seed(training.seed)
    starts = torch.randint(len(text) - size.context, (training.steps, size.batch_size, 1), generator=seeded)
    pieces = text[starts + torch.arange(size.context + 1)]
    return [(piece[:, :-1].contiguous(), piece[:, 1:].contiguous()) for piece in pieces]


def measure_losses(configuration: dict[str, Any], progress: Progress) -> Outcome:
    """Measure one cell of ``losses``: runs in the worker process.

    Samples (nats): ``loss``, one value a step. Derived: see ``docs/columns.md``.
    """
    workload = LossWorkload.from_configuration(configuration)
    training = workload.training
    batches = text_batches(workload)
    device = choose_device(training.device)
    set_matmul_precision(training)
    with telling_user_errors(training):
        check_notes, failure = check_few_blocks(training, device, progress)
        if failure is not None:
            return failure
        progress("building the model")
        model = build_model(training, device)
        optimizer = build_optimizer(
            training, model.parameters(), lr=workload.learning_rate, weight_decay=workload.weight_decay
        )
        losses = _train(TrainStep(training, device, model=model, optimizer=optimizer), batches, progress)
    values = tuple(torch.stack(losses).double().tolist())
    first_infinite = next((value for value in values if not math.isfinite(value)), None)
    notes = check_notes if first_infinite is None else training_warnings(first_infinite, training)
    return Outcome(
        "ok" if first_infinite is None else "wrong",
        samples={"loss": Samples("nats", "of every step", values)},
        derived=with_notes({"parameters": sum(parameter.numel() for parameter in model.parameters())}, notes),
        reason=None if first_infinite is None else "a loss is no number",
    )


def _train(step: TrainStep, batches: Sequence[tuple[Tensor, Tensor]], progress: Progress) -> list[Tensor]:
    """Take one step on each batch, and return the losses, () each.

    Steps that warm up a CUDA graph are the first of the training, so that the model learns as with launched steps.
    """
    losses: list[Tensor] = []
    on_device = [tuple(tensor.to(step.device) for tensor in batch) for batch in batches]

    def keep_loss() -> None:
        assert step.loss is not None
        losses.append(step.loss.detach().clone())  # Replays overwrite it.

    @contextlib.contextmanager
    def on_batch(number: int) -> Iterator[None]:
        for captured_tensor, new in zip((step.inputs, step.targets), on_device[number], strict=True):
            captured_tensor.copy_(new)
        yield
        keep_loss()

    step.warmup_of_capture = min(step.warmup_of_capture, len(batches))  # Each warm-up step uses up a batch.
    step.capture(around_warmup=on_batch)
    for number, batch in enumerate(on_device[len(losses) :], len(losses) + 1):
        if number % 20 == 1:
            progress(f"step {number}/{len(batches)}")
        step.use(*batch)
        step()
        keep_loss()
    return losses
