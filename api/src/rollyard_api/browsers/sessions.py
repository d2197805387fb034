"""One-time codes and the sessions that they become. Both are rows of the database, which all replicas read.

A session is worth nothing without the bearer token by which its code was made. Each request compares the
row's proof with the tokens that are in force, so that a session ends within a second of the removal of its
token from the token file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import sqlalchemy as sa
from rollyard_process.token_bucket import TokenBucket
from sqlalchemy.engine import Connection

from rollyard_api.core.hosts import address_of
from rollyard_api.core.problems import ApiError, LimitReached, Unauthorized
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.schema import browser_sessions, installation, sign_in_codes
from rollyard_api.storage.statements import by_dialect

SessionRole = Literal["viewer", "admin"]
SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")
"""The form of the secret of a session, and of a one-time code: 32 bytes in URL-safe base 64."""
CODE_SECONDS: Final = 60.0
"""The time in seconds within which a code must be used."""
MAX_CODES: Final = 256
"""The largest number of unused codes that tokens of one role have. A further one replaces the oldest."""
MAX_SESSIONS: Final = 1024
"""The largest number of sessions that tokens of one role have. A further one replaces the least recently
used one."""
TOUCH_SECONDS: Final = 300.0
"""The longest time in seconds between two records of a session's use."""
TOUCHES: Final = 12
"""How often the use of a session is recorded within the time after which it would end if unused."""

_Valid = Mapping[Any, Sequence[str]]
_FIRST_NAME: Final = by_dialect(lambda insert: insert(installation).on_conflict_do_nothing())


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A session that is in force."""

    digest: str
    role: SessionRole
    expires_at: float
    """When it ends at the latest, in seconds since the epoch."""


class Sessions:
    """The codes and sessions of one control plane.

    Args:
        database: The database with their rows.
        idle_seconds: The time in seconds after which a session ends that nobody uses.
        longest_seconds: The time in seconds after which every session ends.
        valid: A function that returns the bearer tokens in force, by role.
    """

    def __init__(
        self,
        database: Database,
        idle_seconds: float,
        longest_seconds: float,
        valid: Callable[[], _Valid],
    ) -> None:
        self._database = database
        self._idle = idle_seconds
        self._longest = longest_seconds
        self._touch = min(TOUCH_SECONDS, idle_seconds / TOUCHES)
        self._valid = valid
        self._name = ""

    async def installation(self) -> str:
        """Return the name of this installation, which all of its replicas share. The first call makes it."""
        self._name = self._name or await self._database.read(_named)
        if not self._name:
            self._name = await self._database.write(partial(_name_it, name=secrets.token_hex(4)))
        return self._name

    async def make_code(self, role: SessionRole, maker: str, token: str) -> tuple[str, float]:
        """Make a code for a session of this role, and return it and the time at which it expires.

        Args:
            role: The role of the session.
            maker: The role of the bearer token that requests it.
            token: The secret of this token.
        """
        code = secrets.token_urlsafe(32)

        def add(tx: Transaction) -> float:
            self._make_room(tx, sign_in_codes, sign_in_codes.c.made_at, maker, MAX_CODES)
            row = _row(tx, _digest(code), role, maker, token, CODE_SECONDS)
            tx.conn.execute(sign_in_codes.insert().values(row))
            return tx.now + CODE_SECONDS

        return code, await self._database.write(add)

    async def redeem(self, code: str, earlier: Sequence[str] = ()) -> tuple[str, BrowserSession]:
        """Make a session of a code, which cannot be used again, and return its secret and the session.

        Args:
            code: The code.
            earlier: The secrets of the browser's earlier sessions, which end.

        Raises:
            Unauthorized: The code is unknown, was used before, or has expired.
        """
        if not SECRET.fullmatch(code):
            raise _unusable()
        secret, spent, valid = secrets.token_urlsafe(32), _digest(code), self._valid()
        digest, ended = _digest(secret), [_digest(old) for old in earlier]

        def exchange(tx: Transaction) -> BrowserSession | None:
            row = tx.conn.execute(sign_in_codes.select().where(sign_in_codes.c.digest == spent)).one_or_none()
            removed = tx.conn.execute(sign_in_codes.delete().where(sign_in_codes.c.digest == spent)).rowcount
            token = None if row is None else _maker_of(row, valid)
            if row is None or token is None or not removed or row.expires_at <= tx.now:
                # Nothing is raised, because a code that has expired must still be removed.
                return None
            tx.conn.execute(browser_sessions.delete().where(browser_sessions.c.digest.in_(ended)))
            self._make_room(tx, browser_sessions, browser_sessions.c.used_at, row.maker, MAX_SESSIONS)
            values = _row(tx, digest, row.role, row.maker, token, self._longest)
            tx.conn.execute(browser_sessions.insert().values(**values, used_at=tx.now))
            return BrowserSession(digest, row.role, tx.now + self._longest)

        session = await self._database.write(exchange)
        if session is None:
            raise _unusable()
        return secret, session

    async def find(self, presented: Sequence[str]) -> BrowserSession | None:
        """Return the session of the first of these secrets that has one in force, or None."""
        for secret in presented:
            session = await self.current(_digest(secret))
            if session is not None:
                return session
        return None

    async def current(self, digest: str) -> BrowserSession | None:
        """Return the session with this digest if it is in force, and record that it is used."""
        query = browser_sessions.select().where(browser_sessions.c.digest == digest)
        row = await self._database.read(lambda conn: conn.execute(query).one_or_none())
        now = time.time()
        if row is None or now >= min(row.expires_at, row.used_at + self._idle):
            return None
        if _maker_of(row, self._valid()) is None:
            return None
        if now - row.used_at >= self._touch:
            touch = browser_sessions.update().where(browser_sessions.c.digest == digest)
            # A database without space for this record can still be read.
            with contextlib.suppress(ApiError):
                await self._database.write(
                    lambda tx: tx.conn.execute(touch.values(used_at=tx.now)), durable=False
                )
        return BrowserSession(digest, row.role, row.expires_at)

    async def end(self, digest: str) -> None:
        """End a session."""
        removal = browser_sessions.delete().where(browser_sessions.c.digest == digest)
        await self._database.write(lambda tx: tx.conn.execute(removal))

    async def end_all(self, token: str | None) -> int:
        """End all sessions and codes, or those that were made by one token, and return their number."""

        def remove(tx: Transaction) -> int:
            count = 0
            for table in (browser_sessions, sign_in_codes):
                rows = tx.conn.execute(sa.select(table.c.digest, table.c.proof)).all()
                theirs = [row.digest for row in rows if token is None or _is_proof(token, row)]
                for digest in theirs:
                    count += tx.conn.execute(table.delete().where(table.c.digest == digest)).rowcount
            return count

        return await self._database.write(remove)

    def _make_room(
        self, tx: Transaction, table: sa.Table, age: sa.Column[Any], maker: str, most: int
    ) -> None:
        """Remove all that has expired, and the oldest rows of a maker, so that there is room for one more."""
        sessions, codes = browser_sessions.c, sign_in_codes.c
        over = sa.or_(sessions.expires_at <= tx.now, sessions.used_at <= tx.now - self._idle)
        tx.conn.execute(browser_sessions.delete().where(over))
        tx.conn.execute(sign_in_codes.delete().where(codes.expires_at <= tx.now))
        oldest = sa.select(table.c.digest).where(table.c.maker == maker).order_by(age.desc()).offset(most - 1)
        digests = tx.conn.execute(oldest).scalars().all()
        tx.conn.execute(table.delete().where(table.c.digest.in_(digests)))


def _unusable() -> Unauthorized:
    return Unauthorized(
        f"this code is unknown, was used before, or is older than {CODE_SECONDS:g} s; `rollyard open` makes "
        "another",
        reason="CodeUnusable",
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _proof(token: str, digest: str) -> str:
    return hmac.new(token.encode(), f"rollyard sign-in {digest}".encode(), hashlib.sha256).hexdigest()


def _is_proof(token: str, row: Any) -> bool:
    return hmac.compare_digest(_proof(token, row.digest), row.proof)


def _maker_of(row: Any, valid: _Valid) -> str | None:
    """Return the token in force by which a row was made, or None if it is no longer in force."""
    return next((token for token in valid.get(row.maker, ()) if _is_proof(token, row)), None)


def _named(conn: Connection) -> str:
    return conn.execute(sa.select(installation.c.name)).scalar_one_or_none() or ""


def _name_it(tx: Transaction, *, name: str) -> str:
    # Another replica may be faster.
    tx.conn.execute(_FIRST_NAME[tx.sqlite], {"no": 1, "name": name})
    return _named(tx.conn)


def _row(
    tx: Transaction, digest: str, role: str, maker: str, token: str, seconds: float
) -> dict[str, str | float]:
    """Return the columns that codes and sessions have in common."""
    times = {"made_at": tx.now, "expires_at": tx.now + seconds}
    return {"digest": digest, "role": role, "maker": maker, "proof": _proof(token, digest), **times}


GUESSES: Final = 10
"""The number of wrong codes that one address may send at once."""
WINDOW_SECONDS: Final = 60.0
"""The time in seconds after which it may send as many again; part of the time permits part of them."""
REMEMBERED: Final = 4096
"""The largest number of addresses that are remembered."""
IPV6_NETWORK: Final = 64
"""The leading bits of an IPv6 address that identify one user, who can choose the others freely."""


class WrongCodes:
    """The wrong codes of each address: ten at once, and ten a minute in the long run.

    A code has 256 random bits, so that no number of guesses finds one. The limit keeps guesses from costing
    the database anything. Each replica counts on its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def check(self, address: str) -> None:
        """Refuse an address that has sent too many wrong codes.

        Raises:
            LimitReached: The address must wait.
        """
        bucket = self._buckets.get(_user(address))
        missing = 0.0 if bucket is None else 1.0 - bucket.tokens(self._clock())
        if bucket is not None and missing > 0:
            seconds = missing / bucket.per_second
            raise LimitReached(
                f"{GUESSES} wrong codes came from this address; wait {seconds:.0f} s",
                reason="TooManyGuesses",
                headers={"Retry-After": str(int(seconds) + 1)},
            )

    def count(self, address: str) -> None:
        """Count a wrong code."""
        user = _user(address)
        bucket = self._buckets.pop(user, None) or TokenBucket(GUESSES / WINDOW_SECONDS, GUESSES)
        bucket.take(self._clock())
        self._buckets[user] = bucket
        while len(self._buckets) > REMEMBERED:
            self._buckets.popitem(last=False)


def _user(address: str) -> str:
    parsed = address_of(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, IPV6_NETWORK), strict=False))
    return address if parsed is None else str(parsed)
