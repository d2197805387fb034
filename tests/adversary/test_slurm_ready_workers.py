"""What somebody may try with a worker that stands ready in a Slurm job: read its token, or get its place."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from rollyard_crds.security.job_token import job_of
from rollyard_crds.security.ready_token import ready_worker_of
from rollyard_drivers.reconcile.plan import Owner
from rollyard_slurm.bridge import token_maker
from rollyard_testing.slurm_bridge.bench import Bench, job

pytestmark = pytest.mark.attack(boundary="worker", surface="ready batch job on Slurm")


SECRET = "ry-worker-the-token-of-all-workers"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bridge whose ready worker of the namespace team-a runs."""
    token_of: Callable[[Owner], str] = token_maker(lambda role: SECRET)
    async with httpx.AsyncClient(trust_env=False) as http:
        made = Bench(tmp_path / "h", http, workers={"ready": 1}, account="of-team-a")
        made.token_of = token_of
        made.begin(("team-a",))
        await made.turns()
        made.slurm.run_all()
        await made.turns()
        yield made
        await made.fleet.close()


def asked(bench: Bench, namespace: str, name: str = "qs") -> None:
    made = job(name)
    made.metadata.namespace, made.metadata.uid = namespace, f"u-{name}"
    bench.store.listed.append(made)


@pytest.mark.attack(
    "another user reads its token in the script, the comment or the environment",
    stopped_by="the token is in a file of mode 0600, of which the script has the path; it opens one "
    "assignment",
)
async def test_its_token_is_in_a_file_of_the_user_alone_and_opens_one_assignment(bench: Bench) -> None:
    (file,) = bench.site.tokens.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    found = ready_worker_of(token, SECRET)
    assert found is not None
    assert found.namespace == "team-a"
    assert job_of(token, SECRET) is None
    # Every user of the cluster may read the comment and the name of a job, and at many sites its script.
    seen = bench.slurm.scripts[101] + str(bench.slurm.queued[101])
    assert str(file) in seen, "the script names the file"
    for secret in (token, token.rpartition(".")[2], SECRET):
        assert secret not in seen
    records = "".join(one.read_text() for one in (bench.site.home / "submissions").iterdir())
    assert token.rpartition(".")[2] not in records


@pytest.mark.attack(
    "a job of one namespace runs in the allocation that another namespace holds ready",
    stopped_by="its token names its namespace, and only jobs of this namespace take it",
)
async def test_a_job_of_another_namespace_does_not_get_it(bench: Bench) -> None:
    """A worker that served several namespaces would bring one tenant's work into another one's place."""
    asked(bench, "team-b")
    await bench.turns(1)
    assert bench.store.offers == []
    assert "--ready" not in bench.slurm.scripts[102], "the job starts a worker of its own"
    asked(bench, "team-a", "mine")
    await bench.turns(1)
    (offer,) = bench.store.offers
    assert (offer.namespace, offer.job) == ("team-a", "mine")


@pytest.mark.attack(
    "a job runs in an allocation that another account, partition or profile pays for",
    stopped_by="a worker that was submitted with other settings is replaced and never taken",
)
async def test_a_job_is_not_charged_to_the_account_of_an_earlier_profile(bench: Bench) -> None:
    bench.profile(workers={"ready": 1}, account="of-team-b")
    bench.begin(("team-a",))
    asked(bench, "team-a")
    await bench.turns(1)
    assert bench.store.offers == []
    assert "#SBATCH --account=of-team-b" in bench.slurm.scripts[102]


TWO_JOBS_FOR_ONE_WORKER = pytest.mark.attack(
    "a kill of the bridge, or a restored home, gives one worker to two jobs",
    stopped_by="one write of its record precedes the offer, and the control plane refuses a second offer",
)


@TWO_JOBS_FOR_ONE_WORKER
async def test_of_two_jobs_in_any_order_one_gets_it(bench: Bench) -> None:
    for name in ("a", "b"):
        asked(bench, "team-a", name)
    await bench.turns(1)
    bench.begin(("team-a",))  # It offers again what it may have offered before it was killed.
    await bench.turns(2)
    assert len({(one.worker, one.job, tuple(one.arguments)) for one in bench.store.offers}) == 1


@TWO_JOBS_FOR_ONE_WORKER
async def test_a_record_of_an_earlier_state_of_the_home_gives_it_to_nobody(bench: Bench) -> None:
    """The control plane knows that the worker was offered a job, whatever a restored home says."""
    (record,) = (bench.site.home / "submissions").iterdir()
    before = record.read_text()
    asked(bench, "team-a", "first")
    await bench.turns(1)
    assert json.loads(record.read_text())["ready"]
    record.write_text(before)
    bench.store.listed.clear()
    bench.begin(("team-a",))
    bench.store.refusal = "AlreadyAssigned: it serves one job only"
    asked(bench, "team-a", "second")
    await bench.turns(30)
    assert 101 not in bench.slurm.queued, "it is ended"
    (one,) = [one for one in bench.fleet.jobs if one.workload.owner.name == "second"]
    assert one.job is not None
    assert "--ready" not in bench.slurm.scripts[one.job]
