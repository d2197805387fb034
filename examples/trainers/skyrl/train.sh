#!/usr/bin/env bash
# Train with SkyRL on the rollouts of Rollyard: bash train.sh [more of SkyRL's settings]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:=/models/Qwen3-8B}" "${RUN:=/checkpoints/skyrl-1}" "${GPUS:=4}" "${ROLLYARD_ADAPTER:=}"
export ROLLYARD_JOB=$here/job.yaml ROLLYARD_POOL=default ROLLYARD_ADAPTER PYTHONPATH=$here

lora=()
if [ -n "$ROLLYARD_ADAPTER" ]; then
  lora=(trainer.policy.model.lora.rank=32 trainer.policy.model.lora.alpha=64)
fi

exec python "$here/train.py" \
  data.train_data="['$here/train.jsonl']" \
  trainer.strategy=fsdp \
  trainer.policy.model.path="$MODEL" \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=false \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node="$GPUS" \
  trainer.epochs=1 \
  trainer.train_batch_size=16 \
  trainer.policy_mini_batch_size=16 \
  trainer.micro_forward_batch_size_per_gpu=1 \
  trainer.micro_train_batch_size_per_gpu=1 \
  trainer.max_prompt_length=2048 \
  trainer.eval_interval=-1 \
  trainer.eval_before_train=false \
  trainer.ckpt_interval=10 \
  trainer.max_ckpts_to_keep=2 \
  trainer.resume_mode=latest \
  trainer.ckpt_path="$RUN/checkpoints" \
  trainer.export_path="$RUN" \
  trainer.logger=console \
  trainer.run_name=rollyard \
  generator.n_samples_per_prompt=8 \
  generator.sampling_params.temperature=1.0 \
  generator.sampling_params.max_generate_length=8192 \
  generator.sampling_params.logprobs=1 \
  ${lora[@]+"${lora[@]}"} "$@"
