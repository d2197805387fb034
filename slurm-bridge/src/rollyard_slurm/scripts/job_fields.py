"""The options of a batch script as the JSON fields that slurmrestd takes with it. This module is pure.

slurmrestd does not read `#SBATCH` lines, and options that are given only there have no effect. v0.0.38 takes
the values of sbatch's options under other names. From v0.0.39 on, the fields have types.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rollyard_slurm.readers.command_output import duration_seconds

TYPED: Final = 39
"""The first version whose fields have types, and which can send a warning to the batch script alone."""
_WORDS: Final = {
    "job-name": "name",
    "comment": "comment",
    "output": "standard_output",
    "chdir": "current_working_directory",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "wckey": "wckey",
    "constraint": "constraints",
    "licenses": "licenses",
    "prefer": "prefer",
    "dependency": "dependency",
    "mail-user": "mail_user",
    "mcs-label": "mcs_label",
}
"""The fields that are the same in every version, by the names of sbatch's options."""
_OLD: Final = {
    "open-mode": "open_mode",
    "nodes": "nodes",
    "ntasks": "tasks",
    "exclude": "exclude_nodes",
    "nodelist": "nodelist",
    "time": "time_limit",
    "cpus-per-task": "cpus_per_task",
    "mem": "memory_per_node",
    "mem-per-cpu": "memory_per_cpu",
    "gres": "gres",
    "nice": "nice",
    "mail-type": "mail_type",
    "gpus": "gpus",
    "gpus-per-node": "gpus_per_node",
    "tmp": "temporary_disk_per_node",
    "mincpus": "minimum_cpus_per_node",
}
"""The further fields of v0.0.38, by the names of sbatch's options."""
_FLAGS: Final = ("requeue", "no-requeue", "exclusive")
_SIZE: Final = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_MIB: Final = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}
KNOWN: Final = frozenset({*_WORDS, *_OLD, *_FLAGS, "signal"})
"""The long names of all options for which slurmrestd has fields."""


def sbatch_options(options: Iterable[str]) -> list[tuple[str, str | None]]:
    """Split the options of a profile's `sbatch`, and return pairs of a long name and a value.

    The value of an option that takes none is None.

    Raises:
        ValueError: slurmrestd has no field for one of them, or a value is missing or not allowed.
    """
    pairs: list[tuple[str, str | None]] = []
    for option in options:
        name, equals, value = option.partition("=")
        if not name.startswith("--") or name[2:] not in KNOWN:
            raise ValueError(
                f"{name} cannot be passed to slurmrestd; these options can: "
                + ", ".join(f"--{one}" for one in sorted(KNOWN - {"signal"}))
            )
        if bool(equals) == (name[2:] in _FLAGS):
            raise ValueError(f"{name} takes {'no value' if equals else 'a value: ' + name + '=…'}")
        # Quotes are not part of the value, just as in a line of a script.
        pairs.append((name[2:], "".join(shlex.split(value)) if equals else None))
    return pairs


def fields(options: Iterable[tuple[str, str | None]], env: Mapping[str, str], version: int) -> dict[str, Any]:
    """Return the field `job` of the request that submits a job.

    Args:
        options: The long names of sbatch's options, and their values.
        env: The environment of the job. slurmrestd adds nothing to it.
        version: The last part of the version. For example, 38 stands for v0.0.38.
    """
    fields: dict[str, Any] = {}
    for name, value in options:
        if name in _WORDS:
            fields[_WORDS[name]] = value
        elif version < TYPED:
            fields |= _old(name, value)
        else:
            _add(fields, _typed(name, value or "", version))
    if version < TYPED:
        return {**fields, "environment": dict(env)}
    return {**fields, "environment": [f"{name}={text}" for name, text in env.items()]}


def _old(name: str, value: str | None) -> dict[str, Any]:
    """Return the fields of one option for v0.0.38."""
    if name == "signal":
        return {}  # It refuses "B:", without which the batch script gets no signal.
    if name == "exclusive":
        return {"exclusive": "exclusive"}
    if name in _FLAGS:
        return {name.replace("-", "_"): True}  # The value `requeue: false` would count as true.
    return {_OLD[name]: value}


def _typed(name: str, value: str, version: int) -> dict[str, Any]:
    """Return the fields of one option for v0.0.39 and later."""
    if name == "signal":
        who, _, rest = value.rpartition(":")
        word, _, early = rest.partition("@")
        warning = {"kill_warning_signal": word, "kill_warning_delay": _number(int(early or 60))}
        return {**warning, **({"kill_warning_flags": ["BATCH_JOB"]} if who == "B" else {})}
    if name in ("requeue", "no-requeue"):
        return {"requeue": name == "requeue"}
    if name == "exclusive":
        return {"shared": ["none"]}
    if name == "open-mode":
        return {"open_mode": [value.upper()]}
    if name == "nodes":
        least, _, most = value.partition("-")
        return {"minimum_nodes": int(least), "maximum_nodes": int(most or least)}
    if name in ("ntasks", "cpus-per-task", "nice", "mincpus"):
        return {{"ntasks": "tasks"}.get(name, _OLD[name]): int(value)}
    if name in ("exclude", "nodelist"):
        return {"excluded_nodes" if name == "exclude" else "required_nodes": _split(value)}
    if name == "mail-type":
        return {"mail_type": value.split(",")}
    if name == "time":
        limit = duration_seconds(value)
        return {"time_limit": _number(math.ceil((limit or 0.0) / 60.0))}
    if name in ("mem", "mem-per-cpu"):
        return {_OLD[name]: _number(_mebibytes(value))}
    if name == "tmp":
        return {"temporary_disk_per_node": _mebibytes(value)}
    sep = ":" if version < 40 else "/"
    if name == "gres":
        return {"tres_per_node": ",".join(f"gres{sep}{one}" for one in value.split(","))}
    # The options that remain are --gpus and --gpus-per-node.
    return {"tres_per_job" if name == "gpus" else "tres_per_node": f"gres{sep}gpu:{value}"}


def _add(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add fields to those of a job."""
    for name, value in more.items():
        # --gres and --gpus-per-node share one field.
        fields[name] = f"{fields[name]},{value}" if name == "tres_per_node" and name in fields else value


def _number(value: int) -> dict[str, Any]:
    """Return a number in the shape that typed fields take."""
    return {"set": True, "infinite": False, "number": value}


def _mebibytes(value: str) -> int:
    """Return a size such as `8G` in mebibytes, rounded up.

    Raises:
        ValueError: The text is not a size.
    """
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 8G")
    return math.ceil(int(match[1]) * _MIB[match[2].upper()])


def _split(value: str) -> list[str]:
    """Split a list of nodes at the commas outside of brackets, and return the names."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", value)
