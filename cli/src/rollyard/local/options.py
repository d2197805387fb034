"""The options of `rollyard up`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, ValidationError
from rollyard_api.options.declared import STATE, LeaseSeconds, ListeningOptions, Option, TaskPrefixes
from rollyard_crds.backendpool import EngineSpec
from rollyard_crds.reading.engine_arguments import is_given
from rollyard_drivers.host.home import default_home

from rollyard.errors import LookupFailed, UsageProblem

DEFAULT_POOL: Final = "default"
BACKENDS: Final = "Backends"
SANDBOXES: Final = "Sandboxes"
WORKERS: Final = "Workers"
_WEIGHTS: Final = "*.safetensors, *.bin or *.pt"
_MODEL_FILES: Final = {
    "embedded": ("genai_config.json", "tokenizer.json", "*.onnx"),
    "vllm": ("config.json", "tokenizer.json", _WEIGHTS),
}
"""The files that a model folder needs, by engine: for each, names or patterns of which one must match."""


def whole_path(path: Path) -> Path:
    """Return a path from the command line or a file, without `~` and links."""
    return path.expanduser().resolve()


def _pair(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise ValueError("must be NAME=VALUE")
    return text


def _engine_args(args: tuple[str, ...]) -> tuple[str, ...]:
    _check_engine({"args": list(args)})
    return args


def _engine_env(pairs: tuple[str, ...]) -> tuple[str, ...]:
    _check_engine({"env": engine_variables(pairs)})
    return pairs


def engine_variables(pairs: Sequence[str]) -> dict[str, str]:
    """Return the variables of an engine by name, from texts NAME=VALUE."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _check_engine(fields: dict[str, Any]) -> None:
    """Check that a BackendPool takes these fields of its engine.

    Raises:
        ValueError: The pool refuses one. The message does not have its value, which may be secret.
    """
    try:
        EngineSpec.model_validate({"type": "vllm", **fields})
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(item["msg"].removeprefix("Value error, ")) from None


HOME_OPTION: Final = Option(
    "State folder", STATE, metavar="DIR", elsewhere=("ROLLYARD_HOME",), default="~/.local/state/rollyard"
)
Engine = Literal["embedded", "vllm"]
"""The engines that a driver starts."""
Replicas = Annotated[int, Field(ge=0, le=1024), Option("Backends to start", BACKENDS)]
Gpus = Annotated[
    int, Field(ge=0, le=64), Option("vLLM: GPUs of each server", BACKENDS, default="not restricted")
]
EngineArgs = Annotated[
    tuple[str, ...],
    AfterValidator(_engine_args),
    Option("Argument of the engine; repeatable", BACKENDS, flag="--engine-arg", metavar="ARG"),
]
EngineEnv = Annotated[
    tuple[Annotated[str, AfterValidator(_pair)], ...],
    AfterValidator(_engine_env),
    Field(repr=False),
    Option(
        "Environment of the engine; repeatable", BACKENDS, flag="--engine-env", metavar="K=V", secret=True
    ),
]
"""Variables of an engine, as NAME=VALUE."""
SandboxTemplates = Annotated[
    bool,
    Option(
        "bubblewrap: fork sandboxes from a template; without, each one's server is started alone, with an "
        "address layout and a hash seed of its own",
        SANDBOXES,
    ),
]
"""Whether bubblewrap sandboxes are forked from a template. Otherwise each one is started alone."""
SandboxTools = Annotated[
    Annotated[Path, AfterValidator(whole_path)] | None,
    Option(
        "A folder with programs, such as harnesses, that every sandbox sees as /.rollyard/tools",
        SANDBOXES,
        metavar="DIR",
    ),
]
"""A folder of each node, which is mounted read-only."""
Fakeroot = Annotated[bool, Option("Apptainer: programs inside are root of their image", SANDBOXES)]


class Options(ListeningOptions):
    """The options of `rollyard up`, which are also the settings of its supervisor."""

    prefix: ClassVar[str] = "ROLLYARD_UP_"

    home: Annotated[Path, AfterValidator(whole_path), HOME_OPTION] = Field(default_factory=default_home)
    backend_url: Annotated[
        str, Option("Use a running vLLM-compatible server", BACKENDS, flag="--backend", metavar="URL")
    ] = ""
    """The URL of a running vLLM-compatible server. If it is empty, the supervisor starts backends itself."""
    engine: Annotated[
        Engine,
        Option("What to start instead of --backend", BACKENDS, default="what serves the model"),
    ] = "embedded"
    """The engine of the backends that the supervisor starts. If none is set, the files of the model say."""
    model: Annotated[
        str,
        Option(
            "Model folder, or OWNER/NAME[@REVISION] of the Hugging Face Hub; with --backend: the name it is "
            "served under",
            BACKENDS,
            metavar="MODEL",
            default="the shipped model",
        ),
    ] = ""
    """The model for the engines `embedded` and `vllm`, as a folder or by its name on the hub, or the name
    that an external server serves."""
    replicas: Replicas = 1
    """The number of backends that the supervisor starts."""
    gpus: Gpus = 0
    """The number of GPUs of each vLLM server. With 0, GPUs are neither requested nor restricted."""
    vllm_python: Annotated[
        str, Option("vLLM: Python of its environment", BACKENDS, metavar="PY", default="`vllm` on PATH")
    ] = ""
    """The Python of an environment with vLLM. If it is empty, the command `vllm` is run. It verifies weight
    updates as well, if no other Python is given for that."""
    engine_args: EngineArgs = ()
    engine_env: EngineEnv = ()
    tokenizer: Annotated[
        str,
        Option(
            "With --backend: folder or hub id with tokenizer.json and chat template",
            BACKENDS,
            metavar="DIR",
            default="that of what the server loaded",
        ),
    ] = ""
    """The folder with tokenizer.json and the chat template, for an external server."""

    sandbox: Annotated[
        Literal["bubblewrap", "apptainer", "docker", "podman", "process"],
        Option("What isolates rollouts; `process` isolates nothing", SANDBOXES),
    ] = "bubblewrap"
    default_image: Annotated[
        str,
        Option(
            "Apptainer, Docker, Podman: the image of jobs that name none (docker://NAME, …)",
            SANDBOXES,
            metavar="IMAGE",
        ),
    ] = ""
    image_cache: Annotated[
        Annotated[Path, AfterValidator(whole_path)] | None,
        Option("Apptainer: where built images are kept", SANDBOXES, metavar="DIR", default="in the home"),
    ] = None
    fakeroot: Fakeroot = False
    build_dockerfiles: Annotated[
        bool,
        Option(
            "Apptainer: build the images of tasks' Dockerfiles; their commands run here, as you", SANDBOXES
        ),
    ] = False
    sandbox_templates: SandboxTemplates = True
    sandbox_tools: SandboxTools = None
    ready_workers: Annotated[
        int,
        Field(ge=0, le=64),
        Option(
            "Ready processes for the workers of jobs; 0: no ready process of any kind",
            WORKERS,
        ),
    ] = 1
    """The number of ready processes that can become stage workers. With 0, there are no ready processes of
    any kind."""

    lease_seconds: LeaseSeconds = 15.0
    """The default is half that of a cluster's control plane, because on one machine no heartbeat waits for a
    network."""
    allow_tasks_from: TaskPrefixes = ("file:///",)
    """The control plane runs as the user who calls it, and only holders of that user's token can submit
    jobs."""

    def sandbox_arguments(self) -> tuple[str, ...]:
        """Return the sandbox options for the command lines of stage workers and of a supervisor."""
        return (
            *("--sandbox", self.sandbox),
            *(("--default-image", self.default_image) if self.default_image else ()),
            *(("--image-cache", str(self.image_cache)) if self.image_cache else ()),
            *(("--fakeroot",) if self.fakeroot else ()),
            *(("--build-dockerfiles",) if self.build_dockerfiles else ()),
            *(() if self.sandbox_templates else ("--no-sandbox-templates",)),
            *(("--sandbox-tools", str(self.sandbox_tools)) if self.sandbox_tools else ()),
        )


def shipped_model() -> Path:
    """Return the folder of the model that is shipped with the engine.

    Raises:
        LookupFailed: This installation lacks the model.
    """
    spec = find_spec("rollyard_engine")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "models" / "tiny-policy"
        if (path / "genai_config.json").is_file():
            return path
    raise LookupFailed(
        "this installation lacks the shipped model (rollyard_engine/models/tiny-policy); "
        "give one with --model DIR, or a running server with --backend URL"
    )


def is_for_vllm(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face model, and none for the embedded engine."""
    return (folder / "config.json").is_file() and not (folder / "genai_config.json").is_file()


def check_model_folder(folder: Path, engine: str, engine_args: Sequence[str]) -> None:
    """Check that a folder holds the files that an engine needs.

    Args:
        folder: The folder.
        engine: The engine, `embedded` or `vllm`.
        engine_args: Its arguments. With `--load-format`, vLLM may find the weights elsewhere or need none.

    Raises:
        UsageProblem: There is no such folder, or it lacks a file. The message names all that are missing.
    """
    if not folder.is_dir():
        raise UsageProblem(
            f"--model: {folder} is not a folder, and a model of the Hugging Face Hub is named OWNER/NAME or "
            "OWNER/NAME@REVISION"
        )
    needed = [
        names
        for names in _MODEL_FILES[engine]
        if names != _WEIGHTS or not is_given(engine_args, "--load-format")
    ]
    missing = [names for names in needed if not any(map(list, map(folder.glob, re.split(", | or ", names))))]
    if missing:
        kind = "an ONNX model of onnxruntime-genai" if engine == "embedded" else "a Hugging Face model"
        raise UsageProblem(
            f"--model: {folder} has no {', no '.join(missing)}; give a folder with {kind} and its tokenizer"
        )
