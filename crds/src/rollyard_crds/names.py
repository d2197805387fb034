"""Names apart from the models that use them, for programs that must not wait for the import of these."""

from __future__ import annotations

from typing import Final, Literal

StageName = Literal["init", "run", "eval"]
STAGES: Final[tuple[StageName, ...]] = ("init", "run", "eval")

EXTENSION_NAME: Final = r"^[a-z][a-z0-9_.-]*$"
"""The pattern of the name of an extension, such as a handler."""
PROVIDER: Final = "kubernetes"
"""`SandboxHandle.provider` of a claimed sandbox; its `id` is the claim's id, its `node` NODE."""
NODE: Final = "kubernetes"
"""Node name of workers and sandboxes whose sandboxes are reached over a pod network."""
RUNTIME_PATH: Final = "/.rollyard"
"""Where the runtime (exec server, its Python and its libraries) is mounted read-only in a sandbox."""

UNVERIFIED: Final = "unverified:"
"""Prefix of a server's version label between loading and verification. A paused server answers
nothing, so it must run while it is verified. What it samples meanwhile carries this label, and workers throw
these tokens away and ask again."""
NO_TOOL_PARSER: Final = "NoToolParser"
"""The reason of a Run that fails because no parser fits the model's chat template. Since every rollout of the
job would fail in this way, the control plane ends the job with this reason."""
