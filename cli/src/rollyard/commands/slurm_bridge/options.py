"""The options of `slurm-bridge up`, which are checked together and converted to those of the bridge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard_drivers.host.home import Home
    from rollyard_slurm.options import BridgeOptions


def bridge_home(given: Path | None) -> Home:
    """Return the home that `--home` names, or the default one."""
    from rollyard_drivers.host.home import Home, default_home
    from rollyard_slurm.options import COMMAND

    return Home((given or default_home()).expanduser().absolute(), COMMAND)


def bridge_options(given: dict[str, Any]) -> BridgeOptions:
    """Return the options of the bridge for those of the command line.

    Raises:
        UsageProblem: Options contradict each other, or one of them has a value that cannot be used.
    """
    from rollyard_crds.base import NAME_PATTERN
    from rollyard_drivers.host.control_plane import DEFAULT_NO_BACKEND_SECONDS
    from rollyard_slurm import profile as profiles
    from rollyard_slurm.options import BridgeOptions

    from rollyard.errors import UsageProblem
    from rollyard.host_options import check_hosts
    from rollyard.telemetry_options import set_telemetry

    home = bridge_home(given["home"]).root
    if bool(given["join"]) != (given["token_file"] is not None):
        raise UsageProblem("--join and --token-file belong together")
    if not given["join"] and (given["namespaces"] or given["all_namespaces"]):
        raise UsageProblem("--namespace and --all-namespaces go with --join")
    if given["join"] and bool(given["namespaces"]) == given["all_namespaces"]:
        raise UsageProblem(
            "--join needs --namespace NAME (repeatable) or --all-namespaces: a user who may make a "
            "BackendPool there can run programs as the user of this bridge"
        )
    for name in given["namespaces"]:
        if not re.fullmatch(NAME_PATTERN.strip("^$"), name):
            raise UsageProblem(f"--namespace must be a name such as team-a (got {name!r})")
    if given["join"] and given["engine"] != "none":
        raise UsageProblem(
            "--engine is for a control plane of its own; with --join, submit a BackendPool that says "
            "`placement: slurm`"
        )
    if given["join"] and not given["join"].startswith(("http://", "https://")):
        raise UsageProblem(f"--join must be a URL such as http://head:8765 (got {given['join']!r})")
    if given["join"] and given["no_backend_seconds"] is not None:
        raise UsageProblem(
            "--no-backend-seconds is for a control plane of its own; --join names one that has its own limit"
        )
    if given["join"] and (given["allow_sandbox_hosts"] or given["allow_eval_hosts"]):
        raise UsageProblem(
            "--allow-sandbox-host and --allow-eval-host are for a control plane of its own; the one that "
            "--join names has its own lists"
        )
    check_hosts(given["allow_sandbox_hosts"], given["allow_eval_hosts"])
    if given["join"] and (given["allow_rewards_from"] or given["allow_rewards_networks"]):
        raise UsageProblem(
            "--allow-rewards-from and --allow-rewards-network are for a control plane of its own; the one "
            "that --join names has its own list"
        )
    if given["listen"] == "unix" and (given["advertise"] or given["port"]):
        raise UsageProblem("--advertise and --port have no meaning with --listen unix")
    variables = set_telemetry(given["otlp_endpoint"], given["trace_sample"], given["log_format"])
    telemetry = tuple(sorted(variables.items()))
    names = ("partition", "account", "qos", "time_limit", "constraint")
    chosen = {name: given[name] for name in names}
    if given["rest_url"]:
        chosen["rest"] = {"url": given["rest_url"]}
    site = profiles.load(given["profile"], chosen)
    sandbox: list[str] = []
    if given["no_sandbox_templates"]:
        if given["sandbox"] != "bubblewrap":
            raise UsageProblem("--no-sandbox-templates goes with --sandbox bubblewrap")
        sandbox.append("--no-sandbox-templates")
    sandbox += _allowed_images(given)
    for name, value in (("--default-image", given["default_image"]), ("--image-cache", given["image_cache"])):
        if value and given["sandbox"] != "apptainer":
            raise UsageProblem(f"{name} goes with --sandbox apptainer")
        if value:
            # `docker://NAME`, `docker-archive:/PATH` and similar sources are not paths and stay unchanged.
            local = re.match(r"[a-z][a-z-]*:", value) is None
            sandbox += [name, str(Path(value).expanduser().absolute()) if local else value]
    if given["build_dockerfiles"]:
        if given["sandbox"] != "apptainer":
            raise UsageProblem("--build-dockerfiles goes with --sandbox apptainer")
        sandbox.append("--build-dockerfiles")
    if given["sandbox"] == "apptainer" and not given["image_cache"]:
        sandbox += ["--image-cache", str(home / "images")]
    return BridgeOptions(
        home=home,
        join=given["join"],
        tokens=given["token_file"],
        namespaces=tuple(given["namespaces"]),
        ca_file=given["ca_file"] if given["join"].startswith("https://") else None,
        listen=given["listen"],
        advertise=given["advertise"],
        port=given["port"],
        sandbox=given["sandbox"],
        sandbox_options=tuple(sandbox),
        profile=site,
        telemetry=telemetry,
        pools=_pools(given),
        lease_seconds=given["lease_seconds"],
        no_backend_seconds=given["no_backend_seconds"] or DEFAULT_NO_BACKEND_SECONDS,
        allow_sandbox_hosts=tuple(given["allow_sandbox_hosts"]),
        allow_eval_hosts=tuple(given["allow_eval_hosts"]),
        allow_rewards_from=given["allow_rewards_from"],
        allow_rewards_networks=given["allow_rewards_networks"],
        timeout=given["command_timeout"],
        max_jobs=given["max_jobs"],
    )


def _allowed_images(given: dict[str, Any]) -> list[str]:
    """Return the workers' options about the images that jobs may name.

    Whoever uses a control plane of this bridge holds this user's token. Authors of a control plane that the
    bridge joins do not, and an image shows them files of this user.
    """
    from rollyard.errors import UsageProblem

    entries = list(given["allow_images"]) or (["none"] if given["join"] else [])
    found = []
    for entry in entries:
        alone = entry in ("any", "none")
        if alone and len(entries) > 1:
            raise UsageProblem(f"--allow-image {entry} stands alone")
        if not alone and ":" in entry and not re.match(r"(docker|oras|library|shub)://[^\s/]", entry):
            raise UsageProblem(
                f"--allow-image {entry}: give a path, or a reference such as docker://HOST/PREFIX/; a path "
                "also allows the archives below it"
            )
        reference = alone or "://" in entry
        found += ["--allow-image", entry if reference else str(Path(entry).expanduser().absolute())]
    return found


def _pools(given: dict[str, Any]) -> tuple[Any, ...]:
    from rollyard.errors import UsageProblem
    from rollyard.local.options import Options
    from rollyard.local.supervisor import default_pool

    engine, model = given["engine"], given["model"]
    for name, asked in (("--engine-arg", given["engine_args"]), ("--engine-env", given["engine_env"])):
        if asked and engine == "none":
            raise UsageProblem(f"{name} goes with --engine")
    if engine == "none":
        if model:
            raise UsageProblem("--model goes with --engine")
        return ()
    if given["gpus"] and engine != "vllm":
        raise UsageProblem("--gpus goes with --engine vllm")
    if engine == "vllm" and not model:
        raise UsageProblem("--engine vllm needs --model DIR, a Hugging Face model folder")
    wrong = next(
        (pair for pair in given["engine_env"] if not pair.partition("=")[0] or "=" not in pair), None
    )
    if wrong is not None:
        raise UsageProblem(f"--engine-env must be NAME=VALUE (got {wrong!r})")
    if model.startswith(("/", "~", ".")):
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise UsageProblem(f"--model: {folder} is no folder")
        model = str(folder)
    pairs = (pair.partition("=") for pair in given["engine_env"])
    options = Options(
        home=Path(),
        engine=engine,
        replicas=given["replicas"],
        engine_args=given["engine_args"],
        engine_env=tuple((name, value) for name, _, value in pairs),
        gpus=given["gpus"],
        model=model,
    )
    return (default_pool(options),)
