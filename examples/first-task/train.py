"""Two steps of a training on the tasks of job.yaml, without an optimizer: python train.py."""

import json
import time
from pathlib import Path

import yaml
from rollyard import Client

STEPS = 2
job = yaml.safe_load(Path("job.yaml").read_text())
tasks = [json.loads(line) for line in Path(job["spec"]["tasks"]["url"]).read_text().splitlines()]
# Each run has a stream of its own, with the job and the rewards of this time.
name = job["metadata"]["name"] = f"{job['metadata']['name']}-train-{time.time():.0f}"
job["spec"]["tasks"] = {"stream": True}

with Client() as client:
    client.submit(job)
    try:
        cursor = None
        for step in range(STEPS):
            client.push_tasks(name, [task | {"id": f"{step}-{task['id']}"} for task in tasks])
            batch = client.batch(name, groups=len(tasks), cursor=cursor, timeout=600)
            rows = batch.arrays()  # token ids, log-probabilities, loss mask and rewards
            # Your optimizer steps here, and `client.update_weights` gives the pool its new weights.
            print(f"step {step}: {len(rows.rewards)} rollouts, mean reward {rows.rewards.mean():.2f}")
            cursor = batch.cursor
    finally:
        client.delete(name)  # After Ctrl-C as well.
