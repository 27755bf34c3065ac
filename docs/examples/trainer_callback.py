"""Time the steps of transformers' Trainer, and save them as a cell that ``cs336sys show`` and ``compare`` read.

    python trainer_callback.py RESULTS.jsonl        # trains a tiny Llama for 8 steps; needs transformers and accelerate

In your program: ``Trainer(..., callbacks=[StepTimes("RESULTS.jsonl", context=1024)])``.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from cs336sys.machine.environment import new_run
from cs336sys.results.file import ResultsFile
from cs336sys.results.model import Cell, Samples
from cs336sys.settings.sizes import ModelSize
from cs336sys.settings.training import UserCode, Workload


class StepTimes(TrainerCallback):
    """Save the time, tokens/s and peak memory of steps of ``context`` tokens; the first ``warmup`` stand apart."""

    def __init__(self, path: str | Path, context: int, warmup: int = 3):
        self.file, self.context, self.warmup, self.times = ResultsFile(Path(path)), context, warmup, []

    def on_step_begin(self, args, state, control, **_):
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(1000 * (time.perf_counter() - self.begin))

    def on_train_end(self, args, state, control, model, **_):
        if len(self.times) <= self.warmup or not state.is_world_process_zero:
            return
        step = Samples("ms", "wall clock", tuple(self.times[self.warmup :]), tuple(self.times[: self.warmup]))
        shape, precision = model.config, "bf16" if args.bf16 else "fp32"
        widths = shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, shape.num_attention_heads
        # Of all ranks and micro-batches, as one step has them.
        batch_size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        size = ModelSize("custom", *widths, shape.vocab_size, self.context, batch_size)
        code = UserCode(model=f"transformers:{type(model).__name__}")
        workload = Workload(size, precision=precision, optimizer="torch.optim:AdamW", user=code)
        settings = {"device": args.device.type, "warmup": self.warmup, "steps": len(step.measured)}
        # Of what bench has, this cell knows neither the GPU's busy time nor another attention than the model's.
        derived = {"gpu_busy_ms": None, "same_attention": ["reference"]}
        derived["tokens_per_s"] = 1000 * size.tokens / step.mean
        if torch.cuda.is_available():
            derived["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        run, configuration = new_run(sys.argv[1:]), workload.configuration() | settings
        self.file.append(run)
        self.file.append(Cell("bench", configuration, "ok", {"step": step}, derived, run_id=run.run_id))
        self.file.close()


if __name__ == "__main__":
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 32))]
    options = {
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
    }
    Trainer(LlamaForCausalLM(config), TrainingArguments(".", **options), train_dataset=data,
            callbacks=[StepTimes(sys.argv[1], context=32)]).train()  # fmt: skip
