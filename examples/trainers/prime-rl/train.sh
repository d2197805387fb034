#!/usr/bin/env bash
# Train with prime-rl on the rollouts of Rollyard, in prime-rl's folder: bash train.sh [more of the trainer's settings]
# RESUME is the step of a checkpoint from which to resume.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${MODEL:=/models/Qwen3-8B}" "${RUN:=/checkpoints/prime-rl-1}" "${GPUS:=4}" "${RESUME:=0}" "${ROLLYARD_ADAPTER:=}"

files=(@ "$here/trainer.toml")
settings=(--output-dir "$RUN" --model.name "$MODEL")
if [ -n "$ROLLYARD_ADAPTER" ]; then files+=(@ "$here/lora.toml"); fi
if [ "$RESUME" -gt 0 ]; then settings+=(--ckpt.resume-step "$RESUME"); fi

# The trainer ends after its last step. It looks for the run that orchestrate.py begins, and waits for its batches.
uv run python "$here/orchestrate.py" "$RUN" "$MODEL" "$here/tasks.jsonl" 100 --resume "$RESUME" \
  --adapter "$ROLLYARD_ADAPTER" &
orchestrator=$!
trap 'kill "$orchestrator" 2> /dev/null || true' EXIT
while [ ! -e "$RUN/run_default/ready" ]; do
  kill -0 "$orchestrator"
  sleep 1
done
uv run torchrun --nproc-per-node "$GPUS" -m prime_rl.trainer.rl.train "${files[@]}" "${settings[@]}" "$@"
wait "$orchestrator"
