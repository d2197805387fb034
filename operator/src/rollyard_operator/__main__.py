"""`python -m rollyard_operator --config FILE`: the operator of one installation."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from rollyard_client import DriverClient, Retry

from rollyard_operator.installation import Operator
from rollyard_operator.kube import KubeClient, KubeError
from rollyard_operator.plan import Profile
from rollyard_operator.settings import OperatorSettings, SettingsError, load_settings
from rollyard_operator.shell import LIVENESS, login_of, watch

_log = logging.getLogger("rollyard_operator")
_STARTUP_TRIES = 60


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollyard_operator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the installation's settings, YAML")
    parser.add_argument("--liveness", default=LIVENESS, metavar="URL", help="where to answer liveness probes")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args(arguments)


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"tokenFile: {path} cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"tokenFile: {path} is empty")
    return token
