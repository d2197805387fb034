#!/usr/bin/env bash
# Train with NeMo-RL on the rollouts of Rollyard: NEMO_RL=FOLDER bash train.sh [more of NeMo-RL's settings]
# The files of this folder lie in examples/rollyard of NeMo-RL's folder, as the page about NeMo says.
set -euo pipefail
: "${NEMO_RL:?give the folder of NeMo-RL}" "${MODEL:=/models/Qwen3-8B}" "${RUN:=/checkpoints/nemo-1}"
: "${ROLLYARD_ADAPTER:=}"
cd "$NEMO_RL"
export ROLLYARD_JOB=$NEMO_RL/examples/rollyard/job.yaml ROLLYARD_POOL=default ROLLYARD_ADAPTER
export ROLLYARD_WEIGHTS=$RUN/pool ROLLYARD_MODEL=$MODEL PYTHONPATH=$NEMO_RL

lora=()
if [ -n "$ROLLYARD_ADAPTER" ]; then
  lora=(policy.dtensor_cfg.lora_cfg.enabled=true)
fi

exec uv run --with rollyard --extra automodel --extra vllm --extra nemo_gym examples/rollyard/train.py \
  --config examples/rollyard/config.yaml \
  policy.model_name="$MODEL" \
  checkpointing.checkpoint_dir="$RUN" \
  ${lora[@]+"${lora[@]}"} "$@"
