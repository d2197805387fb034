"""YAML from outside may have no aliases, and its bounds hold before anything is built."""

from __future__ import annotations

import time

import pytest
from rollyard_crds.reading.manifest import ManifestError, load
from rollyard_crds.reading.yaml_text import MAX_DEPTH, MAX_VALUES, YamlError, load_all, load_one
from rollyard_testing.pace import patience

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
)


def test_a_billion_laughs_are_refused_by_line() -> None:
    with pytest.raises(
        YamlError, match=r"line 2, column \d+: the alias \*a is not taken: write the value out"
    ):
        load_one(LAUGHS)
    with pytest.raises(ManifestError, match="manifest: not valid YAML: line 2"):
        load(LAUGHS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: &a {b: c}\nd: {<<: *a}", "the alias"),
        ("[" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ("[" * 200_000, f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 200_000, f"nested more than {MAX_DEPTH} deep"),
        ("".join(f"{' ' * i}a:\n" for i in range(300)), f"nested more than {MAX_DEPTH} deep"),
        ("a: " + "1:" * 200_000 + "1", "a number has more than"),
        ("a: !!int '" + "1:" * 200_000 + "1'", "a number has more than"),
        ("a: !!float '1 : " + "1 : " * 200_000 + "1'", "a number has more than"),
        ("a: " + "9" * 5_000, "a number has more than"),
        ("a: 2001-99-99", "a value cannot be read"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "one document is taken here, and there are 2"),
        ("a: [", r"line \d"),
        ("a: \x00", "unacceptable|not allowed"),
        ("&a [*a]", "the alias"),
    ],
    ids=range(15),
)
def test_what_is_not_plain_is_refused_at_once(text: str, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(YamlError, match=why):
        load_one(text)
    assert time.monotonic() - began < patience(20), "hostile text costs seconds at most"


def test_values_are_bounded() -> None:
    with pytest.raises(YamlError, match=f"more than {MAX_VALUES} values"):
        load_one("[" + "a," * (MAX_VALUES + 1) + "]")


def test_ordinary_manifests_are_read() -> None:
    text = "a: {b: [1, 2.5, true, null, '*x', \"&y\"], c: 2024-01-01}\nlong: " + "0123456789abcdef" * 8
    found = load_one(text)
    assert found["a"]["b"] == [1, 2.5, True, None, "*x", "&y"]
    assert found["long"] == "0123456789abcdef" * 8
    assert load_all("a: &unused 1\n---\nb: 2") == [{"a": 1}, {"b": 2}]
    assert load_one("") is None
