"""What a command refuses before it starts anything: one sentence, in a second, with --dry-run as without."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from cs336sys.cli import app, module_of
from cs336sys.errors import UsageError
from cs336sys.machine.system import Capacity

PLANNED = ("bench", "nsys", "memprof", "allreduce", "ddp", "shard", "attn", "flash")


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], auto_envvar_prefix="CS336SYS")


def refused(*arguments, code=2):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


SWEEPING = [
    (["--cell-timeout", "-1"], "--cell-timeout '-1': must be between 0.001 and 1e+06"),
    (["--track", "nope"], "--track 'nope': choose from mlflow, wandb"),
    (["--save", "x.csv"], "--save x.csv: holds JSON lines, whose names end in .jsonl or .jsonl.gz"),
]


@pytest.mark.parametrize("command", PLANNED)
def test_a_dry_run_refuses_what_the_run_refuses(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, sentence in [*SWEEPING, (["--resume"], "--resume needs --save")]:
        assert refused(command, *options) == refused(command, *options, "--dry-run")
        assert sentence in refused(command, *options, "--dry-run")
    (tmp_path / "notes.jsonl").write_text("of today\n")
    sentence = "cannot write results to notes.jsonl: it holds something else; give another file"
    assert sentence in refused(command, "--save", "notes.jsonl", "--dry-run")
    assert "no folder that can be written to" in refused(command, "--save", "notes.jsonl/r.jsonl", "--dry-run")
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device 'cuda': torch sees no CUDA GPU here" in refused(command, "--device", "cuda", "--dry-run", code=3)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest))
    assert "--track wandb: wandb is not installed" in refused(command, "--track", "wandb", "--dry-run", code=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.jsonl"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, "--plot x.png") for command in ("bench", "nsys", "allreduce", "ddp", "shard", "attn", "flash")),
        *((command, "--plot-scaling x.png") for command in ("ddp", "shard")),
        *((command, "--trace x") for command in ("ddp", "shard")),
        ("ddp", "--plot-buckets x.png"),
        ("nsys", "--keep x"),
        ("memprof", "--snapshot x"),
    ],
)
def test_a_dry_run_writes_nothing_that_is_measured(command, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks = ["--world-size", "1,2"] if option.startswith("--plot-scaling") else []
    sentence = f"error: {option}: --dry-run measures nothing to write there; leave one of them out\n"
    assert refused(command, *ranks, *option.split(), "--dry-run") == sentence


@pytest.mark.parametrize("command", [*PLANNED, "kernels", "losses"])
def test_slurm_reads_the_values_of_options(command):
    for options, sentence in SWEEPING:
        assert sentence in refused("slurm", command, *options)
    assert invoke("slurm", command, "--resume", *(["--text", __file__] if command == "losses" else [])).exit_code == 0


def test_slurm_plans_for_the_devices_and_trackers_of_the_job():
    for command in PLANNED:
        assert invoke("slurm", command, "--device", "cuda", "--track", "wandb").exit_code == 0


# A command line, and what its error says. Values of single options are in test_options.py; of each command one stands
# here, and what depends on several options or on files.
SMALL = "--size tiny --device cpu --context 16"
IN_TURN = f"bench {SMALL} --interleave attention --attention sdpa,flash"
SHARD = "shard --size tiny --device cpu --strategy"
FLASH = "flash --device cpu --context 32 --num-heads 2 --head-dim 16 --dtype fp32"
MODELS = str(Path(__file__).parents[1] / "user_models.py")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
BENCH, BOARD = RESULTS / "bench-h200.jsonl.gz", RESULTS / "flash-board-h200.jsonl.gz"
REFUSED = [
    ("benhc", "unknown command 'benhc': choose from bench, nsys, "),
    ("benhc", "doctor; did you mean bench?"),
    ("account memry", "unknown command 'memry': choose from memory, "),
    ("zzz", "unknown command 'zzz': choose from bench, "),
    ("bench --sizee small", "no such option: --sizee; did you mean --size?"),
    ("bench --zzzz", "no such option: --zzzz"),
    ("bench -size tiny", "no such option: -size; did you mean --size?"),
    ("-verison", "no such option: -verison; did you mean --version?"),
    ("bench --size tiny medium", "unexpected argument 'medium': each value follows its option, and several are joined"),
    ("nsys profile python train.py", "unexpected argument 'profile python train.py': each value follows its option"),
    ("bench --size", "option '--size' requires an argument"),
    (
        "bench --format jsn",
        "unknown format 'jsn': choose from table, markdown, csv, json, latex, typst; did you mean json",
    ),
    ("bench --steps 2,30", "--steps '2,30': not a number"),
    ("account activations --precision fp32,bf16", "--precision 'fp32,bf16': choose from fp32, bf16"),
    # bench
    (
        "bench --size Smal",
        "--size 'Smal': choose from tiny, small, medium, large, xl, 2.7b, 10b, 8b; did you mean small?",
    ),
    (f"bench {SMALL} --precision fp32 --bf16", "--precision, --bf16 and --fp16: give one of them"),
    (f"bench {SMALL} --num-layers 0", "--num-layers '0': must be between 1 and 1000"),
    (f"bench {SMALL} --steps 0", "--steps '0': must be at least 1"),
    (f"bench {SMALL} --num-heads 3", "3 heads do not divide d_model 128: choose a divisor of it"),
    (f"bench {SMALL} --num-heads 128", "head dimension 1: rotary embeddings need an even one"),
    (f"bench {SMALL} --resume", "--resume needs --save"),
    (f"bench {SMALL} --save /proc/no/r.jsonl", "cannot write results to /proc/no/r.jsonl"),
    (f"bench {SMALL} --output /proc/no/t.md", "cannot write --output /proc/no/t.md"),
    (f"bench {SMALL} --plot x.txt", "--plot x.txt: the file must end in .png, .svg, .pdf"),
    (
        f"bench {SMALL} --interleave size",
        "--interleave 'size': choose from precision, compile, attention, kernels, optimizer",
    ),
    (f"bench {SMALL} --interleave attention", "--interleave attention: give --attention two values or more"),
    (f"bench {SMALL} --interleave cuda-graph", "--interleave cuda-graph: give --cuda-graph two values or more"),
    (
        f"{IN_TURN} --warmup 0",
        "--interleave needs at least one warm-up step, so that one-time work is not timed: use --warmup 1",
    ),
    (f"{IN_TURN} --warmup 1,2", "--interleave takes one value of --warmup"),
    (
        f"{IN_TURN} --synchronize none",
        "--interleave: --synchronize none lets alternating steps overlap: use --synchronize step",
    ),
    (f"bench {SMALL} --model gone.py:build", "--model 'gone.py:build': there is no file gone.py"),
    (f"bench {SMALL} --optimizer gone.py:adam", "--optimizer 'gone.py:adam': there is no file gone.py"),
    (f"bench {SMALL} --optimizer gone.py", "--optimizer 'gone.py': names no function: write FILE.py:NAME or package"),
    (f"bench {SMALL} --model {MODELS}:imagess", f"--model '{MODELS}:imagess': user_models.py has no imagess; it has "),
    (f"verify --wrap {MODELS}:imagess", "; did you mean images?"),
    (f"kernels --kernel {MODELS}:zzzz", "user_models.py has no zzzz; it has "),
    (f"bench {SMALL} --batch {MODELS}:images", "is about a model of yours; give --model, too"),
    (f"tune --model {MODELS}:ours --kernels fused", "tune predicts --model with reference only"),
    (
        f"bench {SMALL} --model {MODELS}:ours --loss {MODELS}:half --kernels linear-cross-entropy",
        "linear-cross-entropy cannot compute --loss",
    ),
    # nsys
    (f"nsys {SMALL} --profiler nsys", "--profiler nsys: traces a GPU, and device cpu is none; choose torch"),
    ("nsys --compare-precision --bf16", "--compare-precision runs fp32 and bf16: leave --precision, --bf16"),
    ("nsys --range forward", "--range: a run has its own phases, other ranges are chosen with --from; leave it out"),
    ("nsys --from x.sqlite --size tiny", "--size: --from reads a report; leave it out"),
    ("nsys --from x.sqlite --save r.jsonl", "--save: --from reads a report; leave it out"),
    ("nsys --from a.sqlite --from b.sqlite", "--from: one report is read at a time, not 2; run the command for each"),
    ("nsys --from /dev/zero", "/dev/zero is a pipe or a device, and a report is read more than once"),
    ("nsys --from /no/such.sqlite", "cannot read /no/such.sqlite: No such file or directory"),
    (f"nsys {SMALL} --keep /proc/no", "cannot write --keep /proc/no/trace.json.gz"),
    # memprof
    (f"memprof {SMALL} --checkpoint all", "choose from none, block, every=K, sublayer, attention, ffn, nested"),
    (f"memprof {SMALL} --mode forward --checkpoint block", "--checkpoint block: a forward pass alone saves nothing"),
    (f"memprof {SMALL} --mode forward --checkpoint nope", "--checkpoint 'nope': choose from none, block, every=K"),
    (f"memprof {SMALL} --checkpoint none,every=0", "'every=0': a group has a whole number of blocks, at least 1"),
    (
        f"memprof {SMALL} --checkpoint block --compile model",
        "--checkpoint block: --compile model leaves no blocks to put checkpoints around; choose block",
    ),
    (f"memprof {SMALL} --snapshot /proc/no", "cannot write --snapshot /proc/no"),
    # flash, attn, kernels
    (f"{FLASH} --baseline none", "--baseline 'none': is not measured: choose from"),
    (f"{FLASH} --kv-heads 3", "--kv-heads 3: must divide --num-heads 2, choose from 1, 2"),
    (f"{FLASH} --window 4 --full", "--window 4: counts keys back from the query's own, so it needs --causal"),
    (f"{FLASH} --plot /proc/no/f.png", "cannot write --plot /proc/no/f.png"),
    ("flash --grid course --context 128", "--grid course: has shapes of its own; leave it out, or --context"),
    ("flash --grid board --dtype fp32", "--grid board: has shapes of its own; leave it out, or --dtype"),
    ("flash --grid board --full", "--grid board: has shapes of its own; leave it out, or --causal and --full"),
    ("attn --implementation flex", "--implementation 'flex': choose from eager, compiled"),
    ("kernels --device cpu,cuda", "--device 'cpu,cuda': choose from auto, cuda, cpu"),
    ("kernels --op rope --implementation liger", "--implementation liger: --op rope has none of them"),
    ("kernels --op rope --width 16 --head-dim 6", "--head-dim 6: must be even and divide the width, 16"),
    (f"kernels --kernel {MODELS}:ours", "stands beside one op"),
    (f"kernels --op adamw --kernel {MODELS}:ours", "stands beside one op"),
    (f"kernels --op rms-norm,swiglu --kernel {MODELS}:ours", "stands beside one op"),
    ("flash --kernel mine.py:attention", "there is no file mine.py"),
    ("flash --kernel attention", "names no function"),
    ("flash --kernel cs336sys.nowhere:f", "cs336sys.nowhere"),
    ("kernels --op rms-norm --head-dim 8", "--head-dim 8: only affects rope; add it to --op, or leave it out"),
    ("kernels --op rope --vocab-size 50", "--vocab-size 50: only affects linear-cross-entropy; add it to --op"),
    # allreduce
    ("allreduce --message 5XB", "--message '5XB': write a size as 8B, 10KB, 1MB (1e6 bytes) or 1MiB (2^20 bytes)"),
    ("allreduce --message 1KB:8B", "--message '1KB:8B': a range begins with its smallest size"),
    ("allreduce --message 0", "--message '0': must be a whole number of bytes, between 1 and 1e18"),
    ("allreduce --message 1.2.3", "--message '1.2.3': write a size as"),
    ("allreduce --factor 0.5", "--factor 0.5: must be more than 1"),
    ("allreduce --backend nccl --device cpu", "--backend nccl: communicates tensors on cuda, not on cpu"),
    (
        "allreduce --message 8B:1GB --factor 1.0000001",
        "'8B:1GB': has 186,438,253 sizes by --factor 1.0000001: must be at",
    ),
    # ddp
    ("ddp --world-size 3", "--batch-size 4: 3 ranks cannot share it equally; choose a multiple of 3"),
    ("ddp --backend nccl --device cpu", "--backend nccl: communicates between GPUs"),
    ("ddp --mode flat --transport copy-engines", "only mode bucketed has the choice; add it to --mode"),
    ("ddp --mode naive,torch --bucket-mb 1,10", "--bucket-mb 1: only mode bucketed"),
    ("ddp --mode bucketed --bucket-mb 0", "--bucket-mb '0': must be block, or a number between 1e-06 and 1e+06"),
    ("ddp --mode bucketed --bucket-mb nan", "--bucket-mb 'nan': must be block, or a number"),
    ("ddp --mode bucketed --bucket-mb all", "--bucket-mb 'all': must be block, or a number"),
    ("ddp --check-layers 0", "--check-layers '0': must be at least 1"),
    ("ddp --mode flat --plot-buckets b.png", "--plot-buckets b.png: only mode bucketed"),
    ("ddp --plot-buckets b", "--plot-buckets b: the file must end in .png, .svg, .pdf"),
    ("ddp --trace /proc/no", "cannot write --trace /proc/no"),
    # shard
    ("shard --board --strategy none", "--board --strategy none: a board has one strategy, fsdp or torch-fsdp"),
    ("shard --board --checkpoint auto --memory-limit 130", "--memory-limit '130': give a size such as"),
    ("shard --board --memory-limit infGiB", "--memory-limit 'infGiB': give a size such as"),
    ("shard --board --mesh fsdp=2,tp=2", "--mesh fsdp=2,tp=2: --board's ranks have one dimension; leave one"),
    ("shard --board --plot m.png", "--plot m.png: --board does not record a rank's memory at six moments"),
    ("shard --board --cuda-graph on", "--cuda-graph on: --board launches its step"),
    ("shard --board --fp16", "--precision fp16: --board checks gradients of fp32 and bf16"),
    ("shard --size tiny --strategy fsdp --keep-gathered 3 --dry-run", "--keep-gathered 3: the model has 2 blocks"),
    ("shard --strategy fsdp --checkpoint auto --attention sdpa", "auto only supports --strategy fsdp"),
    ("shard --strategy tensor --prefetch 0,2", "--prefetch 0: only strategies with fsdp gather ahead"),
    ("shard --mesh fsdp=2,tp=2 --keep-gathered 1", "--keep-gathered 1: only fsdp keeps weights"),
    ("shard --strategy fsdp --memory-limit 1GiB", "--memory-limit 1GiB: is for --checkpoint auto"),
    ("shard --checkpoint every=2", "--checkpoint 'every=2': choose from none, block"),
    ("shard --checkpoint block --compile model", "--checkpoint block: --compile model leaves no blocks"),
    ("shard --batch-size 5", "--batch-size 5: 2 ranks cannot share it equally; choose a multiple of 2"),
    ("shard --trace /proc/no", "cannot write --trace /proc/no"),
    ("shard --plot-scaling s.png --dry-run", "needs several numbers of ranks: give --world-size 1,2"),
    (
        "shard --size 8b --board --device cpu --world-size 1 --batch-size 1 --state-dtype fp32",
        "a rank needs 151.9 GiB even if no block keeps gate and up (state in fp32, 1 ranks)",
    ),
    (f"{SHARD} tensor --mesh tp=4 --world-size 2", "--mesh tp=4: that is 4 ranks, and there are 2"),
    (f"{SHARD} tensor --mesh fsdp=1,tp=2", "--mesh fsdp=1,tp=2: strategy 'tensor' has the dimensions tp"),
    (f"{SHARD} fsdp+tensor --mesh fsdp=two", "write dimensions and their numbers of ranks, as in fsdp=2,tp=2"),
    (f"{SHARD} tensor --mesh pp=2", "--mesh pp=2: unknown dimension 'pp': choose from ddp, fsdp, cp, tp"),
    (f"{SHARD} tensor --mesh tp=2,tp=1", "--mesh tp=2,tp=1: tp is given twice"),
    (f"{SHARD} none --mesh tp=2", "--mesh tp=2: the ranks of strategy 'none' have one dimension"),
    (f"{SHARD} fsdp+tensor --mesh tp=2,fsdp=1", "groups are of neighbours, so tp comes last: fsdp=1,tp=2"),
    (f"{SHARD} fsdp+tensor --world-size 3", "choose an even number, or say by --mesh how many"),
    (f"{SHARD} tensor --world-size 3", "4 attention heads cannot be shared by 3 tensor parallel ranks: choose 1, 2 or"),
    (f"{SHARD} ddp+tensor --mesh ddp=3,tp=1 --world-size 3", "3 groups of ranks cannot share it equally"),
    (f"{SHARD} tensor --checkpoint keep=1 --attention sdpa", "--strategy tensor shares them: choose none or block"),
    (f"{SHARD} tensor --kernels fused", "leave out --kernels fused"),
    (f"{SHARD} tensor --compile model", "is compiled by blocks; choose --compile block or off"),
    (f"{SHARD} tensor-sequence --context 15", "--context 15: 2 ranks cannot share it equally; choose a multiple of 2"),
    (f"{SHARD} context-all-to-all --world-size 3", "3 ranks do not divide 4 heads; choose 1, 2 or 4 ranks, or ring"),
    (f"{SHARD} context-ring --context 37 --world-size 40", "a sequence of 37 tokens cannot be split over 40 ranks"),
    (f"{SHARD} context-ring --model {MODELS}:ours", "attention of cs336_basics alone; leave out --model"),
    (f"{SHARD} fsdp --checkpoint keep=1 --attention flash --d-ff 128", "d_ff and d_model are both 128"),
    (f"{SHARD} fsdp --checkpoint keep=1", "--attention reference has no logsumexp; choose flash or sdpa"),
    (f"{SHARD} fsdp --checkpoint keep=4 --attention flash", "--checkpoint keep=4: the model has 2 blocks"),
    (f"{SHARD} fsdp --checkpoint keep", "keep=N takes the number of blocks that keep gate and up, as in keep=24"),
    # tune, verify
    ("tune --size small,medium", "tune chooses for one model"),
    ("tune --size small --memory 1GiB --gpu h200", "the smallest needs"),
    ("tune --size small --memory lots", "--memory 'lots': give a size"),
    ("tune --size small --gpu h2000", "choose from a100, a100-40gb"),
    ("tune --size small --checkpoint sometimes", "choose from none, block"),
    ("tune --size small --gpu h200 --device cpu", "--device cpu has none"),
    ("tune --size small --strategy fsdp", "one rank shares nothing"),
    ("tune --size small --gpu h200 --tokens-per-step 1000", "choose 1,024"),
    ("tune --size small --save x.jsonl", "nothing is measured; add --measure"),
    ("tune --size small --update backward --optimizer adamw", "--update: tune updates in a step of its own"),
    ("verify", "--wrap: name what makes a model parallel"),
    ("verify --wrap dpd", "did you mean ddp?"),
    ("verify --wrap gone.py:wrap", "there is no file gone.py"),
    ("verify --wrap ddp --mesh rows", "unknown dimension 'rows'"),
    ("verify --wrap ddp --mesh data=3", "its sizes multiply to 3, not to 2 ranks"),
    ("verify --wrap ddp --mesh data,tensor=3", "its sizes multiply to 3, not to 2 ranks"),
    ("verify --wrap ddp --mesh data=0,tensor=2", "--mesh data=0,tensor=2: write each dimension once, with its"),
    ("verify --wrap ddp --mesh data=,tensor=2", "--mesh data=,tensor=2: write each dimension once, with its"),
    ("verify --wrap ddp --mesh data,tensor", "at least 1 (one may be without): data=2,tensor=2"),
    ("verify --wrap ddp --batch-size 6", "--batch-size 6: must be at least 8"),
    # losses, precision, doctor
    ("losses", "--text: give a file to learn from, or a folder of them; several with --text again"),
    ("losses --text nowhere.md", "--text nowhere.md: cannot be read (No such file or directory)"),
    ("losses --text /dev/zero", "--text /dev/zero: is no file of text; give a file or a folder"),
    (f"losses --text {__file__} --learning-rate 0", "--learning-rate '0': must be between 1e-12 and 1e+06"),
    (f"losses --text {__file__} --model {MODELS}:ours --batch {MODELS}:images", "losses takes its batches from --text"),
    ("precision --precision fp32", "--precision 'fp32': choose from fp16, bf16"),
    ("precision --save x.json.gz", "--save x.json.gz: holds JSON lines"),
    ("doctor --loss mine.py:loss", "--loss mine.py:loss only applies to --model: add --model, or leave it out"),
    ("doctor --ceilings c.json --model mine.py:build", "leave out --model, or --ceilings"),
    ("doctor --optimizer fused", "--optimizer fused only applies to --model: add --model, or leave it out"),
    # account
    ("account memory --world-size 3", "--batch-size 4: 3 ranks cannot share it equally; choose a multiple of 3"),
    ("account memory --bf16 --fp16", "--precision, --bf16 and --fp16: give one of them"),
    ("account memory --d-model 1e11", "--d-model '1e11': must be between 1 and 1e+06"),
    ("account memory --num-layers 1e8", "--num-layers '1e8': must be between 1 and 1000"),
    ("account memory --plot /none/x.png", "cannot write --plot /none/x.png: there is no folder /none; make it"),
    ("account memory --output /none/x.csv", "cannot write --output /none/x.csv: there is no folder /none; make it"),
    ("account memory --output t.pdf", "--output t.pdf: holds tables, whose names end in .csv, .json"),
    ("account buckets --size huge", "unknown size 'huge'"),
    ("account buckets --call-us -1", "--call-us '-1': must be at least 0.001"),
    ("account buckets --gradients 1GB,8GB", "--gradients '1GB,8GB': write a size as"),
    ("account parallel --mesh 4x", "--mesh '4x': must be N_FSDPxN_TP, such as 4x2"),
    ("account parallel --mesh 0x4", "mesh 0x4: every axis needs at least 1 device"),
    ("account parallel --mesh 4x2 --devices 16", "--mesh 4x2 is 8 devices: its axes must multiply to --devices 16"),
    ("account scaling --bandwidth -1", "--bandwidth '-1': must be at least 1"),
    ("account scaling --node-bandwidth 0", "--node-bandwidth '0': must be at least 1"),
    ("account scaling --devices 8,1000000000000", "--devices '1000000000000': must be between 1 and 1e+06"),
    (
        "account scaling --scaling weak --batch-size 64",
        "--batch-size 64 only affects strong scaling: add strong to --scaling",
    ),
    ("account scaling --scaling strong --device-batch-size 2", "--device-batch-size 2 only affects weak scaling"),
    ("account xxl --device-gb -95", "--device-gb '-95': must be at least 1e-09"),
    ("account xxl --devices 65", "--x 16 and --y 4 multiply to 64, not to --devices 65"),
    # show, compare, report, slurm
    (f"show {RESULTS}/bench-h200.md", "bench-h200.md holds no results: it should be a file written by --save"),
    ("show none.jsonl", "none.jsonl: No such file or directory"),
    ("show", "missing argument 'FILE.jsonl'"),
    (f"show {BENCH} --command ddp", "--command 'ddp': choose from bench"),
    (f"show {BENCH} --status timeout", "--status timeout: no cell has this status"),
    (f"show {BENCH} --table times", "--table 'times': choose from bench, speedup"),
    (f"show {BENCH} --columns stages", "--columns 'stages': choose from size, "),
    (f"show {BENCH} --sort stages", "--sort 'stages': choose from size, "),
    (f"show {BENCH} --html page.pdf", "--html page.pdf: the file must end in .html"),
    (f"show {BENCH} --html /proc/none/o.html", "cannot write --html /proc/none/o.html"),
    (f"show {RESULTS}/bench-attention-h200.jsonl.gz --status oom --plot n.png", "the cells of bench hold no picture's"),
    (f"show {BOARD} --plot b.txt", "--plot b.txt: the file must end in .png, .svg, .pdf"),
    (
        f"compare {BENCH} {BENCH} --fail-above fast",
        "--fail-above 'fast': must be a percentage of at least 0, such as 5%",
    ),
    (f"compare {BENCH} {__file__}", "holds no results: it should be a file written by --save"),
    (f"compare {BENCH} missing.jsonl", "cannot read results from missing.jsonl: No such file or directory"),
    (f"compare {BENCH} {BENCH} --fail-above -5%", "--fail-above '-5%': must be a percentage of at least 0"),
    (f"compare {BENCH} {BENCH} --fail-above nan", "--fail-above 'nan': must be a percentage of at least 0"),
    (f"compare {BENCH} {BENCH} --allow-undecided", "--allow-undecided needs --fail-above: nothing else fails"),
    (f"compare {BENCH} {BENCH} --confidence 100", "--confidence 100: must be a percentage from 50 to less than 100"),
    (f"compare {BENCH} {BENCH} --confidence 0.95", "--confidence 0.95: must be a percentage from 50 to less than 100"),
    (f"compare {BENCH} {BENCH} --metric loss", "no cell has samples of loss in both files: choose --metric from "),
    ("report --from x.jsonl", "no --year: choose from 2025, 2026"),
    ("report --year 2024", "--year 2024: choose from 2025, 2026"),
    ("report --year 2025", "give results with --from, or measure them with --run"),
    ("report --year 2025 --from x --output x.docx", "--output x.docx: the name must end in .html, .htm,"),
    ("report --year 2025 --from x --folder here", "--folder here: is where --run saves; give --run"),
    ("report --year 2025 --run --dry-run --output x.html", "--output x.html: --dry-run prints its plan"),
    ("report --year 2025 --run --dry-run --format latex", "--format latex: --dry-run prints its plan"),
    ("report --year 2025 --from nothing-*.jsonl", "--from nothing-*.jsonl: found no results file"),
    ("report --year 2025 --from missing.jsonl", "cannot read results from missing.jsonl"),
    (f"report --year 2025 --from {__file__}", "holds no results"),
    ("report --year 2025 --from x --only fsdp", "fsdp"),
    ("report --year 2025 --from x --size huge", "--size 'huge': choose from tiny"),
    ("report --year 2026 --gpu h100 --from results", "plans for another machine than this one; add --dry-run"),
    ("report --year 2026 --memory 32GiB --run", "--memory 32GiB: plans for another machine than this one; add --dry"),
    ("report --year 2026 --dry-run --gpu a100-39gb", "no datasheet is known; choose from a100, a100-40gb"),
    ("report --year 2026 --dry-run --memory 32", "--memory '32': give a size such as 130GiB, 140GB"),
    ("report --year 2026 --dry-run --gpu h100 --device cpu", "--gpu h100: --device cpu has none"),
    ("report --year 2025 --from x --format pdf", "--format pdf: a PDF is written to a file, not to stdout"),
    ("slurm train", "'train' is not a command that measures: choose from bench, nsys"),
    ("slurm", "missing argument 'COMMAND'"),
    ("slurm bench --sise xl", "no such option: --sise"),
    ("slurm shard --strategy zero", "--strategy 'zero': choose from none, optimizer"),
    ("slurm ddp --batch-size 3 --world-size 2", "--batch-size 3: 2 ranks cannot share it equally"),
    ("slurm ddp --size", "requires an argument"),
    ("slurm --nodes 2 bench", "--nodes 2: bench runs on one machine; leave --nodes out"),
    ("slurm --nodes 2 --gpus-per-node 8 ddp --world-size 4", "torchrun starts 2 x 8 ranks"),
    # A plan of two ranks was made for the job of three, of 16, or on too few GPUs.
    ("slurm --gpus-per-node 3 ddp --batch-size 4", "--batch-size 4: 3 ranks cannot share it equally"),
    ("slurm --nodes 2 --gpus-per-node 8 ddp --size xl", "--batch-size 4: 16 ranks cannot share it"),
    ("slurm --gpus-per-node 4 shard --mesh fsdp=2,tp=4 --size 2.7b", "that is 8 ranks, and there are"),
    ("slurm --gpus-per-node 2 ddp --world-size 4", "--gpus-per-node 2: --world-size 4 needs 4, one for each"),
    ("slurm --time 1h bench", "--time '1h': must be minutes, minutes:seconds, hours:minutes:seconds"),
    ("slurm --partition 'a b' bench", "--partition 'a b': must be one word"),
    ("slurm --sbatch --mem=0 bench", "--sbatch '--mem=0': must be an option of sbatch without its dashes"),
    ("slurm --sbatch nodes=3 ddp", "--sbatch 'nodes=3': give --nodes to cs336sys slurm instead"),
    ("slurm -o /proc/none/j bench", "cannot write --output /proc/none/j"),
    ("slurm --nodes 2 --gpus 3 ddp", "--gpus 3: give a multiple of --nodes 2, or --gpus-per-node instead"),
    ("slurm --gpus 2 --gpus-per-node 2 ddp", "--gpus 2: give a multiple of --nodes 1"),
    ("slurm --mem 64GB flash", "--mem '64GB': must be megabytes, or a number with K, M, G or T: 64G"),
    ("slurm --sbatch cpus-per-task=3 flash", "--sbatch 'cpus-per-task=3': give --cpus to cs336sys slurm instead"),
    ("slurm report --year 2026", "report without --run measures nothing: add --run"),
    ("slurm --nodes 2 tune", "--nodes 2: tune runs on one machine; leave --nodes out"),
    ("slurm verify", "--wrap: name what makes a model parallel"),
    ("slurm --gpus 4 verify --wrap ddp --mesh data=2", "--mesh data=2: its sizes multiply to 2"),
    ("slurm report --run", "no --year: choose from 2025, 2026"),
    ("slurm report --year 2026 --run --only none", "--only 'none': choose from"),
]


def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cs336sys.run.cells.Worker.measure", None)
    monkeypatch.setattr("cs336sys.machine.diagnosis.diagnose", None)
    wrong = []
    for line, sentence in REFUSED:
        result = invoke(*shlex.split(line))
        errors = result.stderr.splitlines()
        if (result.exit_code, result.stdout, len(errors)) != (2, "", 1) or not errors[0].startswith("error: "):
            wrong.append(f"{line}: {result.exit_code}, {result.output}")
        elif sentence not in result.stderr:
            wrong.append(f"{line}: {result.stderr}")
    assert not wrong, "\n".join(wrong)
    assert list(tmp_path.iterdir()) == []


def test_cell_that_does_not_fit_is_named_before_it_runs(monkeypatch):
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: Capacity("a CPU", 23.5))
    for command in ("bench", "nsys", "memprof"):
        monkeypatch.setattr(f"{module_of(command)}.run_sweep", Mock(side_effect=UsageError("measured")))
        refused_cell = invoke(command, "--size", "tiny,10b", "--device", "cpu")
        assert refused_cell.exit_code == 2
        assert refused_cell.stderr.startswith("error: 10b-s512-b4-v10000-train-fp32-")
        assert refused_cell.stderr.endswith(
            " GiB, and a CPU has 23.5: choose a smaller size (--dry-run shows what fits), or add --force\n"
        )
        told = invoke(command, "--size", "tiny,10b", "--device", "cpu", "--force").stderr.splitlines()
        assert len(told) == 2
        assert told[0].startswith("warning: 10b-s512-b4-v10000-train-fp32-")
        assert "is predicted to need " in told[0]
        assert told[0].endswith(
            " GiB, and a CPU has 23.5: it will run out of memory, or be killed; --dry-run shows what fits"
        )
        assert invoke(command, "--size", "tiny", "--device", "cpu").stderr == "error: measured\n"


@pytest.mark.parametrize("command", ["ddp", "shard"])
def test_ranks_that_do_not_fit_one_cpu_are_said_before_they_are_tried(monkeypatch, command):
    found = Capacity("a CPU", 300.0)
    monkeypatch.setattr("cs336sys.machine.system.capacity", lambda device: found)
    monkeypatch.setattr(f"{module_of(command)}.run_sweep", Mock(side_effect=UsageError("measured")))
    arguments = ("--size", "10b", "--world-size", "1,2", "--device", "cpu")
    assert "a CPU has 300.0: choose a smaller size" in invoke(command, *arguments).stderr
    alone = invoke(command, *arguments, "--force").stderr.splitlines()
    # One rank needs 199 GiB, and the strategies of one cell the same.
    assert len(alone) == 2
    assert " on 2 ranks is predicted to need 398.3 GiB, and a CPU has 300.0: it will run out" in alone[0]
    # A GPU holds as many blocks as are compared on it.
    found = Capacity("a GPU", 300.0, is_gpu=True)
    assert invoke(command, "--size", "10b", "--world-size", "2").stderr == "error: measured\n"
    found = Capacity("a CPU", 300.0)
    assert invoke(command, "--size", "10b", "--check-layers", "1").stderr == "error: measured\n"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert invoke(command, "--size", "10b").stderr == "error: measured\n"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("leaves", ("trains", "missing", "mine.py, line 7: SystemExit: 7")),
        ("diverges", ("trains", "warn", "losses nan, nan, nan")),
    ],
)
def test_doctor_finds_a_model_that_ends_the_process_or_trains_nothing(name, row, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom torch import nn\n\nclass Scaled(nn.Sequential):\n"
        "    def forward(self, x):\n        return super().forward(x) * float('nan')\n"
        "def leaves(size): sys.exit(7)\n"
        "def diverges(size):\n    return Scaled(nn.Embedding(size.vocab_size, 8), nn.Linear(8, size.vocab_size))\n"
    )
    result = invoke("doctor", "--model", f"{tmp_path}/mine.py:{name}", "--format", "json")
    assert result.exit_code == (3 if row[1] == "missing" else 0)
    found = {one["name"]: one for one in json.loads(result.stdout)["tables"][0]["rows"]}["trains"]
    assert (found["name"], found["verdict"]) == row[:2]
    assert row[2] in found["found"]


def test_help_is_whole_without_docstrings_and_may_lose_its_reader():
    for arguments, sentence in {
        "bench": "Time the phases",
        "": "Benchmark, profile",
        "account": "Memory, FLOPs",
    }.items():
        program = [sys.executable, "-OO", "-m", "cs336sys", *arguments.split(), "--help"]
        assert sentence in subprocess.run(program, capture_output=True, text=True).stdout
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "cs336sys", "--help"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_grid_on_the_line_goes_before_shapes_of_a_settings_file(tmp_path, monkeypatch):
    (tmp_path / "s.toml").write_text("[flash]\ncontext = 128\n")
    monkeypatch.setattr("cs336sys.commands.flash.run_sweep", lambda *arguments: (_ for _ in ()).throw(StopIteration))
    assert isinstance(
        invoke("--config", tmp_path / "s.toml", "flash", "--grid", "board").exception, RuntimeError | StopIteration
    )
    (tmp_path / "s.toml").write_text("[flash]\ncontext = 128\ngrid = 'board'\n")
    assert "--grid board: has shapes of its own" in invoke("--config", tmp_path / "s.toml", "flash").stderr


def test_a_message_that_is_no_whole_number_of_elements_is_said(tmp_path):
    plan = invoke("allreduce", "--message", "3B,4B", "--dtype", "bf16", "--device", "cpu", "--dry-run").stdout
    note = "less than asked for, to have whole elements that all ranks share equally: 2 of 3 bytes (bf16, 2 ranks)"
    assert plan.count("less than asked for") == plan.count(note) == 1
