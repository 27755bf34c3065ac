"""The sentences of the write-ups: they answer what is asked, and follow the numbers."""

import importlib
from dataclasses import replace

import pytest
from course_answers import (
    answers,
    changed,
    having,
    kept,
    of_run,
    saved,
    scaled,
    told,
    with_derived,
    with_measured,
    words,
)

from cs336sys.commands.report.document import build_document
from cs336sys.commands.report.evidence import evidence_of
from cs336sys.commands.report.handouts import PROBLEMS
from cs336sys.commands.report.problem import HANDOUTS, Target
from cs336sys.commands.report.problems import code
from cs336sys.commands.report.problems.ranks import ddp_commands, xl_command
from cs336sys.results.model import Results


def test_timings_follow_the_samples():
    slower = changed(saved("bench-h200"), having(size="small"), lambda cell: scaled(cell, 3))
    # 19.08 ms and 33.97 ms as measured.
    assert "small 57.24 ms and 101.9 ms" in told(2025, slower, "benchmarking_script", "b")


def test_a_size_out_of_memory_is_part_of_the_answer():
    def failed(cell):
        return replace(cell, status="oom", samples={}, derived={}, reason="CUDA out of memory")

    oom = changed(saved("bench-h200"), having(size="2.7b"), failed)
    blocks = answers(2026, oom, "benchmarking_script", "b")
    assert "2.7b (the handout's xl) ran out of memory: by the accounting it needs 65.21 GiB." in words(blocks)
    assert any("Not measured: 10b." in line for block in blocks for line in block.missing)
    # Other sizes of the same run were measured: this one was tried, and is not missing.
    blocks = answers(2025, oom, "benchmarking_mixed_precision", "c")
    assert "2.7b in fp32 and 2.7b in bf16 ran out of memory." in words(blocks)
    assert [block.missing for block in blocks] == [[]]


def test_the_largest_deviation_is_that_of_any_cell_of_a_size():
    """Of two contexts of one size the later one's stood for both."""
    (file,) = kept(saved("bench-h200"), having(size="small", precision="fp32"))

    def of_context(context, *step_ms):
        cell = with_measured(file.cells[0], "step", *step_ms)
        return replace(cell, configuration=cell.configuration | {"context": context})

    cells = (of_context(64, 10.0, 20.0), of_context(128, 10.0, 10.1, 10.2))
    text = told(2025, [Results(file.runs, cells)], "benchmarking_script", "b")
    assert "deviation over 2 or 3 steps is not small: at most 47.1 % of the mean step." in text


def test_one_warm_up_step_is_said_to_be_enough_only_where_one_was_measured():
    without = kept(saved("warmup-h200"), having(warmup=(0, 2, 5)))
    sentences = told(2025, without, "benchmarking_script", "c")
    assert "what is done once is done there" in sentences
    assert "After 2 and 5 warm-up steps that step takes at most" in sentences


def test_slow_first_step_of_any_size_needs_more_warm_up():
    def stalled(cell):
        first, *others = cell.samples["step"].measured
        return with_measured(cell, "step", 2 * first, *others)

    files = changed(saved("warmup-h200"), having(size="large", warmup=1), stalled)
    text = told(2025, files, "benchmarking_script", "c")
    assert "2.00x, 1.00x and 1.00x the median: some of that is still to be done after 1." in text
    assert "all that is done once" not in text


def test_inference_is_a_run_of_its_own_where_it_was_profiled():
    """The forward pass of a training step stood for inference."""
    files = saved("nsys-small-h200")
    (block,) = answers(2026, files, "nsys_profile", "d")
    assert "matrix products take 49.3 % in inference and 55.4 % in the whole step" in words([block])
    assert block.missing == []
    (block,) = answers(2026, kept(files, having(mode="train")), "nsys_profile", "d")
    assert "matrix products take 49.3 % in the step's forward pass and 55.4 % in the whole step" in words([block])
    assert "Not measured: inference of small at context 4096 in a run of its own." in block.missing[0]


def test_answers_come_from_no_command_of_another_size():
    """``report --size tiny`` said that times of ``small`` come from ``bench --size tiny``."""
    target = Target(HANDOUTS[2025], "tiny", "cpu")
    document = build_document(PROBLEMS[2025][:1], evidence_of(saved("bench-fp16-h200"), {})[0], target)
    by_letter = {section.letter: section for section in document.problems[0][1]}
    (missing,) = by_letter["b"].answers[0].missing
    assert "Measure it with `cs336sys bench --size small,medium,large,xl,2.7b" in missing
    assert by_letter["c"].measuring_lines == ["cs336sys bench --size tiny --context 64 --warmup 0,1,2,5 --device cpu"]


def test_estimate_counts_each_cell_once():
    target = Target(HANDOUTS[2026])
    flags = ("--strategy", "none,optimizer,optimizer-flat")
    half = xl_command(target, "shard", *flags, cells=3, precision=("fp32",))
    both = xl_command(target, "shard", *flags, cells=6, precision=("fp32", "bf16"))
    assert half.seconds < both.seconds < 2 * half.seconds
    # Naive, flat, overlapped, and bucketed with four sizes of buckets.
    (command,) = ddp_commands(Target(HANDOUTS[2025]))
    flags = ("--mode", "naive,flat,overlap,bucketed", "--bucket-mb", "1,10,100,1000")
    assert command == xl_command(Target(HANDOUTS[2025]), "ddp", *flags, cells=7)


def test_the_share_of_a_step_is_of_the_number_beside_it():
    """The mean of a step that stalled stood next to a share that no other number gave."""

    def stalled(cell):
        return with_measured(with_measured(cell, "synchronize", 1.0, 1.0, 1.0, 4.0), "step", 10.0, 10.0, 10.0, 16.0)

    files = changed(saved("ddp-fp32-h200"), having(strategy="naive"), stalled)
    text = told(2025, files, "naive_ddp_benchmarking")
    assert "a step takes 10.00 ms (median; standard deviation 3.000 ms), of which 1.000 ms, 10.0 %, pass" in text


def with_kernels(rename):
    """The profiles of nsys, with other names of kernels."""

    def renamed(cell):
        kernels = [kernel | {"kernel": rename(kernel)} for kernel in cell.derived["profile"]["kernels"]]
        return with_derived(cell, profile=cell.derived["profile"] | {"kernels": kernels})

    return changed(saved("nsys-h200"), lambda cell: cell.status == "ok", renamed)


def test_the_top_kernel_is_the_profiles_and_not_a_fixed_one():
    files = with_kernels(lambda kernel: kernel["kernel"].replace("gemm", "slow_product"))
    text = told(2025, files, "nsys_profile", "b")
    assert "slow_product" in text
    assert "gemm" not in text


def test_more_kernels_backward_that_are_no_products_are_the_reason_of_their_lower_share():
    def rename(kernel):
        is_product = "xmma" in kernel["kernel"] and kernel["range"] == "backward"
        return f"elementwise_{hash(kernel['kernel'])}" if is_product else kernel["kernel"]

    text = told(2025, with_kernels(rename), "nsys_profile", "d")
    assert "in the whole step, less, as the backward pass has less of them" in text
    assert "AdamW has none" not in text


def test_overlap_is_claimed_only_where_the_trace_shows_it():
    def without_overlap(cell):
        return with_derived(cell, timeline=cell.derived["timeline"] | {"overlap_ms": 0.0})

    files = changed(saved("ddp-fp32-h200"), lambda cell: cell.derived.get("timeline") is not None, without_overlap)
    assert "no clear difference" in told(2025, files, "ddp_overlap_individual_parameters_benchmarking", "b")


def test_differences_within_the_noise_are_no_differences():
    def noisy(cell):
        return with_measured(cell, "step", *(100.0, 900.0) * 4)

    files = changed(saved("shard-xl-h200"), lambda cell: cell.status == "ok", noisy)
    assert "undecided; about" in told(2025, files, "optimizer_state_sharding_accounting", "b")


def test_a_compiled_model_is_compared_with_the_vanilla_model_of_its_own_run():
    """Another run, with more cells, has a vanilla model too."""
    (file,) = saved("bench-h200")
    off, block = (next(filter(having(compile=how, size="small"), file.cells)) for how in ("off", "block"))
    whole = replace(scaled(block, 2), configuration=block.configuration | {"compile": "model"})
    (result,) = answers(2025, [file, of_run("b", file, scaled(off, 2), whole)], "torch_compile", "b")
    assert "With compile model, forward is faster beyond the noise in 1 of 1 rows (1.28x as fast)" in words([result])
    (row,) = result.tables[0].rows
    assert (round(row["forward_before_ms"], 2), round(row["forward_ms"], 2)) == (38.17, 29.92)


def test_a_half_precision_is_compared_with_the_fp32_of_its_own_run():
    """Another run, with more cells, has fp32, too."""
    (file,) = saved("bench-h200")
    full = next(filter(having(size="small", precision="fp32"), file.cells))
    half = replace(full, configuration=full.configuration | {"precision": "fp16"})
    (block,) = answers(2025, [file, of_run("b", file, scaled(full, 4), half)], "benchmarking_mixed_precision", "c")
    rows = {row["precision"]: row for row in block.tables[0].rows if row["size"] == "small"}
    times_ms = {name: (round(row["forward_before_ms"], 2), round(row["forward_ms"], 2)) for name, row in rows.items()}
    assert times_ms == {"fp16": (76.34, 19.09), "bf16": (19.09, 12.85)}
    assert "With precision fp16, forward is faster beyond the noise in 1 of 1 rows (4x as fast)" in words([block])
    # The handouts ask for bf16.
    assert block.missing == []
    # One size in fp16, all in bf16.
    assert "of the whole step in bf16 grows" in words([block])
    assert "of the whole step in fp16" not in words([block])


def test_the_best_checkpoints_are_those_that_were_measured_to_hold_the_least():
    (file,) = kept(saved("memprof-h200"), having(checkpointing="block"))

    def peaks(**gib):
        cells = []
        for name, peak in gib.items():
            configuration = file.cells[0].configuration | {"checkpointing": name.replace("_", "=")}
            cells.append(replace(with_derived(file.cells[0], peak_gib=peak), configuration=configuration))
        return told(2026, [Results(file.runs, tuple(cells))], "gradient_checkpointing", "b")

    alike = peaks(sublayer=59.4, block=59.4, every_2=63.6)
    assert "the least is the 59.40 GiB of `block`, as expected; sublayer needs as much." in alike
    smaller = peaks(sublayer=50.0, block=59.4, every_2=63.6)
    assert "the least is the 50.00 GiB of `sublayer`, and not as expected." in smaller


def test_the_best_of_several_runs_of_the_board_is_the_answer():
    """With the same settings as a run before it, which has more cells."""
    (file,) = saved("board-h200")
    again = scaled(next(cell for cell in file.cells if cell.status == "ok"), 0.1)
    other = of_run("b", file, again, arguments=("shard", "--board", "--steps", "9"))
    (block,) = answers(2026, [file, other], "leaderboard")
    assert f"takes {again.samples['wall'].median:.1f} ms (median)" in words([block])
    assert block.commands == ["cs336sys shard --board --steps 9"]


def test_a_profile_that_agrees_with_the_plain_pass_needs_no_reason():
    files = changed(
        saved("nsys-h200"), having(context=(256, 512)), lambda cell: with_measured(cell, "forward", *(19.3,) * 5)
    )
    text = told(2026, files, "nsys_profile", "a")
    assert "agrees within 10 % in 3 of 3 profiles." in text
    assert "as long under it" not in text


def test_no_allocation_smaller_than_the_largest_is_named():
    def one_larger(cell):
        largest = [kind | {"size": kind["size"] + 2**20 * (number == 1)} for number, kind in enumerate(_largest(cell))]
        return with_derived(cell, largest=sorted(largest, key=lambda kind: -kind["size"]))

    larger = changed(saved("memprof-h200"), lambda cell: bool(_largest(cell)), one_larger)
    after = told(2025, larger, "memory_profiling", "e").split("At context 512 ")[1]
    assert after == (
        "the largest allocations of the forward pass have 129.0 MiB each, made by `where` "
        "(cs336_basics/model.py:180 scaled_dot_product_attention)."
    )


def _largest(cell):
    return cell.derived.get("largest") or []


def test_bucket_sizes_that_the_noise_alone_tells_apart_are_called_alike():
    def noisy(cell):
        step_ms = cell.samples["step"].median
        return with_measured(cell, "step", *(step_ms + change for change in (-60.0, -30.0, 0.0, 30.0, 60.0)))

    # As launched, without the steps in graphs that the site's page has.
    files = saved("ddp-fp32-h200")
    text = told(2025, files, "ddp_bucketed_benchmarking", "a")
    assert "Here 100 MB are fastest, and the slowest, 1 MB, take 1.02x as long." in text
    text = told(2025, changed(files, having(strategy="bucketed"), noisy), "ddp_bucketed_benchmarking", "a")
    assert "Here all sizes are alike within the noise" in text
    assert "are fastest" not in text


def test_another_size_on_ranks_of_a_cpu_stands_in_and_says_so():
    def on_cpu(cell):
        return replace(cell, configuration=cell.configuration | {"size": "small", "device": "cpu"})

    files = changed(saved("ddp-fp32-h200", "shard-xl-h200"), having(), on_cpu)
    for name, letter in (("naive_ddp_benchmarking", ""), ("optimizer_state_sharding_accounting", "a")):
        (block,) = answers(2025, files, name, letter)
        assert "Not measured: xl; these are of small on Gloo ranks of the CPU." in block.missing[0]


def test_a_machine_without_a_gpu_does_not_lack_nccl():
    (block,) = answers(2025, saved("allreduce-gloo-h200"), "distributed_communication_single_node")
    assert "gloo with 4 ranks" in " ".join(block.missing)
    assert "nccl with" not in " ".join(block.missing)


def test_a_test_of_the_course_that_may_fail_is_explained_where_it_does():
    def told_of(outcome):
        tests = {"test_fsdp_correctness[fp32]": outcome, "test_fsdp_gradient_sync[fp32]": "passed"}
        return words(answers(2026, [], "fsdp", tests=tests))

    failed = told_of("failed")
    assert "1 of 2 pass" in failed
    assert "bitwise" in failed
    assert "bitwise" not in told_of("passed")


def test_prediction_for_fsdp_is_of_the_measured_size():
    def halve(cell):
        return with_derived(cell, parameters=cell.derived["parameters"] // 2)

    halved = changed(saved("shard-2.7b-h200"), having(strategy="fsdp"), halve)
    assert "24.60 GiB against `none` (194 % of the 12.69" in told(2026, halved, "fsdp_accounting", "a")


@pytest.mark.parametrize(
    ("of_fp16", "sentence"), [("fp16", "treats both alike"), ("fp32", "treats the two differently here")]
)
def test_layer_norms_that_stay_in_both_half_precisions_are_treated_alike(of_fp16, sentence):
    """On the page both are fp32."""

    def change(cell):
        return with_derived(cell, layer_norm={"fp16": of_fp16, "bf16": "bf16"}[cell.configuration["precision"]])

    files = changed(saved("precision-h200"), lambda cell: "loss_function" in cell.configuration, change)
    assert sentence in told(2025, files, "benchmarking_mixed_precision", "b")


def test_one_message_alone_is_said_once():
    alone = kept(saved("allreduce-h200"), having(message_bytes=1_000_000))
    assert "1.00 MB over nccl take" in told(2025, alone, "distributed_communication_single_node")


def test_a_cost_below_the_noise_is_subtracted_from_nothing():
    """ "Less than 45 ms, below the noise: 30.24 ms of that, 53.9 %, are hidden." """

    def noisy(cell):
        step_ms = cell.samples["unsynchronized"].median
        return with_measured(cell, "step", *(step_ms + change for change in (-9.0, -5.0, 1.0, 6.0, 9.0)))

    name, files = "ddp_overlap_individual_parameters_benchmarking", saved("ddp-fp32-h200")
    assert "are hidden" in told(2025, files, name, "a")
    assert "are hidden" not in told(2025, changed(files, having(strategy="overlap"), noisy), name, "a")


def test_training_memory_of_a_cpu_has_no_reserved_bytes():
    def of_cpu(cell):
        return with_derived(cell, phases=[phase | {"reserved": None} for phase in cell.derived["phases"]])

    files = changed(saved("memprof-h200"), lambda cell: cell.status == "ok", of_cpu)
    text = told(2025, files, "memory_profiling", "a")
    assert "In a training step at context 512 the most is allocated in backward, 65.40 GiB" in text


def test_a_run_of_one_length_alone_adds_rows_and_no_picture():
    files = [*saved("attn-h200"), *kept(saved("attn-model-h200"), having(context=16384))]
    (block,) = answers(2026, files, "pytorch_attention", "a")
    shapes = {(row["implementation"], row["context"], row["head_dim"]): row for row in block.tables[1].rows}
    assert round(shapes["model", 16384, 128]["forward_ms"], 2) == 44.27
    assert len(block.pictures) == 1


@pytest.mark.parametrize("name", sorted({one.name for one in vars(code).values() if isinstance(one, code.Code)}))
def test_code_is_where_an_answer_says(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_variables_of_nccl_do_not_stand_next_to_ranks_of_a_cpu():
    """Gloo on a CPU was measured "with NVLink multicast off"."""
    (file,) = saved("allreduce-ranks-h200")
    runs = {key: replace(run, machine=run.machine | {"gpu": None, "cpu": "Some CPU"}) for key, run in file.runs.items()}
    (block,) = answers(2025, [Results(runs, file.cells)], "distributed_communication_single_node")
    assert block.machine == "Some CPU, torch 2.11.0+cu130"


def test_what_one_machine_lacks_and_another_measured_is_not_missing():
    both = saved("allreduce-ranks-h200", "allreduce-gloo-h200")
    blocks = answers(2025, both, "distributed_communication_single_node")
    assert [block.missing for block in blocks] == [[], []]


def test_leaderboard_of_2025_is_answered_by_no_kernel_of_others():
    ours = having(implementation=("auto", "triton", "hopper", "tiled"))
    others = kept(saved("flash-leaderboard-h200"), lambda cell: not ours(cell))
    assert not answers(2025, others, "leaderboard")


def test_leaderboard_of_2025_takes_the_run_with_the_fastest_kernel():
    """Where none is by the handout's protocol, as on the site's page."""
    text = told(2025, saved("flash-board-h200", "flash-fa4-rows-h200"), "leaderboard")
    assert "Forward and backward together take 3.648 ms" in text
    assert "fa4 3.678 ms (1.01x)" in text


def test_sharded_steps_with_the_handouts_own_attention_and_optimizer_come_first():
    both = saved("shard-2.7b-h200", "shard-2.7b-first-h200")
    (block,) = answers(2026, both, "optimizer_state_sharding_accounting", "b")
    assert "optimizer course" in block.tables[0].title
    assert "In bf16, a step takes 280.0 ms without sharding, 256.7 ms with `optimizer` (" in words([block])
