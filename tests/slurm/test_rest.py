"""slurmrestd in place of Slurm's commands: the same effects, and a bridge that outlives its slurmrestd."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import Bridge, accounted_for, job, until

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]
ASKED = Path(__file__).with_name("asked.py")


@dataclass
class Restd:
    """A slurmrestd of the lab's user on a socket in a folder of theirs."""

    slurm: Any
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix:{self.folder}/restd"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        # One that was killed leaves its socket, on which another one cannot listen.
        (self.folder / "restd").unlink(missing_ok=True)
        command = ["slurmrestd", "-a", "rest_auth/local", "-s", "openapi/v0.0.38", self.url]
        with (self.folder / "restd.log").open("ab") as log:
            self.process = self.slurm.popen_as_user(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

        def listens() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "restd.log").read_text()
            return (self.folder / "restd").is_socket()

        until(listens, 30, "slurmrestd")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(patience(30))


@pytest.fixture
def restd(slurm: Any, shared: Path) -> Iterator[Restd]:
    made = Restd(slurm, shared)
    made.start()
    yield made
    made.kill()


def test_both_ways_to_ask_have_the_same_effects(slurm: Any, shared: Path, restd: Restd) -> None:
    def asked(name: str, how: str) -> dict[str, Any]:
        home = shared / name
        slurm.run_as_user(["mkdir", "-m", "700", str(home)])
        done = slurm.run_as_user([sys.executable, str(ASKED), how, str(home)], timeout=patience(600))
        return dict(json.loads(done.stdout))

    with ThreadPoolExecutor() as both:
        commands, rest = both.map(asked, ("commands", "rest"), ("commands", restd.url))
    assert rest["shown"] == commands["shown"], "an option has got lost"
    assert rest["shown"][0]["TresPerNode"].endswith("gpu:1"), "it is there to get lost"
    for one in (commands, rest):
        assert one["log"] == "ready\nUSR1\nUSR2\nheard 12\n", "signals reach the script, and not its child"
        assert (one["ended"]["state"], one["ended"]["exit_status"]) == ("FAILED", 5)
        assert one["queued"]["limit"] == 420.0
        assert 380 < one["queued"]["left"] <= 420
        assert one["refused"][1] is False
        assert "partition" in one["refused"][0].lower()
        assert (one["cancelled"], one["unknown"]) == ("CANCELLED", None)
        assert one["left"] == []
        assert one["responds"] is True
    same = ("state", "reason", "limit", "name", "comment")
    assert [rest["queued"][name] for name in same] == [commands["queued"][name] for name in same]


def test_a_bridge_outlives_its_slurmrestd(slurm: Any, shared: Path, restd: Restd) -> None:
    bridge = Bridge(slurm, shared / "h", ["--rest-url", restd.url])
    wanted = job("rest", tasks=4, samples=4, pause=5.0)
    try:
        bridge.start()
        with bridge.client() as client:
            client.submit(wanted)
        (number,) = bridge.running()
        restd.kill()
        until(lambda: "Slurm does not answer" in bridge.log.read_text(), 60, "word of the outage")
        assert bridge.jobs().keys() == {number}, "what runs continues"
        restd.start()
        until(lambda: "Slurm answers again" in bridge.log.read_text(), 60, "word of its end")
        bridge.ended("rest")
        accounted_for(bridge, wanted)
        told = slurm.run_as_user(bridge.command("status")).stdout
        assert "not known" not in told
        assert bridge.stop() == 0
    finally:
        bridge.kill()
    said = bridge.log.read_text()
    assert "Slurm was asked" in said
    assert "submit 1" in said, "one job, by slurmrestd"
    assert not any(name in said for name in ("sbatch", "squeue", "scancel"))
    assert not [path for path in (bridge.home / "signals").iterdir() if path.name != str(number)]
