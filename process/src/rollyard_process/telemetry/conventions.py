"""The names of spans and attributes.

Those that begin with `gen_ai` and `error` come from OpenTelemetry's semantic conventions for generative AI
(repository open-telemetry/semantic-conventions-genai, status Development). They may still change, so only
this module has them. The others are Rollyard's own.
"""

from __future__ import annotations

from typing import Final

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
AGENT: Final = "gen_ai.agent.name"
CONVERSATION: Final = "gen_ai.conversation.id"
MODEL: Final = "gen_ai.request.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOOL: Final = "gen_ai.tool.name"
ERROR_TYPE: Final = "error.type"

INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
"""The values of OPERATION, with which the names of such spans begin."""
PROVIDER_NAME: Final = "rollyard"

NAMESPACE: Final = "rollyard.namespace"
JOB: Final = "rollyard.job"
ROLLOUT: Final = "rollyard.rollout"
STAGE: Final = "rollyard.stage"
TOKEN: Final = "rollyard.fencing_token"
STATUS: Final = "rollyard.status"
REASON: Final = "rollyard.reason"
REWARD: Final = "rollyard.reward"
WORKER: Final = "rollyard.worker"
NODE: Final = "rollyard.node"
BACKEND: Final = "rollyard.backend"
TURN: Final = "rollyard.turn"
REQUESTS: Final = "rollyard.requests"
POLICY_VERSION: Final = "rollyard.policy_version"
SANDBOX: Final = "rollyard.sandbox.provider"
PROTOCOL: Final = "rollyard.gateway.protocol"
CONVERSATION_KIND: Final = "rollyard.gateway.conversation"
OUTCOME: Final = "rollyard.gateway.outcome"
"""What came of a call to the gateway: `sampled`, `repeat`, `cut`, or the problem of its error."""

QUEUE_SPAN: Final = "queue"
"""The first word in the name of a wait, as in `queue run`."""
SANDBOX_SPAN: Final = "start sandbox"
GATEWAY_SPAN: Final = "gateway call"
PAUSE_SPAN: Final = "weights pause"
BACKEND_WAIT_SPAN: Final = "backend wait"
UNKNOWN_TOOL: Final = "unknown"
"""Written instead of the name of a tool that does not exist, because the policy wrote that name."""
