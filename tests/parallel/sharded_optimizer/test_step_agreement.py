"""On GPUs ranks compare what they step with, and read the answer in the next step: here with a GPU's parts replaced."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cs336sys.errors import UsageError
from cs336sys.parallel.rank_consistency import digest_of
from cs336sys.parallel.sharded_optimizer import groups
from cs336sys.parallel.sharded_optimizer.groups import StepAgreement


class Event:
    """Knows whether what was launched before it has been waited for."""

    def record(self):
        self.is_recorded = True

    def synchronize(self):
        assert self.is_recorded


@pytest.fixture
def sent(monkeypatch):
    """The digests that rank 0 of three has sent; ``sent.others`` are those of its peers, by default the same."""
    record = SimpleNamespace(digests=[], others=None)
    empty = torch.empty

    def gather(gathered, digest):
        record.digests.append(digest.tolist())
        rows = gathered.view(3, -1)
        rows[:] = digest
        if record.others is not None:
            rows[1:] = torch.stack([digest_of(lines) for lines in record.others])

    monkeypatch.setattr(groups, "group_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(groups, "all_gather_single", gather)
    monkeypatch.setattr(groups, "is_stream_captured", lambda: False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *arguments, **settings: tensor)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **settings: empty(*shape, **settings))
    return record


def step(agreement, *lines, is_step=True):
    with agreement.compared(is_step=is_step) as collected:
        collected += lines


def test_same_lines_step_after_step(sent):
    agreement = StepAgreement()
    for lines in (["lr=1"], ["lr=2", "lr=3"], []):
        step(agreement, *lines)
    assert sent.digests == [digest_of(lines).tolist() for lines in (["lr=1"], ["lr=2", "lr=3"], [])]


@pytest.mark.parametrize(("others", "rank"), [([["lr=9"], ["lr=1"]], 1), ([["lr=1"], ["lr=9"]], 2)])
def test_other_lines_are_refused_in_the_next_step(sent, others, rank):
    agreement = StepAgreement()
    sent.others = others
    step(agreement, "lr=1")
    with pytest.raises(
        UsageError, match=rf"^ranks differ in what they train: in the last step, rank {rank} had other "
    ):
        step(agreement, "lr=1")
    # Which is said once.
    sent.others = None
    step(agreement, "lr=1")


def fail(agreement):
    with agreement.compared() as lines:
        lines.append("lr=1")
        raise UsageError("frozen")


def test_an_error_is_raised_here_at_once_and_compared_by_its_text(sent):
    agreement = StepAgreement()
    with pytest.raises(UsageError, match=r"^frozen$"):
        fail(agreement)
    assert sent.digests == [digest_of(["UsageError: frozen"]).tolist()]
    step(agreement, "lr=1")


def test_a_step_does_not_wait_for_the_answer_to_its_own_clipping(sent):
    agreement = StepAgreement()
    sent.others = [["clip"], ["other"]]
    step(agreement, "clip", is_step=False)
    sent.others = None
    step(agreement, "lr=1")
    with pytest.raises(UsageError, match="rank 2 had other options"):
        step(agreement, "lr=1")


def test_the_first_question_of_a_step_waits_for_the_last(sent):
    agreement = StepAgreement()
    sent.others = [["lr=1"], ["other"]]
    step(agreement, "lr=1")
    with pytest.raises(UsageError, match="rank 2 had other options"):
        step(agreement, "clip", is_step=False)


def test_nothing_is_compared_in_a_graph(sent, monkeypatch):
    monkeypatch.setattr(groups, "is_stream_captured", lambda: True)
    step(StepAgreement(), "lr=1")
    assert sent.digests == []
