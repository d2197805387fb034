"""The headers with which answers are sent to browsers."""

from __future__ import annotations

from typing import Final

_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; font-src 'none'; "
    "require-trusted-types-for 'script'"
)
"""The content security policy of the page. It permits the files and calls of the control plane alone."""
DOCS_POLICY: Final = (
    f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'none'"
)
"""The policy of `/docs`. The style sheet of Swagger UI has images in itself, and its script sets markup."""
DATA_POLICY: Final = _NOTHING
"""The policy of answers that are data, in case a browser shows one as a document."""

COMMON: Final[tuple[tuple[str, str], ...]] = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Frame-Options", "DENY"),
)
"""The headers of every answer to a browser."""
DOCUMENT: Final = (("Cross-Origin-Opener-Policy", "same-origin"),)
"""The headers of documents in addition."""


def document_headers(policy: str) -> dict[str, str]:
    """Return the headers of a document with this content security policy."""
    return {"Content-Security-Policy": policy, **dict(COMMON), **dict(DOCUMENT)}


def data_headers() -> dict[str, str]:
    """Return the headers of an answer that is no document."""
    return {"Content-Security-Policy": DATA_POLICY, **dict(COMMON)}
