"""Kubernetes quantities (`500m`, `2Gi`) as numbers."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=32)]
"""A Kubernetes resource quantity, such as `500m`, `2` or `2Gi`."""

_UNITS: Final = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(|m|k|M|G|T|Ki|Mi|Gi|Ti)")


def parse_quantity(quantity: str) -> float:
    """Return a Kubernetes quantity as a plain number.

    Raises:
        ValueError: The text is not a quantity. The message says what would be one.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity; write for example '1', '500m', '512Mi' or '2Gi'")
    return float(match[1]) * _UNITS[match[2]]
