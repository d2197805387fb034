"""The base class of harnesses, which say how a program is started that plays a rollout.

    class AiderHarness(Harness):
        def program(self, place: HarnessPlace) -> HarnessProgram:
            command = place.command or "aider"
            arguments = f'--yes --model openai/{shlex.quote(place.model)} --message "$ROLLYARD_PROMPT"'
            return HarnessProgram(f"{command} {arguments}", env={"ROLLYARD_PROMPT": place.prompt})

The program calls the model through the gateway, which records every token that it samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rollyard_crds.task import Message

from rollyard_pipeline.errors import TaskInvalid

LOG: Final = "log.txt"
"""The name of the log in the harness's folder, unless a preset has another one."""
_PROMPTS: Final = ("system", "user")


@dataclass(frozen=True, slots=True)
class HarnessPlace:
    """Where a harness runs, and what it plays."""

    base_url: str
    """The gateway, such as `http://127.0.0.1:40123`, without `/v1`."""
    key: str
    """The key that its calls show."""
    model: str
    """The name of the model."""
    context: int
    """The most tokens of a prompt and its reply together."""
    messages: Sequence[Message]
    """The messages that the task begins with."""
    folder: str
    """The folder of the harness in the sandbox, outside of the work folder: `$ROLLYARD_HARNESS`."""
    workdir: str
    """The work folder, in which the program starts."""
    command: str | None = None
    """The job's `agent.command`."""

    @property
    def prompt(self) -> str:
        """Return the task as one text: its system and user messages, with an empty line between them.

        Raises:
            TaskInvalid: The task begins with messages of an assistant or a tool, which are no prompt.
        """
        for message in self.messages:
            if message.role not in _PROMPTS:
                raise TaskInvalid(
                    f"messages: a harness starts from a prompt, and the task begins with a message of role "
                    f"'{message.role}'; with 'harness: command', a program can read messages.json"
                )
        return "\n\n".join(message.content for message in self.messages if message.content)


@dataclass(frozen=True, slots=True)
class HarnessProgram:
    """What is started."""

    script: str
    """What `/bin/sh -c` runs in the work folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of `provider_variables`, or instead of them."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files by their paths, which are relative to the harness's folder."""
    stdin: str = ""
    """The standard input, if the program has no terminal."""
    terminal: bool = False
    """Whether the program has a pseudo-terminal, if the job does not say."""
    log: str = LOG
    """The file in the harness's folder whose end goes into the record: `$ROLLYARD_LOG`."""


class Harness(ABC):
    """The base of harnesses.

    Implement `program` and name the class in the entry point group `rollyard.harnesses`.
    """

    @abstractmethod
    def program(self, place: HarnessPlace) -> HarnessProgram:
        """Return the program that plays a task.

        Raises:
            TaskInvalid: The harness cannot play this task.
        """


def provider_variables(place: HarnessPlace) -> dict[str, str]:
    """Return the variables by which the clients of model providers find the gateway."""
    base = place.base_url
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{base}/v1"),
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), base),
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), place.key),
        **dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL", "ROLLYARD_MODEL"), place.model),
    }
