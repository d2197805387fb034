"""What checks the certificate of a server."""

from __future__ import annotations

import os
import ssl

from rollyard_client.context import Context
from rollyard_client.environment import CA_FILE
from rollyard_client.errors import ContextError


def verify(context: Context) -> ssl.SSLContext:
    """Return what checks the server's certificate, by default with the usual public authorities.

    Raises:
        ContextError: The file that the environment names for this cannot be used.
    """
    if context.tls is not None:
        return context.tls
    if not context.url.startswith("https:"):
        # This context trusts no authority, and no connection needs one. Reading the usual ones takes 30 ms.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name = CA_FILE if os.environ.get(CA_FILE) else "SSL_CERT_FILE"
    path = os.environ.get(name)
    if not path:
        import certifi

        return ssl.create_default_context(cafile=certifi.where())
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # SSLError is a subclass of OSError.
        raise ContextError(f"{name}={path}: cannot be used: {error.strerror or error}") from error
