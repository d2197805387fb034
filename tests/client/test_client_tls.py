"""Which certificates the client trusts."""

from __future__ import annotations

import ssl

import pytest
from rollyard_client.context import Context, verify


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http+unix:///tmp/s"])
def test_plain_connections_read_no_authorities_and_would_trust_nobody(url: str) -> None:
    context = verify(Context(url, "t"))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.get_ca_certs() == []


def test_https_trusts_the_usual_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLYARD_CA_FILE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert verify(Context("https://127.0.0.1:1", "t")).get_ca_certs()
