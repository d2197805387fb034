"""A user of the same node prepares the place of a worker's sandboxes: nothing of it is used.

The real head of a worker's batch script runs in bash, as Slurm would run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_pipeline.sandboxes.errors import NodeUnusable
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.scripts.site import Site
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="node")


INSTANCE = "abcd1234"
OTHER = 54_321
BASE = f"ry-{os.getuid()}-{INSTANCE}"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@dataclass
class Node:
    """A node's /tmp, and what a worker's script does there before the worker starts."""

    tmp: Path
    secret: Path
    """A file of the victim, whose content must stay."""

    def start(self, name: str = "cn1") -> subprocess.CompletedProcess[str]:
        workload = Workload(
            name="qs-worker-0",
            kind="stage-worker",
            owner=Owner("RolloutJob", "default", "qs", "12345678"),
            stages=("init",),
            concurrency=(("init", 1),),
        )
        profile = SiteProfile.model_validate({"workers": {"runDir": "/tmp"}})
        site = Site(home=Path("/h"), instance=INSTANCE, url="http://h:1", profile=profile)
        text = batch_script(workload, site, SlurmJobIdentity.of(workload, INSTANCE, "f", 0)).text()
        head = text[text.index("umask 077") : text.index("name=qs")].replace("top=/tmp", f"top={self.tmp}")
        return subprocess.run(
            ["bash", "-c", f'{head}\nstat -c %a "$base" "$run"; ls "$run"; echo "$run"'],
            env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": name, "SLURM_JOB_ID": "7"},
            capture_output=True, text=True, timeout=patience(60),
        )  # fmt: skip

    def refused(self) -> None:
        done = self.start()
        assert done.returncode == 73, done.stdout
        assert "choose another workers.runDir" in done.stderr
        assert self.secret.read_text() == "kept"
        with pytest.raises(NodeUnusable, match="cannot be used") as caught:
            SandboxFolder(self.tmp / BASE / "cn1").prepare()
        assert caught.value.reason == "RunDirUnusable"
        assert self.secret.read_text() == "kept"


@pytest.fixture
def node() -> Iterator[Node]:
    # The paths of sockets are short, and pytest's own folders are too long.
    with tempfile.TemporaryDirectory(prefix="ry-", dir="/tmp") as folder:
        tmp = Path(folder, "tmp")
        tmp.mkdir()
        tmp.chmod(0o1777)
        secret = Path(folder, "secret")
        secret.write_text("kept")
        yield Node(tmp, secret)


@pytest.mark.attack(
    "an untouched node, or the site's own link on the way, is taken for an attack",
    surface="run folder",
    stopped_by="both work",
)
def test_an_untouched_node(node: Node) -> None:
    for _ in range(2):
        done = node.start()
        assert done.stdout.split() == ["700", "700", "name", f"{node.tmp}/{BASE}/cn1"], done.stderr
    assert os.listdir(node.tmp) == [], "the last one to leave removes the folders"


def prepare_folder(node: Node) -> None:
    base = node.tmp / BASE
    base.mkdir(mode=0o777)
    os.chown(base, OTHER, OTHER)


def prepare_lock_link(node: Node) -> None:
    prepare_folder(node)
    (node.tmp / BASE / "cn1.lock").symlink_to(node.secret)


def prepare_link_to_private(node: Node) -> None:
    victim = node.secret.parent / "private"
    victim.mkdir(mode=0o700)
    link = node.tmp / BASE
    link.symlink_to(victim)
    os.chown(link, OTHER, OTHER, follow_symlinks=False)


def prepare_socket(node: Node) -> None:
    prepare_folder(node)
    sandboxes = node.tmp / BASE / "cn1" / "sandboxes"
    sandboxes.mkdir(parents=True)
    for folder in (sandboxes, sandboxes.parent):
        os.chown(folder, OTHER, OTHER)


@pytest.mark.attack(
    "another user makes the worker's run folder first, with links, sockets or locks in it",
    surface="a node's shared `/tmp`",
    stopped_by="the whole path must belong to root or to the user, sticky where others write; it is "
    "opened by descriptor; nothing is truncated",
)
@as_root
@pytest.mark.parametrize(
    "attack",
    [prepare_folder, prepare_lock_link, prepare_link_to_private, prepare_socket],
    ids=lambda f: f.__name__,
)
def test_what_another_user_prepared_is_not_used(node: Node, attack: Callable[[Node], None]) -> None:
    attack(node)
    node.refused()


@pytest.mark.attack(
    "another user renames the folder later",
    surface="a node's shared `/tmp`",
    stopped_by="a way that others can write to without a sticky bit is refused",
)
def test_a_run_dir_that_anybody_may_rename_is_refused(node: Node) -> None:
    node.tmp.chmod(0o777)
    node.refused()


@pytest.mark.attack(
    "a folder of the user that others may write to",
    surface="a node's shared `/tmp`",
    stopped_by="it is refused",
)
def test_an_own_folder_that_others_may_write_to_is_refused(node: Node) -> None:
    base = node.tmp / BASE
    base.mkdir()
    base.chmod(0o777)
    assert node.start().returncode == 73


@pytest.mark.attack(
    "it is a link to a file of the victim",
    surface="lock of the run folder",
    stopped_by="it is opened to append and never truncated",
)
def test_a_lock_that_is_a_link_truncates_nothing(node: Node) -> None:
    """A leftover link costs nobody's data, even in the victim's own folder."""
    base = node.tmp / BASE
    base.mkdir(mode=0o700)
    (base / "cn1.lock").symlink_to(node.secret)
    node.start()
    assert node.secret.read_text() == "kept"


@pytest.mark.attack(
    "it holds a path or shell code",
    surface="name of the node",
    stopped_by="other characters than those of names become `_`",
)
@pytest.mark.parametrize("name", ["../../escape", "/etc", "..", "a b;touch x", "$(touch x)"])
def test_a_nodes_name_is_no_path(node: Node, name: str) -> None:
    done = node.start(name)
    run = done.stdout.split("\n")[-2]
    assert done.returncode == 0, done.stderr
    assert Path(run).parent == node.tmp / BASE
    assert "/" not in run.removeprefix(f"{node.tmp}/{BASE}/")
    assert os.listdir(node.tmp) == []


@pytest.mark.attack(
    "a link of the site on the way to it is taken for an attack",
    surface="run folder",
    stopped_by="it is followed once, before the checks",
)
def test_the_sites_own_link_on_the_way_is_followed(node: Node) -> None:
    real = node.tmp.parent / "local"
    real.mkdir(mode=0o755)
    shutil.rmtree(node.tmp)
    node.tmp.symlink_to(real)
    done = node.start()
    assert done.stdout.split()[-1] == f"{real}/{BASE}/cn1", done.stderr
