"""The sentences of the write-ups: they answer what is asked, and follow the numbers."""

import importlib
from dataclasses import replace

import pytest
from course_answers import answers, changed, saved, scaled, words

from cs336sys.commands.report.document import build_document
from cs336sys.commands.report.evidence import evidence_of
from cs336sys.commands.report.handouts import PROBLEMS
from cs336sys.commands.report.problem import HANDOUTS, Target
from cs336sys.commands.report.problems import code
from cs336sys.commands.report.problems.ranks import ddp_commands, xl_command
from cs336sys.results.model import Results, Samples


def test_timings_follow_the_samples():
    files = saved("bench-h200")
    before = words(answers(2025, files, "benchmarking_script", "b"))
    slower = changed(files, lambda cell: cell.configuration["size"] == "small", lambda cell: scaled(cell, 3))
    after = words(answers(2025, slower, "benchmarking_script", "b"))
    assert "small 19.08 ms and 33.97 ms" in before
    assert "small 57.24 ms and 101.9 ms" in after
    # Both years have the size, and call it otherwise.
    assert "2.7b (the handout's xl)" in words(answers(2026, files, "benchmarking_script", "b"))


def test_a_size_out_of_memory_is_part_of_the_answer():
    files = saved("bench-h200")
    oom = changed(
        files,
        lambda cell: cell.configuration["size"] == "2.7b",
        lambda cell: replace(cell, status="oom", samples={}, derived={}, reason="CUDA out of memory"),
    )
    blocks = answers(2026, oom, "benchmarking_script", "b")
    text = words(blocks)
    assert "2.7b (the handout's xl) ran out of memory: by the accounting it needs 65.21 GiB." in text
    assert any("Not measured: 10b." in line for block in blocks for line in block.missing)
    # Other sizes of the same run were measured: this one was tried, and is not missing.
    blocks = answers(2025, oom, "benchmarking_mixed_precision", "c")
    assert "2.7b in fp32 and 2.7b in bf16 ran out of memory." in words(blocks)
    assert [block.missing for block in blocks] == [[]]


def test_the_largest_deviation_is_that_of_any_cell_of_a_size():
    """Of two contexts of one size the later one's stood for both."""
    small = changed(saved("bench-h200"), lambda cell: cell.configuration["size"] != "small", lambda cell: None)
    (file,) = [replace(one, cells=tuple(cell for cell in one.cells if cell is not None)) for one in small]
    plain = next(cell for cell in file.cells if cell.configuration["precision"] == "fp32")

    def of_context(context, *step_ms):
        samples = plain.samples | {"step": Samples("ms", "cuda events", step_ms)}
        return replace(plain, configuration=plain.configuration | {"context": context}, samples=samples)

    cells = (of_context(64, 10.0, 20.0), of_context(128, 10.0, 10.1, 10.2))
    (block,) = answers(2025, [Results(file.runs, cells)], "benchmarking_script", "b")
    assert "deviation over 2 or 3 steps is not small: at most 47.1 % of the mean step." in words([block])


def test_one_warm_up_step_is_said_to_be_enough_only_where_one_was_measured():
    files = saved("warmup-h200")
    text = words(answers(2025, files, "benchmarking_script", "c"))
    assert "After 1, 2 and 5 warm-up steps that step takes at most 1.00x, 1.00x and 1.00x the median." in text
    without = [
        replace(file, cells=tuple(cell for cell in file.cells if cell.configuration["warmup"] != 1)) for file in files
    ]
    sentences = words(answers(2025, without, "benchmarking_script", "c"))
    assert "what is done once is done there" in sentences
    assert "After 2 and 5 warm-up steps that step takes at most" in sentences


def test_slow_first_step_of_any_size_needs_more_warm_up():
    def stalled(cell):
        step = cell.samples["step"]
        longer = replace(step, measured=(2 * step.measured[0], *step.measured[1:]))
        return replace(cell, samples=cell.samples | {"step": longer})

    def is_large_after_one(cell):
        return (cell.configuration["size"], cell.configuration["warmup"]) == ("large", 1)

    files = changed(saved("warmup-h200"), is_large_after_one, stalled)
    text = words(answers(2025, files, "benchmarking_script", "c"))
    assert "2.00x, 1.00x and 1.00x the median: some of that is still to be done after 1." in text
    assert "all that is done once" not in text


def test_inference_is_a_run_of_its_own_where_it_was_profiled():
    """The forward pass of a training step stood for inference."""
    files = saved("nsys-small-h200")
    (block,) = answers(2026, files, "nsys_profile", "d")
    assert "matrix products take 49.3 % in inference and 55.4 % in the whole step" in words([block])
    assert block.missing == []
    trained = [replace(f, cells=tuple(c for c in f.cells if c.configuration["mode"] == "train")) for f in files]
    (block,) = answers(2026, trained, "nsys_profile", "d")
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
    files = saved("ddp-fp32-h200")
    cell = next(cell for file in files for cell in file.cells if cell.configuration["strategy"] == "naive")
    waiting = Samples("ms", "cuda events", (1.0, 1.0, 1.0, 4.0))
    samples = {**cell.samples, "synchronize": waiting, "step": Samples("ms", "cuda events", (10.0, 10.0, 10.0, 16.0))}
    changed_files = changed(
        files, lambda one: one.configuration["strategy"] == "naive", lambda one: replace(one, samples=samples)
    )
    sentences = words(answers(2025, changed_files, "naive_ddp_benchmarking"))
    assert "a step takes 10.00 ms (median; standard deviation 3.000 ms), of which 1.000 ms, 10.0 %, pass" in sentences


def test_the_top_kernel_is_the_profiles_and_not_a_fixed_one():
    files = saved("nsys-h200")
    before = words(answers(2025, files, "nsys_profile", "b"))

    def renamed(cell):
        profile = cell.derived["profile"]
        kernels = [one | {"kernel": one["kernel"].replace("gemm", "slow_product")} for one in profile["kernels"]]
        return replace(cell, derived=cell.derived | {"profile": profile | {"kernels": kernels}})

    after = words(answers(2025, changed(files, lambda cell: cell.status == "ok", renamed), "nsys_profile", "b"))
    assert "gemm" in before
    assert "slow_product" in after
    assert "gemm" not in after


def test_overlap_is_claimed_only_where_the_trace_shows_it():
    files = saved("ddp-fp32-h200")
    before = words(answers(2025, files, "ddp_overlap_individual_parameters_benchmarking", "b"))

    def without_overlap(cell):
        timeline = cell.derived["timeline"] | {"overlap_ms": 0.0}
        return replace(cell, derived=cell.derived | {"timeline": timeline})

    flat = changed(files, lambda cell: cell.derived.get("timeline") is not None, without_overlap)
    after = words(answers(2025, flat, "ddp_overlap_individual_parameters_benchmarking", "b"))
    assert "the second implementation overlaps and the first does not" in before
    assert "no clear difference" in after


def test_differences_within_the_noise_are_no_differences():
    files = saved("shard-xl-h200")
    noisy = changed(
        files,
        lambda cell: cell.status == "ok",
        lambda cell: replace(
            cell, samples=cell.samples | {"step": replace(cell.samples["step"], measured=(100.0, 900.0) * 4)}
        ),
    )
    assert "undecided; about" in words(answers(2025, noisy, "optimizer_state_sharding_accounting", "b"))


def test_a_compiled_model_is_compared_with_the_vanilla_model_of_its_own_run():
    """Another run, with more cells, has a vanilla model too."""
    (file,) = saved("bench-h200")
    off, block = (
        next(
            cell
            for cell in file.cells
            if cell.configuration["compile"] == how and cell.configuration["size"] == "small"
        )
        for how in ("off", "block")
    )
    whole = replace(scaled(block, 2), configuration=block.configuration | {"compile": "model"}, run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b")}
    (result,) = answers(2025, [file, Results(runs, (replace(scaled(off, 2), run_id="b"), whole))], "torch_compile", "b")
    assert "With compile model, forward is faster beyond the noise in 1 of 1 rows (1.28x as fast)" in words([result])
    (row,) = result.tables[0].rows
    assert (round(row["forward_before_ms"], 2), round(row["forward_ms"], 2)) == (38.17, 29.92)


def test_a_half_precision_is_compared_with_the_fp32_of_its_own_run():
    """Another run, with more cells, has fp32, too."""
    (file,) = saved("bench-h200")
    full = next(cell for cell in file.cells if cell.configuration["size"] == "small")
    assert full.configuration["precision"] == "fp32"
    half = replace(full, configuration=full.configuration | {"precision": "fp16"}, run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b")}
    other = Results(runs, (replace(scaled(full, 4), run_id="b"), half))
    (block,) = answers(2025, [file, other], "benchmarking_mixed_precision", "c")
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
    def peaks(**gib):
        cells = [cell for cell in files[0].cells if cell.configuration["checkpointing"] == "block"]
        measured = [
            replace(
                cells[0],
                configuration=cells[0].configuration | {"checkpointing": name.replace("_", "=")},
                derived=cells[0].derived | {"peak_gib": peak},
            )
            for name, peak in gib.items()
        ]
        return words(answers(2026, [Results(files[0].runs, tuple(measured))], "gradient_checkpointing", "b"))

    files = saved("memprof-h200")
    alike = peaks(sublayer=59.4, block=59.4, every_2=63.6)
    assert "the least is the 59.40 GiB of `block`, as expected; sublayer needs as much." in alike
    smaller = peaks(sublayer=50.0, block=59.4, every_2=63.6)
    assert "the least is the 50.00 GiB of `sublayer`, and not as expected." in smaller


def test_the_best_of_several_runs_of_the_board_is_the_answer():
    """With the same settings as a run before it, which has more cells."""
    (file,) = saved("board-h200")
    cell = next(cell for cell in file.cells if cell.status == "ok")
    again = replace(scaled(cell, 0.1), run_id="b")
    runs = {"b": replace(next(iter(file.runs.values())), run_id="b", arguments=("shard", "--board", "--steps", "9"))}
    (block,) = answers(2026, [file, Results(runs, (again,))], "leaderboard")
    assert f"takes {again.samples['wall'].median:.1f} ms (median)" in words([block])
    assert block.commands == ["cs336sys shard --board --steps 9"]


def test_a_profile_that_differs_from_the_plain_pass_says_in_which_direction_and_why():
    files = saved("nsys-h200")
    text = words(answers(2026, files, "nsys_profile", "a"))
    # Kernels run in 8.94 of 19.45 ms under the profiler, beside 12.4 ms without; 19.27 ms beside 22.7 ms.
    assert "agrees within 10 % in 1 of 3 profiles; the others take between 0.818x and 1.64x as long under it" in text
    assert "with kernels running in between 46.0 % and 91.7 % of that." in text

    def slower_without(cell):
        samples = cell.samples | {"forward": replace(cell.samples["forward"], measured=(19.3,) * 5)}
        return replace(cell, samples=samples)

    agreeing = changed(files, lambda cell: cell.configuration["context"] in (256, 512), slower_without)
    after = words(answers(2026, agreeing, "nsys_profile", "a"))
    assert "agrees within 10 % in 3 of 3 profiles." in after
    assert "as long under it" not in after


def test_all_kinds_of_the_largest_allocations_are_named_and_no_smaller_one():
    files = saved("memprof-h200")
    text = words(answers(2025, files, "memory_profiling", "e"))
    of_512 = text.split("At context 512 ")[1]
    assert "128.0 MiB each, made by `bmm` (cs336_basics/model.py:178 scaled_dot" in of_512
    assert of_512.count("(cs336_basics/") == 5

    def one_larger(cell):
        largest = [kind | {"size": kind["size"] + 2**20 * (number == 1)} for number, kind in enumerate(_largest(cell))]
        return replace(cell, derived=cell.derived | {"largest": sorted(largest, key=lambda kind: -kind["size"])})

    larger = changed(files, lambda cell: bool(_largest(cell)), one_larger)
    after = words(answers(2025, larger, "memory_profiling", "e")).split("At context 512 ")[1]
    assert after == (
        "the largest allocations of the forward pass have 129.0 MiB each, made by `where` "
        "(cs336_basics/model.py:180 scaled_dot_product_attention)."
    )


def _largest(cell):
    return cell.derived.get("largest") or []


def test_bucket_sizes_that_the_noise_alone_tells_apart_are_called_alike():
    files = saved("ddp-fp32-h200")
    (block,) = answers(2025, files, "ddp_bucketed_benchmarking", "a")
    expected = words([block])
    assert "Here 100 MB are fastest, and the slowest, 1 MB, take 1.02x as long." in expected
    assert "Buckets of 1 MB and 10 MB are the same 387 calls" in expected
    # Predicted 4.226 and 2.744 ms for 100 and 1000 MB, and measured 7.624 and 9.330.
    assert "The order of the sizes is another than the equation predicts" in expected
    assert "optimizer fused, CUDA graph off, warm-up 2" in block.tables[0].title
    assert any("medians of 5 steps after 2 warm-up" in note for table in block.tables for note in table.notes)
    assert (
        "takes longer: by 15.36 ms with 1 MB, 14.78 ms with 10 MB, 7.023 ms with 100 MB and 5.732 ms with 1000 MB"
        in expected
    )

    def noisy(cell):
        step = cell.samples["step"]
        spread = tuple(step.median + change for change in (-60.0, -30.0, 0.0, 30.0, 60.0))
        return replace(cell, samples=cell.samples | {"step": replace(step, measured=spread)})

    after = changed(files, lambda cell: cell.configuration.get("strategy") == "bucketed", noisy)
    text = words(answers(2025, after, "ddp_bucketed_benchmarking", "a"))
    assert "Here all sizes are alike within the noise" in text
    assert "are fastest" not in text


def test_another_size_on_ranks_of_a_cpu_stands_in_and_says_so():
    def on_cpu(cell):
        return replace(cell, configuration=cell.configuration | {"size": "small", "device": "cpu"})

    files = changed(saved("ddp-fp32-h200", "shard-xl-h200"), lambda cell: True, on_cpu)
    for name, letter in (("naive_ddp_benchmarking", ""), ("optimizer_state_sharding_accounting", "a")):
        (block,) = answers(2025, files, name, letter)
        assert "Not measured: xl; these are of small on Gloo ranks of the CPU." in block.missing[0]
    (block,) = answers(2025, saved("ddp-fp32-h200"), "naive_ddp_benchmarking")
    assert block.missing == []


def test_a_machine_without_a_gpu_does_not_lack_nccl():
    missing = [
        line
        for block in answers(2025, saved("allreduce-gloo-h200"), "distributed_communication_single_node")
        for line in block.missing
    ]
    assert any("gloo with 4 ranks" in line for line in missing)
    assert not any("nccl with" in line for line in missing)


def test_a_test_of_the_course_that_may_fail_is_explained_where_it_does():
    failing = "test_fsdp_correctness[fp32]"
    texts = {
        outcome: words(answers(2026, [], "fsdp", tests={failing: outcome, "test_fsdp_gradient_sync[fp32]": "passed"}))
        for outcome in ("passed", "failed")
    }
    assert "1 of 2 pass" in texts["failed"]
    assert "bitwise" in texts["failed"]
    assert "bitwise" not in texts["passed"]


def test_prediction_for_fsdp_is_of_the_measured_size():
    halved = changed(
        saved("shard-2.7b-h200"),
        lambda cell: cell.configuration["strategy"] == "fsdp",
        lambda cell: replace(cell, derived=cell.derived | {"parameters": cell.derived["parameters"] // 2}),
    )
    assert "24.60 GiB against `none` (194 % of the 12.69" in words(answers(2026, halved, "fsdp_accounting", "a"))


def test_layer_norms_that_stay_in_both_half_precisions_are_treated_alike():
    files = saved("precision-h200")
    assert "output is fp32 under fp16 autocast and fp32 under bf16 autocast" in words(
        answers(2025, files, "benchmarking_mixed_precision", "b")
    )

    def with_layer_norm(dtypes):
        def change(cell):
            dtype = dtypes[cell.configuration["precision"]]
            return replace(cell, derived=cell.derived | {"layer_norm": dtype})

        cells = changed(files, lambda cell: "loss_function" in cell.configuration, change)
        return words(answers(2025, cells, "benchmarking_mixed_precision", "b"))

    assert "treats both alike" in with_layer_norm({"fp16": "fp16", "bf16": "bf16"})
    assert "treats the two differently here" in with_layer_norm({"fp16": "fp32", "bf16": "bf16"})


def test_one_message_alone_is_said_once():
    (file,) = saved("allreduce-h200")
    alone = Results(file.runs, tuple(cell for cell in file.cells if cell.configuration["message_bytes"] == 1_000_000))
    text = words(answers(2025, [alone], "distributed_communication_single_node"))
    assert "1.00 MB over nccl take" in text


def test_a_cost_below_the_noise_is_subtracted_from_nothing():
    """ "Less than 45 ms, below the noise: 30.24 ms of that, 53.9 %, are hidden." """
    name = "ddp_overlap_individual_parameters_benchmarking"

    def noisy(cell):
        step = cell.samples["unsynchronized"].median
        samples = replace(cell.samples["step"], measured=tuple(step + change for change in (-9.0, -5.0, 1.0, 6.0, 9.0)))
        return replace(cell, samples=cell.samples | {"step": samples})

    files = changed(saved("ddp-fp32-h200"), lambda cell: cell.configuration["strategy"] == "overlap", noisy)
    assert "are hidden" in words(answers(2025, saved("ddp-fp32-h200"), name, "a"))
    assert "are hidden" not in words(answers(2025, files, name, "a"))


def test_training_memory_of_a_cpu_has_no_reserved_bytes():
    files = saved("memprof-h200")

    def of_cpu(cell):
        phases = [phase | {"reserved": None} for phase in cell.derived["phases"]]
        return replace(cell, derived=cell.derived | {"phases": phases})

    (block,) = answers(2025, changed(files, lambda cell: cell.status == "ok", of_cpu), "memory_profiling", "a")
    assert "In a training step at context 512 the most is allocated in backward, 65.40 GiB" in words([block])


def test_a_run_of_one_length_alone_adds_rows_and_no_picture():
    files = saved("attn-h200", "attn-model-h200")
    long = [cell for cell in files[1].cells if cell.configuration["context"] == 16384]
    (block,) = answers(2026, [files[0], replace(files[1], cells=tuple(long))], "pytorch_attention", "a")
    shapes = {(row["implementation"], row["context"], row["head_dim"]): row for row in block.tables[1].rows}
    assert round(shapes["model", 16384, 128]["forward_ms"], 2) == 44.27
    assert len(block.pictures) == 1
    (block,) = answers(2026, files, "pytorch_attention", "a")
    assert block.missing == []
    assert len(block.pictures) == 2


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


def test_share_of_products_in_the_whole_step_has_its_reason():
    text = words(answers(2025, saved("nsys-h200", "nsys-forward-h200"), "nsys_profile", "d"))
    assert "70.3 % in the whole step, more, as the backward pass has more of them; elementwise" in text
    assert "AdamW's 2.52 % of the step." in text
    text = words(answers(2026, saved("nsys-2.7b-long-h200"), "nsys_profile", "d"))
    assert "86.9 % in the whole step, less, as AdamW has none of them" in text

    def with_fewer_products_backward(cell):
        profile = cell.derived["profile"]
        kernels = [
            kernel | ({"kernel": f"elementwise_{number}"} if "xmma" in kernel["kernel"] else {})
            if kernel["range"] == "backward"
            else kernel
            for number, kernel in enumerate(profile["kernels"])
        ]
        return replace(cell, derived=cell.derived | {"profile": profile | {"kernels": kernels}})

    files = changed(saved("nsys-h200"), lambda cell: cell.status == "ok", with_fewer_products_backward)
    text = words(answers(2025, files, "nsys_profile", "d"))
    assert "in the whole step, less, as the backward pass has less of them" in text
    assert "AdamW has none" not in text


def test_what_one_machine_lacks_and_another_measured_is_not_missing():
    both = [*saved("allreduce-ranks-h200"), *saved("allreduce-gloo-h200")]
    blocks = answers(2025, both, "distributed_communication_single_node")
    assert [block.missing for block in blocks] == [[], []]
    (alone,) = answers(2025, saved("allreduce-gloo-h200"), "distributed_communication_single_node")
    assert "gloo with 4 ranks" in " ".join(alone.missing)


def test_leaderboard_of_2025_is_answered_by_no_kernel_of_others():
    def is_ours(cell):
        return cell.configuration["implementation"] in ("auto", "triton", "hopper", "tiled")

    files = saved("flash-leaderboard-h200")
    others = [replace(file, cells=tuple(cell for cell in file.cells if not is_ours(cell))) for file in files]
    assert not answers(2025, others, "leaderboard")


def test_leaderboard_of_2025_takes_the_run_with_the_fastest_kernel():
    files = [result for name in ("flash-board-h200", "flash-fa4-rows-h200") for result in saved(name)]
    text = words(answers(2025, files, "leaderboard"))
    assert "Forward and backward together take 3.648 ms" in text
    assert "fa4 3.678 ms (1.01x)" in text
