"""The private place of an evaluation is fresh, empty and out of Run's reach; sabotage is no bad luck."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.client.results import variables_of
from rollyard_sandbox.errors import FileError, SandboxSabotaged
from rollyard_testing.pace import patience

SMALL_PLACE = (192 << 20) // 8  # bytes that the tests' sandboxes may take, by their memory

LOOK = """
set -e
cd "$HOME"; test -z "$(ls -A .)"; test -z "$(ls -A "$TMPDIR")"; test -f "$REWARD"; test ! -s "$REWARD"
echo x > "$HOME/a"; echo y > "$TMPDIR/b"; echo 0.5 > "$REWARD"; stat -c %a "$PLACE"
"""
FILL = "head -c 1G /dev/zero > {0}/fill 2>/dev/null; test -s {0}/fill"


async def look(sandbox: Any) -> tuple[Any, str]:
    place = await sandbox.client.begin_eval()
    env = {
        "PATH": "/usr/bin:/bin", "HOME": place.home, "TMPDIR": place.tmp, "REWARD": place.reward_file,
        "PLACE": place.folder,
    }  # fmt: skip
    result = await sandbox.client.run(["bash", "-c", LOOK], env=env, clean_env=True, cwd="/")
    assert result.exit_code == 0, result.text()
    assert (await sandbox.client.read_file(place.reward_file)).text() == "0.5\n"
    return place, result.text().strip()


async def test_each_evaluation_gets_a_fresh_private_place(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider) as sandbox:
        await sandbox.client.bash("export POLICY=1; (sleep 1000 &)")
        first, mode = await look(sandbox)
        assert mode == "700"
        second, _ = await look(sandbox)  # Another worker does it after the first one was lost.
        assert (await sandbox.client.info()).sessions == ()
        async with await provider.attach(sandbox.handle) as other:
            await look(other)
        await sandbox.client.begin_eval()
        # What the earlier ones held is gone, wherever they were.
        for place in {first.folder, second.folder}:
            with pytest.raises(FileError, match="No such file"):
                await sandbox.client.read_file(f"{place}/home/a")


async def test_every_process_of_run_is_gone(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider) as sandbox:
        running = asyncio.create_task(
            sandbox.client.bash("setsid sleep 4242 & exec sleep 4242", timeout=patience(60))
        )
        await kit.until(lambda: kit.processes_naming("sleep 4242"))
        await sandbox.client.begin_eval()
        assert kit.processes_naming("sleep 4242") == []
        result = await running
        assert (result.killed, result.exit_code) == (True, 137)


async def test_a_locked_work_folder_does_not_matter(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider) as sandbox:
        await sandbox.client.bash("chmod 000 .")
        await look(sandbox)


async def test_a_clean_environment_is_exactly_the_given_one(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider, env={"OF_THE_JOB": "1"}) as sandbox:
        env = {"PATH": "/usr/bin:/bin", "ONLY": "this"}
        clean = await sandbox.client.run(["env"], env=env, clean_env=True)
        assert sorted(clean.text().splitlines()) == ["ONLY=this", "PATH=/usr/bin:/bin"]
        usual = await sandbox.client.run(["env"], env=env)
        assert "OF_THE_JOB=1" in usual.text()


async def test_the_variables_of_the_sandbox_come_with_the_place(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider, env={"OF_THE_JOB": "two\nlines"}) as sandbox:
        await sandbox.client.bash("export OF_RUN=1 OF_THE_JOB=changed")
        place = await sandbox.client.begin_eval()
        shown = await sandbox.client.run(["env", "-0"], cwd="/")
        assert place.environment == variables_of(shown.text())
        assert place.environment["OF_THE_JOB"] == "two\nlines"
        assert "OF_RUN" not in place.environment


async def test_an_evaluation_does_not_begin_without_a_proof(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider) as sandbox:
        sandbox.client.secret = b"k" * 32
        with pytest.raises(SandboxSabotaged):
            await sandbox.client.begin_eval()


LOCK = "chmod 000 /work /tmp /dev/shm"
FILL_ALL = "; ".join(FILL.format(folder) for folder in ("/work", "/tmp", "/dev/shm"))
SABOTAGE = {
    "locked": (LOCK, "mode"),
    "full": (FILL_ALL, "full"),
    "mixed": (f"chmod 555 /work; chmod 000 /tmp; {FILL.format('/dev/shm')}", "full"),
    "removed": (f"rm -rf /work/* /tmp/*; {LOCK}", "mode"),
}


@pytest.mark.parametrize("name", sorted(SABOTAGE))
async def test_no_folder_is_in_the_way_of_a_mounted_place(
    kit: Any, isolated: NodeProvider, name: str
) -> None:
    async with await kit.acquire(isolated) as sandbox:
        await sandbox.client.bash(SABOTAGE[name][0], timeout=patience(60))
        place, _ = await look(sandbox)
        # It is of a fixed size, whatever else is full.
        script = f"head -c 1G /dev/zero > {place.tmp}/fill 2>/dev/null; stat -c %s {place.tmp}/fill"
        result = await sandbox.client.run(["bash", "-c", script], cwd="/")
        assert 1 << 20 < int(result.text()) < SMALL_PLACE


async def test_run_can_never_write_where_a_place_will_be(kit: Any, isolated: NodeProvider) -> None:
    async with await kit.acquire(isolated) as sandbox:
        place = await sandbox.client.begin_eval()
    async with await kit.acquire(isolated, "r-2") as sandbox:
        for script in (f"echo 1 > {place.reward_file}", f"mkdir -p {place.home}"):
            assert (await kit.sh(sandbox, script))[0] not in (0, 127)


async def test_sabotage_is_told_from_bad_luck_where_nothing_can_be_mounted(
    kit: Any, pods: Any, bundle: Path, tmp_path: Path, folder: Path
) -> None:
    """This is the case in a pod."""
    root = kit.make_root(tmp_path / "root", "chmod", "head")
    sizes = [
        part for path in ("/dev/shm", "/tmp", "/work") for part in ("--size", "4194304", "--tmpfs", path)
    ]
    options = ("--unshare-net", "--bind", str(folder), "/sockets", *sizes)
    for name, (script, evidence) in SABOTAGE.items():
        listen = f"unix:/sockets/{name}"
        process, _ = await pods.start(bundle, root, "--listen", listen, options=options)
        try:
            async with await ExecClient.connect(f"unix:{folder}/{name}", token=pods.SECRET) as client:
                await client.bash(script, timeout=patience(60))
                with pytest.raises(SandboxSabotaged, match=evidence):
                    await client.begin_eval()
        finally:
            await pods.stop(process)
