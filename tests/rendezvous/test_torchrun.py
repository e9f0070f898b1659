"""torchrun --rdzv-backend=podring: agents that come, die and come back."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import podring.rendezvous
import pytest
import torch
from torch.distributed import launcher
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStateError

from tests import harness, processes
from tests.rendezvous import servers
from tests.rendezvous.servers import HOST, server, side_by_side

LIMIT = 100.0
"""Seconds for one job."""
CONF = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Job:
    """The agents of one job; all of them, and their workers, are gone at the end."""

    def __init__(
        self, directory: Path, endpoint: str, nnodes: str, conf: str = CONF, env: dict[str, str] | None = None
    ):
        self.directory, self.endpoint, self.nnodes, self.conf, self.env = directory, endpoint, nnodes, conf, env or {}
        self.agents: dict[str, processes.Rank] = {}
        self.until = time.monotonic() + LIMIT

    def start(self, agent: str, conf: str = "", program: bool = False) -> None:
        """Starts an agent with one worker: the program itself, or what it does in a forked process, whose worker is
        forked too. There torch is loaded already, which costs a program seconds."""
        command = ["--rdzv-backend", "podring"]
        command += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", "job", "--rdzv-conf", self.conf + conf]
        command += [
            "--nnodes",
            self.nnodes,
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "3",
            "--monitor-interval",
            "0.2",
        ]
        command += [str(harness.PROGRAMS / "elastic.py"), harness.BACKEND, str(self.directory)]
        env = {"AGENT": agent, "OMP_NUM_THREADS": "1", **self.env}

        def main(_: processes.Connection) -> None:
            faulthandler.cancel_dump_traceback_later()
            os.environ.update(env)
            if program:
                os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])
            config, _python, arguments = torchrun.config_from_args(torchrun.parse_args(command))
            config.start_method = "fork"
            launcher.elastic_launch(config, _worker)(harness.PROGRAMS / "elastic.py", *arguments[-2:])

        self.agents[agent] = processes.fork(main, self.directory / f"{agent}.log", LIMIT)

    def kill(self, agent: str) -> None:
        """Ends an agent and its worker as the loss of their host would."""
        pid = self.directory / f"{agent}.pid"
        worker = int(pid.read_text()) if pid.exists() else None
        processes.kill(self.agents[agent])
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        pid.unlink(missing_ok=True)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until it holds."""
        while not condition():
            assert time.monotonic() < self.until, f"{what} didn't come\n{self.report()}"
            time.sleep(0.05)

    def end(self, agent: str) -> None:
        """The agent must end well."""
        process = self.agents[agent]
        self.wait(f"{agent}'s end", lambda: processes.collect(process))
        assert process.exit_code == 0, f"{agent}: exit code {process.exit_code}\n{self.report()}"

    def lives(self) -> list[list[str]]:
        """agent, rank, world size, first step, store: a line per life of a worker."""
        path = self.directory / "lives"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def held(self, agent: str) -> str:
        """With how many ranks the agent's worker holds; empty if it doesn't."""
        path = self.directory / f"{agent}.held"
        return path.read_text() if path.exists() else ""

    def report(self) -> str:
        """What the agents and workers printed."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs)


@contextlib.contextmanager
def job(directory: Path, endpoint: str, nnodes: str, env: dict[str, str] | None = None) -> Iterator[Job]:
    running = Job(directory, endpoint, nnodes, env=env)
    try:
        yield running
    finally:
        for agent, process in running.agents.items():
            if not processes.collect(process):
                running.kill(agent)


def _worker(*command: str | Path) -> None:
    # The agent's settings came after torch was loaded.
    podring.rendezvous.register()
    sys.argv = [str(word) for word in command]
    runpy.run_path(sys.argv[0], run_name="__main__")


def alone() -> float:
    """The loss of the same training in one process."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(12, 4), torch.randn(12, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((model(inputs) - targets) ** 2).sum() / 12
        loss.backward()
        optimizer.step()
    return loss.item()


def expected_loss() -> float:
    value = servers.end(servers.run(alone))
    assert isinstance(value, float)
    return value


def loss_of(running: Job) -> float:
    """The last loss, from the shares that the agents' workers had of it."""
    return sum(float(path.read_text()) for path in running.directory.glob("*.loss"))


def test_an_agent_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Two agents; one dies (scale down), comes back (scale up): the training resumes both times where it was."""
    (tmp_path / "hold").touch()
    with job(tmp_path, f"{HOST}:{harness.free_port()}", "1:2") as running:
        # The coordinator is the first agent's: the one that lives on. The other waits for it.
        running.start("a")
        running.start("b", ",is_host=0")
        running.wait("the hold of two", lambda: running.held("a") == "2" == running.held("b"))
        running.kill("b")
        running.wait("the hold of one", lambda: running.held("a") == "1")
        running.start("b", ",is_host=0", program=True)
        running.wait("the second hold of two", lambda: running.held("a") == "2")
        (tmp_path / "hold").unlink()
        running.end("a")
        running.end("b")
        lives = running.lives()
        steps = {(agent, world): int(step) for agent, _, world, step, _ in lives}
        assert {world for _, _, world, _, _ in lives} == {"1", "2"}, lives
        assert steps["a", "1"] >= 10 and steps["a", "2"] > steps["a", "1"], lives
        assert all(store == "podring_torch._face_" + _minor() + ".Store" for *_, store in lives), lives
        assert loss_of(running) == pytest.approx(expected_loss(), rel=1e-4), running.report()


def _minor() -> str:
    return "_".join(torch.__version__.split(".")[:2])


def test_the_first_agent_dies_beside_a_standing_coordinator(tmp_path: Path) -> None:
    """With a coordinator of its own, and a token, any agent may go: here with a fixed number of them."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef-of-the-job")
    (tmp_path / "hold").touch()
    with (
        server("podring", token=token.read_text()) as one,
        job(tmp_path, f"{HOST}:{one.port}", "2:2", env={"PODRING_TOKEN_FILE": str(token)}) as running,
    ):
        running.start("a")
        running.start("b")
        running.wait("the hold", lambda: running.held("a") == "2" == running.held("b"))
        (tmp_path / "a.held").unlink()
        running.kill("a")
        running.start("a")
        running.wait("the second hold", lambda: running.held("a") == "2")
        (tmp_path / "hold").unlink()
        running.end("a")
        running.end("b")
        second = [int(step) for _, _, _, step, _ in running.lives()[2:]]
        assert len(second) >= 2 and min(second) >= 10, running.lives()
        assert loss_of(running) == pytest.approx(expected_loss(), rel=1e-4), running.report()


def _parameters(endpoint: str, **conf: str) -> RendezvousParameters:
    return RendezvousParameters("podring", endpoint, "run", 1, 2, **conf)


def test_what_is_wrong_is_said() -> None:
    from podring import _torchrun

    with pytest.raises(ValueError, match="needs a port"):
        _torchrun.create(_parameters("localhost:0"))
    with pytest.raises(ValueError, match="read_timeout"):
        _torchrun.create(_parameters("localhost:1", read_timeout="0"))
    with pytest.raises(ValueError, match=r"node_rank: expected 0 to 1, .* got 2"):
        _torchrun.create(_parameters("localhost:1", node_rank="2"))
    with pytest.raises(RendezvousConnectionError, match="no podring coordinator at"):
        _torchrun.create(_parameters(f"{HOST}:{harness.free_port()}", is_host="0", read_timeout="1"))


def test_agents_are_numbered_as_they_are_told() -> None:
    from podring import _torchrun

    def agent(run: str, number: int, address: str, shared: bool = True) -> int | str:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(not shared))
        conf = {"node_rank": str(number), "is_host": "0", "join_timeout": "30"}
        handler = _torchrun.create(RendezvousParameters("podring", place, run, 2, 2, address, **conf))
        try:
            info = handler.next_rendezvous()
        except RendezvousStateError as error:
            return str(error)
        assert info.world_size == 2 and info.bootstrap_store_info is not None
        assert "@" not in info.bootstrap_store_info.master_addr, info
        return info.rank

    with server("podring") as one:
        place = f"{HOST}:{one.port}"
        # By address it would be the other way round.
        ranks = side_by_side(
            {
                "1": lambda: agent("ours", 1, "127.0.0.1"),
                "0": lambda: agent("ours", 0, "127.0.0.2"),
                "torch's 1": lambda: agent("torch's", 1, "127.0.0.1", shared=False),
                "torch's 0": lambda: agent("torch's", 0, "127.0.0.2", shared=False),
                "twice": lambda: agent("twice", 0, "127.0.0.1"),
                "again": lambda: agent("twice", 0, "127.0.0.2"),
            }
        )
    assert str(ranks.pop("again")).startswith("node_rank 0 is number 1 of the 2 agents that have come"), ranks
    assert ranks == {"1": 1, "0": 0, "torch's 1": 1, "torch's 0": 0, "twice": 0}


def test_the_state_is_exchanged_by_compare_and_set() -> None:
    from podring._torchrun import Backend

    with server("podring") as one:
        first, second = Backend(one.client(2), "run"), Backend(one.client(), "run")
        assert first.name == "podring" and first.get_state() is None
        # A token of nobody's, while there is no state: nothing is written.
        assert first.set_state(b"x", object()) is None
        state, token, won = first.set_state(b"\x80state") or (b"", None, False)
        assert (state, won) == (b"\x80state", True)
        assert second.get_state() == (b"\x80state", token)
        # Without a token only the first state is written; with an old one, nothing.
        assert second.set_state(b"other") == (b"\x80state", token, False)
        state, newer, won = second.set_state(b"\x80state", token) or (b"", None, False)
        assert (state, won) == (b"\x80state", True) and newer != token
        assert first.set_state(b"late", token) == (b"\x80state", newer, False)
        assert Backend(one.client(), "another").get_state() is None
        one.client().set("podring/torchrun/run/state", "0:***")
        with pytest.raises(Exception, match="corrupt"):
            first.get_state()
        one.kill()
        with pytest.raises(RendezvousConnectionError):
            first.get_state()
