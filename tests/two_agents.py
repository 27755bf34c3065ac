"""Two ranks that meet on a free loopback port: of two torchrun agents, as of two machines, or without an agent.

Agents and ranks without one are forked, which spares each an import of torch; an agent starts its ranks itself.
"""

import socket
from pathlib import Path

from forked_processes import Answer, run_scripts
from torch.distributed import TCPStore, run

TORCHRUN = Path(run.__file__)


def run_torchrun(*arguments: str, folder: Path, environment: dict[str, str] | None = None) -> Answer:
    """Run one agent on a port that it chooses itself; see :func:`run_scripts`."""
    (answer,) = run_scripts(TORCHRUN, [("--standalone", *arguments)], [environment or {}], folder=folder)
    return answer


def run_two_agents(*target: str, folder: Path, environment: dict[str, str] | None = None) -> list[Answer]:
    """Run ``target`` (``-m cs336sys ...`` or a script with its arguments) as one job of two nodes."""
    with socket.socket() as held:
        # Held, so that nobody else is given it; torchrun's store can listen on it all the same, asking for that, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        agents = [[*options, "--node-rank", str(node), *target] for node in range(2)]
        variables = {"OMP_NUM_THREADS": "1"} | (environment or {})
        return run_scripts(TORCHRUN, agents, [variables] * 2, folder=folder)


def run_two_ranks(script: Path, *arguments: str, folder: Path) -> list[Answer]:
    """Run a script as torchrun would on two ranks, without an agent."""
    # As an agent's, it outlives the ranks: one that ends last must not miss it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return run_scripts(script, [arguments] * 2, ranks, folder=folder)
