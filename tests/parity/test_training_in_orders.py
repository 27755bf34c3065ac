"""One process trains on its batch part after part: losses and gradients are means over parts, in any order."""

import random
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cs336sys.parity.orders import Order, train_in_order
from cs336sys.parity.training import run_steps, train
from cs336sys.parity.weights import STEPS
from cs336sys.settings.sizes import choose_size
from cs336sys.settings.training import UserCode, Workload
from cs336sys.training.step import TrainStep

SIZE = choose_size("tiny", batch_size=4)
CPU = torch.device("cpu")
RATE = 1 / 16
# Which random number a step draws; None for none.
DRAWS = {"nothing": lambda: 0.0, "torch": lambda: torch.rand(()).item(), "python": random.random}


class Line(nn.Module):
    """A slope, and a parameter that nothing trains."""

    def __init__(self, size):
        super().__init__()
        self.slope = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(0.25, dtype=torch.float64))
        self.draw = DRAWS["nothing"]

    def forward(self, x, note):
        return x @ self.slope + self.offset + self.draw()


def batch(size, generator, device):
    x = torch.rand(size.batch_size, 2, generator=generator, device=device, dtype=torch.float64)
    return {"x": x, "note": "no tensor"}, x[:, 0]


def loss(output, targets):
    return (output - targets).square().mean()


def of_this_file(name):
    return f"{Path(__file__)}:{name}"


USER = UserCode(of_this_file("Line"), of_this_file("loss"), of_this_file("batch"))


def build_step(draws="nothing"):
    model = Line(SIZE)
    model.draw = DRAWS[draws]
    workload = Workload(SIZE, device="cpu", user=USER)
    return TrainStep(workload, CPU, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE)), model


def trained(order, *, draws="nothing", warmup=0):
    step, model = build_step(draws)
    return train_in_order(step, model, warmup, order)


def by_hand(draw=lambda number, part: 0.0, parts=((0, 1, 2, 3),), warmup=0):
    """Return losses and weights of the same training, and its first gradient, from formulas."""
    slope, losses, first = torch.full((2,), 0.5, dtype=torch.float64), [], None
    for number in [0] * warmup + list(range(1, STEPS + 1)):
        points, targets = batch(SIZE, torch.Generator().manual_seed(number), CPU)
        part_losses, gradient = [], torch.zeros(2, dtype=torch.float64)
        for rank, part in enumerate(parts):
            x, wanted = points["x"][list(part)], targets[list(part)]
            error = x @ slope + 0.25 + draw(number, rank) - wanted
            part_losses.append(error.square().mean())
            gradient += 2 * error @ x / len(part) / len(parts)
        slope = slope - RATE * gradient
        if number:
            losses.append(torch.stack(part_losses).mean().item())
            first = gradient if first is None else first
    return losses, slope, first


def assert_same(result, losses, slope, first):
    assert torch.stack(result.losses).tolist() == pytest.approx(losses, rel=1e-12)
    assert result.loss == pytest.approx(losses[0], rel=1e-12)
    torch.testing.assert_close(result.weights["slope"], slope)
    assert list(result.gradients) == ["slope"]
    torch.testing.assert_close(result.gradients["slope"], first)
    assert result.weights["unused"].item() == 1


@pytest.mark.parametrize(
    "order",
    [
        Order(((0, 1, 2, 3),)),
        Order(((3, 2, 1, 0),), scale=0.5),
        Order(((2, 3), (0, 1)), scale=1.5),
        Order(((0,), (1,), (2,), (3,)), scale=4.0, shares=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("warmup", [0, 2])
def test_all_orders_of_a_mean_train_alike(order, warmup):
    result = trained(order, warmup=warmup)
    assert_same(result, *by_hand(warmup=warmup))
    assert not result.draws
    assert not result.weights["slope"].requires_grad
    assert result.start == "[1.0, 1.0, 0.25]", "by which models are told apart"


def test_parts_are_those_of_the_order():
    """Of a loss that is a mean over unequal targets, parts of other sequences have other losses."""
    first_half, second_half = (trained(Order((part,))) for part in ((0, 1), (2, 3)))
    assert first_half.loss == pytest.approx(by_hand(parts=((0, 1),))[0][0], rel=1e-12)
    assert second_half.loss == pytest.approx(by_hand(parts=((2, 3),))[0][0], rel=1e-12)
    assert first_half.loss != second_half.loss


def drawn_by_torch(number, rank):
    generator = torch.Generator().manual_seed(1_000_003 * number + rank)
    return torch.rand((), generator=generator).item()


def drawn_by_python(number, rank):
    return random.Random(1_000_003 * number + rank).random()


@pytest.mark.parametrize(("draws", "draw"), [("torch", drawn_by_torch), ("python", drawn_by_python)])
@pytest.mark.parametrize("parts", [((0, 1, 2, 3),), ((0, 1), (2, 3))], ids=str)
def test_each_part_draws_what_its_rank_draws_in_this_step(draws, draw, parts):
    result = trained(Order(parts), draws=draws, warmup=1)
    assert result.draws
    assert_same(result, *by_hand(draw, parts, warmup=1))


def test_our_models_draw_nothing_and_seed_nothing():
    workload = Workload(choose_size("tiny", context=4, batch_size=2, vocab_size=8, d_model=8, d_ff=8, num_layers=1))
    step = TrainStep(workload, CPU)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert not train_in_order(step, step.model, 0, Order(((0,), (1,)))).draws
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_are_kept_beyond_the_step():
    """In memory of their own, though the optimizer may write into that of the parameter's."""
    step, model = build_step()
    update = step.optimizer.step

    def overwrite(*arguments, **settings):
        update(*arguments, **settings)
        model.slope.grad.fill_(100)

    step.optimizer.step = overwrite
    result = train_in_order(step, model, 0, Order(((0, 1, 2, 3),)))
    torch.testing.assert_close(result.gradients["slope"], by_hand()[2])


def counting_step(cuda_graph="off"):
    """A step whose loss is the number of updates before it."""
    step = Mock(workload=Workload(SIZE, device="cpu", cuda_graph=cuda_graph, optimizer="fused"))
    step.loss, step.warmup_of_capture = torch.tensor(0.0), 2
    step.phases = {name: getattr(step, name) for name in ONE_STEP}
    # In the same memory, as replays do.
    step.update.side_effect = lambda: step.loss.add_(1)
    step.side_effect = lambda: [phase() for phase in step.phases.values()]
    step.weights.side_effect = lambda parameters: (dict(parameters), {"the copy of w": torch.zeros(1)})
    return step


def calls_of(step):
    """Return what was called of a step, and the numbers of batches."""
    return [arguments[0] if name == "use_batch" else name for name, arguments, _ in step.mock_calls if name]


ONE_STEP = ["forward", "backward", "update"]


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_steps_have_a_batch_each_after_the_warm_up_and_the_first_is_looked_at(warmup):
    step = counting_step()
    losses = run_steps(step, warmup, begin=lambda number: step.begin(number), before_update=lambda: step.look())
    assert torch.stack(losses).tolist() == [warmup + number for number in range(1, 6)]
    first = [1, "begin", "forward", "backward", "look", "update"]
    others = [call for number in range(2, 6) for call in (number, "begin", *ONE_STEP)]
    assert calls_of(step) == ONE_STEP * warmup + first + others
    assert [call.args for call in step.begin.call_args_list] == [(1,), (2,), (3,), (4,), (5,)]


def test_captured_steps_are_warmed_up_by_the_capture():
    step = counting_step("on")
    assert torch.stack(run_steps(step, 2)).tolist() == [1, 2, 3, 4, 5]
    assert calls_of(step) == ["capture"] + [call for number in range(1, 6) for call in (number, *ONE_STEP)]
    with pytest.raises(AssertionError):
        run_steps(counting_step("on"), 3)


def test_a_training_returns_losses_by_number_weights_and_copies():
    model = nn.Linear(1, 1, bias=False)
    result = train(counting_step(), model, 1)
    assert [(name, result[f"the loss of step {name}"].item()) for name in range(1, 6)] == [
        (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)
    ]  # fmt: skip
    assert result["weight"] is model.weight
    assert result["the copy of w"].tolist() == [0]
    assert len(result) == 7
