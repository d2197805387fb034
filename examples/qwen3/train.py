"""Train a model on tasks.jsonl with TRL and rollouts from Rollyard: python train.py RUN."""

import json
import os
import sys
from pathlib import Path

import yaml
from datasets import Dataset
from peft import LoraConfig
from rollyard import Client
from rollyard.integrations.trl import TrlRollouts, TrlWeights, rollyard_reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL, POOL, PROMPTS, SAMPLES, STEPS = "Qwen/Qwen3-8B", "default", 16, 8, 100
# With None, all weights are trained.
LORA = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")

run, folder = sys.argv[1], Path("runs", sys.argv[1])
tasks = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
job = yaml.safe_load(Path("job.yaml").read_text())
job["metadata"]["name"] = run
job["spec"] |= {"tasks": {"stream": True}, "samplesPerTask": SAMPLES}
config = GRPOConfig(
    output_dir=str(folder / "trainer"),
    max_steps=STEPS,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=PROMPTS * SAMPLES // int(os.environ.get("WORLD_SIZE", "1")),
    num_generations=SAMPLES,
    learning_rate=1e-5 if LORA else 1e-6,
    lr_scheduler_type="constant",
    temperature=job["spec"]["sampling"]["temperature"],
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
with Client() as client:
    client.check_tokenizer(POOL, MODEL)
    adapter = "trained" if LORA else ""
    weights = TrlWeights(client, POOL, folder / "weights", adapter=adapter, at_once=True, timeout=1800)
    rollouts = TrlRollouts(client, job, tasks, weights=weights, timeout=7200)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16" if LORA else "float32"),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        args=config,
        train_dataset=Dataset.from_list(rollouts.dataset()),
        reward_funcs=rollyard_reward,
        rollout_func=rollouts,
        peft_config=LORA,
    )
    with rollouts.player:
        trainer.train()
        trainer.accelerator.wait_for_everyone()
trainer.save_model(str(folder / "model"))
