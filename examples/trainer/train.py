"""Train on a stream of rollouts: python train.py TASKS.jsonl CHECKPOINT STEPS STATE.json."""

import json
import os
import sys
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from rollyard import Client

GROUPS, POOL, JOB = 4, "default", "train"
tasks = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
checkpoint, steps, file = sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
state = json.loads(file.read_text()) if file.exists() else {"step": 0, "cursor": None}

with Client() as client:
    client.check_tokenizer(POOL, checkpoint)
    client.submit(Path(__file__).with_name("job.yaml"))
    for step in range(state["step"], steps):
        chosen = islice(cycle(tasks), step * GROUPS, (step + 1) * GROUPS)
        client.push_tasks(JOB, [task | {"id": f"{step}/{task['id']}"} for task in chosen])
        batch = client.batch(JOB, groups=GROUPS, max_lag=1, cursor=state["cursor"])

        rows = batch.arrays()
        means = np.array([rows.rewards[rows.groups == group].mean() for group in rows.groups])
        advantages = (rows.rewards - means)[:, None] * rows.loss_mask
        loss = -(advantages * rows.logprobs).sum() / rows.loss_mask.sum()  # Your optimizer steps here.

        update = client.update_weights(POOL, f"step-{step + 1}", checkpoint=checkpoint)
        done = client.wait_weights(POOL, update.id, timeout=900)
        if done.state != "Succeeded":
            raise SystemExit(f"the weights of step {step + 1} were refused: {done.message}")
        state = {"step": step + 1, "cursor": batch.cursor}
        file.with_suffix(".new").write_text(json.dumps(state))
        os.replace(file.with_suffix(".new"), file)
        print(f"step {step + 1}: reward {rows.rewards.mean():.3f}, loss {loss:.4f}, lags {batch.lags}")
