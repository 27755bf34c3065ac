"""Gluon as the Hopper kernels use it, for triton 3.6 to 3.9, named barriers, which it lacks, and masks."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# What hides keys from a query, a kernel's MASK: 0 for nothing, the causal mask, or that and a window.
CAUSAL, WINDOW = gl.constexpr(1), gl.constexpr(2)

store_wait = tma.store_wait
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


if hasattr(gl, "barrier"):  # from 3.7
    thread_barrier = gl.barrier
else:
    thread_barrier = gl.thread_barrier

if hasattr(tma, "async_load"):  # from 3.8
    tma_load, tma_store, tma_reduce_add = tma.async_load, tma.async_store, tma.async_atomic_add
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    # The compiler of 3.6 lowers the instruction, though its Gluon has no function that emits it.
    tma_reduce_add = _reduce_add


@builtin
def run_assembly(text, constraints, operands, _semantic=None):
    """Run instructions for what they do: ``$0`` is the result that inline assembly must have, and nobody reads."""
    gl.inline_asm_elementwise(text, constraints, operands, gl.int32, False, 1, _semantic=_semantic)  # is_pure, pack


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return a barrier for each slot, whose phases end after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def named_barrier_arrive(number, threads):
    """Arrive at one of the multiprocessor's 16 barriers, for so many threads in all, and go on."""
    run_assembly("bar.arrive $1, $2; mov.u32 $0, $1;", "=r,r,r", [number, threads])


@gluon.jit
def named_barrier_wait(number, threads):
    """Arrive, and wait until all the threads have."""
    run_assembly("bar.sync $1, $2; mov.u32 $0, $1;", "=r,r,r", [number, threads])


@gluon.jit
def change_kernels():
    """Wait for the kernel before this one, if this one was launched early, and let the next kernel be launched early.

    That begins when all programs have come here and a multiprocessor has room, and then waits here for this one.
    """
    run_assembly("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $1;", "=r,r", [0])


@gluon.jit
def reduce_wait(PENDING: gl.constexpr):
    """Wait until all but the last PENDING tiles that this thread has added by TMA are in memory.

    ``store_wait`` waits only until shared memory has been read.
    """
    run_assembly("cp.async.bulk.wait_group $2; mov.u32 $0, $1;", "=r,r,n", [0, PENDING])
