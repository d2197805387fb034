# `helm test`: over the service, the control plane is ready, knows its tokens and refuses others.
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = os.environ["URL"]
CONTEXT = ssl.create_default_context(cafile=os.environ.get("CA")) if URL.startswith("https:") else None
TOKEN = Path("/etc/rollyard/driver").read_text().strip()
SECONDS = 60


def status(path, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(URL + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=CONTEXT) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def settled(path, wanted, token=None):
    """Wait until the answer is the wanted one. A service's endpoints may lag behind its pods."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            seen = status(path, token)
        except OSError as error:
            seen = str(error)
        if seen == wanted or time.monotonic() > deadline:
            return seen
        time.sleep(0.5)


failed = False
for what, path, token, wanted in (
    ("is ready", "/readyz", None, 200),
    ("lists jobs", "/v1/rolloutjobs?limit=1&omit=tasks", TOKEN, 200),
    ("refuses callers without a token", "/v1/rolloutjobs", None, 401),
    ("refuses unknown tokens", "/v1/rolloutjobs", "unknown", 401),
):
    seen = settled(path, wanted, token)
    failed |= seen != wanted
    print(f"{'ok  ' if seen == wanted else 'FAIL'} {URL} {what}: {seen}")
sys.exit(failed)
