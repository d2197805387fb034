"""What Run samples with: the session of an agent of ours, or the gateway of a harness."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rollyard_crds.lease import BackendAssignment, Lease, RouteRequest, RouteResponse, RunStats
from rollyard_crds.rolloutjob import ASSUMED_CONTEXT, RolloutJobSpec
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import RunRecord
from rollyard_inference.errors import BackendUnavailable

from rollyard_pipeline import registry
from rollyard_pipeline.agents.base import stated_context
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_pipeline.chat.format import ChatFormat, FormatCache
from rollyard_pipeline.chat.tokenizer import ModelSizes, locate, model_sizes
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.gateway.session import Chat, GatewaySession
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.tool_parsers.base import ChatModel, TokenParser, ToolCallParser
from rollyard_pipeline.tool_parsers.detect import configured, explained
from rollyard_pipeline.tool_parsers.renderers import Readers
from rollyard_pipeline.tools.base import Tool
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import TrajectoryRecorder

_ROUTE_RETRY: Final = 1.0  # seconds
_KEY_BYTES: Final = 24
_SHOWN: Final = 2000  # characters of a harness's output in an error


class ModelSource(Protocol):
    """What limits and live views need of what a rollout samples with."""

    on_wait: Callable[[float], None] | None

    @property
    def waited_seconds(self) -> float:
        """How long the rollout has waited for backends, in seconds."""

    async def silence(self) -> str | None:
        """Return what the backend last said, if nothing is sampled because none answers; else None."""

    def sampled_now(self) -> tuple[Sequence[int], float] | None:
        """Return the ids of the turn that is being sampled and the seconds since it began, or None."""


@dataclass(slots=True)
class RunModel:
    """What one Run samples with. An agent that asks no model has neither a session nor a gateway."""

    session: BackendSession | None = None
    gateway: GatewaySession | None = None
    parser: ToolCallParser | TokenParser | None = None
    model_context: int | None = None
    """The context in the model's config.json, in tokens, or None."""
    stated: int | None = None
    """The context that the job, the server or the model states, in tokens, or None."""

    @property
    def source(self) -> BackendSession | GatewaySession | None:
        """The one of the two that the rollout has."""
        return self.gateway or self.session

    @property
    def seconds(self) -> float:
        """How long the model has sampled, in seconds."""
        return self.source.model_seconds if self.source is not None else 0.0

    @property
    def stats(self) -> RunStats:
        """What was counted."""
        return self.source.stats if self.source is not None else RunStats()

    def recorded(
        self, episode: Episode, lease: Lease, spec: RolloutJobSpec
    ) -> tuple[RunRecord, list[PackedSegment]]:
        """Return the record of the Run, and its token lists.

        Raises:
            Exception: No backend has answered the last call of a harness, or another failure of the
                infrastructure has ended it.
            PipelineError: The time of Run has ended a harness before the model had sampled anything, in which
                the policy has no part.
        """
        source = self.source
        url, mode = ("", "") if source is None else (source.backend.url, source.logprobs_mode)
        if self.gateway is not None:
            self.gateway.conversations.add_unanswered()
        record = episode.record(lease, spec.sampling, url, mode)
        if self.gateway is None:
            return record, [] if episode.recorder is None else episode.recorder.segments()
        if self.gateway.failure is not None:
            raise self.gateway.failure
        if not self.gateway.turns:
            output = episode.harness.output.strip()[-_SHOWN:] if episode.harness is not None else ""
            raise PipelineError(
                f"the harness '{spec.agent.harness}' had the model sample nothing until the end of Run: "
                f"{output or '(no output)'}",
                "HarnessFailed",
            )
        kept = self.gateway.conversations.branches()
        update = {"conversation": kept.conversation, "continues": kept.continues, "branches": kept.branches}
        return record.model_copy(update=update), kept.segments


class RunModels:
    """Opens what Runs sample with, and holds what all rollouts of a worker share for it."""

    def __init__(
        self,
        control: WorkerCalls,
        backends: BackendClient,
        formats: FormatCache,
        egress: Egress,
        extensions: Callable[[RolloutJobSpec], registry.Registry],
        budget: float,
    ) -> None:
        self._control = control
        self._backends = backends
        self._formats = formats
        self._egress = egress
        self._extensions = extensions
        self._budget = budget
        self._readers = Readers()
        self._model_sizes: dict[str, ModelSizes] = {}

    async def close(self) -> None:
        """End the processes that read tool calls."""
        await self._readers.close()

    def session(self, lease: Lease, spec: RolloutJobSpec) -> BackendSession:
        """Return a session on the backend of a lease.

        Raises:
            BackendUnavailable: The lease has none.
        """
        if lease.backend is None:
            raise BackendUnavailable(f"no backend was assigned; the agent '{spec.agent.type}' needs one")
        return self._session(lease, lease.backend, spec)

    async def prepare(
        self,
        model: RunModel,
        lease: Lease,
        spec: RolloutJobSpec,
        tools: Mapping[str, Tool],
        episode: Episode,
        *,
        gateway: bool,
    ) -> None:
        """Prepare what a Run samples with, and begin its token record.

        Args:
            model: It has a session, unless the agent asks no model.
            tools: The tools that an agent of ours offers. Those of a harness are known at each call.
            gateway: Whether the agent uses the gateway, which then replaces the session.

        Raises:
            PipelineError: Tokenizer, template or parser cannot be used.
        """
        session = model.session
        if session is None:
            return
        tokenizer, schemas = session.backend.tokenizer, [tool.schema() for tool in tools.values()]
        chat = await self._formats.get(tokenizer, schemas, spec.agent.chat_template_kwargs)
        if tools:
            offered = await self._offered(spec, session.backend, chat, schemas)
            chat, episode.tool_parser, model.parser = offered.format, offered.name, offered.parser
        sizes = await self._sizes(tokenizer, chat)
        session.vocabulary, model.model_context = sizes.vocabulary, sizes.context
        reported = await session.context_limit()
        model.stated = stated_context(spec.agent.max_context_tokens, reported, sizes.context)
        if gateway:
            model.gateway = self._gateway(session, lease, spec, episode, model.stated or ASSUMED_CONTEXT)
            model.session = None
        else:
            episode.recorder = TrajectoryRecorder(chat, chat.opening(episode.messages))

    def _gateway(
        self, first: BackendSession, lease: Lease, spec: RolloutJobSpec, episode: Episode, context: int
    ) -> GatewaySession:
        backend = first.backend

        async def chats(tools: Sequence[Mapping[str, Any]]) -> Chat:
            chat = await self._formats.get(backend.tokenizer, tools, spec.agent.chat_template_kwargs)
            if not tools:
                return Chat(chat, "", None)
            return await self._offered(spec, backend, chat, tools)

        unused = [first]

        def sessions() -> BackendSession:
            session = unused.pop() if unused else self._session(lease, backend, spec)
            session.vocabulary = first.vocabulary
            return session

        return GatewaySession(
            spec=spec.agent,
            sampling=spec.sampling,
            episode=episode,
            key=secrets.token_hex(_KEY_BYTES),
            model=backend.model,
            context=context,
            chats=chats,
            sessions=sessions,
        )

    async def _offered(
        self,
        spec: RolloutJobSpec,
        backend: BackendAssignment,
        chat: ChatFormat,
        tools: Sequence[Mapping[str, Any]],
    ) -> Chat:
        """Return how the tools are offered to the model, and the parser that reads the calls of its turns.

        Raises:
            NoToolParser: No parser fits the model, or its template knows no tools and none explains them.
        """
        name = spec.agent.tool_parser
        parser = self._extensions(spec).load(registry.TOOL_PARSERS, name)()
        folder = await asyncio.to_thread(locate, backend.tokenizer)
        model = ChatModel(backend.model, folder, chat.template.source)
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters", {}) for function in functions}
        used, reader = await configured(name, parser, model, schemas, self._readers)
        return Chat(explained(chat, backend.model, name, reader), used, reader)

    async def _sizes(self, tokenizer: str, chat: ChatFormat) -> ModelSizes:
        """Return what the folder of the tokenizer says of the model."""
        if tokenizer not in self._model_sizes:
            folder = await asyncio.to_thread(locate, tokenizer)
            self._model_sizes[tokenizer] = await asyncio.to_thread(
                model_sizes, folder, chat.tokenizer.vocabulary_size
            )
        return self._model_sizes[tokenizer]

    def _session(self, lease: Lease, backend: BackendAssignment, spec: RolloutJobSpec) -> BackendSession:
        self._egress.infrastructure.add(backend.url)

        async def route(failed_url: str, error: str, blame: bool) -> RouteResponse:
            request = RouteRequest(
                rollout=lease.rollout, token=lease.token, failed_url=failed_url, error=error, blame=blame
            )
            try:
                answer = await self._control.route(request)
            except ControlPlaneUnavailable:
                return RouteResponse(backend=None, retry_after=_ROUTE_RETRY)
            if answer.backend is not None:
                self._egress.infrastructure.add(answer.backend.url)
            return answer

        return BackendSession(
            self._backends,
            backend,
            route,
            spec.sampling,
            task_id=lease.task.id,
            sample_index=lease.sample_index,
            budget=self._budget,
        )
