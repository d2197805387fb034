"""The root of the operator's exceptions. Each exception is defined next to the code that raises it."""

from __future__ import annotations


class OperatorError(Exception):
    """The base class of every exception of the operator."""

    reason: str = "OperatorError"
    """A CamelCase word for programs. It is stable, and in a `KubeError` it is the word of Kubernetes."""
