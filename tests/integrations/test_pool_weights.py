"""The weights of every trainer reach a pool of a real control plane, whose two servers speak vLLM's calls.

What stands in for the trainers writes what their sources write. `test_real_packages.py` has the real verl and
SkyRL, and `test_trl_trainer.py` the real TRL.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import httpx
import pytest
from rollyard.errors import CliError
from rollyard.integrations.errors import TrainerMismatch
from rollyard.integrations.nemo import NemoWeights
from rollyard.integrations.prime_rl import PrimeRlWeights
from rollyard.integrations.skyrl import SkyrlWeights
from rollyard.integrations.slime import SlimeWeights
from rollyard.integrations.trl import TrlWeights
from rollyard.integrations.verl import VerlWeights
from rollyard.integrations.weights import PoolWeights
from rollyard_api.weights.verification import PROMPT_TOKENS
from rollyard_client import Client
from rollyard_crds.weights import WeightUpdate
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.inference.scripted import LOGPROB, VllmShaped
from rollyard_testing.manifests import pool_manifest

TOKENIZER = "tokenizer.json"


def safetensors(file: Path, step: int) -> None:
    """Write a safetensors file with one tensor, which tells the steps apart."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(header).to_bytes(8, "little") + header + step.to_bytes(4, "little"))


def step_of(folder: Path) -> int:
    """Return the step whose weights are in a folder."""
    (file,) = folder.glob("*.safetensors")
    return int.from_bytes(file.read_bytes()[-4:], "little")


def write_model(folder: Path, step: int, *, adapter: bool = False) -> None:
    """Write what transformers or PEFT saves."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors(folder / ("adapter_model.safetensors" if adapter else "model.safetensors"), step)
    (folder / ("adapter_config.json" if adapter else "config.json")).write_text('{"vocab_size": 100}')


class Trainer:
    """A trainer that stands in for a real one.

    Args:
        folder: Its folder.
        adapter: Whether it trains an adapter.
    """

    weights: ClassVar[type[PoolWeights]]

    def __init__(self, folder: Path, *, adapter: bool = False) -> None:
        self.folder, self.adapter = folder, adapter
        self.base = folder / "base"
        write_model(self.base, 0)
        (self.base / TOKENIZER).write_text("{}")

    def options(self) -> dict[str, Any]:
        """Return what its weights object needs besides the arguments that all have."""
        return {}

    def bring(self, weights: Any, step: int) -> None:
        """Do what the trainer does once it has taken a step."""
        raise AssertionError


class Trl(Trainer):
    weights = TrlWeights

    def bring(self, weights: Any, step: int) -> None:
        model = SimpleNamespace(
            save_pretrained=lambda to, state_dict: write_model(to, state_dict["w"], adapter=self.adapter)
        )
        accelerator = SimpleNamespace(
            is_main_process=True, wait_for_everyone=lambda: None, get_state_dict=lambda model: {"w": step},
            unwrap_model=lambda model: model,
        )  # fmt: skip
        tokenizer = SimpleNamespace(save_pretrained=lambda to: (to / TOKENIZER).write_text("{}"))
        state = SimpleNamespace(global_step=step)
        weights.bring(
            SimpleNamespace(accelerator=accelerator, model=model, state=state, processing_class=tokenizer)
        )


class Verl(Trainer):
    weights = VerlWeights

    def checkpoint(self, step: int) -> Path:
        """Return a checkpoint, of which the older one has been removed."""
        made = self.folder / "checkpoints" / f"global_step_{step}"
        shutil.rmtree(made.with_name(f"global_step_{step - 1}"), ignore_errors=True)
        write_model(made / "actor" / "huggingface", step)
        (made / "actor" / "huggingface" / TOKENIZER).write_text("{}")
        return made

    def bring(self, weights: Any, step: int) -> None:
        weights.bring(self.checkpoint(step))


class Skyrl(Trainer):
    weights = SkyrlWeights

    def bring(self, weights: Any, step: int) -> None:
        def save_hf_model(model: str, folder: str, tokenizer: str) -> None:
            assert (model, tokenizer) == ("policy", "the tokenizer")
            write_model(Path(folder), step, adapter=self.adapter)
            (Path(folder) / TOKENIZER).write_text("{}")

        dispatch = SimpleNamespace(save_hf_model=save_hf_model)
        trainer = SimpleNamespace(dispatch=dispatch, tokenizer="the tokenizer", global_step=step)
        weights.install(trainer)
        asyncio.run(trainer.dispatch.save_weights_for_sampler())  # type: ignore[attr-defined]


class Slime(Trainer):
    weights = SlimeWeights

    def args(self) -> Any:
        """Return the arguments that matter."""
        return SimpleNamespace(
            save_hf=str(self.folder / "hf" / "{rollout_id}"), save_interval=1, hf_checkpoint=str(self.base)
        )

    def save(self, rollout_id: int, *, index: bool = True) -> None:
        """Write the folder of a rollout."""
        saved = self.folder / "hf" / str(rollout_id)
        write_model(saved, rollout_id + 1)
        (saved / TOKENIZER).write_text("{}")
        if index:
            text = json.dumps({"weight_map": {"w": "model.safetensors"}})
            (saved / "model.safetensors.index.json").write_text(text)

    def bring(self, weights: Any, step: int) -> None:
        self.save(step - 1)
        weights.bring(self.args(), step)


class PrimeRl(Trainer):
    weights = PrimeRlWeights

    def options(self) -> dict[str, Any]:
        return {"model": self.base}

    def bring(self, weights: Any, step: int) -> None:
        written = self.folder / "run_default" / "broadcasts" / f"step_{step}"
        shutil.rmtree(written.with_name(f"step_{step - 2}"), ignore_errors=True)
        write_model(written, step, adapter=self.adapter)
        (written / "config.json").unlink(missing_ok=True)
        (written / "STABLE").touch()
        weights.bring(self.folder / "run_default", step)


class Nemo(Trainer):
    weights = NemoWeights

    def options(self) -> dict[str, Any]:
        return {"policy": self, "checkpointing": {"save_consolidated": True, "is_async": True}}

    def save_checkpoint(self, weights_path: str, tokenizer_path: str, checkpointing_cfg: Any) -> None:
        assert checkpointing_cfg == {"save_consolidated": True, "is_async": False}
        model = Path(weights_path) / "model"
        write_model(model if self.adapter else model / "consolidated", self.step, adapter=self.adapter)
        Path(tokenizer_path).mkdir()
        (Path(tokenizer_path) / TOKENIZER).write_text("{}")

    def bring(self, weights: Any, step: int) -> None:
        self.step = step
        assert weights.sync_weights(timer=None, kv_scales=None) == {}


# TRL's trainer is run as a whole every day.
TRAINERS = (pytest.param(Trl, marks=pytest.mark.nightly), Verl, Skyrl, Slime, PrimeRl, Nemo)
OF_ADAPTERS = (pytest.param(Trl, marks=pytest.mark.nightly), Skyrl, PrimeRl, Nemo)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    """Yield a control plane that compares servers with what new weights give."""
    folder = tmp_path_factory.mktemp("api")
    program = folder / "forward"
    answer = json.dumps({"logprobs": [LOGPROB["new"]] * (PROMPT_TOKENS - 1)})
    program.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{answer}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    options = ("--verify-python", str(program))
    with a_control_plane(folder, *options, ready_seconds=50, end_seconds=20) as started:
        yield started


class Served(NamedTuple):
    """A client, and a pool of two servers."""

    client: Client
    pool: str
    servers: list[VllmShaped]

    def loaded(self) -> list[str]:
        """Return the folders that the servers were asked to load, which is the same for each of them."""
        first, second = (
            [
                body["lora_path"] if path.endswith("adapter") else body["kwargs"]["weights_path"]
                for path, body in server.bodies
                if path in ("/v1/load_lora_adapter", "/collective_rpc")
            ]
            for server in self.servers
        )
        assert first == second
        return first

    def updates(self) -> list[WeightUpdate]:
        """Return the pool's updates, the oldest first."""
        return self.client.weight_updates(self.pool)[::-1]


@pytest.fixture
def served(plane: StartedControlPlane, request: pytest.FixtureRequest) -> Iterator[Served]:
    pool = f"p{abs(hash(request.node.name))}"
    servers = [VllmShaped(), VllmShaped()]
    manifest = pool_manifest(pool, {"model": "tiny", "engine": {"type": "vllm"}})
    backends = [{"url": one.url, "ready": True, "policyVersion": one.label} for one in servers]
    calls = (("admin", "POST", "", manifest), ("driver", "PUT", f"/{pool}/backends", {"backends": backends}))
    for role, method, path, body in calls:
        headers = {"Authorization": f"Bearer {plane.tokens[role]}"}
        url = f"{plane.url}/v1/backendpools{path}"
        httpx.request(method, url, json=body, headers=headers).raise_for_status()
    with Client(plane.url, plane.tokens["admin"]) as client:
        yield Served(client, pool, servers)
    for one in servers:
        one.close()


@pytest.mark.parametrize("made_of", TRAINERS)
def test_the_weights_of_each_step_reach_every_server(
    made_of: type[Trainer], served: Served, tmp_path: Path
) -> None:
    trainer = made_of(tmp_path / "trainer")
    folder = tmp_path / "pool"
    options = {"require_verified": True, "keep": 1, **trainer.options()}
    weights = made_of.weights(served.client, served.pool, folder, **options)
    for step in (1, 2):
        trainer.bring(weights, step)
        newest = folder / weights.version
        assert weights.version.partition("-")[2] == f"step-{step}"
        assert [server.label for server in served.servers] == [weights.version] * 2
        assert served.loaded()[-1] == str(newest)
        assert step_of(newest) == step
        assert {"config.json", TOKENIZER} <= {file.name for file in newest.iterdir()}
    updates = served.updates()
    assert [(one.state, one.verified, one.verified_by) for one in updates] == [
        ("Succeeded", True, "transformers")
    ] * 2
    assert [path.name for path in folder.iterdir()] == [weights.version]


@pytest.mark.parametrize("made_of", OF_ADAPTERS)
def test_an_adapter_reaches_every_server_under_its_name(
    made_of: type[Trainer], served: Served, tmp_path: Path
) -> None:
    trainer = made_of(tmp_path / "trainer", adapter=True)
    options = trainer.options()
    plain = made_of.weights(served.client, served.pool, tmp_path / "pool", **options)
    with pytest.raises(TrainerMismatch, match=f"give {made_of.weights.__name__} adapter='NAME'") as refused:
        trainer.bring(plain, 1)
    assert refused.value.reason == "AdapterMismatch"
    assert (served.loaded(), list((tmp_path / "pool").iterdir())) == ([], [])
    weights = made_of.weights(served.client, served.pool, tmp_path / "pool", adapter="trained", **options)
    trainer.bring(weights, 1)
    assert step_of(tmp_path / "pool" / weights.version) == 1
    assert [server.adapters for server in served.servers] == [["trained"]] * 2
    assert [one.in_flight for one in served.updates()] == ["restart"]
    trainer.adapter = False
    with pytest.raises(TrainerMismatch, match=r"has adapter='trained', .* saved a whole model"):
        trainer.bring(weights, 2)
    assert len(served.updates()) == 1


def test_a_server_that_refuses_stops_the_trainer_and_a_second_attempt_succeeds(
    served: Served, tmp_path: Path
) -> None:
    trainer = Skyrl(tmp_path / "trainer")
    weights = SkyrlWeights(served.client, served.pool, tmp_path / "pool")
    served.servers[1].stale = True  # It answers that it has loaded, and keeps its weights.
    with pytest.raises(CliError, match=f"step-1 did not reach pool {served.pool}: ") as refused:
        trainer.bring(weights, 1)
    assert (refused.value.reason, weights.version) == ("WeightsRefused", "")
    served.servers[1].stale = False
    trainer.bring(weights, 1)
    assert weights.version.endswith("-step-1")
    assert [server.label for server in served.servers] == [weights.version] * 2


class Recorder:
    """A client that records the steps whose weights a pool gets, and loads them at once."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        """The step that the version names, and the one whose weights the folder holds."""

    def update_weights(self, pool: str, version: str, *, checkpoint: str, **_: Any) -> Any:
        self.steps.append((int(version.rpartition("-")[2]), step_of(Path(checkpoint))))
        return SimpleNamespace(id=len(self.steps))

    def wait_weights(self, pool: str, update: int, timeout: float) -> Any:
        return SimpleNamespace(state="Succeeded")


def recorded(made_of: type[PoolWeights], folder: Path, **options: Any) -> tuple[Recorder, Any]:
    """Return a recorder, and the weights object that brings weights to it."""
    recorder = Recorder()
    return recorder, made_of(recorder, "policy", folder, **options)  # type: ignore[arg-type]


def test_a_second_attempt_leaves_the_folder_alone_that_servers_may_be_reading(tmp_path: Path) -> None:
    recorder, weights = recorded(PoolWeights, tmp_path)
    states = ["Running", "Succeeded"]
    recorder.wait_weights = lambda *_: SimpleNamespace(state=states.pop(0), message="")  # type: ignore[method-assign]
    filled: list[Path] = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        write_model(folder, 1)

    with pytest.raises(CliError, match="did not reach pool policy: Running"):
        weights.bring_step(1, fill)
    for _ in range(2):
        weights.bring_step(1, fill)
    assert (recorder.steps, len(filled)) == ([(1, 1)] * 2, 1)


def test_what_the_trainer_removes_stays_for_servers_that_restart(tmp_path: Path) -> None:
    for trainer in (Verl(tmp_path / "verl"), PrimeRl(tmp_path / "prime-rl")):
        recorder, weights = recorded(trainer.weights, tmp_path / f"{type(trainer)}", **trainer.options())
        for step in (1, 2, 3, 4):
            trainer.bring(weights, step)
        assert recorder.steps == [(step, step) for step in (1, 2, 3, 4)]
        assert sorted(map(step_of, Path(weights.folder).iterdir())) == [3, 4]


def test_files_are_copied_from_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Any, target: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", link)
    recorder, weights = recorded(VerlWeights, tmp_path / "pool")
    Verl(tmp_path).bring(weights, 1)
    assert recorder.steps == [(1, 1)]


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    trainer = PrimeRl(tmp_path)
    (trainer.base / "config.json").rename(tmp_path / "blob")
    (trainer.base / "config.json").symlink_to(tmp_path / "blob")
    _, weights = recorded(PrimeRlWeights, tmp_path / "pool", model=trainer.base)
    trainer.bring(weights, 1)
    made = tmp_path / "pool" / weights.version / "config.json"
    assert (made.is_symlink(), made.read_text()) == (False, '{"vocab_size": 100}')


def verl_config(trainer: Verl, **of_trainer: Any) -> Any:
    """Return the part of verl's configuration that says where it resumes."""
    local = {"default_local_dir": str(trainer.folder / "checkpoints"), "resume_mode": "auto", **of_trainer}
    model = SimpleNamespace(path=str(trainer.base))
    return SimpleNamespace(trainer=SimpleNamespace(**local), actor_rollout_ref=SimpleNamespace(model=model))


def test_verl_brings_the_checkpoint_from_which_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Verl(tmp_path)
    latest: list[str | None] = [None]
    module = SimpleNamespace(find_latest_ckpt_path=lambda path: latest[0])
    monkeypatch.setitem(sys.modules, "verl.utils.checkpoint.checkpoint_manager", module)
    recorder, weights = recorded(VerlWeights, tmp_path / "pool")
    weights.bring_resumed(verl_config(trainer))
    latest[0] = str(trainer.checkpoint(7))
    weights.bring_resumed(verl_config(trainer, resume_mode="disable"))
    assert recorder.steps == [], "the pool has the weights that a new run begins with"
    weights.bring_resumed(verl_config(trainer))
    assert recorder.steps == [(7, 7)]
    chosen = str(trainer.checkpoint(9))
    weights.bring_resumed(verl_config(trainer, resume_mode="resume_path", resume_from_path=chosen))
    assert recorder.steps == [(7, 7), (9, 9)]
    latest[0] = None
    recorder, weights = recorded(VerlWeights, tmp_path / "pool", at_once=True)
    weights.bring_resumed(verl_config(trainer))
    assert recorder.steps == [(0, 0)]


def test_verl_is_refused_what_no_server_could_load(tmp_path: Path) -> None:
    trainer = Verl(tmp_path)
    recorder, weights = recorded(VerlWeights, tmp_path / "pool")
    with pytest.raises(TrainerMismatch, match=r"async_save to false"):
        weights.bring(trainer.checkpoint(1), async_save=True)
    checkpoint = trainer.checkpoint(2)
    actor = checkpoint / "actor"
    (actor / "lora_train_meta.json").write_text("{}")
    with pytest.raises(TrainerMismatch, match=r"give VerlWeights adapter='NAME'") as refused:
        weights.bring(checkpoint)
    assert refused.value.reason == "AdapterMismatch"
    (actor / "lora_train_meta.json").unlink()
    (actor / "huggingface" / "model.safetensors").unlink()
    with pytest.raises(TrainerMismatch, match=r"has no weights: .*save_contents must have hf_model"):
        weights.bring(checkpoint)
    assert recorder.steps == []


@pytest.mark.parametrize(
    ("lag", "saved", "rollouts", "brought"),
    [
        (0, (0, 1), (0, 1, 2), [1, 2]),
        (1, (0,), (0, 1, 2), [1]),
        (1, (4, 5), (6,), [6]),
        (1, (4,), (6,), [5]),
    ],
)
def test_slime_brings_the_newest_whole_folder(
    tmp_path: Path, lag: int, saved: tuple[int, ...], rollouts: tuple[int, ...], brought: list[int]
) -> None:
    trainer = Slime(tmp_path)
    recorder, weights = recorded(SlimeWeights, tmp_path / "pool", lag=lag)
    weights.bring(trainer.args(), 0)
    for number in saved:
        trainer.save(number)
    trainer.save(max(saved) + 1, index=False)  # slime still writes it.
    for number in rollouts:
        weights.bring(trainer.args(), number)
    assert recorder.steps == [(step, step) for step in brought]


def test_slime_is_refused_without_a_folder_of_each_rollout(tmp_path: Path) -> None:
    trainer = Slime(tmp_path)
    recorder, weights = recorded(SlimeWeights, tmp_path / "pool", timeout=0)
    for change in ({"save_hf": None}, {"save_hf": "/hf"}, {"save_interval": 20}, {"save_interval": None}):
        args = SimpleNamespace(**{**vars(trainer.args()), **change})
        with pytest.raises(TrainerMismatch, match=r"give --save-hf FOLDER/\{rollout_id\} --save-interval 1"):
            weights.bring(args, 3)
    trainer.save(2, index=False)
    with pytest.raises(CliError, match=r"slime's model in .*/hf/2 was not there within 0 s") as late:
        weights.bring(trainer.args(), 3)
    assert (late.value.reason, recorder.steps) == ("WeightsLate", [])
    with pytest.raises(ValueError, match="slime trains no adapters"):
        recorded(SlimeWeights, tmp_path / "pool", adapter="trained")
    recorder, weights = recorded(SlimeWeights, tmp_path / "pool", at_once=True)
    weights.bring(trainer.args(), 0)
    assert recorder.steps == [(0, 0)]


def test_prime_rl_waits_for_the_marker_of_its_trainer(tmp_path: Path) -> None:
    trainer = PrimeRl(tmp_path)
    run = tmp_path / "run_default"
    recorder, weights = recorded(PrimeRlWeights, tmp_path / "pool", model=trainer.base, timeout=0)
    weights.bring(run, 0)
    write_model(run / "broadcasts" / "step_1", 1)
    with pytest.raises(CliError, match=r"prime-rl's .*/step_1/STABLE was not there within 0 s") as late:
        weights.bring(run, 1)
    assert (late.value.reason, recorder.steps) == ("WeightsLate", [])
    with pytest.raises(ValueError, match=r"give the folder of a model, which has a config\.json"):
        recorded(PrimeRlWeights, tmp_path / "pool", model=tmp_path)
    recorder, weights = recorded(PrimeRlWeights, tmp_path / "pool", model=trainer.base, at_once=True)
    weights.bring(run, 0)
    assert recorder.steps == [(0, 0)]


@pytest.mark.parametrize(
    ("completed", "at_once", "stale", "brought"),
    [(0, False, False, [1, 2]), (0, True, True, [0, 1]), (5, False, True, [5, 6])],
)
def test_nemo_rl_counts_its_steps(
    tmp_path: Path, completed: int, at_once: bool, stale: bool, brought: list[int]
) -> None:
    trainer = Nemo(tmp_path)
    options = {"completed": completed, "at_once": at_once, **trainer.options()}
    recorder, weights = recorded(NemoWeights, tmp_path / "pool", **options)
    weights.init_communicator()
    assert weights.is_stale == stale
    for step in brought:
        trainer.bring(weights, step)
    assert not weights.is_stale
    weights.shutdown()
    assert recorder.steps == [(step, step) for step in brought]


def test_nemo_rl_must_save_what_servers_load(tmp_path: Path) -> None:
    trainer = Nemo(tmp_path)

    def save_checkpoint(weights_path: str, **_: Any) -> None:
        write_model(Path(weights_path) / "model", 1)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign,assignment]
    recorder, weights = recorded(NemoWeights, tmp_path / "pool", **trainer.options())
    with pytest.raises(TrainerMismatch, match=r"set checkpointing\.save_consolidated to true"):
        trainer.bring(weights, 1)
    assert (recorder.steps, list((tmp_path / "pool").iterdir())) == ([], [])
