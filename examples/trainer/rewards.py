"""Give the rewards of a stream's rollouts: python rewards.py TASKS.jsonl GROUPS."""

import json
import sys
from pathlib import Path

from rollyard import Client

JOB, groups = "own-rewards", int(sys.argv[2])


def score(trajectory):
    calls = [call.name for turn in trajectory.turns for call in turn.tool_calls]
    return ("submit" in calls) - trajectory.sampled_tokens / 1000


with Client() as client:
    client.submit(Path(__file__).with_name("rewards.yaml"))
    client.push_tasks(JOB, [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])
    client.open_target(JOB, "step-1", groups)
    while client.job(JOB).status.dynamic_sampling.informative_groups < groups:
        waiting = list(client.unscored(JOB, wait=5))
        if waiting:
            taken = client.rewards(JOB, {trajectory.id: score(trajectory) for trajectory in waiting})
            print(f"{taken.accepted} rewards, {len(taken.late)} too late")
    for group in client.groups(JOB, informative=True):
        print(group.group_id, [round(trajectory.reward, 3) for trajectory in group.trajectories])
