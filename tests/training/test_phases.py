"""Ranges around phases, blocks and the parts of attention: put on from outside, in order, and taken off again."""

import contextlib

import cs336_basics.model
import pytest
import torch
from cs336_basics.nn_utils import cross_entropy

from cs336sys.capture.range_names import ATTENTION_RANGE, FINAL_MATMUL, SCORES, SOFTMAX
from cs336sys.training.profiler_ranges import annotated_model, phase

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("own_attention")


class WrittenMarks:
    """Writes down what a profiler would see; ``+name`` opens a range and ``-name`` ends it."""

    def __init__(self):
        self.events = []

    def start(self, name):
        self.events.append(f"+{name}")
        return lambda: self.events.append(f"-{name}")

    @contextlib.contextmanager
    def range(self, name):
        end = self.start(name)
        try:
            yield
        finally:
            end()


@pytest.fixture
def marks():
    return WrittenMarks()


@pytest.fixture
def model(own_attention):
    return cs336_basics.model.BasicsTransformerLM(
        vocab_size=11, context_length=8, d_model=16, num_layers=2, num_heads=2, d_ff=32
    )


def loss_of(model):
    tokens = torch.arange(16).reshape(2, 8) % 11
    return cross_entropy(model(tokens), tokens)


ATTENTION_EVENTS = [
    *(f"+{ATTENTION_RANGE}", f"+{SCORES}", f"-{SCORES}", f"+{SOFTMAX}", f"-{SOFTMAX}", f"+{FINAL_MATMUL}"),
    *(f"-{FINAL_MATMUL}", f"-{ATTENTION_RANGE}"),
]


def test_blocks_and_attention_forward_and_backward(model, marks):
    with annotated_model(model.layers, marks):
        loss = loss_of(model)
        forward, marks.events = marks.events, []
        loss.backward()
    assert forward == ["+block 0", *ATTENTION_EVENTS, "-block 0", "+block 1", *ATTENTION_EVENTS, "-block 1"]
    assert marks.events == ["+block 1 backward", "-block 1 backward", "+block 0 backward", "-block 0 backward"]


def test_annotation_changes_no_number_and_is_taken_off(model, marks):
    def replaceable():
        module = cs336_basics.model
        return module.scaled_dot_product_attention, module.softmax, dict(vars(module.TransformerBlock))

    before = replaceable()
    plain = loss_of(model)
    plain.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with annotated_model(model.layers, marks):
        annotated = loss_of(model)
        annotated.backward()
    assert torch.equal(plain, annotated)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    assert replaceable() == before
    count = len(marks.events)
    loss_of(model)
    assert len(marks.events) == count


def test_an_error_ends_all_ranges_and_takes_the_annotation_off(model, monkeypatch, marks):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cs336_basics.model.SwiGLU, "forward", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), annotated_model(model.layers, marks), phase("forward", marks, CPU):
        loss_of(model)
    opened = [event[1:] for event in marks.events if event[0] == "+"]
    ended = [event[1:] for event in marks.events if event[0] == "-"]
    assert sorted(opened) == sorted(ended)
    assert marks.events[-1] == "-forward"
    assert "__call__" not in vars(cs336_basics.model.TransformerBlock)


def test_attention_that_calls_no_softmax_of_the_models_has_no_parts(model, monkeypatch, marks):
    def fused(Q, K, V, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=True)

    monkeypatch.setattr(cs336_basics.model, "scaled_dot_product_attention", fused)
    with annotated_model([], marks):
        loss_of(model)
    assert marks.events == [f"+{ATTENTION_RANGE}", f"-{ATTENTION_RANGE}"] * 2


def test_blocks_and_softmax_outside_of_the_model_are_left_alone(model, marks):
    other = cs336_basics.model.TransformerBlock(16, 2, 32, None)
    with annotated_model(model.layers, marks, attention=False):
        other(torch.zeros(1, 4, 16))
    with annotated_model(model.layers, marks):
        cs336_basics.model.softmax(torch.zeros(3))
    assert marks.events == []


def test_compiled_blocks_are_neither_cut_nor_compiled_again(model, marks):
    torch.compiler.reset()
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    for block in model.layers:
        block.compile(backend=backend, dynamic=False)
    loss_of(model).backward()
    count = len(compilations)
    with annotated_model(model.layers, marks, attention=False):
        loss_of(model).backward()
    assert len(compilations) == count
    assert marks.events[:2] == ["+block 0", "-block 0"]
    assert marks.events[-1] == "-block 0 backward"
    torch.compiler.reset()
