"""The names of environment variables that a client reads, for programs that set them for child processes."""

from __future__ import annotations

from typing import Final

CA_FILE: Final = "ROLLYARD_CA_FILE"
"""A PEM file with the authorities to trust, for a server whose authority is not a public one. SSL_CERT_FILE,
which other programs know too, has the same effect."""
