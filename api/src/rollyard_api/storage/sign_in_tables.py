"""The tables of sign-in: one-time codes, the sessions of browsers, and the name of the installation.

No secret is kept. A row is found by the SHA-256 of its secret, and `proof` shows by which bearer token it was
made: it is the HMAC-SHA-256 of `digest` under that token.
"""

from __future__ import annotations

import sqlalchemy as sa

from rollyard_api.storage.schema import metadata

sign_in_codes = sa.Table(
    "sign_in_codes",
    metadata,
    # The SHA-256 of the code.
    sa.Column("digest", sa.String(64), primary_key=True),
    # The role of the session that the code becomes, viewer or admin.
    sa.Column("role", sa.String(16), nullable=False),
    # The role of the token by which it was made.
    sa.Column("maker", sa.String(16), nullable=False),
    sa.Column("proof", sa.String(64), nullable=False),
    sa.Column("made_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)

browser_sessions = sa.Table(
    "browser_sessions",
    metadata,
    # The SHA-256 of the secret in the cookie.
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("maker", sa.String(16), nullable=False),
    sa.Column("proof", sa.String(64), nullable=False),
    sa.Column("made_at", sa.Double, nullable=False),
    # When a request last used the session. It is written from time to time only.
    sa.Column("used_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)

# The single row, with the number 1, has the name that the cookies of this installation end in.
installation = sa.Table(
    "installation",
    metadata,
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(16), nullable=False),
)
