"""Two "machines" on one: two torchrun agents, each with one rank, that meet on a free loopback port."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What one agent's rank wrote, with what torchrun itself logged, and the agent's exit code."""

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
