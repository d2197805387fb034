"""A bridge beside another driver: it runs what is placed on Slurm, and leaves the rest alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.host.errors import StartFailed
from rollyard_drivers.loop.driver import Driver
from rollyard_drivers.reconcile.placement import is_for
from rollyard_slurm.bridge import Bridge
from rollyard_slurm.options import CA_NAME, BridgeOptions, reconcile_profile, served
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_testing.slurm_bridge.bench import Bench, job


def placed(name: str, uid: str, placement: str | None) -> RolloutJob:
    made = job(name)
    made.metadata.uid = uid
    made.spec.placement = placement  # type: ignore[assignment]
    return made


def pool(name: str, uid: str, placement: str | None) -> BackendPool:
    spec = {"model": "m", "engine": {"type": "embedded"}} | ({"placement": placement} if placement else {})
    return BackendPool.model_validate({"metadata": {"name": name, "uid": uid}, "spec": spec})


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    names = {"any": None, "slurm": "slurm", "pods": "kubernetes"}
    async with httpx.AsyncClient(trust_env=False) as http:
        jobs = [placed(f"j-{name}", f"1{name:a<7}-j", where) for name, where in names.items()]
        made = Bench(tmp_path / "h", http, *jobs)
        made.store.pool_list += [pool(f"p-{name}", f"2{name:a<7}-p", where) for name, where in names.items()]
        yield made
        await made.fleet.close()


def drive(bench: Bench, joined: bool) -> None:
    """Run the driver as the bridge does it."""
    mine = partial(is_for, driver="slurm", default=not joined)
    profile = reconcile_profile(bench.site)
    bench.driver = Driver(bench.store, bench.fleet, profile, takes=mine, serves=mine, alone=not joined)


def owners(bench: Bench) -> set[str]:
    found = (SlurmJobIdentity.parse(one.comment) for one in bench.slurm.queued.values())
    return {one.owner.rpartition("/")[2] for one in found if one is not None}


def unserved(bench: Bench) -> set[str]:
    things: list[Any] = [*bench.store.listed, *bench.store.pool_list]
    return {
        thing.metadata.name
        for thing in things
        if any(one.reason == "NoDriver" for one in thing.status.conditions)
    }


async def test_beside_another_driver_it_runs_what_names_slurm(bench: Bench) -> None:
    drive(bench, joined=True)
    await bench.turns(4)
    assert owners(bench) == {"j-slurm", "p-slurm"}
    assert unserved(bench) == set(), "the other driver says that, where it is so"
    silent = {one.metadata.name for one in bench.store.listed if not one.status.conditions}
    assert silent == {"j-any", "j-pods"}


async def test_with_a_control_plane_of_its_own_it_runs_all_that_names_no_other(bench: Bench) -> None:
    drive(bench, joined=False)
    await bench.turns(4)
    assert owners(bench) == {"j-any", "j-slurm", "p-any", "p-slurm"}
    assert unserved(bench) == {"j-pods", "p-pods"}


async def test_what_is_not_its_own_any_more_is_ended(bench: Bench) -> None:
    drive(bench, joined=True)
    await bench.turns(4)
    bench.slurm.run_all()
    await bench.turns(2)
    bench.store.listed = [one for one in bench.store.listed if one.metadata.name != "j-slurm"]
    bench.store.pool_list.clear()
    await bench.turns(60, seconds=1.0)
    assert owners(bench) == set()


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("", ""), ("no certificate", "")])
async def test_an_authority_that_cannot_be_used_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    given = tmp_path / "given.crt"
    if text is not None:
        given.write_text(text)
    tokens = tmp_path / "tokens.json"
    options = BridgeOptions(tmp_path / "h", join="https://127.0.0.1:1", tokens=tokens, ca_file=given)
    bridge = Bridge(options, lambda ready: pytest.fail("it continues"))
    with pytest.raises(StartFailed, match=rf"--ca-file {given}: cannot be used: .*{words}"):
        await bridge.run()
    assert not (tmp_path / "h" / CA_NAME).exists()


@pytest.mark.attack(
    "its author runs any program as the bridge's user",
    boundary="slurm",
    surface="command, arguments and environment of a pool",
    stopped_by="permitted, in the namespaces that the bridge names: `--namespace`",
)
def test_a_joined_bridge_runs_what_its_namespaces_ask_for(tmp_path: Path) -> None:
    """The authors of other namespaces cannot run programs as the bridge's user."""

    def pool(namespace: str, placement: str | None) -> BackendPool:
        spec = {"model": "m", "placement": placement}
        return BackendPool.model_validate({"metadata": {"name": "p", "namespace": namespace}, "spec": spec})

    some = BridgeOptions(tmp_path, join="https://head:1", namespaces=("team-a", "team-b"))
    assert [some.serves(pool(name, "slurm")) for name in ("team-a", "team-b", "team-c")] == [
        True,
        True,
        False,
    ]
    assert not some.serves(pool("team-a", None))
    assert BridgeOptions(tmp_path, join="https://head:1").serves(pool("team-c", "slurm"))
    assert BridgeOptions(tmp_path).serves(pool("team-c", None))
    assert served(some.namespaces) == "the namespaces team-a, team-b"
