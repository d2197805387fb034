"""A task: one JSON object of a task list, which is a file, inline or pushed to a stream."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, LiteralString

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rollyard_crds.base import CheckedEnv, Model, Path, cel
from rollyard_crds.fields.allowed_hosts import MAX_HOSTS, AllowedHost, HostRule
from rollyard_crds.fields.chat_messages import MessageRefused, plain_messages
from rollyard_crds.fields.code_tests import CodeTests
from rollyard_crds.fields.harbor import HarborFolder
from rollyard_crds.fields.json_values import HALF_CHARACTER, deeper_than, lone_surrogate
from rollyard_crds.fields.swe_tests import SweTests

MAX_DEPTH: Final = 100
"""How deep lists and objects may nest in a task, which is stored within other documents; JSON permits 254."""

TaskId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


class FunctionCall(Model):
    """Name and arguments of a tool call, as chat templates expect them."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the tool."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The tool's arguments, a free-form object."""


class ToolCall(Model):
    """A tool call inside an assistant message of a task's own history."""

    id: Annotated[str, Field(max_length=128)] | None = None
    """What a tool message refers to by `tool_call_id`."""
    type: Literal["function"] = "function"
    """The only type of call."""
    function: FunctionCall
    """What is called."""


class Message(Model):
    """One turn of the conversation that a task starts from."""

    # Chat messages are snake_case everywhere in the field, unlike Kubernetes objects.
    model_config = ConfigDict(alias_generator=None, extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    """Who speaks."""
    content: Annotated[str, Field(max_length=1 << 20)] = ""
    """What is said."""
    reasoning_content: Annotated[str, Field(max_length=1 << 20)] | None = None
    """The thought that precedes an assistant message, for templates that show it."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=64)] | None = None
    """Calls that an assistant message makes."""
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None
    """The call that a tool message answers."""
    name: Annotated[str, Field(max_length=128)] | None = None
    """Name of the speaker or of the tool."""


_FOLDER_PATTERN: Final = r"^/[a-z][a-z0-9_-]{0,31}$"
_SYSTEM: Final = frozenset(
    {
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/nix",
        "/opt",
        "/proc",
        "/root",
        "/run",
        "/sbin",
        "/snap",
        "/sys",
        "/tmp",
        "/usr",
        "/var",
        "/work",
    }
)


def folder_problem(path: str) -> str:
    """Return why a sandbox cannot have an empty folder at `path`, or "" if it can."""
    if not re.fullmatch(_FOLDER_PATTERN, path):
        return "must be a folder directly below /, of lower-case letters, digits, '_' and '-'"
    return "must not be a folder of the system" if path in _SYSTEM else ""


def _checked_folder(path: str) -> str:
    if problem := folder_problem(path):
        raise ValueError(problem)
    return path


EmptyFolder = Annotated[str, Field(pattern=_FOLDER_PATTERN, max_length=33), AfterValidator(_checked_folder)]


class TaskSandbox(Model):
    """This task's additions to the job's sandbox, which are applied when the sandbox is handed out."""

    image: Annotated[str, Field(max_length=1024)] | None = None
    """Instead of the job's image."""
    env: Annotated[dict[str, str], Field(max_length=256), CheckedEnv] = Field(default_factory=dict)
    """Environment variables in addition to the job's, over which they take precedence."""
    files: Annotated[dict[Path, Annotated[str, Field(max_length=1 << 20)]], Field(max_length=1024)] = Field(
        default_factory=dict
    )
    """Path (relative to the work folder, or absolute) to text content."""
    folders: Annotated[list[EmptyFolder], Field(max_length=8)] | None = None
    """Empty folders directly below /, besides the work folder, in which programs can write. Each may grow as
    large as the work folder, and hides what the image has at its path."""
    allowed_hosts: Annotated[list[AllowedHost], Field(max_length=MAX_HOSTS)] | None = None
    """Those of the job's `allowedHosts` that this task may reach. An empty list means no network; without a
    list the task has the network of the job."""
    setup: Annotated[str, Field(max_length=1 << 16)] | None = None
    """A bash script that Init runs when the files are there; it must exit with 0."""

    @model_validator(mode="after")
    def _hosts_can_be_read(self) -> TaskSandbox:
        for text in self.allowed_hosts or ():
            try:
                HostRule.parse(text)
            except ValueError as error:
                raise ValueError(f"'allowedHosts': {error}") from error
        return self


MAX_ANSWERS: Final = 64
"""The largest number of accepted answers of a task."""
Choice = Annotated[str, Field(max_length=1 << 16)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


AcceptedAnswer = Annotated[str, Field(max_length=1 << 16), AfterValidator(_not_blank)]
Tolerance = Annotated[float, Field(ge=0.0, le=1.0)]


class NumericAnswer(Model):
    """How far a number may be from the answer, and in which unit it is (handler `stem`)."""

    model_config = ConfigDict(alias_generator=None, extra="forbid")

    relative: Tolerance = 0.01
    """The permitted distance as a share of the answer."""
    absolute: Annotated[float, Field(ge=0.0, le=1e12)] = 0.0
    """The permitted distance in the answer's unit, where it is larger."""
    unit: Annotated[str, Field(max_length=64)] = ""
    """The answer's unit, such as `m/s^2`; other units of its kind are converted."""


class Task(Model):
    """One task. Fields that only some handlers read are optional here and checked by the handler.

    Raises:
        pydantic.ValidationError: neither or both of `prompt` and `messages` are given, or both `answer` and
            `answers`.
    """

    model_config = ConfigDict(
        alias_generator=None,
        extra="forbid",
        json_schema_extra=cel(
            ("has(self.prompt) != has(self.messages)", "give exactly one of 'prompt' and 'messages'"),
            ("!has(self.answer) || !has(self.answers)", "give at most one of 'answer' and 'answers'"),
        ),
    )

    id: TaskId
    """Unique within its job."""
    prompt: Annotated[str, Field(min_length=1, max_length=1 << 20)] | None = None
    """The user's message, where the conversation is just this one."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    """The conversation to start from; it may already hold turns."""
    answer: Annotated[str, Field(max_length=1 << 16)] | None = None
    """Gold answer (handlers `math` and `stem`)."""
    answers: Annotated[list[AcceptedAnswer], Field(min_length=2, max_length=MAX_ANSWERS)] | None = None
    """Two or more accepted answers, any of which is right, instead of `answer`."""
    choices: Annotated[list[Choice], Field(max_length=26)] = Field(default_factory=list)
    """The choices A, B and so on, at least two, of which `answer` is the letter (handler `stem`)."""
    numeric: NumericAnswer | None = None
    """Given if `answer` is a number (handler `stem`)."""
    tests: CodeTests | None = None
    """The tests of a program (handler `code`)."""
    swe: SweTests | None = None
    """A repository and its hidden tests (handler `swe`)."""
    test_script: Annotated[str, Field(max_length=1 << 20)] | None = None
    """Bash script that decides (handler `shell`): exit status 0 means solved."""
    harbor: HarborFolder | None = None
    """The task folder (handler `harbor`)."""
    solution: Annotated[list[FunctionCall], Field(max_length=256)] | None = None
    """Reference solution for the `oracle` agent: tool calls, one a turn."""
    sandbox: TaskSandbox = Field(default_factory=TaskSandbox)
    """What this task adds to the job's sandbox."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Free-form; comes back with every trajectory of the task."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, document: Any) -> Any:
        document = cls._with_plain_messages(document)
        if deeper_than(document, MAX_DEPTH):
            raise ValueError(f"lists and objects may nest {MAX_DEPTH} deep")
        location = lone_surrogate(document)
        if location is not None:
            raise cls._refused("lone_surrogate", HALF_CHARACTER, location)
        return document

    @classmethod
    def _with_plain_messages(cls, document: Any) -> Any:
        messages = document.get("messages") if isinstance(document, dict) else None
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return document
        try:
            return {**document, "messages": plain_messages(messages)}
        except MessageRefused as error:
            location = ("messages", *error.location)
            raise cls._refused("message_refused", error.problem, location, error.shown) from error

    @classmethod
    def _refused(
        cls, kind: LiteralString, problem: str, location: tuple[int | str, ...], shown: Any = None
    ) -> ValidationError:
        """Return the error of one field, which shows `shown` unless it is None."""
        fault = PydanticCustomError(kind, "{problem}", {"problem": problem})
        shown = {} if shown is None else shown  # No message shows an object.
        return ValidationError.from_exception_data(
            cls.__name__, [{"type": fault, "loc": location, "input": shown}]
        )

    @field_validator("answer", mode="before")
    @classmethod
    def _one_answer(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise PydanticCustomError(
                "several_answers", "must be a text; accepted answers are a list in the field 'answers'"
            )
        return value

    @model_validator(mode="after")
    def _no_two_of_them(self) -> Task:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of 'prompt' and 'messages'")
        if self.answer is not None and self.answers is not None:
            raise ValueError("give at most one of 'answer' and 'answers'")
        return self

    def accepted_answers(self) -> list[str]:
        """Return `answers`, or else `answer` alone. The list is empty if there is none, or a blank one."""
        return [text for text in map(str.strip, self.answers or [self.answer or ""]) if text]

    def chat(self) -> list[Message]:
        """Return the conversation that the rollout starts from."""
        if self.messages is not None:
            return list(self.messages)
        return [Message(role="user", content=self.prompt or "")]
