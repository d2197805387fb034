"""What `rollyard up` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rollyard.errors import NotFound

DEFAULT_PORT = 8765
DEFAULT_POOL = "default"
DEFAULT_LEASE_SECONDS = 15.0
"""Half of what a cluster's control plane takes: on one machine no heartbeat waits for a network."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one supervisor."""

    home: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0: a free one."""
    backend_url: str = ""
    """A running vLLM-compatible server; empty: backends that are started here."""
    engine: str = "embedded"
    """The engine that is started here: `embedded` or `vllm`."""
    replicas: int = 1
    """Backends that are started."""
    vllm_python: str = ""
    """The Python of an environment with vLLM; empty: the command `vllm`."""
    engine_args: tuple[str, ...] = ()
    engine_env: tuple[tuple[str, str], ...] = ()
    gpus: int = 0
    """GPUs of each vLLM server; 0: neither asked for nor restricted."""
    model: str = ""
    """Embedded and vLLM: model folder. External: the name that the server serves."""
    tokenizer: str = ""
    """External: folder with tokenizer.json and the chat template."""
    verify_python: str = ""
    """A Python with torch and transformers, which verifies weight updates; empty: `vllm_python`, if given."""
    sandbox: str = "bubblewrap"
    default_image: str = ""
    """Apptainer: the image of jobs that name none."""
    image_cache: str = ""
    """Apptainer: where built images are kept; empty: in the home."""
    fakeroot: bool = False
    """Apptainer: programs inside are root of their image."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """How long a stage worker may be silent before its rollouts go to another."""

    def sandbox_arguments(self) -> tuple[str, ...]:
        """The sandbox options of stage workers, and of a supervisor."""
        return (
            *("--sandbox", self.sandbox),
            *(("--default-image", self.default_image) if self.default_image else ()),
            *(("--image-cache", self.image_cache) if self.image_cache else ()),
            *(("--fakeroot",) if self.fakeroot else ()),
        )


def shipped_model() -> Path:
    """The folder of the policy that the engine ships.

    Raises:
        NotFound: this installation lacks it.
    """
    spec = find_spec("rollyard_engine")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "models" / "tiny-policy"
        if (path / "genai_config.json").is_file():
            return path
    raise NotFound(
        "this installation lacks the shipped model (rollyard_engine/models/tiny-policy); "
        "give one with --model DIR, or a running server with --backend URL"
    )
