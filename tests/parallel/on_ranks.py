"""Tests whose bodies run on every rank."""

import functools
import importlib
import inspect

import pytest


def on_ranks(*world_sizes, gpus=False):
    """Run the body of a test on each of so many ranks, in turn; with ``gpus``, on two GPUs, too."""
    sizes = [*world_sizes, *[pytest.param("gpus", marks=pytest.mark.multigpu)] * gpus]

    def decorate(body):
        @pytest.mark.parametrize("world_size", sizes)
        @functools.wraps(body)
        def test(request, world_size, **arguments):
            on_gpus = world_size == "gpus"
            ranks = request.getfixturevalue("two_gpus") if on_gpus else request.getfixturevalue("ranks")(world_size)
            ranks.run(_run_body, body.__module__, body.__name__, arguments)

        del test.__wrapped__
        names = ["request", "world_size", *inspect.signature(body).parameters]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        test.body = body
        return test

    return decorate


def _run_body(module, name, arguments):
    body = getattr(importlib.import_module(module), name).body
    try:
        body(**arguments)
    except AssertionError as error:
        # Ranks import tests without pytest, which would say what was compared.
        values = next(frame.frame.f_locals for frame in inspect.trace()[::-1] if frame.function == name)
        error.add_note("; ".join(f"{key} = {value!r:.200}" for key, value in values.items()))
        raise
