"""How clients name themselves, and the environment variables that they read."""

from __future__ import annotations

from typing import Final

CA_FILE: Final = "ROLLYARD_CA_FILE"
"""A PEM file with the authorities to trust, for a server whose authority is not a public one. SSL_CERT_FILE,
which other programs know too, has the same effect."""
USER_AGENT: Final = "rollyard-client"
"""The name of this client in the logs of proxies."""
