"""How a reward is made: components, their weights and penalties, and who scores."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rollyard_crds.base import EntryPointName, Model, cel
from rollyard_crds.fields.dynamic_sampling import REWARD

HANDLER: Final = "handler"
"""The component that holds the handler's own reward."""
OVERLONG: Final = "overlong"
"""The component that holds the penalty for length, which is 0 or negative."""
FUNCTION: Final = "function"
"""The component that holds the result of the reward function."""
SERVICE: Final = "service"
"""The component that holds the result of the reward service."""
RESERVED: Final = (REWARD, HANDLER, OVERLONG, FUNCTION, SERVICE)
"""The names that no format check and no score of a function or a service may have."""
MAX_COMPONENTS: Final = 64
"""The largest number of components that a function or a service may return beside the reward."""
COMPONENT_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
TRAINER_SECONDS: Final = 3600
"""How long a rollout waits for the trainer's reward where its job does not say it, in seconds."""
MAX_PATTERN: Final = 512
"""The largest number of characters of a pattern."""
_INLINE_FLAGS: Final = re.compile(r"\(\?[aiLmsux]*(-[imsx]+)?[:)]")

ComponentName = Annotated[str, Field(pattern=COMPONENT_PATTERN, max_length=128)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]

_BUFFER: Final = "'bufferTokens' must be at most 'maxTokens'"
_ONE_CHECK: Final = "give exactly one of 'pattern' and 'tags'"
_TAKEN: Final = f"'name' must not be one of {', '.join(RESERVED)}"
_ONE_SCORER: Final = "give at most one of 'function' and 'service'"
_TRAINER_ALONE: Final = (
    "'trainer' takes no other field: the trainer hands in whole rewards, with its own weights and penalties"
)
_NO_WEIGHT: Final = (
    f"'weights' must not name '{REWARD}', which is their result, or '{OVERLONG}', which has a factor"
)
_FUNCTION_MISSING: Final = "'weights' names 'function', but no function is given"
_SERVICE_MISSING: Final = "'weights' names 'service', but no service is given"
_NO_WEIGHTS: Final = "'weights' must name at least one component"
_IMMUTABLE: Final = "'reward' is immutable: delete the job and create it again"
_UNSCORED: Final = (
    "the handler 'unscored' gives no reward: give 'reward.function' or 'reward.service', or let the trainer "
    "hand in the rewards of a stream (client.rewards), which needs 'tasks.stream: true' and no 'reward' but "
    "'reward.trainer'"
)
_TRAINER_SCORES_ALL: Final = (
    "'reward.trainer' needs 'handler: unscored': other handlers give rewards of their own"
)
UNSCORED: Final = "unscored"
"""The handler that gives no reward of its own."""
JOB_RULES: Final = (
    ("has(self.reward) == has(oldSelf.reward)", _IMMUTABLE),
    (
        f"self.handler != '{UNSCORED}' || (has(self.reward) && "
        "(has(self.reward.function) || has(self.reward.service))) || "
        "(self.tasks.stream && (!has(self.reward) || has(self.reward.trainer)))",
        _UNSCORED,
    ),
    (
        f"self.handler == '{UNSCORED}' || !has(self.reward) || !has(self.reward.trainer)",
        _TRAINER_SCORES_ALL,
    ),
)
"""CEL rules of a job's spec. Those after the first one say the same as `check`."""


def rounded(reward: float) -> str:
    """Return a reward for people: with three decimals, or three significant digits if it is below 0.01."""
    return f"{reward:.3g}" if 0 < abs(reward) < 0.01 else f"{reward:.3f}"


def _pattern(text: str) -> str:
    """Return a pattern that can be compiled in a short time.

    Raises:
        ValueError: The pattern is malformed, or sets flags. Case-insensitive ranges would take long to
            compile, and the control plane checks the patterns of every author.
    """
    if _INLINE_FLAGS.search(text.replace("(?:", "")):
        raise ValueError("flags such as (?i) are not taken; '.' matches every character")
    try:
        re.compile(text, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression of Python: {error}") from error
    return text


Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN), AfterValidator(_pattern)]


class OverlongPenalty(Model):
    """DAPO's soft punishment of long completions, by the number of tokens that the policy sampled.

    It is 0 up to `maxTokens - bufferTokens` tokens, falls evenly to `-factor` at `maxTokens`, and stays
    there.
    """

    model_config = ConfigDict(json_schema_extra=cel(("self.bufferTokens <= self.maxTokens", _BUFFER)))

    max_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    """The number of sampled tokens from which the penalty is full."""
    buffer_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    """The number of tokens below `maxTokens` over which the penalty grows."""
    factor: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] = 1.0
    """The size of the full penalty."""

    @model_validator(mode="after")
    def _within(self) -> OverlongPenalty:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(_BUFFER)
        return self

    def penalty(self, tokens: int) -> float:
        """Return the penalty of a completion of this many tokens, from `-factor` to 0."""
        over = tokens - (self.max_tokens - self.buffer_tokens)
        return 0.0 if over <= 0 else -self.factor * min(1.0, over / self.buffer_tokens)


class FormatCheck(Model):
    """A check of the form of what the policy wrote: a component that is 1 if the form is kept, else 0."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("has(self.pattern) != has(self.tags)", _ONE_CHECK),
            (f"!(self.name in [{', '.join(repr(name) for name in RESERVED)}])", _TAKEN),
        )
    )

    name: ComponentName
    """The name of the component."""
    pattern: Pattern | None = None
    """A regular expression of Python that must be found in the text. '.' matches line ends, too."""
    tags: (
        Annotated[
            list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=64)]],
            Field(min_length=1, max_length=16),
        ]
        | None
    ) = None
    """Names of tags that must each be opened and closed exactly once, one after the other: `[think, answer]`
    stands for `<think>…</think> … <answer>…</answer>`."""
    messages: Literal["last", "every"] = "last"
    """Whether the last message of the policy must have the form, or every one."""

    @model_validator(mode="after")
    def _one_check(self) -> FormatCheck:
        if (self.pattern is None) == (self.tags is None):
            raise ValueError(_ONE_CHECK)
        if self.name in RESERVED:
            raise ValueError(_TAKEN)
        return self


class RewardFunctionSpec(Model):
    """A reward function of a plugin (`--plugin FILE`) or of an installed package."""

    name: EntryPointName
    """Its name: that of the function in a plugin, or of an entry point of the group
    `rollyard.reward_functions`."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 30.0
    """The limit of one call. A call that takes longer is a failure of the infrastructure."""


class RewardServiceSpec(Model):
    """A service that is asked over HTTP for the reward of each rollout."""

    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)]
    """An `http://` or `https://` URL that the control plane's installer allows. The control plane sends the
    requests."""
    timeout_seconds: Annotated[float, Field(gt=0.0, le=600.0)] = 60.0
    """The limit of one request."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 16
    """Requests of this job that are sent at the same time; more wait."""
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """The most requests for one evaluation. If none succeeds, the evaluation fails, and may be repeated as
    `stages.eval.maxAttempts` says."""
    components: Annotated[list[ComponentName], Field(max_length=MAX_COMPONENTS)] = Field(default_factory=list)
    """Components that the service returns beside the reward, and that `weights` may name."""


class TrainerRewardSpec(Model):
    """Rewards that the trainer hands in, for the rollouts that Run has left."""

    timeout_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = TRAINER_SECONDS
    """How long a rollout waits for its reward after Run. Then it ends as Failed, with the reason
    RewardNotGiven."""


_UNIQUE_NAMES: Final[dict[str, Any]] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["name"],
}


class RewardSpec(Model):
    """How the reward is made from components. Each component is delivered with the trajectory."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("!(has(self.function) && has(self.service))", _ONE_SCORER),
            (
                "!has(self.trainer) || !(has(self.function) || has(self.service) || has(self.weights) || "
                "has(self.overlong) || (has(self.format) && size(self.format) > 0))",
                _TRAINER_ALONE,
            ),
            ("!has(self.weights) || size(self.weights) > 0", _NO_WEIGHTS),
            (
                f"!has(self.weights) || !('{REWARD}' in self.weights || '{OVERLONG}' in self.weights)",
                _NO_WEIGHT,
            ),
            (
                f"!has(self.weights) || has(self.function) || !('{FUNCTION}' in self.weights)",
                _FUNCTION_MISSING,
            ),
            (f"!has(self.weights) || has(self.service) || !('{SERVICE}' in self.weights)", _SERVICE_MISSING),
        )
    )

    weights: Annotated[dict[ComponentName, Weight], Field(max_length=MAX_COMPONENTS)] | None = None
    """The reward is the sum of these components, each times its weight, and of the overlong penalty. Default:
    `service` or `function` if there is one, else `handler`, with the weight 1."""
    overlong: OverlongPenalty | None = None
    """A penalty for long completions."""
    format: Annotated[list[FormatCheck], Field(max_length=16, json_schema_extra=_UNIQUE_NAMES)] = Field(
        default_factory=list
    )
    """Checks of form. They count as `weights` says."""
    function: RewardFunctionSpec | None = None
    """A reward function of a plugin (`--plugin FILE`) or of an installed package."""
    service: RewardServiceSpec | None = None
    """A reward service."""
    trainer: TrainerRewardSpec | None = None
    """The trainer, in a stream of the handler `unscored`, which hands in the rewards
    (`POST …/rewards`). The other fields do not apply."""

    @model_validator(mode="after")
    def _consistent(self) -> RewardSpec:
        if self.function is not None and self.service is not None:
            raise ValueError(_ONE_SCORER)
        others = (self.function, self.service, self.weights, self.overlong)
        if self.trainer is not None and (self.format or any(other is not None for other in others)):
            raise ValueError(_TRAINER_ALONE)
        if self.weights is not None and not self.weights:
            raise ValueError(_NO_WEIGHTS)
        names = [check.name for check in self.format]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"'format[{index}].name' {name!r} stands twice")
        weights = self.weights or {}
        if REWARD in weights or OVERLONG in weights:
            raise ValueError(_NO_WEIGHT)
        if FUNCTION in weights and self.function is None:
            raise ValueError(_FUNCTION_MISSING)
        if SERVICE in weights and self.service is None:
            raise ValueError(_SERVICE_MISSING)
        return self

    @property
    def effective_weights(self) -> dict[str, float]:
        """The weights that apply: the given ones, or that of the only score."""
        if self.weights is not None:
            return dict(self.weights)
        if self.service is not None:
            return {SERVICE: 1.0}
        return {HANDLER: 1.0} if self.function is None else {FUNCTION: 1.0}

    def own_components(self) -> frozenset[str]:
        """Return the names of all components that this section adds, as far as it states them."""
        own = {HANDLER, *(check.name for check in self.format)}
        if self.overlong is not None:
            own.add(OVERLONG)
        if self.function is not None:
            own.add(FUNCTION)
        if self.service is not None:
            own |= {SERVICE, *self.service.components}
        return frozenset(own)


def trainer_seconds(handler: str, reward: RewardSpec | None) -> int | None:
    """Return how long a rollout waits for the trainer's reward, or None if the trainer gives none."""
    if handler != UNSCORED:
        return None
    if reward is None:
        return TRAINER_SECONDS
    return None if reward.trainer is None else reward.trainer.timeout_seconds


def check(handler: str, reward: RewardSpec | None, *, stream: bool) -> None:
    """Check a job's `reward` beside its handler, and whether its tasks are a stream.

    Raises:
        ValueError: Nothing gives a reward, or both the handler and the trainer do.
    """
    if handler != UNSCORED:
        if reward is not None and reward.trainer is not None:
            raise ValueError(_TRAINER_SCORES_ALL)
        return
    scored = reward is not None and (reward.function or reward.service) is not None
    if not scored and (not stream or trainer_seconds(handler, reward) is None):
        raise ValueError(_UNSCORED)
