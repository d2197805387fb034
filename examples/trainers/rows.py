"""Make the data set of a trainer from a file of tasks: python rows.py TRAINER TASKS.jsonl FILE.

TRAINER is verl, skyrl, slime or nemo.

Each row has the task as JSON text, because a column of a table has one type. The trainer reads the prompt
only to leave out those that are too long: Rollyard's agent builds its own from the task.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rollyard import Task


def prompt_of(task: Task) -> list[dict[str, Any]]:
    """Return the messages of a task."""
    if task.messages:
        return [message.model_dump(exclude_none=True) for message in task.messages]
    return [{"role": "user", "content": task.prompt or ""}]


def row(trainer: str, number: int, task: Task) -> dict[str, Any]:
    """Return a row of a trainer's data set."""
    prompt, text = prompt_of(task), task.model_dump_json(exclude_none=True, by_alias=True)
    if trainer == "verl":
        model = {"style": "rule", "ground_truth": ""}
        extra = {"index": number, "task": text}
        return {"data_source": "rollyard", "prompt": prompt, "reward_model": model, "extra_info": extra}
    if trainer == "skyrl":
        return {"prompt": prompt, "env_class": "rollyard", "task": text}
    if trainer == "slime":
        return {"prompt": prompt, "metadata": {"task": text}}
    if trainer == "nemo":
        agent = {"type": "responses_api_agents", "name": "rollyard"}
        return {"responses_create_params": {"input": prompt}, "agent_ref": agent, "task": text}
    raise SystemExit(f"{trainer}: give verl, skyrl, slime or nemo")


def main() -> None:
    """Write the file. verl reads Parquet, the others JSON lines."""
    trainer, source, target = sys.argv[1:]
    tasks = [Task.model_validate_json(line) for line in Path(source).read_text().splitlines()]
    rows = [row(trainer, number, task) for number, task in enumerate(tasks)]
    if trainer == "verl":
        import pandas

        pandas.DataFrame(rows).to_parquet(target)
    else:
        Path(target).write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main()
