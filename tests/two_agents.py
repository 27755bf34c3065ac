"""Two ranks that meet on a free loopback port: of two torchrun agents, as of two machines, or forked."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forked_processes import ForkedContext, run_script
from torch.distributed import TCPStore


@dataclass(frozen=True)
class Answer:
    """What one rank wrote, with what torchrun itself logged, and the exit code: under torchrun the agent's."""

    exit_code: int
    stdout: str
    stderr: str


def run_two_agents(*target: str, timeout_s: float = 180, environment: dict[str, str] | None = None) -> list[Answer]:
    """Run ``target`` (``-m cs336sys ...`` or a script with its arguments) as one job of two nodes; nothing outlives it.

    Raises:
        TimeoutError: an agent is not done in time.
    """
    with socket.socket() as held:
        # Held, so that nobody else is given it; torchrun's store can listen on it all the same, asking for that, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        agents = [
            subprocess.Popen(
                [*torchrun, "--node-rank", str(node), *target],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(2)
        ]
        try:
            outputs = [agent.communicate(timeout=timeout_s) for agent in agents]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"not done after {timeout_s} s: {error.cmd}") from error
        finally:
            for agent in agents:
                # torchrun ends its ranks when it is terminated, and not when it is killed.
                agent.terminate()
                agent.wait()
    return [Answer(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def run_two_ranks(script: Path, *arguments: str, folder: Path, timeout_s: float = 180) -> list[Answer]:
    """Run a script as torchrun would on two ranks, without an agent and forked, which spares four imports of torch.

    Args:
        folder: for what the ranks write.

    Raises:
        TimeoutError: a rank is not done in time.
    """
    # As an agent's, it outlives the ranks: one that ends last must not miss it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks, outputs = [], []
    for number in map(str, range(2)):
        outputs.append([folder / f"{name} of rank {number}" for name in ("stdout", "stderr")])
        own = variables | {"RANK": number, "LOCAL_RANK": number}
        ranks.append(ForkedContext().process(run_script, own, outputs[-1], script, *arguments))
        ranks[-1].start()
    try:
        for rank in ranks:
            rank.join(timeout_s)
            if rank.exitcode is None:
                raise TimeoutError(f"not done after {timeout_s} s: {script}")
    finally:
        for rank in ranks:
            rank.kill()
    return [
        Answer(rank.exitcode, *(output.read_text() for output in own)) for rank, own in zip(ranks, outputs, strict=True)
    ]
