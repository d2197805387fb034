"""Every reason that the code gives is described in `rollyard_crds.reasons`, and every description is used.

The source is read, because many reasons need a broken cluster, a full disk or a hostile policy to appear.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from rollyard_crds.reasons import FAULTS, PLACES, ReasonUnknown, all_reasons, link, meanings

pytestmark = pytest.mark.static

ROOT = Path(__file__).resolve().parents[2]
WORD = re.compile(r"[A-Z]+[a-z][a-z0-9]*(?:[A-Z]+[a-z0-9]*)*")
SEVERAL = re.compile(r"\w*[a-z0-9][A-Z]\w*[a-z0-9]")
"""A word of several parts, which is hardly anything but a reason or the name of a class."""
PARAMETERS = {"reason", "reward_reason", "failed"}
"""The parameters that take reasons. `failed` and `timeout` are those of helper processes."""
INTERNAL = {
    # The package that raises them catches them, and what people see has another reason.
    "LoadFailed", "NotAValue", "NotStructural", "SessionOver", "SourceUnreadable", "Superseded",
    "Unverifiable",
    # Roots and branches of exceptions, of which every one that is raised is more precise.
    "BridgeError", "CrdsError", "Error", "ProcessError", "TasksError", "WorkerError",
}  # fmt: skip
"""Reasons that nobody sees."""
FOREIGN = {
    # Kubernetes: words of pods, of specs and of refusals.
    "BearerToken", "ConfigMap", "ContainerCannotRun", "CreateContainerConfigError", "CreateContainerError",
    "CustomResourceDefinition", "DeleteOptions", "DisruptionTarget", "DoesNotExist", "ErrImageNeverPull",
    "DoNotSchedule", "ErrImagePull", "FallbackToLogsOnError", "IfNotPresent", "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName", "NetworkPolicy", "NoExecute", "NodeShutdown", "NotIn", "NotReady",
    "OnRootMismatch", "PodScheduled", "PostStartHookError", "PreCreateHookError", "PreStartHookError",
    "RegistryUnavailable", "RunContainerError", "RuntimeDefault", "ScheduleAnyway",
    "SignatureValidationFailed", "StartError",
    "Http",
    # Slurm: why a job is pending, and the fields that scontrol prints.
    "BadConstraints", "BeginTime", "ExitCode", "JobHeldAdmin", "JobHeldUser", "JobId", "JobState", "NodeDown",
    "PartitionConfig", "PartitionDown", "PartitionInactive", "PartitionNodeLimit",
    "PartitionTimeLimit", "Reason", "RunTime", "TimeLimit",
    # Docker and Podman: fields of `docker info` and `podman info`.
    "CPUCfsQuota", "CpuCfsQuota", "MemoryLimit", "OperatingSystem", "PidsLimit",
    "SecurityOptions", "ServerErrors", "ServerVersion",
    # vLLM's kinds of errors, tokenizers, YAML and Python.
    "BadRequestError", "ByteFallback", "ByteLevel", "CSafeLoader", "InternalServerError", "NotFoundError",
    "OrderedDict", "ServiceUnavailableError",
    # Kinds, lists and values of our own objects, and words of the page's tables.
    "BackendPoolList", "HalfOpen", "RolloutJobList",
    # Names of types that are no classes.
    "ChatMessage", "StageName", "ToolError", "ToolParser", "TrainingAdvantage",
    # The names of rules of the failure policy.
    "AttemptsUsedUp", "EvalLeaseLost", "FinalFailure", "HandOver", "TooManyLostLeases", "TooStale",
    # An exit of a program between a sandbox and its starter.
    "NotConfined",
}  # fmt: skip
"""Words of the same form that are no reasons of ours."""


class Sources:
    """The modules of the packages, and the reasons in them.

    Args:
        texts: The source of each module by its path.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.trees = {path: ast.parse(text) for path, text in texts.items()}
        self._constants: defaultdict[str, set[str]] = defaultdict(set)
        self._parameters: defaultdict[str, list[list[str]]] = defaultdict(list)
        self._bases: defaultdict[str, list[str]] = defaultdict(list)
        self.classes: dict[str, ast.ClassDef] = {}
        nodes = {path: [*filter(_matters, ast.walk(tree))] for path, tree in self.trees.items()}
        for node in chain.from_iterable(nodes.values()):
            self._learn(node)
        self._taking = dict(self._positions())
        self.found: defaultdict[str, set[str]] = defaultdict(set)
        """The places of each reason."""
        for path, known in nodes.items():
            for node in known:
                for word in self._reasons(node):
                    self.found[word].add(f"{path}:{getattr(node, 'lineno', 0)}")

    def _learn(self, node: ast.AST) -> None:
        """Keep what other nodes refer to by name: constants, parameters of calls, and bases of classes."""
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value) if name.isupper():
                self._constants[name] |= set(_words(value))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value) if name.isupper():
                self._constants[name] |= set(_words(value))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._parameters[node.name].append([one.arg for one in _positional(node)])
            case ast.ClassDef():
                # The client has some names of the control plane, whose path comes before.
                self.classes.setdefault(node.name, node)
                self._bases[node.name] += [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                own = [
                    one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
                ]
                fields = [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
                self._parameters[node.name].append(
                    [one.arg for one in _positional(own[0])] if own else ["self", *fields]
                )

    def derives(self, name: str, root: str) -> bool:
        """Return whether a class is below the root."""
        return root in self._above(name)

    def _above(self, name: str) -> set[str]:
        """Return the bases of a class, and theirs. Classes of several packages may have one name."""
        seen, left = set(), list(self._bases.get(name, ()))
        while left:
            base = left.pop()
            if base not in seen:
                seen.add(base)
                left += self._bases.get(base, ())
        return seen

    def own_reason(self, cls: ast.ClassDef) -> str | None:
        """Return the reason that a class states in its body, or None."""
        for node in cls.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="reason")], value=ast.Constant(value=str(word))):
                    return word
                case ast.AnnAssign(target=ast.Name(id="reason"), value=ast.Constant(value=str(word))):
                    return word
        return None

    def status(self, name: str) -> int:
        """Return the HTTP status of an error of the control plane."""
        for node in self.classes[name].body:
            match node:
                case ast.Assign(targets=[ast.Name(id="status")], value=ast.Constant(value=int(number))):
                    return number
        return self.status(self._bases[name][0]) if name != "ApiError" else 500

    def values(self, node: ast.expr) -> set[str]:
        """Return the words in an expression, and those of constants that it names."""
        words = set(_words(node))
        for part in ast.walk(node):
            name = getattr(part, "id", None) or getattr(part, "attr", "")
            words |= self._constants.get(str(name), set())
        return words

    def _positions(self) -> Iterator[tuple[str, set[int]]]:
        """Yield the name of each function and class that takes reasons by position, and these positions."""
        for name in {*self._parameters, *self._bases}:
            positions = {
                number - (names[0] in ("self", "cls"))
                for one in (name, *self._above(name))
                for names in self._parameters.get(one, ())
                for number, parameter in enumerate(names)
                if parameter in PARAMETERS
            }
            if positions:
                yield name, positions

    def _reasons(self, node: ast.AST) -> set[str]:
        """Return the reasons that one node of the source states."""
        match node:
            case ast.Constant(value=str(word)) if SEVERAL.fullmatch(word) and WORD.fullmatch(word):
                # Names of classes are often in texts: in `__all__`, and in annotations.
                return {word} if word not in self.classes else set()
            case ast.keyword(arg="reason" | "failed", value=value):
                return self.values(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)] | targets, value=value):
                return self.values(value) if any("reason" in _name(one) for one in targets) else set()
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return self.values(value) if "reason" in _name(target).lower() else set()
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                named = [
                    value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "reason"
                ]
                return set().union(*map(self.values, named))
            case ast.Call():
                return self._in_call(node)
            case ast.ClassDef() if self.derives(node.name, "ControlPlaneError"):
                return {node.name} if self.own_reason(node) is None else set()
        return set()

    def _in_call(self, node: ast.Call) -> set[str]:
        positions = self._taking.get(_name(node.func), set())
        given = [argument for number, argument in enumerate(node.args) if number in positions]
        return set().union(*map(self.values, given))

    def problems(self) -> Iterator[tuple[str, int]]:
        """Yield the reason and the status of each error of the control plane that states both."""
        for path, tree in self.trees.items():
            for node in ast.walk(tree) if path.startswith("api/") else ():
                if not isinstance(node, ast.Call):
                    continue
                function = node.func
                is_of = isinstance(function, ast.Attribute) and function.attr == "of"
                name = _name(function.value if is_of else function)
                given = {one.arg: one.value for one in node.keywords}
                if name != "ApiError" and not self.derives(name, "ApiError"):
                    continue
                status = given.get("status", ast.Constant(self.status(name)))
                reason = given.get("reason", ast.Constant(self.own_reason(self.classes[name]) or name))
                if isinstance(status, ast.Constant) and isinstance(reason, ast.Constant):
                    yield reason.value, status.value


def _matters(node: ast.AST) -> bool:
    return isinstance(
        node,
        ast.Constant
        | ast.keyword
        | ast.Assign
        | ast.AnnAssign
        | ast.Dict
        | ast.Call
        | ast.ClassDef
        | ast.FunctionDef
        | ast.AsyncFunctionDef,
    )


def _words(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and WORD.fullmatch(part.value):
            yield part.value


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name, or nothing for another expression."""
    return str(getattr(node, "id", "") or getattr(node, "attr", ""))


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args]


@cache
def sources() -> Sources:
    """Return those of this checkout."""
    paths = sorted(ROOT.glob("*/src/**/*.py"))
    return Sources({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths})


def missing(found: Iterable[str]) -> list[str]:
    """Return the words that are neither described nor listed above."""
    return sorted(set(found) - set(all_reasons()) - INTERNAL - FOREIGN)


def test_every_reason_is_described() -> None:
    lines = [f"{word}: {', '.join(sorted(sources().found[word])[:3])}" for word in missing(sources().found)]
    assert lines == [], "describe these in crds/src/rollyard_crds/reasons.toml, or list them in this test"


def test_every_description_is_of_a_reason() -> None:
    assert sorted(set(all_reasons()) - set(sources().found)) == [], "no code gives these reasons any more"


def test_every_exemption_is_needed() -> None:
    assert sorted((INTERNAL | FOREIGN) - set(sources().found)) == []
    assert sorted((INTERNAL | FOREIGN) & set(all_reasons())) == []


def test_statuses_are_those_of_the_code() -> None:
    stated: defaultdict[str, set[int]] = defaultdict(set)
    for reason, status in sources().problems():
        stated[reason].add(status)
    described = {
        name: {status for meaning in several for status in meaning.statuses}
        for name, several in all_reasons().items()
    }
    assert len(stated) > 50
    assert {name: seen for name, seen in stated.items() if not seen <= described.get(name, set())} == {}


@pytest.mark.parametrize(
    "text",
    [
        'raise Invalid("no", reason="NewWord")',
        'class Bad(Exception):\n    reason = "NewWord"',
        'NEW: Final = "NewWord"',
        'def f(message, reason): ...\nf("no", "NewWord")',
        "class ControlPlaneError(Exception): ...\nclass New(ControlPlaneError): ...",
        'def refused():\n    yield "NewWord", "text"',
    ],
)
def test_a_reason_is_found_wherever_it_stands(text: str) -> None:
    assert missing(Sources({"new.py": text}).found) in (["NewWord"], ["New"])


def test_texts_are_sentences() -> None:
    for name, several in all_reasons().items():
        for meaning in several:
            assert set(meaning.places) <= set(PLACES), name
            assert set(meaning.faults) <= set(FAULTS), name
            assert bool(meaning.statuses) >= ("problem" in meaning.places), name
            for text in (meaning.what, meaning.remedy):
                assert re.match(r"[A-Z`]|kubectl|sbatch", text), f"{name}: {text}"
                assert text.endswith("."), f"{name}: {text}"


def test_reasons_stand_in_the_order_of_the_alphabet() -> None:
    names = list(all_reasons())
    assert names == sorted(names, key=str.lower)


def test_lookups_take_letters_of_either_case_and_name_what_is_near() -> None:
    assert meanings("leaseexpired") == meanings("LeaseExpired")
    assert link("LeaseExpired").endswith("/reasons.html#leaseexpired")
    with pytest.raises(ReasonUnknown, match="'LeaseExpiry'; did you mean LeaseExpired"):
        meanings("LeaseExpiry")
