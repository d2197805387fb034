"""Saves a tiny model with the code of verl and SkyRL, brings it, and prints how far it is from the trained.

    python weights_on_real_packages.py FOLDER SETTINGS.json > seen.json

SETTINGS.json has the arguments with which the scripts of examples/trainers start both trainers.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import inspect
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import typing_extensions

# SkyRL 0.3 gives pydantic a TypedDict of typing, which pydantic takes from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "examples" / "tiny-policy" / "hf"
sys.path += [str(ROOT / "examples" / "trainers" / name) for name in ("verl", "skyrl")]

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

# SkyRL imports the first for attention on a GPU, and verl the others to read which ranks vLLM takes.
for module in (
    "flash_attn",
    "flash_attn.bert_padding",
    "verl.workers.rollout.vllm_rollout",
    "verl.workers.rollout.vllm_rollout.utils",
):
    absent = types.ModuleType(module)
    absent.__spec__ = importlib.machinery.ModuleSpec(module, None)
    absent.__dict__.update(
        dict.fromkeys(
            ("index_first_axis", "pad_input", "rearrange", "unpad_input", "get_vllm_max_lora_rank"),
            lambda value=None: value,
        )
    )
    sys.modules[module] = absent

import hydra  # noqa: E402
from rollyard.integrations.errors import TrainerMismatch  # noqa: E402
from rollyard.integrations.skyrl import SkyrlWeights  # noqa: E402
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy  # noqa: E402
from skyrl.backends.skyrl_train.workers import worker_dispatch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402
from verl.utils.config import validate_config  # noqa: E402

IDS = torch.tensor([[3, 14, 15, 9, 26, 5]])
TOKENIZER = transformers.AutoTokenizer.from_pretrained(BASE)


class Servers:
    """A client whose servers load what they get, and compute with it."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.logits: list[torch.Tensor] = []

    def update_weights(
        self, pool: str, version: str, *, checkpoint: str | None, lora: tuple[str, str] | None, **_: Any
    ) -> Any:
        assert pool == "policy"
        self.versions.append(version.partition("-")[2])
        kind = transformers.AutoModelForCausalLM
        if lora is not None:
            assert lora[0] == "trained"
            base = kind.from_pretrained(BASE, dtype=torch.float32)
            model: Any = peft.PeftModel.from_pretrained(base, lora[1])
        else:
            assert checkpoint is not None
            transformers.AutoTokenizer.from_pretrained(checkpoint)
            model = kind.from_pretrained(checkpoint, dtype=torch.float32)
        self.logits.append(logits(model))
        return types.SimpleNamespace(id=len(self.versions))

    def wait_weights(self, pool: str, update: int, timeout: float) -> Any:
        return types.SimpleNamespace(state="Succeeded")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return what a model computes for some ids."""
    values: torch.Tensor = model(IDS).logits.float()
    return values.full_tensor() if hasattr(values, "full_tensor") else values


def trained(seed: int, *, adapter: bool) -> Any:
    """Return a sharded model whose weights, or whose adapter's, are others than those it began with."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    if adapter:
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    return model


def distances(servers: Servers, model: Any) -> tuple[float, float]:
    """Return how far the servers' newest weights are from the trained ones, and these from those before."""
    values = logits(model)
    before = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return float((servers.logits[-1] - values).abs().max()), float((logits(before) - values).abs().max())


def verl_settings(arguments: list[str]) -> Any:
    """Return verl's configuration with the arguments of examples/trainers/verl/train.sh."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=arguments)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    return config


def of_verl(folder: Path, arguments: list[str], *, adapter: bool) -> dict[str, Any]:
    """Save two checkpoints as verl's workers do, let verl's callback bring them, and resume."""
    import rollyard_weights

    servers = Servers()
    rollyard_weights.Client = lambda: servers  # type: ignore[assignment,misc]
    os.environ |= {"ROLLYARD_POOL": "policy", "ROLLYARD_ADAPTER": "trained" if adapter else ""}
    config = verl_settings(arguments)
    config.trainer.default_local_dir = str(folder)
    callback = build_checkpoint_callback(config)
    seen = []
    for step in (1, 2):
        model = trained(step, adapter=adapter)
        checkpoint = folder / f"global_step_{step}"
        manager = FSDPCheckpointManager(
            model=model,
            processing_class=TOKENIZER,
            optimizer=torch.optim.SGD(model.parameters()),
            checkpoint_config=config.actor_rollout_ref.actor.checkpoint,
        )
        manager.save_checkpoint(str(checkpoint / "actor"), global_step=step)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        callback.on_save(
            trainer=None, global_step=step, checkpoint_dir=str(checkpoint), async_save=False, later=1
        )
        seen.append(distances(servers, model))
    build_checkpoint_callback(config)
    seen.append(distances(servers, model))
    return {"versions": servers.versions, "distances": seen}


def of_skyrl(folder: Path, arguments: list[str], *, adapter: bool) -> dict[str, Any]:
    """Let SkyRL's trainer sync, whose one worker saves the model as SkyRL's do."""
    import train

    config = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(config)
    source = inspect.getsource(RayPPOTrainer.train)
    assert source.index("self.init_weight_sync_state()") < source.index("dispatch.save_weights_for_sampler()")
    servers = Servers()
    strategy = object.__new__(FSDPStrategy)
    strategy.is_rank_0 = lambda: True
    strategy.print = lambda *_: None

    class Group:
        """A worker's group with one worker, in this process."""

        def backload_to_gpu(self, **_: bool) -> None:
            """Do nothing: the model is on the CPU."""

        def async_run_ray_method(self, kind: str, name: str, export_dir: str, tokenizer: Any) -> Any:
            assert (kind, name) == ("pass_through", "save_hf_model")
            return strategy.save_hf_model(trainer.policy, export_dir, tokenizer=tokenizer)

    worker_dispatch.ray = types.SimpleNamespace(get=lambda reference: reference)  # type: ignore[attr-defined]
    trainer = object.__new__(train.RollyardTrainer)
    trainer.dispatch = worker_dispatch.WorkerDispatch(config, typing.cast(Any, Group()))
    trainer.tokenizer = TOKENIZER
    trainer.weights = SkyrlWeights(
        typing.cast(Any, servers), "policy", folder, adapter="trained" if adapter else ""
    )
    trainer.init_weight_sync_state()
    seen = []
    for step in (0, 1, 2):
        trainer.global_step = step
        trainer.policy = trained(step, adapter=adapter)
        asyncio.run(trainer.dispatch.save_weights_for_sampler())
        if step:
            seen.append(distances(servers, trainer.policy))
    plain = SkyrlWeights(typing.cast(Any, servers), "policy", folder, adapter="" if adapter else "trained")
    reason = ""
    try:
        asyncio.run(plain.bring(trainer))
    except TrainerMismatch as error:
        reason = error.reason
    assert reason == "AdapterMismatch"
    return {"versions": servers.versions, "distances": seen}


def main() -> None:
    """Print one JSON object."""
    folder, settings = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    seen = {}
    for adapter in (False, True):
        for name, check in (("verl", of_verl), ("skyrl", of_skyrl)):
            case = f"{name}-{'adapter' if adapter else 'model'}"
            (folder / case).mkdir()
            seen[case] = check(folder / case, settings[case], adapter=adapter)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
