"""The settings that the command line determines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parsed command line. Sizes are in tokens, requests and bytes."""

    model: Path
    host: str
    port: int
    served_names: tuple[str, ...]
    policy_version: str
    max_num_seqs: int
    max_waiting: int
    max_kept_seqs: int
    max_model_len: int | None
    kv_cache_mib: int
    threads: int
    port_file: Path | None
    script: Path | None = None
    """The file with scripted answers, or None if the model chooses all."""
    log_samples: Path | None = None
    """The file to which each ended request is appended with what was sampled, or None."""
    log_format: str | None = None
    """The form of log lines, or None for that of the variable ROLLYARD_LOG_FORMAT."""

    @property
    def cache_bytes(self) -> int:
        """The memory for all caches, in bytes."""
        return self.kv_cache_mib << 20
