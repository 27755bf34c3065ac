"""The kernels as an H200 would run them, compiled for sm_90 on any machine: registers, spills and instructions."""

from pathlib import Path

import compile_for_hopper
import pytest
import triton
from compile_for_hopper import touched_early

from cs336sys.kernels.attention import native_call

REGISTERS = 65536
SHARED_BYTES = 227 * 1024
# What the driver keeps of the shared memory of each resident program.
RESERVED_BYTES = 1024


@pytest.fixture(scope="module")
def report(tier, compile_by):
    """What the script prints."""
    return compile_by(compile_for_hopper.__file__, *tier.choose([], ["all"]))


@pytest.fixture(scope="module")
def compiled(report):
    """{configuration: {kernel: what came out}}."""
    return report["kernels"]


def test_native_call_knows_how_to_launch_every_kernel(report):
    """With the installed triton, whose launcher may be another than that of 3.6 to 3.9: see KNOWN_LAUNCHERS."""
    assert native_call.KNOWN_TRITON
    assert report["refused by native_call"] == []


def kernels(compiled, *configurations):
    for configuration in configurations:
        for name, kernel in compiled[configuration].items():
            yield f"{configuration}: {name}: {kernel}", kernel


LARGE = {"head dim 64", "head dim 128"}


@pytest.fixture(scope="module")
def plain(compiled):
    """Names of the plain kernels' configurations."""
    return [name for name in compiled if not name.startswith(("hopper", "combine"))]


@pytest.fixture(scope="module")
def half(plain):
    """Those of the configurations in half precision."""
    return [name for name in plain if not name.startswith("float32")]


@pytest.fixture(scope="module")
def hopper(compiled):
    """Names of the Hopper kernels' configurations."""
    return [name for name in compiled if name.startswith("hopper")]


def programs_per_multiprocessor(kernel):
    by_registers = REGISTERS // (kernel["registers"] * 32 * kernel["num_warps"])
    return min(by_registers, SHARED_BYTES // (kernel["shared_bytes"] + RESERVED_BYTES))


def test_matrix_products_run_on_tensor_cores(compiled, plain):
    for name, kernel in kernels(compiled, *plain):
        assert kernel["tensor_core"] > 0, name


# Bytes of registers that go to memory. With head dimension 256 dK and dV of 64 keys take 128 registers a thread. Some
# of the others spill, and yet the pass takes 0.73 times as long as with 32 queries a tile, where none does.
SPILLED = {("head dim 256", "grad_key_value"): 116 if triton.__version__.startswith("3.6.") else 260}
if not triton.__version__.startswith("3.6."):
    SPILLED["grouped, head dim 256", "grad_key_value"] = 56


def test_half_precision_spills_nothing_elsewhere(compiled, half):
    for configuration in (*half, "combine"):
        for name, kernel in compiled[configuration].items():
            spilled = SPILLED.get((configuration, name), 0)
            assert kernel["spilled_bytes"] <= spilled, f"{configuration}: {name}: {kernel}"


def test_matrix_products_are_serialized_only_where_a_register_limit_was_chosen(compiled, half):
    for name, kernel in kernels(compiled, *half):
        assert not kernel["serialized"] or kernel["limited"], name


def test_nothing_touches_the_registers_of_a_running_product(compiled, half, hopper):
    """A known fault of the assembler of triton 3.6 to 3.8, seen in its listing."""
    for name, kernel in kernels(compiled, *half, *hopper):
        assert kernel["touched_early"] == [], name


def test_registers_that_are_touched_early_are_found():
    product = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;\n"
    other = "/*0020*/ HGMMA.64x32x16.F32.BF16 R64, gdesc[UR4], R64, gsb0 ;\n"
    wait_for_both, wait_for_one = (f"/*0030*/ WARPGROUP.DEPBAR.LE gsb0, {left} ;\n" for left in ("0x0", "0x1"))
    overwrites, reads = "/*0040*/ F2FP.BF16 R11, R90, R91 ;\n", "/*0050*/ @P0 FADD R90, R55, R91 ;\n"
    beside, stores = "/*0060*/ FADD R90, R56, R91 ;\n", "/*0070*/ STS.128 [R8], R92 ;\n"
    loads_around = "/*0080*/ LDS.128 R5, [R90] ;\n"
    for early in (overwrites, reads, loads_around):
        assert touched_early(product + early) == [early.strip()]
        assert touched_early(product + other + wait_for_one + early) == []
    assert touched_early(product + beside + stores) == []
    assert touched_early(other + product + wait_for_one + overwrites) == [overwrites.strip()]
    assert touched_early(other + product + wait_for_both + overwrites) == []


def test_large_shapes_load_by_tma(compiled):
    for name, kernel in kernels(compiled, *compiled.keys() & {*LARGE, "one long head"}):
        assert kernel["tma_load"] > 0, name


def test_programs_share_a_multiprocessor(compiled):
    """Plain Triton overlaps softmax and matrix products only between programs."""
    at_least = {"head dim 64": {"forward": 3, "grad_key_value": 3, "grad_query": 2}}
    # With triton 3.6 dQ takes 131 registers a thread, 3 more than two programs have.
    at_least["head dim 128"] = {"forward": 2, "grad_query": 1 if triton.__version__.startswith("3.6.") else 2}
    at_least["float32, one head"] = {"backward": 2}
    for configuration in compiled.keys() & at_least.keys():
        for name, count in at_least[configuration].items():
            kernel = compiled[configuration][name]
            assert programs_per_multiprocessor(kernel) >= count, f"{configuration}: {name}: {kernel}"


def test_fused_form_reduces_by_tma(compiled):
    assert compiled["head dim 16"]["backward"]["tma_reduce"] > 0
    for name, kernel in kernels(compiled, *compiled.keys() & LARGE):
        assert kernel["tma_reduce"] == 0, name


def allowed_spills():
    """Bytes by configuration and kernel, as spilled.txt has them for the triton that is installed."""
    version = "3.6" if triton.__version__.startswith("3.6.") else "3.7+"
    allowed = {}
    for line in Path(__file__).with_name("spilled.txt").read_text().splitlines():
        facts, _, configurations = line.partition(": ")
        if facts.startswith(f"{version} "):
            _, kernel, size = facts.split()
            allowed |= {
                (f"hopper, head dim {configuration}", kernel): int(size) for configuration in configurations.split(", ")
            }
    return allowed


def test_hopper_kernels_keep_their_sums_in_registers(compiled, hopper):
    allowances = allowed_spills()
    for configuration in hopper:
        for name, kernel in compiled[configuration].items():
            allowed = allowances.get((configuration, name), 0)
            assert kernel["spilled_bytes"] <= allowed, f"{configuration}: {name}: {kernel}"
            assert not kernel["serialized"], f"{configuration}: {name}: {kernel}"


def test_hopper_kernels_are_warp_specialised(compiled, hopper):
    for name, kernel in kernels(compiled, *hopper):
        assert kernel["reallocates_registers"], name
        assert kernel["tensor_core"] > 0, name
        assert kernel["tma_load"] > 0, name
        assert kernel["shared_bytes"] <= SHARED_BYTES, name


def test_hopper_softmax_runs_beside_a_product(compiled, hopper):
    """The assembler likes to pull the wait for P V up to the one for S, in front of the softmax."""
    for configuration in hopper:
        forward = compiled[configuration]["forward"]
        head_dim = int(configuration.split()[3])
        # 64 x 128 scores (64 x 64 with head dimension 256) of 128 threads.
        exponentials, consumers = 32 if head_dim == 256 else 64, 3 if head_dim <= 64 else 2
        assert forward["exp2_beside_product"] == [exponentials] * consumers, f"{configuration}: {forward}"


def test_hopper_backward_adds_dq_up_by_tma_or_vector_reductions(compiled, hopper):
    for configuration in hopper:
        forward, backward = compiled[configuration]["forward"], compiled[configuration]["backward"]
        assert forward["tma_reduce"] == forward["vector_reduce"] == 0, configuration
        head_dim = int(configuration.split()[3])
        # Up to head dimension 64 the reducer, one tile. Otherwise each of two consumers: a thread holds half of
        # 64 x D / 128 numbers, four to a reduction.
        expected = (1, 0) if head_dim <= 64 else (0, head_dim // 8)
        assert (backward["tma_reduce"], backward["vector_reduce"]) == expected, configuration
