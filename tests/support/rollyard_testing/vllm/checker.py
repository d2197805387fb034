"""Trajectories are judged against what servers said on the wire, and against a fresh forward pass.

Nothing of Rollyard is imported here: trajectories are what its REST API answers, and exchanges are what a
proxy between it and the servers recorded. Each finding names the check that failed:

    shape       parallel lists of unequal length; the mask is not 1 exactly on the turns
    sampling    a request asked for other sampling than the trajectory says
    prompt      no server was sent the ids before a turn
    ids         a server was sent them and sampled other ids than the turn holds
    logprobs    the ids are those that it sampled, the log-probabilities are not, bit for bit
    versions    the policy versions are not those that it gave
    unused      a server sampled tokens for a client that read them, no trajectory holds them, and no
                restart explains this
    forward     a fresh forward pass gives other log-probabilities

A turn may be made of several answers: an `abort` cuts one, or the stream breaks, and the next request holds
its ids. Of an answer only the tokens before the first with an `unverified:` label count, and of a stream that
broke those that the next request holds. Every answer is used once.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rollyard_testing.vllm.proxy import Exchange

UNVERIFIED = "unverified:"
CUT = "cut"
"""The `finish` of a stream that broke, or whose client left, before its end."""
BF16_ROUNDING = 2.0**-7
"""bfloat16 keeps 8 significant bits: two roundings of half a unit each, and two of the same size beside."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    check: str
    where: str
    message: str


@dataclass(slots=True)
class Answer:
    """What a server sampled in one request; the three lists are parallel."""

    number: int
    server: str
    prompt: tuple[int, ...]
    parameters: dict[str, Any]
    ids: list[int]
    logprobs: list[float]
    versions: list[str]
    """The policy versions; they are empty strings where the server says nothing."""
    finish: str
    began: float
    ended: float
    delivered: bool
    """Whether the client was there until the end."""
    kept: int | None = None
    """How many of its tokens the client has kept, where it was cut."""

    @property
    def key(self) -> tuple[str, int]:
        """Return its server and number, which no other answer has."""
        return self.server, self.number

    @property
    def seed(self) -> int | None:
        """Return the seed that it was sampled with."""
        return self.parameters.get("seed")

    @property
    def counted(self) -> int:
        """Return how many of its tokens count: those before the first with an unverified label."""
        if self.kept is not None:
            return self.kept
        for place, version in enumerate(self.versions):
            if version.startswith(UNVERIFIED):
                return place
        return len(self.ids)


def answers(server: str, exchanges: Iterable[Exchange]) -> list[Answer]:
    """Return the answers with samples among what was recorded before `server`."""
    found = []
    for exchange in exchanges:
        if exchange.path.startswith("/inference/v1/generate"):
            read = _generate
        elif exchange.path.startswith("/v1/completions"):
            read = _completions
        else:
            continue
        if exchange.status != 200:
            continue
        try:
            request, events = json.loads(exchange.request), _events(exchange.response)
        except ValueError:
            continue  # It was cut off in the middle, so it cannot have been read.
        prompt, parameters, ids, logprobs, versions, finish = read(request, events)
        found.append(
            Answer(
                exchange.number, server, tuple(prompt), parameters, ids, logprobs, versions, finish,
                exchange.began, exchange.ended, exchange.end == "complete",
            )
        )  # fmt: skip
    return found


_Read = tuple[list[int], dict[str, Any], list[int], list[float], list[str], str]


def _events(response: str) -> list[dict[str, Any]]:
    """Return the choices of an answer, of which a stream has one in each of its whole events."""
    if not response.startswith("data:"):
        return list(json.loads(response)["choices"])
    *lines, _rest = response.split("\n")
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    bodies = [json.loads(text) for text in data if text != "[DONE]"]
    return [choice for body in bodies for choice in body.get("choices", ())]


def _finish(choices: Sequence[dict[str, Any]]) -> str:
    return str(choices[-1].get("finish_reason") or CUT) if choices else CUT


def _generate(request: dict[str, Any], choices: Sequence[dict[str, Any]]) -> _Read:
    ids = [token for choice in choices for token in choice["token_ids"]]
    content = [one for choice in choices for one in (choice.get("logprobs") or {}).get("content", ())]
    versions = [""] * len(ids)
    for part in (choices[-1].get("weight_versions") or []) if choices else []:
        versions[part["start"] : part["end"]] = [str(part["version"])] * (part["end"] - part["start"])
    return (
        request["token_ids"], request["sampling_params"], ids, [one["logprob"] for one in content], versions,
        _finish(choices),
    )  # fmt: skip


def _completions(request: dict[str, Any], choices: Sequence[dict[str, Any]]) -> _Read:
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    logprobs = [
        value for choice in choices for value in (choice.get("logprobs") or {}).get("token_logprobs", ())
    ]
    return request["prompt"], request, ids, logprobs, [""] * len(ids), _finish(choices)


def _kept(
    answer: Answer, prompt: tuple[int, ...], ids: Sequence[int], by_prompt: Mapping[tuple[int, ...], Any]
) -> int:
    """Return how many tokens of a stream that was cut are in a turn that has `ids` after its prompt."""
    common = 0
    for sampled, held in zip(answer.ids, ids, strict=False):
        if sampled != held:
            break
        common += 1
    ends = range(common, 0, -1)
    return next((n for n in ends if n == len(ids) or prompt + tuple(ids[:n]) in by_prompt), 0)


def _bits(values: Sequence[float]) -> bytes:
    # The record keeps them so: rounding in reduced precision above 0 is taken for 0.
    return struct.pack(f"<{len(values)}d", *(min(value, 0.0) + 0.0 for value in values))


@dataclass(slots=True)
class Judgement:
    """What was found wrong, what was left over, and how much was compared."""

    findings: list[Finding] = field(default_factory=list)
    unused: list[Answer] = field(default_factory=list)
    """The answers that no trajectory holds."""
    tokens: int = 0
    """The sampled tokens whose ids and log-probabilities are those of a server."""
    turns: int = 0
    continued: int = 0
    """The turns that are made of more than one answer."""
    moved: int = 0
    """The trajectories whose turns were sampled by more than one server."""

    @property
    def checks(self) -> set[str]:
        return {finding.check for finding in self.findings}

    def add(self, check: str, where: str, message: str) -> None:
        self.findings.append(Finding(check, where, message))


def judge(
    trajectories: Iterable[dict[str, Any]], served: Iterable[Answer], *, restarts: bool = False
) -> Judgement:
    """Compare every turn of every trajectory with what was served.

    Args:
        restarts: Whether rollouts may have been restarted. An answer that no trajectory holds is then
            explained if it was sampled before the restart of its rollout.
    """
    trajectories = list(trajectories)
    by_prompt: dict[tuple[int, ...], list[Answer]] = defaultdict(list)
    for answer in served:
        by_prompt[answer.prompt].append(answer)
    used: set[tuple[str, int]] = set()
    verdict = Judgement()
    for trajectory in trajectories:
        _judge_one(trajectory, by_prompt, used, verdict)
    for group in by_prompt.values():
        for answer in group:
            # A request for one token is a probe of the server and belongs to no rollout.
            probe = answer.parameters.get("max_tokens") == 1
            if answer.key not in used and answer.counted and not probe:
                verdict.unused.append(answer)
    explained = _before_restarts(trajectories, by_prompt, used, verdict.unused) if restarts else set()
    for answer in verdict.unused:
        if answer.delivered and answer.key not in explained:
            verdict.add(
                "unused",
                f"{answer.server} request {answer.number}",
                f"{answer.counted} tokens were sampled after {len(answer.prompt)} and are nowhere "
                f"(finish {answer.finish!r}, versions {sorted(set(answer.versions))})",
            )
    return verdict


def _before_restarts(
    trajectories: Iterable[dict[str, Any]],
    by_prompt: Mapping[tuple[int, ...], Sequence[Answer]],
    used: Set[tuple[str, int]],
    unused: Sequence[Answer],
) -> set[tuple[str, int]]:
    """Return the key of each unused answer that a rollout had before it was restarted.

    A restarted rollout sends its first request once more, with the same prompt and seed. An unused answer to
    this request was therefore discarded, and so was everything that continues it. Its weights do not matter:
    until its worker has heard of the restart, a rollout samples with the new ones too.
    """
    asked = {one.prompt for group in by_prompt.values() for one in group if one.key in used}
    repeated = [
        answer
        for answer in unused
        if answer.prompt in asked and sum(one.seed == answer.seed for one in by_prompt[answer.prompt]) > 1
    ]
    starts = {answer.prompt + tuple(answer.ids[: answer.counted]) for answer in repeated}
    # What continues a trajectory itself is lost, also where an earlier attempt began with the same tokens.
    held = asked | {
        (*segment["prompt_ids"], *segment["response_ids"])
        for trajectory in trajectories
        for segment in trajectory["segments"]
    }
    continuing = [
        answer
        for answer in unused
        if answer.prompt not in held and any(answer.prompt[: len(start)] == start for start in starts)
    ]
    return {answer.key for answer in (*repeated, *continuing)}


def _judge_one(
    trajectory: dict[str, Any],
    by_prompt: dict[tuple[int, ...], list[Answer]],
    used: set[tuple[str, int]],
    verdict: Judgement,
) -> None:
    servers: set[str] = set()
    masks = [[0] * len(segment["response_ids"]) for segment in trajectory["segments"]]
    for number, turn in enumerate(trajectory["turns"]):
        where = f"{trajectory['id']} turn {number}"
        segment = trajectory["segments"][turn["segment"]]
        start, end = turn["start"], turn["end"]
        masks[turn["segment"]][start:end] = [1] * (end - start)
        verdict.turns += 1
        prompt = (*segment["prompt_ids"], *segment["response_ids"][:start])
        parts = 0
        while start < end:
            wanted = _Wanted(
                segment["response_ids"][start:end],
                segment["logprobs"][start:end],
                segment["policy_versions"][start:end],
            )
            there = [one for one in by_prompt.get(prompt, ()) if one.key not in used]
            for one in there:
                if one.finish == CUT:
                    one.kept = _kept(one, prompt, wanted.ids, by_prompt)
            answer = wanted.choose(there, where, verdict)
            if answer is None:
                break
            used.add(answer.key)
            servers.add(answer.server)
            _judge_sampling(trajectory, answer, where, verdict)
            prompt += tuple(answer.ids[: answer.counted])
            start += answer.counted
            verdict.tokens += answer.counted
            parts += 1
        verdict.continued += parts > 1
    verdict.moved += len(servers) > 1
    for number, (segment, mask) in enumerate(zip(trajectory["segments"], masks, strict=True)):
        where = f"{trajectory['id']} segment {number}"
        names = ("response_ids", "loss_mask", "logprobs", "policy_versions")
        if len({len(segment[name]) for name in names}) != 1:
            verdict.add("shape", where, f"{', '.join(names)} are of unequal length")
        if segment["loss_mask"] != mask:
            verdict.add("shape", where, "the loss mask is not 1 exactly on the tokens of turns")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rest of a turn, as the trajectory holds it."""

    ids: list[int]
    logprobs: list[float]
    versions: list[str]

    def choose(self, there: list[Answer], where: str, verdict: Judgement) -> Answer | None:
        """Return the answer that this is, or begins with; else the finding nearest to it."""
        if not there:
            verdict.add("prompt", where, "no server was asked (once more) with the ids before it")
            return None
        # A rest of the turn may only follow an answer that was cut.
        same = [
            one
            for one in there
            if one.counted
            and one.ids[: one.counted] == self.ids[: one.counted]
            and (one.counted == len(self.ids) or one.finish in ("abort", CUT) or one.counted < len(one.ids))
        ]
        if not same:
            verdict.add("ids", where, f"its ids are in none of the {len(there)} answers to its prompt")
            return None
        exact = [
            one for one in same if _bits(one.logprobs[: one.counted]) == _bits(self.logprobs[: one.counted])
        ]
        if not exact:
            verdict.add("logprobs", where, "the server gave these ids other log-probabilities")
            return None
        labelled = [
            one
            for one in exact
            if not any(one.versions) or one.versions[: one.counted] == self.versions[: one.counted]
        ]
        if not labelled:
            verdict.add("versions", where, "the server gave these tokens other policy versions")
            return None
        return max(labelled, key=lambda one: one.counted)


def _judge_sampling(trajectory: dict[str, Any], answer: Answer, where: str, verdict: Judgement) -> None:
    said = trajectory["sampling"]
    for name in ("temperature", "top_p", "top_k"):
        if answer.parameters.get(name) != said[name]:
            verdict.add(
                "sampling", where, f"{name}: asked for {answer.parameters.get(name)}, recorded {said[name]}"
            )


@dataclass(frozen=True, slots=True)
class Pass:
    """One segment for a forward pass: its ids, and the temperature that they were sampled at."""

    where: str
    ids: list[int]
    temperature: float
    places: list[int]
    """The places of `ids` that were sampled."""
    recorded: list[float]
    """The recorded log-probabilities of these places."""


def passes(trajectories: Iterable[dict[str, Any]], version: str | None = None) -> Iterator[Pass]:
    """Yield every segment with sampled tokens, or only those of a policy version, where it is given."""
    for trajectory in trajectories:
        for number, segment in enumerate(trajectory["segments"]):
            before = len(segment["prompt_ids"])
            places = [
                place
                for place, mask in enumerate(segment["loss_mask"])
                if mask and version in (None, segment["policy_versions"][place])
            ]
            if places:
                yield Pass(
                    f"{trajectory['id']} segment {number}",
                    segment["prompt_ids"] + segment["response_ids"],
                    trajectory["sampling"]["temperature"],
                    [before + place for place in places],
                    [segment["logprobs"][place] for place in places],
                )


@dataclass(slots=True)
class Agreement:
    """How recorded log-probabilities compare with a forward pass."""

    findings: list[Finding] = field(default_factory=list)
    tokens: int = 0
    largest: float = 0.0
    """The largest difference, in nats."""


def compare(asked: Sequence[Pass], fresh: Sequence[Sequence[float]]) -> Agreement:
    """Compare with a forward pass's log-probabilities, which are parallel to `places` of each pass.

    Two numbers agree within what bfloat16 leaves of them, and of 1 nat at least.
    """
    agreement = Agreement()
    for one, values in zip(asked, fresh, strict=True):
        for place, recorded, value in zip(one.places, one.recorded, values, strict=True):
            difference = abs(recorded - value)
            agreement.tokens += 1
            agreement.largest = max(agreement.largest, difference)
            if not difference <= BF16_ROUNDING * max(1.0, abs(value)):
                agreement.findings.append(
                    Finding("forward", f"{one.where} id {place}", f"{recorded} recorded, {value} computed")
                )
    return agreement
