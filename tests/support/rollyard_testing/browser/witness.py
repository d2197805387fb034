"""A witness of a browser's pages: what they request, what they log, and what they must never do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Page, Request, Response

HIDDEN: Final = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
"""Characters that show nothing, or that change how others are shown."""
_LISTEN: Final = """
(() => {
  document.addEventListener("securitypolicyviolation", event => {
    window.__witnessed(`${event.violatedDirective} refused ${event.blockedURI} ${event.sample}`);
  });
})();
"""
_ATTACKED: Final = """
() => {
  const found = [];
  if (window.attacked !== undefined) found.push(`window.attacked is ${window.attacked}`);
  if (({}).attacked !== undefined || ({}).x !== undefined) found.push("Object.prototype was changed");
  for (const each of document.querySelectorAll("[data-attack], iframe, object, embed, base, form[action]")) {
    found.push(`element ${each.outerHTML.slice(0, 200)}`);
  }
  for (const each of document.querySelectorAll("script, img, link, a[href], use, source")) {
    const given = each.getAttribute("src") ?? each.getAttribute("href") ?? "";
    const url = new URL(given, location.href);
    if (url.origin !== location.origin) found.push(`address ${url}`);
  }
  for (const each of document.querySelectorAll("*")) {
    for (const name of each.getAttributeNames()) {
      if (/^on/i.test(name)) found.push(`handler ${name} of ${each.tagName}`);
    }
  }
  return found;
}
"""


@dataclass(slots=True)
class Witness:
    """What the pages of one browser context have done since `attend`."""

    origin: str
    """The only origin that pages may ask, such as `http://127.0.0.1:8765`."""
    requests: list[str] = field(default_factory=list)
    """The method and the URL of each request."""
    statuses: list[tuple[str, int]] = field(default_factory=list)
    """The URL and the status of each answer."""
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Uncaught errors of scripts."""
    console: list[str] = field(default_factory=list)
    """What was logged as a warning or an error, apart from answers that are no success."""
    violations: list[str] = field(default_factory=list)
    """What the content security policy refused."""
    pages: int = 0
    """The number of pages that were opened."""

    def foreign(self) -> list[str]:
        """Return the requests to other origins than the control plane's."""
        found = []
        for request in self.requests:
            url = urlsplit(request.partition(" ")[2])
            if f"{url.scheme}://{url.netloc}" != self.origin:
                found.append(request)
        return found

    def faults(self) -> list[str]:
        """Return everything that no page may do, as lines for a message."""
        return [
            *(f"dialog: {each}" for each in self.dialogs),
            *(f"error: {each}" for each in self.errors),
            *(f"console: {each}" for each in self.console),
            *(f"policy: {each}" for each in self.violations),
            *(f"request: {each}" for each in self.foreign()),
        ]

    def asked(self, part: str) -> int:
        """Return how many requests had this text in their URL."""
        return sum(part in each for each in self.requests)


def attend(context: BrowserContext, origin: str) -> Witness:
    """Return a witness of all pages of a context from now on."""
    witness = Witness(origin)

    def violated(_source: dict[str, Any], text: str) -> None:
        witness.violations.append(text)

    context.expose_binding("__witnessed", violated)
    context.add_init_script(_LISTEN)
    context.on("request", lambda request: _requested(witness, request))
    context.on("response", lambda response: _answered(witness, response))
    context.on("page", lambda page: _opened(witness, page))
    return witness


def attacks_seen(page: Page) -> list[str]:
    """Return the traces in a document of text that was taken for more than text."""
    found: list[str] = page.evaluate(_ATTACKED)
    return found


def _requested(witness: Witness, request: Request) -> None:
    witness.requests.append(f"{request.method} {request.url}")


def _answered(witness: Witness, response: Response) -> None:
    witness.statuses.append((response.url, response.status))


def _opened(witness: Witness, page: Page) -> None:
    witness.pages += 1
    page.on("dialog", lambda dialog: _asked(witness, dialog))
    page.on("pageerror", lambda error: witness.errors.append(str(error)))
    page.on("console", lambda message: _logged(witness, message))


def _asked(witness: Witness, dialog: Dialog) -> None:
    witness.dialogs.append(f"{dialog.type}: {dialog.message}")
    dialog.dismiss()


def _logged(witness: Witness, message: ConsoleMessage) -> None:
    if message.type not in ("error", "warning", "assert"):
        return
    text = message.text
    # The browser itself logs answers such as 401 and lost connections, which pages handle.
    if text.startswith("Failed to load resource"):
        return
    witness.console.append(text)
