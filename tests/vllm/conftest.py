"""Two real vLLM servers for all tests of this folder, started once.

    def test_something(vllm_servers: list[VllmServer]) -> None: ...

Each test finds both running, with their first weights, whatever the test before did to them.
Tests that kill or restart a server carry the mark `kills_vllm` and run last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rollyard_testing.vllm.forward import Forward, forward_passes
from rollyard_testing.vllm.product import a_product
from rollyard_testing.vllm.proxy import recording
from rollyard_testing.vllm.servers import EnvironmentMissing, VllmServer
from rollyard_testing.vllm.servers import vllm_python as make_environment
from rollyard_testing.vllm.stage import Stage

MODEL = Path(__file__).parent / "model" / "hf"
_FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those that kill a server come last, to spare the others a restart."""
    here = [item for item in items if _FOLDER in item.path.parents]
    for item in here:
        if any("vllm" in name for name in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.vllm)
    last = [item for item in here if item.get_closest_marker("kills_vllm")]
    items[:] = [item for item in items if item not in last] + last


@pytest.fixture(scope="session")
def vllm_model() -> Path:
    """Return the test model: a Hugging Face folder whose vocabulary holds every family's special tokens."""
    return MODEL


@pytest.fixture(scope="session")
def vllm_python(missing: Callable[[str], NoReturn]) -> Path:
    """Return the Python of the environment with vLLM, torch, transformers and safetensors."""
    try:
        return make_environment()
    except EnvironmentMissing as error:
        missing(str(error))


@pytest.fixture(scope="session")
def forward(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forward]:
    """Yield a process that computes log-probabilities again, with transformers."""
    with forward_passes(vllm_python, tmp_path_factory.mktemp("forward")) as running:
        yield running


StartVllm = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def start_vllm(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, even_scheduling: None
) -> Iterator[StartVllm]:
    """Yield a starter of further servers, `start_vllm(model, index, …)`, which are ready; arguments as
    VllmServer's.

    `ready=False` returns at once, so several can start together; `wait()` has to be called then.
    """
    folder = tmp_path_factory.mktemp("vllm")
    started: list[VllmServer] = []

    def start(model: Path, index: int, *, ready: bool = True, **options: Any) -> VllmServer:
        server = VllmServer(vllm_python, model, index, folder, **options)
        started.append(server)
        server.launch()
        if ready:
            server.wait()
        return server

    try:
        yield start
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="session")
def vllm_fleet(start_vllm: StartVllm, vllm_model: Path) -> list[VllmServer]:
    """Return the two servers, for fixtures that live longer than a test. They may need `heal()`."""
    servers = [start_vllm(vllm_model, index, ready=False) for index in (0, 1)]
    for server in servers:
        server.wait()
    return servers


@pytest.fixture(scope="session")
def _third(start_vllm: StartVllm, vllm_model: Path) -> VllmServer:
    arguments = ("--no-enable-scale-out", "--logprobs-mode", "raw_logprobs")
    return start_vllm(vllm_model, 0, arguments=arguments, ready=False)


@pytest.fixture
def completions_server(_third: VllmServer) -> VllmServer:
    """Return a third server without `/inference/v1/generate`, with log-probabilities before temperature.

    The last test that needs it stops it, for its memory.
    """
    if _third.alive():
        _third.wait()  # It waits for its first start.
    _third.heal()
    return _third


@pytest.fixture(scope="session")
def stage(
    vllm_fleet: list[VllmServer], vllm_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Stage]]:
    """Return a product of its own before the two servers, with a proxy before each: `with stage() as there`.

    `stage([server])` puts it before others.
    """

    @contextmanager
    def make(servers: Sequence[VllmServer] = ()) -> Iterator[Stage]:
        folder = tmp_path_factory.mktemp("stage")
        with ExitStack() as stack:
            proxies = [
                stack.enter_context(recording(server.url, folder, f"proxy{number}"))
                for number, server in enumerate(servers or vllm_fleet)
            ]
            yield Stage(stack.enter_context(a_product()), proxies, folder, vllm_model)

    return make


@pytest.fixture
def vllm_servers(vllm_fleet: list[VllmServer], request: pytest.FixtureRequest) -> Iterator[list[VllmServer]]:
    """Yield two real vLLM servers of the test model; where a test fails, the end of their logs is shown."""
    for server in vllm_fleet:
        server.heal()
    failed = request.session.testsfailed
    yield vllm_fleet
    if request.session.testsfailed > failed:
        for server in vllm_fleet:
            request.node.add_report_section("teardown", server.log.name, server.words())
