"""The libraries that the client does without until they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rollyard_client.errors import RollyardError


def library(name: str) -> Any:
    """Return a library that is imported only now.

    Raises:
        RollyardError: It is not installed. The message names the extra of Rollyard that has it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        if name == "torch":
            text = (
                "torch is not installed: pip install 'rollyard[torch]', or install torch as it suits your GPU"
            )
        else:
            text = f"{name} is not installed: pip install 'rollyard[numpy]'"
        raise RollyardError(text, reason="MissingLibrary") from error
