"""Images of Apptainer sandboxes: what is understood, what is refused and how, what is built once."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.apptainer import starter as apptainer_module
from rollyard_pipeline.sandboxes.apptainer.image_cache import BUILDS_AT_ONCE, ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import parse_image
from rollyard_pipeline.sandboxes.apptainer.program import ContainerProgram
from rollyard_pipeline.sandboxes.errors import DiskFull, ImageNotUsable, NodeUnusable, SandboxStartFailed
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_testing.pace import patience

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Env": ["PATH=/opt/own:/usr/bin:/bin", "OF_THE_IMAGE=yes"], "Cmd": ["bash"]},
}


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def layer_of(root: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as layer:
        layer.add(root, arcname=".")
    return stream.getvalue()


def docker_archive(path: Path, root: Path) -> Path:
    """Make by hand what `docker save` writes."""
    layer = layer_of(root)
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = json.dumps({**CONFIG, "rootfs": {"type": "layers", "diff_ids": [digest]}}).encode()
    name = hashlib.sha256(config).hexdigest()
    with tarfile.open(path, "w") as archive:
        add(archive, f"{name}.json", config)
        add(archive, "layer.tar", layer)
        manifest = [{"Config": f"{name}.json", "RepoTags": ["made:here"], "Layers": ["layer.tar"]}]
        add(archive, "manifest.json", json.dumps(manifest).encode())
    return path


def oci_archive(path: Path, root: Path) -> Path:
    """Make an OCI image layout in a tar file by hand."""
    layer = layer_of(root)
    packed = gzip.compress(layer, 1)
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = json.dumps({**CONFIG, "rootfs": {"type": "layers", "diff_ids": [digest]}}).encode()
    kinds = "application/vnd.oci.image"

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        add(archive, f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data)
        return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}

    with tarfile.open(path, "w") as archive:
        for name in ("blobs", "blobs/sha256"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kinds}.manifest.v1+json",
            "config": blob(config, f"{kinds}.config.v1+json"),
            "layers": [blob(packed, f"{kinds}.layer.v1.tar+gzip")],
        }
        entry = blob(json.dumps(manifest).encode(), f"{kinds}.manifest.v1+json")
        add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://x/y.sif", r"know no http://.*docker://NAME"),
        ("docker:x", r"docker:// must be followed by"),
        ("docker://", r"docker:// must be followed by"),
        ("docker://a b", r"docker:// must be followed by"),
        ("images/x.sif", r"not an absolute path and no image's name"),
        ("/does/not/exist.sif", r"no such file on this node"),
        ("docker-archive:/does/not/exist.tar", r"no such file on this node"),
        ("oci-archive:x.tar", r"'x\.tar' is not an absolute path"),
        ("/", r"secrets"),
    ],
)
def test_what_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(ImageNotUsable, match=rf"^sandbox\.image .*{message}"):
        parse_image(text)


def test_what_is_understood(tmp_path: Path) -> None:
    tar = tmp_path / "a b.tar"
    tar.touch()
    assert parse_image("docker://python:3.12-slim").kind == "registry"
    for text in (f"docker-archive:{tar}", f"docker-archive://{tar}"):
        image = parse_image(text)
        assert (image.kind, image.path, image.source) == ("archive", tar, f"docker-archive:{tar}")


def test_broken_files_are_named(tmp_path: Path) -> None:
    other = tmp_path / "x.sif"
    other.write_bytes(b"#!/bin/sh\necho no image\n" * 100)
    with pytest.raises(ImageNotUsable, match=r"is not a SIF file"):
        parse_image(str(other))
    other.write_bytes(b"")
    with pytest.raises(ImageNotUsable, match=r"is not a SIF file"):
        parse_image(str(other))
    with pytest.raises(ImageNotUsable, match=r"is not an image archive"):
        parse_image(f"docker-archive:{other}").key()
    with tarfile.open(other, "w") as archive:
        add(archive, "some/file", b"x")
    with pytest.raises(ImageNotUsable, match=r"neither manifest\.json nor index\.json"):
        parse_image(f"oci-archive:{other}").key()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_that_may_not_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "x.sif"
    closed.touch(mode=0)
    with pytest.raises(ImageNotUsable, match=r"cannot be read: Permission denied"):
        parse_image(str(closed))


def test_key_follows_the_content(kit: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/name").write_text("first")
    first = parse_image(f"docker-archive:{docker_archive(tmp_path / 'a.tar', root)}").key()
    shutil.copy(tmp_path / "a.tar", tmp_path / "b.tar")
    assert parse_image(f"docker-archive:{tmp_path / 'b.tar'}").key() == first
    (root / "etc/name").write_text("other")
    # The layer is named by the archive and not by its content: the configuration tells them apart.
    assert parse_image(f"docker-archive:{docker_archive(tmp_path / 'a.tar', root)}").key() != first


@pytest.mark.apptainer
@pytest.mark.nightly
@pytest.mark.parametrize("make", [docker_archive, oci_archive])
async def test_archives_are_built_once(
    kit: Any, apptainer: NodeProvider, run_dir: Path, tmp_path: Path, make: Any
) -> None:
    root = kit.make_root(tmp_path / "root")
    archive = make(tmp_path / "image.tar", root)
    image = f"{make.__name__.replace('_', '-')}:{archive}"
    async with await kit.acquire(apptainer, image=image, files={"a": "text"}) as sandbox:
        script = "cat /etc/image-name a; echo; echo $OF_THE_IMAGE $PATH $HOME; python3 --version 2>/dev/null"
        _, output = await kit.sh(sandbox, script)
        first, second, words = output.splitlines()
        assert (first, second) == ("made-by-test", "text")
        # These are the image's variables, its PATH first in Apptainer's, and the sandbox's own home.
        assert words.startswith("yes /opt/own:/usr/bin:/bin")
        assert words.endswith(" /work")
        # The injected Python runs though the image has none, nor its libraries.
        script = "/.rollyard/venv/bin/python -c 'import ssl, zmq, ipykernel; print(6 * 7)'"
        assert await kit.sh(sandbox, script) == (0, "42")
    cache = run_dir / "apptainer" / "images"
    (built,) = cache.glob("*.sif")
    assert sorted(path.name for path in cache.iterdir()) == sorted([built.name, f"{built.stem}.json"])
    identity = built.stat().st_ino
    archive.rename(tmp_path / "moved.tar")
    async with await kit.acquire(apptainer, image=image.replace("image.tar", "moved.tar")) as sandbox:
        assert await kit.sh(sandbox, "echo $OF_THE_IMAGE") == (0, "yes")
    assert [path.stat().st_ino for path in cache.glob("*.sif")] == [identity]


@contextmanager
def a_registry(archive: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Run a registry of this machine that has one image, `some/image:1`, over plain HTTP.

    Yields:
        It yields its address, the digest of the image, and what was asked of it.
    """
    with tarfile.open(archive) as opened:
        files = {one.name: opened.extractfile(one) for one in opened if one.isfile()}
        blobs = {
            f"sha256:{name.rpartition('/')[2]}": file.read()
            for name, file in files.items()
            if file is not None and name.startswith("blobs/")
        }
        index = files["index.json"]
        (entry,) = json.loads(index.read())["manifests"]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            kind, data = "application/octet-stream", b"{}"
            repository, _, name = self.path.removeprefix("/v2/").rpartition("/")
            known = self.path == "/v2/"
            if repository == "some/image/manifests" and name in ("1", entry["digest"]):
                known, kind, data = True, entry["mediaType"], blobs[entry["digest"]]
            elif repository == "some/image/blobs" and name in blobs:
                known, data = True, blobs[name]
            self.send_response(200 if known else 404)
            for header, value in (("Content-Type", kind), ("Content-Length", str(len(data)))):
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="registry")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", entry["digest"], asked
        finally:
            server.shutdown()
            thread.join(patience(10))


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_images_of_a_registry_are_fetched_once(
    kit: Any, apptainer: NodeProvider, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_NOHTTPS", "1")
    monkeypatch.setenv("SINGULARITY_NOHTTPS", "1")
    archive = oci_archive(tmp_path / "image.tar", kit.make_root(tmp_path / "root"))
    with a_registry(archive) as (where, digest, asked):
        for name in ("some/image:1", f"some/image@{digest}"):
            image = f"docker://{where}/{name}"
            before = len(asked)
            async with await kit.acquire(apptainer, image=image) as sandbox:
                assert await kit.sh(sandbox, "cat /etc/image-name; echo $OF_THE_IMAGE") == (
                    0,
                    "made-by-test\nyes",
                )
            assert len(asked) > before, "it comes from there"
            before = len(asked)
            async with await kit.acquire(apptainer, image=image) as sandbox:
                assert (await kit.sh(sandbox, "cat /etc/image-name"))[1] == "made-by-test"
            assert len(asked) == before, "and is there from then on"
        with pytest.raises(ImageNotUsable, match=r"sandbox\.image 'docker://.*some/image:2' cannot be built"):
            await kit.acquire(apptainer, image=f"docker://{where}/some/image:2")
    with pytest.raises(SandboxStartFailed, match="could not be built this time"):
        await kit.acquire(apptainer, image=f"docker://{where}/some/image:3")


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_images_that_break_late(kit: Any, apptainer: NodeProvider, sif: Path, tmp_path: Path) -> None:
    whole = sif.read_bytes()
    cut = tmp_path / "cut.sif"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image '.*cut\.sif': .* is cut off"):
        await kit.acquire(apptainer, image=str(cut))
    # It has the right length, with nothing in it.
    empty = tmp_path / "empty.sif"
    empty.write_bytes(whole[:40000] + bytes(len(whole) - 40000))
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image '.*empty\.sif'"):
        await kit.acquire(apptainer, image=str(empty))
    root = kit.make_root(tmp_path / "root")
    (root / "usr/bin/bash").rename(root / "usr/bin/ash")
    (root / "usr/bin/sh").unlink()
    (root / "usr/bin/sh").symlink_to("ash")
    archive = docker_archive(tmp_path / "nobash.tar", root)
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image 'docker-archive:.*nobash\.tar': has no bash"):
        await kit.acquire(apptainer, image=f"docker-archive:{archive}")
    broken = tmp_path / "broken.tar"
    broken.write_bytes(archive.read_bytes()[:-200000])
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image 'docker-archive:.*broken\.tar'"):
        await kit.acquire(apptainer, image=f"docker-archive:{broken}")
    assert apptainer.claimed() == []


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_no_image_at_all(kit: Any, apptainer_works: None, run_dir: Path) -> None:
    provider = kit.open("apptainer", run_dir)
    await provider.start()
    try:
        with pytest.raises(ImageNotUsable, match=r"sandbox\.image: not given.*--default-image"):
            await kit.acquire(provider)
    finally:
        await kit.clean(provider)
    with pytest.raises(ImageNotUsable, match="no such file"):
        await kit.open("apptainer", run_dir, "/no/such.sif").start()


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_without_fuse_images_are_unpacked(
    kit: Any, sif: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apptainer_module, "fuse_problem", lambda: "/dev/fuse is closed to this user")
    provider = kit.open("apptainer", run_dir, str(sif))
    await provider.start()
    try:
        assert "/dev/fuse is closed to this user" in caplog.text
        assert "mode 0666" in caplog.text
        async with await kit.acquire(provider) as sandbox:
            assert await kit.sh(sandbox, "cat /etc/image-name") == (0, "made-by-test")
            assert "fuse" not in (await kit.sh(sandbox, "head -1 /proc/self/mountinfo"))[1]
        (unpacked,) = (run_dir / "apptainer" / "images").glob("*.dir")
        assert (unpacked / "usr/bin/bash").is_file()
    finally:
        await kit.clean(provider)


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_without_fuse_on_an_old_kernel_images_are_read_only(
    kit: Any, root_folder: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, apptainer_works: None
) -> None:
    monkeypatch.setattr(apptainer_module, "fuse_problem", lambda: "/dev/fuse is closed to this user")
    monkeypatch.setattr(apptainer_module.platform, "release", lambda: "4.18.0-553.el8_10.x86_64")
    provider = kit.open("apptainer", run_dir, str(root_folder))
    await provider.start()
    try:
        async with await kit.acquire(provider, files={"a": "text"}) as sandbox:
            code, output = await kit.sh(sandbox, "cat a; touch /tmp/x /usr/x")
            assert code != 0
            assert "/usr/x" in output
            assert "Read-only file system" in output
    finally:
        await kit.clean(provider)


# The cache, with a program that builds in its own way.


def builder(folder: Path, script: str) -> ContainerProgram:
    """Return a program whose `build … TARGET SOURCE` runs `script` with $target and $source set."""
    path = folder / "builder"
    head = '#!/bin/bash\nn=$#; target=${@:n-1:1}; source=${@:n:1}; echo x >> "$0.calls"\n'
    path.write_text(head + script + "\n")
    path.chmod(0o755)
    return ContainerProgram(str(path), "apptainer", "1.4.5", (), True)


def calls(program: ContainerProgram) -> int:
    return len(Path(f"{program.path}.calls").read_text().splitlines())


async def test_one_build_for_all_who_wait(tmp_path: Path) -> None:
    program = builder(tmp_path, 'sleep 0.3; echo "$source" > "$target"')
    # There are two caches, as two nodes have, over the same folder.
    caches = [ImageCache(tmp_path / "cache") for _ in range(2)]
    for cache in caches:
        cache.prepare()
    image = parse_image("docker://some/image:1")
    paths = await asyncio.gather(
        *(cache.ready(image, program, unpacked=False) for cache in caches for _ in range(3))
    )
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "docker://some/image:1\n"
    assert calls(program) == 1
    notes = json.loads(paths[0].with_suffix(".json").read_text())
    assert notes["image"] == "docker://some/image:1"
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".sif"]


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ("dial tcp: lookup registry: no such host", SandboxStartFailed, "could not be built this time"),
        ("toomanyrequests: rate limit, HTTP 429", SandboxStartFailed, "could not be built this time"),
        ("manifest unknown", ImageNotUsable, r"^sandbox\.image 'docker://some/image:1' cannot be built"),
        ("write x: no space left on device", DiskFull, "no room left in the image cache"),
        ("write x: disk quota exceeded", DiskFull, "no room left in the image cache"),
    ],
)
async def test_failures_of_a_build(tmp_path: Path, words: str, error: type[Exception], text: str) -> None:
    program = builder(tmp_path, f'mkdir -p "$target.part"; echo "FATAL: {words}" >&2; exit 255')
    cache = ImageCache(tmp_path / "cache")
    cache.prepare()
    with pytest.raises(error, match=text) as caught:
        await cache.ready(parse_image("docker://some/image:1"), program, unpacked=False)
    assert words in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


async def test_cancelled_build_leaves_nothing_and_no_lock(kit: Any, tmp_path: Path) -> None:
    program = builder(tmp_path, 'touch "$0.began"; sleep 60; echo late > "$target"')
    cache = ImageCache(tmp_path / "cache")
    cache.prepare()
    image = parse_image("docker://some/image:1")
    building = asyncio.create_task(cache.ready(image, program, unpacked=False))
    await kit.until(Path(f"{program.path}.began").exists)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert list((tmp_path / "cache").iterdir()) == []
    again = builder(tmp_path, 'echo now > "$target"')
    path = await cache.ready(image, again, unpacked=False)
    assert path.read_text() == "now\n"


async def test_builds_at_once_are_bounded(tmp_path: Path) -> None:
    """Twice as many images as places: each build waits until all places are taken, and counts the others."""
    script = f'''mkdir -p {tmp_path}/now; touch {tmp_path}/now/$$
for i in $(seq 100); do
  ls {tmp_path}/now | wc -l >> {tmp_path}/seen
  test -e {tmp_path}/full && break
  test $(ls {tmp_path}/now | wc -l) -ge {BUILDS_AT_ONCE} && touch {tmp_path}/full
  sleep 0.05
done
rm {tmp_path}/now/$$; echo > "$target"'''
    cache = ImageCache(tmp_path / "cache")
    cache.prepare()
    program = builder(tmp_path, script)
    images = [parse_image(f"docker://image:{n}") for n in range(2 * BUILDS_AT_ONCE)]
    await asyncio.gather(*(cache.ready(image, program, unpacked=False) for image in images))
    assert calls(program) == len(images)
    assert max(map(int, (tmp_path / "seen").read_text().split())) == BUILDS_AT_ONCE


async def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    program = builder(tmp_path, 'head -c 1000000 /dev/zero > "$target"')
    cache = ImageCache(tmp_path / "cache", max_bytes=2_500_000)
    cache.prepare()
    made = []
    for n in range(3):
        path = await cache.ready(parse_image(f"docker://image:{n}"), program, unpacked=False)
        os.utime(path, (1_000_000_000 + n, 1_000_000_000 + n))
        made.append(path)
    # It is used now, so it stays, though it is the oldest.
    assert await cache.ready(parse_image("docker://image:0"), program, unpacked=False) == made[0]
    await cache.ready(parse_image("docker://image:3"), program, unpacked=False)
    assert [path.exists() for path in made] == [True, False, True]
    assert not made[1].with_suffix(".json").exists()


@pytest.mark.attack(
    "a job's tasks name so many images that those brought ahead fill the node's disk, or displace those "
    "of others",
    boundary="slurm",
    surface="`sandbox.image`",
    stopped_by="two at a time, of the next 64 tasks, and only while the cache has room",
)
async def test_an_image_that_nobody_waits_for_needs_room(tmp_path: Path) -> None:
    program = builder(tmp_path, 'head -c 1000000 /dev/zero > "$target"')
    cache = ImageCache(tmp_path / "cache", max_bytes=1_500_000)
    cache.prepare()
    images = [parse_image(f"docker://image:{n}") for n in range(4)]
    ahead = [await cache.fetch(image, program, unpacked=False) for image in images[:3]]
    assert (ahead, calls(program)) == ([True, True, False], 2)
    # What is there needs no further room, and a sandbox that waits gets its image.
    assert await cache.fetch(images[1], program, unpacked=False)
    oldest = await cache.ready(images[0], program, unpacked=False)
    await cache.ready(images[3], program, unpacked=False)
    assert calls(program) == 3
    # Those that were not used for an hour give way.
    os.utime(oldest, (1_000_000_000, 1_000_000_000))
    os.utime(await cache.ready(images[1], program, unpacked=False), (1_000_000_000, 1_000_000_000))
    assert await cache.fetch(images[2], program, unpacked=False)
    assert not oldest.exists()


def test_cache_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NodeUnusable, match=r"--image-cache .*file/cache cannot be used"):
        ImageCache(tmp_path / "file" / "cache").prepare()
