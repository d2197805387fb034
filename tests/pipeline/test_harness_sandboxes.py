"""The agent of the example plays a rollout in each kind of sandbox that isolates on one node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.stages.stages import Stages
from rollyard_testing.pipeline.single_rollouts import Plane, Rollout, UseModel, call
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif, podman_image

AGENT = Path(__file__).resolve().parents[2] / "examples/harness/agent.py"
COMMAND = 'test -t 0 && test -t 1 && /.rollyard/venv/bin/python -u "$ROLLYARD_HARNESS/agent.py"'

pytestmark = pytest.mark.slow


@pytest.fixture(
    params=[
        "bubblewrap",
        pytest.param("apptainer", marks=pytest.mark.apptainer),
        pytest.param("podman", marks=(pytest.mark.podman, pytest.mark.nightly)),
    ]
)
async def rollout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rollout]:
    """Yield a rollout whose sandboxes are of one of the kinds that isolate on one node."""
    request.getfixturevalue(f"{request.param}_works")
    folder, image = tmp_path_factory.mktemp("s"), None
    if request.param == "apptainer":
        image = str(make_sif(make_image(folder / "root")))
    elif request.param == "podman":
        image = request.getfixturevalue("engine_image")
    provider = open_provider(
        request.param,
        run_dir=folder / "run",
        node="n",
        apptainer=ApptainerOptions(default_image=image),
        default_image=image,
    )
    await provider.start()
    plane: Any = Plane()
    try:
        async with BackendClient(stall_timeout=20.0) as backends:
            egress = Egress()
            stages = Stages(plane, backends, provider, Registry({}), backend_budget=1.0, egress=egress)
            yield Rollout(provider, stages, plane, egress.infrastructure)
            await stages.close()
    finally:
        for sandbox in provider.claimed():
            await provider.release(sandbox)
        await provider.aclose()


@pytest.fixture(scope="module")
def engine_image(podman_works: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of an image in Podman with all that the agent calls."""
    with podman_image(make_image(tmp_path_factory.mktemp("image") / "root")) as name:
        yield name


async def test_an_agent_plays_a_rollout(rollout: Rollout, model: UseModel) -> None:
    steps = [
        call("bash", command="grep -c wagon meadow.txt > count.txt; cat count.txt"),
        call("submit", answer="2"),
    ]
    agent = {
        "type": "harness",
        "harness": "command",
        "command": COMMAND,
        "files": {"agent.py": AGENT.read_text()},
        "terminal": True,
    }
    task = {
        "prompt": "Count the wagons.",
        "sandbox": {"files": {"meadow.txt": "wagon 1\nbagel 2\nwagon 3\n"}},
        "test_script": '[ "$(cat count.txt)" = 2 ] && [ "$ROLLYARD_ANSWER" = 2 ]',
    }
    model(lambda prompt: steps["count.txt" in prompt], agent, task)
    trajectory = await rollout.play()
    record = trajectory.harness
    assert record is not None
    assert record.exit_code == 0, record.output
    assert record.output.split() == ["bash:", "2", "submit:", "submitted"]
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "2"
    # Each prompt is the ids of the segment so far, and what the model has said is trained on, once.
    (segment,) = trajectory.segments
    prompts = [segment.prompt_ids + segment.response_ids[: turn.start] for turn in trajectory.turns]
    assert rollout.model.prompts == prompts
    sampled = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
    assert sampled == [token for step in steps for token in rollout.model.tokenizer.encode(step)]
    assert (await rollout.score()).reward == 1.0
