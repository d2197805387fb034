"""Checkpoints: what servers load, what a run continues from, and what a broken one is answered with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rollyard import Group
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from tinygrpo.batch import Row
from tinygrpo.checkpoint import Checkpoints, Progress
from tinygrpo.errors import CheckpointError
from tinygrpo.ledger import UsedGroup, read_ledger
from tinygrpo.onnx_folder import OnnxTemplate
from tinygrpo.policy import load_policy, reference
from tinygrpo.rollouts import StreamPlace
from tinygrpo.update import UpdateSettings, make_optimizer, update_policy


@pytest.fixture
def checkpoints(tmp_path: Path, base: Path, onnx_folder: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", base, OnnxTemplate(onnx_folder))


def test_the_shipped_weights_give_the_shipped_onnx_file(
    tmp_path: Path, base: Path, onnx_folder: Path
) -> None:
    OnnxTemplate(onnx_folder).write(load_file(base / "model.safetensors"), tmp_path)
    for file in onnx_folder.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_every_weight_reaches_the_onnx_file(tmp_path: Path, base: Path, onnx_folder: Path) -> None:
    template = OnnxTemplate(onnx_folder)
    weights = load_file(base / "model.safetensors")
    shipped = (onnx_folder / "model.onnx.data").read_bytes()
    for name, value in weights.items():
        template.write({**weights, name: value + 1}, tmp_path)
        written = (tmp_path / "model.onnx.data").read_bytes()
        changed = np.frombuffer(written, "<f4") != np.frombuffer(shipped, "<f4")
        assert int(changed.sum()) == value.size, name


def test_weights_that_do_not_fit_the_graph_are_refused(tmp_path: Path, base: Path, onnx_folder: Path) -> None:
    template = OnnxTemplate(onnx_folder)
    weights = load_file(base / "model.safetensors")
    head = weights.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*lacks"):
        template.write(weights, tmp_path)
    with pytest.raises(CheckpointError, match="has the shape"):
        template.write({**weights, "lm_head.weight": head[:-1]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"no place for model\.layers\.9"):
        template.write({**weights, "lm_head.weight": head, "model.layers.9.x": head}, tmp_path)


def test_a_folder_without_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.onnx cannot be read"):
        OnnxTemplate(tmp_path)


def test_a_run_continues_where_it_was(
    checkpoints: Checkpoints, policy: PreTrainedModel, sampled_rows: list[list[Row]]
) -> None:
    optimizer = make_optimizer(policy, 1e-4)
    settings = UpdateSettings(1e-4, 2)
    update_policy(policy, optimizer, sampled_rows, 3, random.Random(0), settings)
    progress = Progress(
        1, StreamPlace("c1.7", 40, 96), 320, 12.5, 1, {"success": 0.5, "groups": {"stale": 1}}
    )
    folder = checkpoints.save(policy, optimizer, progress)
    assert checkpoints.newest() == folder
    resumed = load_policy(folder)
    other = make_optimizer(resumed, 1e-4)
    assert checkpoints.restore(folder, other) == progress
    for model, its in ((policy, optimizer), (resumed, other)):
        update_policy(model, its, sampled_rows, 4, random.Random(1), settings)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_checkpoint_that_was_cut_off_is_not_the_newest(
    checkpoints: Checkpoints, policy: PreTrainedModel, tmp_path: Path
) -> None:
    assert checkpoints.newest() is None
    first = checkpoints.save(policy, make_optimizer(policy, 1e-4), Progress(1))
    (tmp_path / "checkpoints" / "step-0002.partial").mkdir()
    (tmp_path / "checkpoints" / "step-0002.partial" / "trainer.pt").write_bytes(b"")
    assert checkpoints.newest() == first


def test_only_the_last_two_keep_the_state_of_the_trainer(
    checkpoints: Checkpoints, policy: PreTrainedModel
) -> None:
    for step in range(4):
        checkpoints.save(policy, make_optimizer(policy, 1e-4), Progress(step))
    assert [(checkpoints.path(step) / "trainer.pt").exists() for step in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert all((checkpoints.path(step) / "model.onnx.data").exists() for step in range(4))


def test_a_broken_state_is_refused(checkpoints: Checkpoints, policy: PreTrainedModel) -> None:
    optimizer = make_optimizer(policy, 1e-4)
    folder = checkpoints.save(policy, optimizer, Progress())
    (folder / "trainer.pt").write_bytes((folder / "trainer.pt").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"trainer\.pt cannot be used"):
        checkpoints.restore(folder, optimizer)


def test_a_checkpoint_is_never_written_over(checkpoints: Checkpoints, policy: PreTrainedModel) -> None:
    optimizer = make_optimizer(policy, 1e-4)
    folder = checkpoints.save(policy, optimizer, Progress())
    before = (folder / "trainer.pt").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoints.save(policy, optimizer, Progress())
    assert (folder / "trainer.pt").read_bytes() == before


def test_a_newest_checkpoint_without_its_state_is_refused(
    checkpoints: Checkpoints, policy: PreTrainedModel
) -> None:
    optimizer = make_optimizer(policy, 1e-4)
    checkpoints.save(policy, optimizer, Progress())
    (checkpoints.save(policy, optimizer, Progress(1)) / "trainer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step-0001 has no trainer\.pt"):
        checkpoints.newest()


def test_the_ledger_is_in_the_checkpoints_and_in_the_order_of_the_steps(
    checkpoints: Checkpoints, policy: PreTrainedModel, group: Callable[..., Group]
) -> None:
    optimizer = make_optimizer(policy, 1e-4)
    checkpoints.save(policy, optimizer, Progress())
    for step, name in ((1, "z"), (2, "a")):
        checkpoints.save(policy, optimizer, Progress(step), [UsedGroup.of(step, "trained", group(name))])
    found = list(read_ledger(checkpoints.folder))
    assert [(one.step, one.group, one.rollouts) for one in found] == [
        (1, "z", ["z-0", "z-1"]),
        (2, "a", ["a-0", "a-1"]),
    ]
    (checkpoints.path(2) / "used.jsonl").write_text("{}")
    with pytest.raises(CheckpointError, match=r"used\.jsonl cannot be used"):
        list(read_ledger(checkpoints.folder))


def test_servers_of_other_users_can_read_it(
    checkpoints: Checkpoints, policy: PreTrainedModel, base: Path
) -> None:
    folder = checkpoints.save(policy, make_optimizer(policy, 1e-4), Progress())
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_reference_has_one_log_probability_for_each_id_after_the_first(policy: PreTrainedModel) -> None:
    found = reference(policy, [5, 6, 7, 8], 0.001)
    assert found["promptIds"] == [5, 6, 7, 8]
    logprobs = found["logprobs"]
    assert isinstance(logprobs, list)
    assert len(logprobs) == 3
    assert max(logprobs) <= 0.0
