#!/usr/bin/env bash
# Train with verl on the rollouts of Rollyard: bash train.sh [more of verl's settings]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:=/models/Qwen3-8B}" "${RUN:=/checkpoints/verl-1}" "${GPUS:=4}" "${ROLLYARD_ADAPTER:=}"
export ROLLYARD_JOB=$here/job.yaml ROLLYARD_POOL=default ROLLYARD_ADAPTER PYTHONPATH=$here

contents=[model,optimizer,extra,hf_model]
lora=()
if [ -n "$ROLLYARD_ADAPTER" ]; then
  contents=[model,optimizer,extra]
  lora=(
    actor_rollout_ref.model.lora_rank=32
    actor_rollout_ref.model.lora_alpha=64
    actor_rollout_ref.model.target_modules=all-linear
    actor_rollout_ref.rollout.load_format=safetensors
    +actor_rollout_ref.actor.checkpoint.save_lora_only=true
  )
fi

exec python -m verl.trainer.main_ppo \
  data.train_files="$here/train.parquet" \
  data.val_files="$here/train.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=2048 \
  data.max_response_length=8192 \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.checkpoint.save_contents="$contents" \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.calculate_log_probs=true \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
  actor_rollout_ref.rollout.agent.default_agent_loop=rollyard \
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/loops.yaml" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.total_epochs=1 \
  trainer.val_before_train=false \
  trainer.test_freq=-1 \
  trainer.save_freq=1 \
  trainer.max_actor_ckpt_to_keep=2 \
  trainer.default_local_dir="$RUN" \
  trainer.checkpoint_callback_class=rollyard_weights.RollyardWeights \
  "trainer.logger=[console]" \
  ${lora[@]+"${lora[@]}"} "$@"
