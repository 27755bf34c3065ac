import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def compile_by(tmp_path_factory):
    """Run a script that compiles kernels in a process of its own: this one may be the interpreter's.

    Returns what it prints as JSON.
    """

    def run(script, *arguments):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # A cache hit would not run ptxas, whose log is read.
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton_cache"))
        command = [sys.executable, script, *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout)

    return run


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """Takes three quarters off the time of interpreted kernels: what is made or checked again and again is kept.

    The interpreter replaces the functions of triton.language at every launch, and again, to no effect, whenever one
    kernel function calls another. What integers overflow is computed beside every sum and product, and asserted only
    with ``options.debug``, which the interpreter cannot be given. Each tensor makes constants of its shape anew, a type
    of its block, and a table of all data types.
    """
    if torch.cuda.is_available():
        # Kernels are compiled.
        yield
        return
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    @functools.cache
    def languages(function):
        return {id(value) for value in function.__globals__.values()} & {id(tl), id(tl.core)}

    def patch_once(function):
        if languages(function) <= patched:
            return None
        patched.update(languages(function))
        return patch_language(function)

    def launch_unpatched(executor, *args, **kwargs):
        patched.clear()
        return launch(executor, *args, **kwargs)

    np_dtype_of = interpreter._get_np_dtype
    np_dtype_of_numbers = functools.cache(np_dtype_of)

    def np_dtype(of):
        # Types of pointers cannot be hashed.
        return np_dtype_of(of) if of.scalar.is_ptr() else np_dtype_of_numbers(of.scalar)

    @functools.cache
    def constants(shape):
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def initialize_tensor(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = constants(type.shape if type.is_block() else ())

    check_block, equals = tl.block_type.__init__, tl.core.tuple.__eq__

    @functools.cache
    def of_shape(*sizes):
        checked = SimpleNamespace()
        check_block(checked, tl.int32, list(sizes))
        return checked.shape, checked.numel

    def initialize_block(block, element_ty, shape):
        block.element_ty = element_ty
        block.shape, block.numel = of_shape(*(size.value if isinstance(size, tl.constexpr) else size for size in shape))

    def are_integers(values):
        return all(type(value) is int for value in values)

    def shapes_are_equal(shape, other):
        if are_integers(shape.values) and isinstance(other, (list, tl.core.tuple)) and are_integers(other):
            return tl.constexpr(shape.values == list(other))
        return equals(shape, other)

    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_unpatched)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
        monkeypatch.setattr(tl.tensor, "__init__", initialize_tensor)
        monkeypatch.setattr(tl.block_type, "__init__", initialize_block)
        name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
        monkeypatch.setattr(tl.block_type, "name", name, raising=False)
        monkeypatch.setattr(tl.core.tuple, "__eq__", shapes_are_equal)
        yield


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fills uninitialised memory with NaN, so that an element that a kernel leaves unwritten shows."""

    def poisoned(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                # Detached, because torch itself makes empty leaves that require gradients.
                tensor.detach().fill_(math.nan)
            return tensor

        return allocate_nan

    compiled_code = torch._C._dynamo.guards
    allocators = (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (compiled_code, "_empty_strided_cuda"),
    )
    for owner, name in allocators:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def called(monkeypatch):
    """How often fused models called each kernel."""
    from cs336sys.kernels import fuse as module

    counts = {}

    def counted(name):
        kernel = getattr(module, name)

        def count(*arguments, **options):
            counts[name] = counts.get(name, 0) + 1
            return kernel(*arguments, **options)

        return count

    for name in ("rms_norm", "rope", "swiglu", "linear_cross_entropy"):
        monkeypatch.setattr(module, name, counted(name))
    return counts
