"""The scores that functions and services return, which are checked before they count."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from rollyard_crds.fields.reward import COMPONENT_PATTERN, MAX_COMPONENTS, RESERVED
from rollyard_crds.trajectory import MAX_REWARD

from rollyard_pipeline.errors import PipelineError

_NAME: Final = re.compile(COMPONENT_PATTERN)
_SHOWN: Final = 80  # Characters of a wrong value in a message.


def checked_score(
    answer: Mapping[str, Any],
    *,
    name: str,
    wanted: Collection[str],
    taken: Collection[str],
    what: str,
    failed: type[PipelineError],
) -> dict[str, float]:
    """Return a score as components: the reward under `name`, and the components beside it.

    Args:
        answer: An object with `reward` and, where there are any, `components`.
        name: The component that holds the reward.
        wanted: The components that must be there.
        taken: The names that others have.
        what: Who gave the score, for messages.
        failed: The exception for a score that cannot be used.

    Raises:
        PipelineError: The exception `failed`: a value is no finite number of at most 10⁶ in size, or a
            component is missing or has a name that it must not have.
    """
    components = answer.get("components") or {}
    if not isinstance(components, dict) or len(components) > MAX_COMPONENTS:
        raise failed(f"{what}: 'components' must be an object of at most {MAX_COMPONENTS} numbers")
    found = {name: _number(answer.get("reward"), "reward", what, failed)}
    for key, value in components.items():
        if len(key) > 128 or _NAME.match(key) is None or key in RESERVED or key in taken:
            raise failed(f"{what}: {_shown(key)} is no name that a component of it may have")
        found[key] = _number(value, f"component '{key}'", what, failed)
    missing = sorted(set(wanted) - found.keys())
    if missing:
        raise failed(f"{what}: component '{missing[0]}' is missing")
    return found


def _number(value: Any, field: str, what: str, failed: type[PipelineError]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _in_range(value):
        raise failed(
            f"{what}: {field} is {_shown(value)}, expected a number of at most {MAX_REWARD:,.0f} in size"
        )
    return float(value)


def _in_range(value: int | float) -> bool:
    return (isinstance(value, int) or math.isfinite(value)) and -MAX_REWARD <= value <= MAX_REWARD


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
