"""Plugins of the installer's: jobs keep the text of their submission, and names are looked for again."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollyard_api.core.entrypoints import WAYS, Extensions
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs import jobs
from rollyard_api.storage.schema import plugins
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_testing.api.plane import make_manifest, serving

FIRST = """from rollyard_pipeline.handlers import Evaluation, Handler
raise SystemExit("the control plane never runs this")
class ClosenessHandler(Handler):
    async def eval(self, ctx):
        return Evaluation(0.25)
"""
SECOND = FIRST.replace("0.25", "0.75")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def test_a_job_keeps_the_text_that_its_plugin_had(settings: Any, tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(FIRST)
    async with serving(settings, plugins=(file,)) as plane:
        await plane.submit("plain")
        await plane.submit("first", handler="closeness")
        file.write_text(SECOND)
        manifest = make_manifest("first", handler="closeness")
        again = await plane.admin.post("/v1/rolloutjobs", json=manifest)
        assert again.status_code == 200, "the same job, with its own text"
        kept = {"file": "my_rewards.py", "sha256": sha256(FIRST)}
        assert again.json()["status"]["plugins"] == [{**kept, "edited": True}]
        file.write_text("class (\n")
        again = await plane.admin.post("/v1/rolloutjobs", json=manifest)
        assert again.json()["status"]["plugins"] == [{**kept, "edited": True}], "it cannot be used now"
        file.write_text(FIRST)
        again = await plane.admin.post("/v1/rolloutjobs", json=manifest)
        assert again.json()["status"]["plugins"] == [kept]
        file.write_text(SECOND)
        await plane.submit("second", handler="closeness")

        async def known(name: str) -> Any:
            return (await plane.admin.get(f"/v1/rolloutjobs/{name}")).json()["status"].get("plugins")

        assert await known("plain") is None
        assert await known("first") == [{"file": "my_rewards.py", "sha256": sha256(FIRST)}]
        assert await known("second") == [{"file": "my_rewards.py", "sha256": sha256(SECOND)}]
        await plane.driver.put("/v1/rolloutjobs/first/status", json={"phase": "Run"})
        assert await known("first"), "a report of its driver does not remove it"

        spec = (await plane.worker.get("/v1/leases/job", params={"name": "first"})).json()["spec"]
        offers = {"handlers": {"closeness": "ClosenessHandler"}}
        assert spec["plugins"] == [{"file": "my_rewards.py", "sha256": sha256(FIRST), "offers": offers}]
        get = partial(plane.worker.get, "/v1/leases/plugin")
        text = await get(params={"name": "first", "sha256": sha256(FIRST)})
        assert (text.status_code, text.text) == (200, FIRST)
        other = await get(params={"name": "first", "sha256": sha256(SECOND)})
        assert (other.status_code, other.json()["reason"]) == (404, "PluginNotFound")
        for reader in (plane.viewer, plane.anonymous):
            refused = await reader.get("/v1/leases/plugin", params={"name": "first", "sha256": sha256(FIRST)})
            assert refused.status_code in (401, 403)

        # The text goes with its job.
        job_id = await plane.plane.database.write(partial(jobs.delete, namespace="default", name="first"))
        await plane.plane.cancel_rest(job_id)
        while not await plane.plane.database.write(partial(jobs.purge_some, job_id=job_id)):
            pass
        rows = await plane.plane.database.read(lambda conn: conn.execute(plugins.select()).all())
        assert [row.sha256 for row in rows] == [sha256(SECOND)]


async def test_what_nobody_offers_is_refused_with_the_ways_to_offer_it(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FIRST)
    async with serving(settings, plugins=(tmp_path,)) as plane:
        manifest = make_manifest(handler="closenes", agent={"type": "oracle", "tools": ["hammer"]})
        refused = await plane.admin.post("/v1/rolloutjobs", json=manifest)
        problem = refused.json()
        assert (refused.status_code, problem["reason"]) == (422, "NotInstalled")
        assert problem["errors"][0].startswith(
            "spec.handler: no handler 'closenes' is offered; offered: closeness, code, "
        )
        assert problem["errors"][1].startswith("spec.agent.tools[0]: no tool 'hammer' is offered; offered: ")
        assert problem["errors"][2:] == [WAYS], "clients print the errors in the place of the detail"

        # What is wrong with a manifest comes before a name that is taken.
        await plane.submit("taken")
        wrong = await plane.admin.post("/v1/rolloutjobs", json=make_manifest("taken", handler="closenes"))
        assert (wrong.status_code, wrong.json()["reason"]) == (422, "NotInstalled")
        other = await plane.admin.post("/v1/rolloutjobs", json=make_manifest("taken", handler="closeness"))
        assert (other.status_code, other.json()["reason"]) == (409, "AlreadyExists")

        # A file that was edited to nonsense offers nothing, and the answer to jobs that need it says why.
        (tmp_path / "mine.py").write_text("class (\n")
        await plane.submit("plain")
        refused = await plane.admin.post("/v1/rolloutjobs", json=make_manifest(handler="closeness"))
        assert refused.status_code == 422
        reason = "a plugin cannot be used now: mine.py: line 1, column 7: invalid syntax"
        assert refused.json()["errors"][1:] == [reason]
        assert reason in refused.json()["detail"]

        # A name of Rollyard's own is not taken over.
        (tmp_path / "mine.py").write_text(FIRST.replace("ClosenessHandler", "ShellHandler"))
        refused = await plane.admin.post("/v1/rolloutjobs", json=make_manifest("own"))
        assert (refused.status_code, refused.json()["reason"]) == (422, "PluginInvalid")
        assert refused.json()["detail"].startswith("mine.py: ShellHandler has the name 'shell', and Rollyard")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class (\n", "--plugin mine.py: line 1, column 7: invalid syntax"),
        (
            FIRST.replace("ClosenessHandler", "MathHandler"),
            "--plugin mine.py: MathHandler has the name 'math'",
        ),
    ],
)
async def test_a_plugin_with_a_fault_prevents_the_start(
    settings: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(OptionInvalid, match=words):
        async with serving(settings, plugins=(tmp_path / "mine.py",)):
            pass


async def test_a_package_is_found_that_is_installed_later() -> None:
    now, looks, names = [0.0], [], {"math"}

    def look() -> Any:
        looks.append(now[0])
        kinds = {"agents": {"oracle"}, "tool_parsers": {"auto"}, "tools": {"bash", "submit"}}
        own = {kind: frozenset(known) for kind, known in kinds.items()}
        return {
            **own,
            "handlers": frozenset(names),
            "task_formats": frozenset(),
            "reward_functions": frozenset(),
        }

    def spec(handler: str) -> RolloutJobSpec:
        agent = {"type": "oracle", "tools": []}
        return RolloutJobSpec.model_validate({"tasks": {"stream": True}, "handler": handler, "agent": agent})

    extensions = Extensions(look=look, clock=lambda: now[0])
    try:
        assert await extensions.used_by(spec("math")) == ()
        assert looks == [0.0], "what is known needs no further look"
        now[0] = 5.0
        for _ in range(3):
            with pytest.raises(Invalid, match="no handler 'closeness' is offered; offered: math"):
                await extensions.used_by(spec("closeness"))
        assert looks == [0.0, 5.0], "one look a second"
        names.add("closeness")
        now[0] = 6.0
        assert await extensions.used_by(spec("closeness")) == ()
    finally:
        extensions.close()
