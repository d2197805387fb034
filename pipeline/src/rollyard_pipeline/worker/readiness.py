"""The parts of a worker that a process prepares while it stands ready and knows no job yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.provider import NodeProvider

log = logging.getLogger(__name__)


class Readiness:
    """Prepared parts of one worker. All of them depend on this machine only, and on no job."""

    def __init__(self) -> None:
        self.extensions = Registry()
        self.formats = FormatCache()
        self._provider: SandboxProvider | None = None
        self._settings: dict[str, Any] = {}

    async def prepare(self, settings: Mapping[str, Any], tokenizer: str | None = None) -> Exception | None:
        """Prepare what can be prepared here. What fails is left to the worker, which reports its error.

        Args:
            settings: The arguments of `open_provider`.
            tokenizer: The tokenizer that jobs of this machine are likely to use, if one is known.

        Returns:
            The error for which sandboxes cannot be started, or None.
        """
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.extensions.load_own)
        if tokenizer is not None:
            with contextlib.suppress(Exception):
                await self.formats.load_ahead(tokenizer)
        provider: SandboxProvider | None = None
        try:
            provider = open_provider(**settings)
            if isinstance(provider, NodeProvider):
                await provider.stand_ready()
        except BaseException as error:
            if provider is not None:
                await provider.aclose()
            if not isinstance(error, Exception):
                raise
            log.debug("the sandboxes are not prepared: %s", error)
            return error
        self._provider, self._settings = provider, dict(settings)
        return None

    async def provider(self, settings: Mapping[str, Any]) -> SandboxProvider:
        """Return the prepared provider if it was opened with these settings, and else a new one.

        The caller owns it and starts it. This is called once.

        Raises:
            ValueError: See `open_provider`.
        """
        if self._provider is not None and self._settings != settings:
            await self.aclose()
        prepared, self._provider = self._provider, None
        return prepared if prepared is not None else open_provider(**settings)

    async def aclose(self) -> None:
        """End the provider if nobody has taken it."""
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.aclose()
