"""The chart's value `jobs.allow`: what the installation permits in templates beyond the defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, Field
from rollyard_crds.base import Model

Text = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^\S+$")]
"""A name, a prefix or a key."""
Ids = Annotated[
    list[
        Annotated[int, Field(ge=1, le=2**31 - 1)]
        | Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}-[1-9][0-9]{0,9}$")]
    ],
    Field(max_length=256),
]
"""Numbers of users or groups, and ranges of them such as `2000-2999`. Root is never among them."""
NamesOrAll = bool | Annotated[list[Text], Field(max_length=256)]
"""True permits any name. False, or an empty list, permits none."""
Entries = Annotated[list[Text], Field(max_length=256)]

ORDINARY_VOLUMES: Final = frozenset(("configMap", "downwardAPI", "emptyDir", "image"))
"""The kinds of volumes that need no permission.

A volume of kind `image` is read-only and grants no more than a sandbox's image does.
"""
OWN_VALUES: Final = frozenset(("hostPath", "secret"))
"""The kinds of volumes that are permitted by values of their own."""
ORDINARY_TOLERATIONS: Final = (
    "amd.com/gpu",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
    "nvidia.com/gpu",
)
MOUNT_ROOTS: Final = ("/data", "/media", "/mnt", "/models", "/srv")
"""The folders of a stage worker in which a template's volumes may appear. No program is looked up in them."""


def _kinds(kinds: list[str]) -> list[str]:
    for kind in kinds:
        if kind in OWN_VALUES:
            own = "hostPath" if kind == "hostPath" else "secrets"
            raise ValueError(f"{kind!r} is permitted by its own value, {own!r}")
    return kinds


def _folders(paths: list[str]) -> list[str]:
    for path in paths:
        if segments(path) is None:
            raise ValueError(f"{path!r} is not an absolute path without '.' and '..'")
    return paths


class Allowed(Model):
    """What templates of jobs and pools may contain in addition to what is always permitted."""

    volumes: Annotated[Entries, AfterValidator(_kinds)] = Field(default_factory=list)
    """Additional kinds of volumes, such as `persistentVolumeClaim`, `csi` or `serviceAccountToken`."""
    host_path: Annotated[Entries, AfterValidator(_folders)] = Field(default_factory=list)
    """The folders of the nodes that may be mounted, including everything below them."""
    secrets: NamesOrAll = Field(default_factory=list)
    """The Secrets of the namespace, by name, for volumes, environment variables and image pulls."""
    images: NamesOrAll = Field(default_factory=list)
    """The images of stage workers. An entry is a whole name or a prefix up to a `/`, a `:` or an `@`."""
    labels: Entries = Field(default_factory=list)
    """The keys of labels. `prefix/*` stands for all keys with that prefix."""
    annotations: Entries = Field(default_factory=list)
    """The keys of annotations, in the same form."""
    tolerations: Entries = Field(default_factory=lambda: list(ORDINARY_TOLERATIONS))
    """The keys of taints, in the same form. `*` stands for all of them."""
    priority_classes: NamesOrAll = Field(default_factory=list)
    """The names of PriorityClasses."""
    runtime_classes: NamesOrAll = Field(default_factory=list)
    """The names of RuntimeClasses."""
    schedulers: NamesOrAll = Field(default_factory=list)
    """The names of schedulers."""
    init_containers: NamesOrAll = Field(default_factory=list)
    """The images of init containers, in the form of `images`. Their authors choose the command."""
    users: Ids = Field(default_factory=list)
    """The users as which stage workers and backends may run. On a file server they may be somebody."""
    groups: Ids = Field(default_factory=list)
    """The groups that stage workers and backends may have, in the same form."""
    env: Entries = Field(default_factory=list)
    """The names of environment variables of stage workers that decide which code runs or whom it trusts."""
    mounts: Annotated[Entries, AfterValidator(_folders)] = Field(default_factory=list)
    """Additional folders of stage workers in which volumes may appear."""
    cross_namespace_affinity: bool = False
    """Whether affinity may name pods of other namespaces. With it, a pod may keep those pods from a node."""


def segments(path: object) -> tuple[str, ...] | None:
    """Return the names in an absolute path, or None if it is relative or contains `.` or `..`."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return None
    names = tuple(name for name in path.split("/") if name)
    return None if "." in names or ".." in names else names


def is_below(path: object, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders or is inside one of them."""
    names = segments(path)
    roots = (segments(folder) for folder in folders)
    return names is not None and any(root is not None and names[: len(root)] == root for root in roots)


def is_named(name: object, names: bool | list[str]) -> bool:
    """Return whether a name is permitted."""
    return isinstance(name, str) and (names is True or (names is not False and name in names))


def is_id(number: int, ids: Iterable[int | str]) -> bool:
    """Return whether the number of a user or a group is one of the numbers or in one of the ranges."""
    for one in ids:
        first, _, last = str(one).partition("-")
        if int(first) <= number <= int(last or first):
            return True
    return False


def is_key(key: object, keys: Iterable[str]) -> bool:
    """Return whether the key of a label, an annotation or a taint matches one of the keys or `prefix/*`."""
    if not isinstance(key, str) or not key:
        return False
    return any(one in ("*", key) or (one.endswith("/*") and key.startswith(one[:-1])) for one in keys)


def is_image(image: str, images: bool | list[str]) -> bool:
    """Return whether an image is permitted by its whole name or by a prefix that ends where a part ends."""
    if isinstance(images, bool):
        return images
    return any(
        image == one or (image.startswith(one) and (one[-1] in "/:@" or image[len(one)] in "/:@"))
        for one in images
    )
