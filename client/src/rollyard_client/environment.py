"""How clients name themselves, and the environment variables that they read."""

from __future__ import annotations

from typing import Final

CA_FILE: Final = "ROLLYARD_CA_FILE"
"""A PEM file with the authorities to trust, for a server whose authority is not a public one. SSL_CERT_FILE,
which other programs know too, has the same effect."""
USER_AGENT: Final = "rollyard-client/3"
"""The name of this client. Its number tells the control plane which fields it accepts: `attempts` of results
since 2, and `watched` of heartbeats since 3. Older clients have no number."""
