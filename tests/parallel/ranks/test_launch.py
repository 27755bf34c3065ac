"""Launching: results in rank order, and every way in which a rank can fail ends all ranks, in time and by name."""

import itertools
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace
from unittest import mock

import launch_ranks
import pytest
import torch
import torch.distributed as dist
from running import is_running, left_in, wait_until
from small_models import wait_at_most
from two_agents import run_torchrun

from cs336sys.errors import CapabilityError, LostProcessError, UsageError
from cs336sys.parallel.ranks import launch, spawned
from cs336sys.parallel.ranks.spawned import Failure, RankError, SpawnedRanks, _cause_before_consequence, _failure, _Rank
from cs336sys.processes.files import remove_abandoned

HERE = pathlib.Path(__file__).parent

# For processes that this file starts: they import launch_ranks.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}

# Ranks that would wait this long for a failed one outlast the time limit of the test.
OUTLASTS_THE_TEST_S = 3600

pytestmark = pytest.mark.usefixtures("time_limit")


@pytest.fixture(scope="module")
def pair():
    """Started in a thread that ends before the ranks are used, which they must survive."""
    started = []

    def start():
        started.append(launch.start(2, backend="gloo", timeout_s=60))
        started[0].run(launch_ranks.process_id)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as ranks:
        yield ranks


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_spawned_ranks_listen_on_loopback_alone(pair):
    """Gloo listened on the address of the host's name, and anybody on the network may connect."""
    for addresses in pair.run(launch_ranks.listening_addresses):
        assert addresses
        assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}


@pytest.fixture
def temporary_directory(tmp_path, monkeypatch):
    """Where this test's ranks meet, to see what they leave there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def children():
    return {process.pid for process in multiprocessing.active_children()}


def test_run_returns_what_ranks_returned_and_leaves_nothing(real_processes, temporary_directory):
    before = children()
    results = launch.run(launch_ranks.rank_and_sum, 5, world_size=2, backend="gloo")
    assert [(rank, size) for rank, size, _ in results] == [(0, 2), (1, 2)]
    assert all(total.item() == 10 + 1 for *_, total in results)
    assert left_in(temporary_directory) == []
    assert children() == before


def test_ranks_may_end_in_their_own_time_up_to_a_limit(tmp_path, monkeypatch):
    launch.run(launch_ranks.touch_at_exit, tmp_path, 0.2, world_size=2, backend="gloo")
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
    monkeypatch.setattr(spawned, "_EXIT_TIMEOUT_S", 0.2)
    with launch.start(1, backend="gloo") as ranks:
        ranks.run(launch_ranks.touch_at_exit, tmp_path, OUTLASTS_THE_TEST_S)
    assert not ranks.alive


def test_function_that_cannot_be_sent_is_refused_and_the_ranks_live_on(pair):
    with pytest.raises(UsageError, match="top level of a module"):
        pair.run(lambda: None)
    assert len(pair.run(launch_ranks.process_id)) == 2


def test_ranks_inherit_the_environment_share_the_cores_and_print_to_stderr(real_processes, monkeypatch, capfd):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("OMP_NUM_THREADS")
    with launch.start(1, backend="gloo") as ranks:
        ((environment, threads),) = ranks.run(launch_ranks.environment_and_threads)
        ranks.run(launch_ranks.say, "a line of a rank")
    assert environment == {"NCCL_NVLS_ENABLE": "0", "RANK": None}
    assert 1 <= threads <= os.cpu_count()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "a line of a rank" in captured.err


@pytest.mark.parametrize(
    ("how", "heading", "cause"),
    [
        ("raise", "rank 1 of 2: ValueError: the numbers are wrong\n\nTraceback (most recent call last):", ValueError),
        ("kill", "rank 1 of 2: was killed by SIGKILL\n\n", type(None)),
        ("exit", "rank 1 of 2: ended with exit code 7\n\n", type(None)),
        ("crash", "rank 1 of 2: was killed by SIGSEGV\n\nrank 1 was here:\nFatal Python error: Segm", type(None)),
    ],
)
def test_failed_rank_ends_the_run_with_its_own_error_first(how, heading, cause, temporary_directory):
    before = children()
    with launch.start(2, backend="gloo", timeout_s=OUTLASTS_THE_TEST_S) as ranks:
        ranks.run(launch_ranks.process_id)
        with pytest.raises(RankError) as caught:
            ranks.run(launch_ranks.fail, how)
    assert str(caught.value).startswith(heading)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, cause)
    assert isinstance(caught.value, LostProcessError) == (how != "raise"), "what it raised has a traceback to show"
    assert left_in(temporary_directory) == []
    assert children() == before
    if how in ("raise", "crash"):
        assert "launch_ranks.py" in str(caught.value)
    if how == "raise":
        # The other rank was still waiting for this one: it had no broken connection to report.
        assert "rank 0" not in str(caught.value)


def test_cause_comes_before_consequences():
    """A killed rank is the cause, though the broken connection that its peer reports may be seen first."""
    broken = Failure(0, "RuntimeError: Connection closed by peer", "", time_s=1.0)
    later = Failure(3, "RuntimeError: Connection closed by peer", "", time_s=2.0)
    aborted = Failure(2, "was killed by SIGABRT", "", time_s=0.5, exit_code=-signal.SIGABRT)
    killed = Failure(1, "was killed by SIGKILL", "", time_s=1.5, exit_code=-signal.SIGKILL)
    failures = sorted([later, broken, aborted, killed], key=_cause_before_consequence)
    assert [failure.rank for failure in failures] == [1, 0, 3, 2]


@pytest.mark.parametrize("sent", [b"\0\0", b"\0\0\1\0half an answer"])
def test_rank_that_was_killed_while_it_answered_is_named(sent):
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), sent)
    theirs.close()
    process = SimpleNamespace(join=lambda timeout: None, exitcode=-signal.SIGKILL)
    failure = _Rank(1, process, ours).receive()
    assert (failure.rank, failure.reason, failure.exit_code) == (1, "was killed by SIGKILL", -signal.SIGKILL)


def test_answer_that_cannot_be_read_here_is_a_failure():
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(b"cno_such_module\nvalue\n.")
    failure = _Rank(1, None, ours).receive()
    assert failure.reason == "its result cannot be read here: ModuleNotFoundError: No module named 'no_such_module'"


def raised_by_run(how):
    """What ``run`` raises where the only rank has raised what :func:`launch_ranks.fail` raises."""
    ours, theirs = multiprocessing.Pipe()
    rank = _Rank(0, None, ours)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        launch_ranks.go_wrong(how)
    theirs.send_bytes(pickle.dumps(_failure(0, raised.value)))
    ranks = object.__new__(SpawnedRanks)
    ranks._ranks = [rank]
    return ranks._error(rank.receive(), [])


def test_usage_error_of_a_rank_keeps_its_type_and_sentence():
    error = raised_by_run("usage")
    assert type(error) is UsageError
    assert str(error) == "3 sequences: 2 ranks do not divide them"
    assert error.__notes__ == ["on rank 0 of 1"]


def test_error_that_cannot_be_sent_is_told_in_words():
    error = raised_by_run("raise unpicklable")
    assert str(error).startswith("rank 0 of 1: WrongAnswer: 6 x 7 is not 43\n\nTraceback")
    assert error.__cause__ is None


def test_wrapped_out_of_memory_keeps_its_chain_of_causes():
    error = raised_by_run("out of memory")
    assert isinstance(error, RankError)
    assert isinstance(error.__cause__, RuntimeError)
    assert isinstance(error.__cause__.__cause__, MemoryError)


@pytest.fixture
def stacks_in_their_own_time(monkeypatch):
    """Busy cores may keep a rank from writing where it is for longer than a command waits for that."""
    monkeypatch.setattr(spawned, "_STACKS_S", 60.0)


@pytest.mark.usefixtures("stacks_in_their_own_time")
def test_rank_that_does_not_come_to_a_collective_is_named_at_the_timeout():
    with launch.start(2, backend="gloo", timeout_s=OUTLASTS_THE_TEST_S) as ranks:
        # Once before, so that within the half second both ranks are where they stay.
        ranks.run(launch_ranks.process_id)
        ranks.run(wait_at_most, 0.5)
        with pytest.raises(RankError) as caught:
            ranks.run(launch_ranks.fail, "hang")
    heading, *rest = str(caught.value).split("\n")
    assert isinstance(caught.value, LostProcessError)
    assert heading.startswith("rank 0 of 2: RuntimeError: ")
    assert heading.endswith("(in all_reduce); still running: rank 1")
    stacks = "\n".join(rest).split("rank 1 was here:")[1]
    assert "launch_ranks.py" in stacks
    assert "in fail" in stacks


@pytest.mark.usefixtures("stacks_in_their_own_time")
def test_rank_that_does_not_return_is_named_at_the_timeout():
    with launch.start(2, backend="gloo", timeout_s=OUTLASTS_THE_TEST_S) as ranks:
        ranks.run(launch_ranks.process_id)
        ranks._timeout_s = 0.5
        with pytest.raises(RankError) as caught:
            ranks.run(launch_ranks.hang_after_the_last_collective)
    assert str(caught.value).startswith("rank 1 of 2 hangs: not done 0.5 s after rank 0\n")
    assert "in hang_after_the_last_collective" in str(caught.value)
    assert caught.value.rank == 1


def test_stacks_of_a_hanging_rank_are_read_when_they_are_whole(monkeypatch):
    """On a busy machine faulthandler writes them bit by bit."""
    lines = ["Current thread 0x1 (most recent call first):\n", '  File "ranks.py", line 1 in hang\n']
    written = itertools.accumulate(["", *lines, '  File "<string>", line 1 in <module>\n'])
    signals = []
    monkeypatch.setattr(os, "kill", lambda *arguments: signals.append(arguments))
    monkeypatch.setattr(SpawnedRanks, "_written_stacks", lambda self, number: next(written))
    stacks = object.__new__(SpawnedRanks)._stacks_now([_Rank(1, SimpleNamespace(pid=7), connection=None)])
    assert signals == [(7, signal.SIGUSR1)]
    assert stacks.startswith("Current thread")
    assert stacks.endswith('in hang\n  File "<string>", line 1 in <module>\n')


def test_result_that_cannot_be_sent_is_an_error_and_ranks_that_ended_refuse_to_run():
    with launch.start(1, backend="gloo") as ranks:
        with pytest.raises(RankError, match=r"rank 0 of 1: .*pickle"):
            ranks.run(launch_ranks.fail, "unpicklable result", 0)
        with pytest.raises(UsageError, match="have ended"):
            ranks.run(launch_ranks.process_id)


# A parent in a process of its own, which starts ranks that hang and tell their process ids through files.
PARENT = """
import signal, sys, launch_ranks
from cs336sys.parallel.ranks import launch
if __name__ == "__main__":
    # A shell starts background jobs, of which these tests may be one, with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch.run(launch_ranks.say_and_hang, sys.argv[1], world_size=2, backend="gloo")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
"""


def start_parent(tmp_path):
    script, ids, temporary = tmp_path / "parent.py", tmp_path / "ids", tmp_path / "temporary"
    script.write_text(PARENT)
    ids.mkdir()
    temporary.mkdir()
    environment = ENVIRONMENT | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, script, ids], env=environment, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: {path.name for path in ids.iterdir()} >= {"0", "1"} or parent.poll() is not None, 60)
    return parent, [int((ids / str(rank)).read_text()) for rank in range(2)], temporary


def test_ranks_die_with_their_parent_and_others_remove_their_folder(tmp_path, monkeypatch):
    parent, ranks, temporary = start_parent(tmp_path)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(is_running(pid) for pid in ranks), 60)
    assert len(left_in(temporary)) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    remove_abandoned()
    assert left_in(temporary) == []


def test_ctrl_c_ends_all_ranks_and_reaches_the_caller(tmp_path):
    parent, ranks, temporary = start_parent(tmp_path)
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=60)
    assert (output, parent.returncode) == ("interrupted\n", 130)
    assert not any(is_running(pid) for pid in ranks)
    assert left_in(temporary) == []


def test_run_joins_the_ranks_that_torchrun_started_and_one_that_fails_ends_the_others(tmp_path):
    """Both runs of the script: each gets a process group of its own from torchrun's one store. A third fails."""
    command = "--nproc-per-node", "2", str(HERE / "launch_ranks.py"), "2", "fail"
    answer = run_torchrun(*command, folder=tmp_path, environment=ENVIRONMENT)
    assert answer.stdout == "[(0, 2, 21), (1, 2, 21)]\n[(0, 2, 41), (1, 2, 41)]\n", answer.stderr
    assert answer.exit_code == 1
    assert "ValueError: the numbers are wrong" in answer.stderr
    assert "on rank 1 of 2" in answer.stderr


def test_impossible_runs_are_refused_before_anything_starts(monkeypatch, temporary_directory):
    """For other reasons see figures.txt."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for asked, error in (({"timeout_s": 0.0}, UsageError), ({"backend": "nccl"}, CapabilityError)):
        with pytest.raises(error):
            launch.run(launch_ranks.process_id, world_size=3, **asked)
    with pytest.raises(CapabilityError, match=r"1000000000 ranks .* a process of at least 0.2 GB, and it has"):
        launch.run(launch_ranks.process_id, world_size=10**9, backend="gloo")
    assert left_in(temporary_directory) == []


def test_ranks_started_outside_go_on_after_a_refusal_alone(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_outside_stores", [])
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **settings: iter([(dist.HashStore(), 0, 1)]))
    assert launch.outside_store() is launch.outside_store()
    with launch.start(1, backend="gloo") as ranks:
        assert (ranks.alive, ranks.run(launch_ranks.process_id)) == (True, [os.getpid()])
        for how, error_type in (("usage", UsageError), ("raise", ValueError)):
            with pytest.raises(error_type) as caught:
                ranks.run(launch_ranks.go_wrong, how)
            assert caught.value.__notes__ == ["on rank 0 of 1"]
            assert ranks.alive == (how == "usage")
        ranks.alive = True
    assert not ranks.alive
    assert not dist.is_initialized()


def test_ranks_started_outside_must_be_as_many_as_asked_for(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    identity = launch.started_outside()
    assert (identity.rank, identity.world_size, identity.local_rank) == (5, 8, 1)
    with pytest.raises(UsageError, match="world size 2: 8 ranks were started"):
        launch.run(launch_ranks.process_id, world_size=2, backend="gloo")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be a whole number, as torchrun sets it; unset it"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE=-1: must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: must be less than WORLD_SIZE, 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, .* MASTER_ADDR expected, but not set"),
    ],
)
def test_variables_that_name_no_rank_are_refused(variables, message, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        launch.run(launch_ranks.process_id, world_size=2, backend="gloo")


def test_ranks_started_outside_do_not_wait_for_ever_for_others(monkeypatch):
    """torch's own limit is half an hour."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CapabilityError, match=r"^rank 0: not all 2 ranks met at 127.0.0.1:0 within 0.5 s \("):
        launch.run(launch_ranks.process_id, world_size=2, backend="gloo", timeout_s=0.5)


def test_ranks_started_outside_all_refuse_when_one_machine_has_too_few_gpus_or_shared_caches(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # Rank 0 has its GPU, and is done first with saying so.
    store.set("refusal-0", "")
    with pytest.raises(CapabilityError, match=r"^rank 1: 2 ranks on this machine: .* torch sees 1"):
        launch._check_every_machine(launch.RankIdentity(1, 2, local_rank=1), "nccl", store)
    with pytest.raises(CapabilityError, match=r"^rank 1: 2 ranks on this machine"):
        launch._check_every_machine(launch.RankIdentity(0, 2, local_rank=0), "nccl", store)
    monkeypatch.setattr(launch, "use_private_caches", mock.Mock(side_effect=CapabilityError("caches")))
    with pytest.raises(CapabilityError, match=r"^rank 0: caches$"):
        launch._check_every_machine(launch.RankIdentity(0, 1, local_rank=0), "gloo", dist.HashStore())
    with pytest.raises(CapabilityError, match=r"^caches$"):
        launch.start(1, backend="gloo")


@pytest.mark.gpu
def test_run_on_a_gpu():
    assert launch.run(launch_ranks.rank_and_sum, 5, world_size=1) == [(0, 1, torch.tensor([5]))]


@pytest.mark.multigpu
@pytest.mark.parametrize(("how", "timeout_s"), [("kill", OUTLASTS_THE_TEST_S), ("hang", 10)])
def test_failed_rank_ends_the_run_on_gpus(how, timeout_s):
    """The other rank waits in a kernel that no signal interrupts: only killing it ends it."""
    with pytest.raises(RankError) as caught:
        launch.run(launch_ranks.fail, how, world_size=2, backend="nccl", timeout_s=timeout_s)
    if how == "hang":
        assert str(caught.value).split("\n")[0].endswith("still running: rank 1")
    else:
        assert caught.value.rank == 1
        assert "rank 0" not in str(caught.value)


def test_wrong_network_interface_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere")
    with pytest.raises(CapabilityError) as caught:
        spawned.join_process_group(spawned.RankIdentity(0, 1, local_rank=0), "gloo", dist.HashStore(), 5.0)
    assert str(caught.value).startswith("Gloo finds no address on interface nothere: set GLOO_SOCKET_IFNAME to one")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_default_device", mock.Mock(side_effect=RuntimeError))
    with pytest.raises(CapabilityError, match="Gloo finds no address on any interface: set GLOO_SOCKET_IFN"):
        spawned.join_process_group(spawned.RankIdentity(0, 1, local_rank=0), "gloo", dist.HashStore(), 5.0)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


class Asked:
    """In place of spawned ranks."""

    def __init__(self, *arguments):
        self.arguments, self.alive = arguments, True

    def __exit__(self, *exception):
        self.alive = False


def test_ranks_are_kept_until_others_are_asked_for(monkeypatch):
    monkeypatch.setattr(launch, "SpawnedRanks", Asked)
    monkeypatch.setattr(launch, "use_private_caches", lambda: None)
    monkeypatch.setattr(launch, "_kept", {})
    first = launch.kept(2, backend="gloo")
    assert launch.kept(2, backend="gloo") is first
    second = launch.kept(2, backend="gloo", timeout_s=9.0)
    assert (first.alive, second.alive) == (False, True)
    assert second.arguments[:3] == (2, "gloo", 9.0)
    second.alive = False
    third = launch.kept(2, backend="gloo", timeout_s=9.0)
    assert third is not second
    assert third.alive
    launch.end_kept()
    assert not third.alive
