# Written by: CS336SYS_WRITE_DOCS=1 pytest tests/test_api.py -k stub
# fmt: off
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cs336sys.api import Interrupted as Interrupted
from cs336sys.api import Results as Results
from cs336sys.api import Tables as Tables
from cs336sys.api import account as account
from cs336sys.api import compare as compare
from cs336sys.api import read as read
from cs336sys.commands.verify.library import verify as verify

__version__: str

def allreduce(*, backend: str | Iterable[str] = (), collective: str | Iterable[str] = ('all_reduce',), message: str
    | Iterable[str] = (), factor: float = 2.0, world_size: int | Iterable[int] = (), dtype: str | Iterable[str] =
    ('fp32',), warmup: int = 5, steps: int = 20, timeout: float = 120.0, device: str = 'auto', plot: str | Path |
    None = None, dry_run: bool = False, save: str | Path | None = None, track: str | Iterable[str] = (),
    cell_timeout: float | None = None, cool_down: float = 0.0, format: str | None = None, output: str | Path | None
    = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None, wide: bool
    = False
) -> Results: ...
def attn(*, implementation: str | Iterable[str] = ('eager', 'compiled'), batch_size: int | Iterable[int] = (8,),
    head_dim: int | Iterable[int] = (16, 32, 64, 128), context: int | Iterable[int] = (256, 1024, 4096, 8192,
    16384), dtype: str | Iterable[str] = ('fp32',), causal: bool = False, warmup: int = 10, steps: int = 100, plot:
    str | Path | None = None, device: str = 'auto', seed: int = 0, dry_run: bool = False, save: str | Path | None =
    None, track: str | Iterable[str] = (), cell_timeout: float | None = None, cool_down: float = 0.0, format: str |
    None = None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] =
    (), sort: str | None = None, wide: bool = False
) -> Results: ...
def bench(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, size:
    str | Iterable[str] = (), context: int | Iterable[int] = (), batch_size: int | Iterable[int] = (), vocab_size:
    int | None = None, d_model: int | None = None, d_ff: int | None = None, num_layers: int | None = None,
    num_heads: int | None = None, model: str | Callable[..., Any] | None = None, loss: str | Callable[..., Any] |
    None = None, batch: str | Callable[..., Any] | None = None, blocks: str | None = None, debug: bool = False,
    precision: str | Iterable[str] = (), bf16: bool = False, fp16: bool = False, compile: str | Iterable[str] =
    ('off',), attention: str | Iterable[str] = ('reference',), kernels: str | Iterable[str] = ('reference',),
    optimizer: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str |
    Iterable[str] = ('fp32',), update: str | Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',),
    device: str = 'auto', seed: int = 0, tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int]
    = (5,), steps: int = 10, mode: str | Iterable[str] = ['train'], rounds: int = 1, interleave: str | None = None,
    percentiles: float | Iterable[float] = [], baseline: str | None = None, plot: str | Path | None = None, dry_run:
    bool = False, force: bool = False, save: str | Path | None = None, track: str | Iterable[str] = (),
    cell_timeout: float | None = None, cool_down: float = 0.0, format: str | None = None, output: str | Path | None
    = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None, wide: bool
    = False
) -> Results: ...
def ddp(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, mode: str
    | Iterable[str] = ('naive', 'flat', 'overlap', 'bucketed', 'torch'), bucket_mb: str | float | Iterable[str |
    float] = ('block',), gradient_dtype: str | Iterable[str] = ('fp32',), transport: str | Iterable[str] =
    ('collectives',), world_size: int | Iterable[int] = (), backend: str = 'auto', timeout: float = 120.0,
    check_layers: int | None = None, plot_scaling: str | Path | None = None, trace: str | Path | None = None, plot:
    str | Path | None = None, plot_buckets: str | Path | None = None, size: str | Iterable[str] = (), context: int |
    Iterable[int] = (), batch_size: int | Iterable[int] = (), vocab_size: int | None = None, d_model: int | None =
    None, d_ff: int | None = None, num_layers: int | None = None, num_heads: int | None = None, model: str |
    Callable[..., Any] | None = None, loss: str | Callable[..., Any] | None = None, batch: str | Callable[..., Any]
    | None = None, blocks: str | None = None, debug: bool = False, precision: str | Iterable[str] = (), bf16: bool =
    False, fp16: bool = False, compile: str | Iterable[str] = ('off',), attention: str | Iterable[str] =
    ('reference',), kernels: str | Iterable[str] = ('reference',), optimizer: str | Callable[..., Any] |
    Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str | Iterable[str] = ('fp32',), update: str |
    Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',), device: str = 'auto', seed: int = 0,
    tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int] = (5,), steps: int = 10, rounds: int
    = 1, dry_run: bool = False, force: bool = False, save: str | Path | None = None, track: str | Iterable[str] =
    (), cell_timeout: float | None = None, cool_down: float = 0.0, format: str | None = None, output: str | Path |
    None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None, wide:
    bool = False
) -> Results: ...
def doctor(*, model: str | Callable[..., Any] | None = None, loss: str | Callable[..., Any] | None = None, batch:
    str | Callable[..., Any] | None = None, blocks: str | None = None, debug: bool = False, optimizer: str |
    Callable[..., Any] = 'course', ceilings: str | Path | None = None, format: str | None = None, output: str | Path
    | None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None,
    wide: bool = False
) -> Results: ...
def flash(*, implementation: str | Iterable[str] = ('auto', 'triton', 'hopper', 'deterministic', 'tiled', 'eager',
    'compiled', 'sdpa-flash', 'sdpa-cudnn', 'sdpa-efficient', 'flex', 'fa4', 'fa4-deterministic'), batch_size: int |
    Iterable[int] = (1,), num_heads: int | Iterable[int] = (16,), kv_heads: int | Iterable[int] = (), head_dim: int
    | Iterable[int] = (64,), context: int | Iterable[int] = (1024, 4096), queries: int | Iterable[int] = (), causal:
    bool = True, window: int | Iterable[int] = (), grid: str | None = None, rounds: int = 1, keep_settings: bool =
    False, kernel: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = (), dtype: str | Iterable[str] =
    ('bf16',), baseline: str | None = None, warmup_ms: float = 25.0, repetition_ms: float = 100.0, plot: str | Path
    | None = None, device: str = 'auto', seed: int = 0, dry_run: bool = False, save: str | Path | None = None,
    track: str | Iterable[str] = (), cell_timeout: float | None = None, cool_down: float = 0.0, format: str | None =
    None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (),
    sort: str | None = None, wide: bool = False
) -> Results: ...
def losses(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, text:
    str | Path | Iterable[str | Path] = [], size: str | Iterable[str] = (), context: int | Iterable[int] = (),
    batch_size: int | Iterable[int] = (), vocab_size: int | None = None, d_model: int | None = None, d_ff: int |
    None = None, num_layers: int | None = None, num_heads: int | None = None, model: str | Callable[..., Any] | None
    = None, loss: str | Callable[..., Any] | None = None, batch: str | Callable[..., Any] | None = None, blocks: str
    | None = None, debug: bool = False, precision: str | Iterable[str] = (), bf16: bool = False, fp16: bool = False,
    compile: str | Iterable[str] = ('off',), attention: str | Iterable[str] = ('reference',), kernels: str |
    Iterable[str] = ('reference',), optimizer: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] =
    ('course',), state_dtype: str | Iterable[str] = ('fp32',), update: str | Iterable[str] = ('step',), cuda_graph:
    str | Iterable[str] = ('off',), device: str = 'auto', seed: int = 0, tf32: bool = False, synchronize: str =
    'step', steps: int = 300, learning_rate: float = 0.0003, weight_decay: float = 0.1, force: bool = False, plot:
    str | Path | None = None, save: str | Path | None = None, track: str | Iterable[str] = (), cell_timeout: float |
    None = None, cool_down: float = 0.0, format: str | None = None, output: str | Path | None = None, table: str |
    Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None, wide: bool = False
) -> Results: ...
def memprof(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, from_:
    str | Path | Iterable[str | Path] = (), against: str | Path | Iterable[str | Path] = (), html: str | Path | None
    = None, size: str | Iterable[str] = (), context: int | Iterable[int] = (), batch_size: int | Iterable[int] = (),
    vocab_size: int | None = None, d_model: int | None = None, d_ff: int | None = None, num_layers: int | None =
    None, num_heads: int | None = None, model: str | Callable[..., Any] | None = None, loss: str | Callable[...,
    Any] | None = None, batch: str | Callable[..., Any] | None = None, blocks: str | None = None, debug: bool =
    False, precision: str | Iterable[str] = (), bf16: bool = False, fp16: bool = False, compile: str | Iterable[str]
    = ('off',), attention: str | Iterable[str] = ('reference',), kernels: str | Iterable[str] = ('reference',),
    optimizer: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str |
    Iterable[str] = ('fp32',), update: str | Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',),
    device: str = 'auto', seed: int = 0, tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int]
    = [1], steps: int = 3, mode: str | Iterable[str] = ['train'], checkpoint: str | Iterable[str] = ('none',),
    micro_batches: int | Iterable[int] = (1,), plan: bool = False, memory: str | None = None, top: int = 5,
    snapshot: str | Path | None = None, predict: bool = True, dry_run: bool = False, force: bool = False, save: str
    | Path | None = None, track: str | Iterable[str] = (), cell_timeout: float | None = None, cool_down: float =
    0.0, format: str | None = None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str
    | Iterable[str] = (), sort: str | None = None, wide: bool = False
) -> Results: ...
def nsys(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, from_:
    str | Path | Iterable[str | Path] = [], range: str | Iterable[str] = [], size: str | Iterable[str] = (),
    context: int | Iterable[int] = (), batch_size: int | Iterable[int] = (), vocab_size: int | None = None, d_model:
    int | None = None, d_ff: int | None = None, num_layers: int | None = None, num_heads: int | None = None, model:
    str | Callable[..., Any] | None = None, loss: str | Callable[..., Any] | None = None, batch: str | Callable[...,
    Any] | None = None, blocks: str | None = None, debug: bool = False, precision: str | Iterable[str] = (), bf16:
    bool = False, fp16: bool = False, compile: str | Iterable[str] = ('off',), attention: str | Iterable[str] =
    ('reference',), kernels: str | Iterable[str] = ('reference',), optimizer: str | Callable[..., Any] |
    Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str | Iterable[str] = ('fp32',), update: str |
    Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',), device: str = 'auto', seed: int = 0,
    tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int] = (5,), steps: int = 5, mode: str |
    Iterable[str] = ['train'], compare_precision: bool = False, profiler: str | Iterable[str] = ('auto',), keep: str
    | Path | None = None, top: int = 5, full_names: bool = False, plot: str | Path | None = None, dry_run: bool =
    False, force: bool = False, save: str | Path | None = None, track: str | Iterable[str] = (), cell_timeout: float
    | None = None, cool_down: float = 0.0, format: str | None = None, output: str | Path | None = None, table: str |
    Iterable[str] = (), columns: str | Iterable[str] = (), sort: str | None = None, wide: bool = False
) -> Results: ...
def precision(*, precision: str | Iterable[str] = ['fp16', 'bf16'], device: str = 'auto', save: str | Path | None =
    None, format: str | None = None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str
    | Iterable[str] = (), sort: str | None = None, wide: bool = False
) -> Results: ...
def shard(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *,
    strategy: str | Iterable[str] = ('none', 'optimizer', 'optimizer-flat', 'fsdp', 'torch-zero', 'torch-fsdp'),
    prefetch: int | Iterable[int] = (1,), keep_gathered: int | Iterable[int] = (0,), checkpoint: str | Iterable[str]
    = ('none',), memory_limit: str | None = None, board: bool = False, mesh: str | None = None, world_size: int |
    Iterable[int] = (), backend: str = 'auto', timeout: float = 120.0, check_layers: int | None = None,
    plot_scaling: str | Path | None = None, trace: str | Path | None = None, plot: str | Path | None = None, size:
    str | Iterable[str] = (), context: int | Iterable[int] = (), batch_size: int | Iterable[int] = (), vocab_size:
    int | None = None, d_model: int | None = None, d_ff: int | None = None, num_layers: int | None = None,
    num_heads: int | None = None, model: str | Callable[..., Any] | None = None, loss: str | Callable[..., Any] |
    None = None, batch: str | Callable[..., Any] | None = None, blocks: str | None = None, debug: bool = False,
    precision: str | Iterable[str] = (), bf16: bool = False, fp16: bool = False, compile: str | Iterable[str] =
    ('off',), attention: str | Iterable[str] = ('reference',), kernels: str | Iterable[str] = ('reference',),
    optimizer: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str |
    Iterable[str] = ('fp32',), update: str | Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',),
    device: str = 'auto', seed: int = 0, tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int]
    = (5,), steps: int = 10, dry_run: bool = False, force: bool = False, save: str | Path | None = None, track: str
    | Iterable[str] = (), cell_timeout: float | None = None, cool_down: float = 0.0, format: str | None = None,
    output: str | Path | None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] = (), sort: str
    | None = None, wide: bool = False
) -> Results: ...
def trace(files: str | Path | Iterable[str | Path], /, *, against: str | Path | Iterable[str | Path] = (), step: str
    | None = None, top: int = 10, full_names: bool = False, roofline: bool = False, ceilings: str | Path | None =
    None, allreduce: str | Path | None = None, html: str | Path | None = None, save: str | Path | None = None,
    format: str | None = None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str |
    Iterable[str] = (), sort: str | None = None, wide: bool = False
) -> Results: ...
def tune(model_or_size: str | Callable[..., Any] | Iterable[str | Callable[..., Any]] | None = None, /, *, size: str
    | Iterable[str] = (), context: int | Iterable[int] = (), batch_size: int | Iterable[int] = (), vocab_size: int |
    None = None, d_model: int | None = None, d_ff: int | None = None, num_layers: int | None = None, num_heads: int
    | None = None, model: str | Callable[..., Any] | None = None, loss: str | Callable[..., Any] | None = None,
    batch: str | Callable[..., Any] | None = None, blocks: str | None = None, debug: bool = False, precision: str |
    Iterable[str] = (), bf16: bool = False, fp16: bool = False, compile: str | Iterable[str] = ('off',), attention:
    str | Iterable[str] = ('reference',), kernels: str | Iterable[str] = ('reference',), optimizer: str |
    Callable[..., Any] | Iterable[str | Callable[..., Any]] = ('course',), state_dtype: str | Iterable[str] =
    ('fp32',), update: str | Iterable[str] = ('step',), cuda_graph: str | Iterable[str] = ('off',), device: str =
    'auto', seed: int = 0, tf32: bool = False, synchronize: str = 'step', warmup: int | Iterable[int] = [3], steps:
    int = 5, checkpoint: str | Iterable[str] = (), micro_batch: int | Iterable[int] = (), tokens_per_step: int |
    None = None, world_size: int = 1, strategy: str | Iterable[str] = (), gradient_dtype: str | None = None, memory:
    str | None = None, gpu: str | None = None, rates: str | Path | None = None, launch_us: float | None = None,
    lines: int = 1, measure: int = 0, budget: float = 600.0, plot: str | Path | None = None, save: str | Path | None
    = None, track: str | Iterable[str] = (), cell_timeout: float | None = None, cool_down: float = 0.0, format: str
    | None = None, output: str | Path | None = None, table: str | Iterable[str] = (), columns: str | Iterable[str] =
    (), sort: str | None = None, wide: bool = False
) -> Results: ...
