"""Pages with raw arrays: nothing that a page says makes its reader trust a wrong array."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgpack
import pytest
from rollyard_client import AnswerInvalid
from rollyard_client.training.packed import ARRAYS, group_page, trajectories

pytestmark = pytest.mark.attack(boundary="tenants", surface="pages with raw arrays")


IDS = {"dtype": "<u2", "data": b"\1\0\2\0"}
SEGMENT: dict[str, Any] = {
    "prompt_ids": IDS,
    "response_ids": IDS,
    "loss_mask": {"dtype": "<u1", "data": b"\1\0"},
    "logprobs": {"dtype": "<f4", "data": bytes(8)},
    "policy_versions": {"runs": [["v1", 1], ["", 1]]},
}


def page(**fields: Any) -> bytes:
    return bytes(msgpack.packb([{"id": "r", "segments": [SEGMENT | fields]}]))


WRONG_ARRAYS = pytest.mark.attack(
    "an array of another type or length than its segment, or of Python objects",
    stopped_by="five types of numbers are taken, and all lists of a segment must be equally long; "
    "`AnswerInvalid` names the field",
)


@WRONG_ARRAYS
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_ids": {"dtype": "|O", "data": bytes(16)}}, "dtype"),
        ({"response_ids": {"dtype": "<u2,<u2", "data": bytes(8)}}, "dtype"),
        ({"response_ids": {"dtype": ["<u2"], "data": bytes(8)}}, "dtype"),
        ({"response_ids": {"dtype": "<u4", "data": bytes(6)}}, "whole numbers"),
        ({"response_ids": {"dtype": "<u2", "data": "text"}}, "data"),
        ({"response_ids": {"dtype": "<f4", "data": bytes(8)}}, "integers"),
        ({"response_ids": "text"}, "list of numbers"),
        ({"response_ids": ["1", {}]}, "list of numbers"),
        ({"logprobs": {"dtype": "<f4", "data": bytes(12)}}, "has 3 entries, response_ids has 2"),
        ({"loss_mask": {"dtype": "<u1", "data": b""}}, "has 0 entries"),
        ({"policy_versions": {"runs": [["v1", 2**60]]}}, "entries"),
        ({"policy_versions": {"runs": [["v1", 3], ["", -1]]}}, "greater than 0"),
        ({"policy_versions": {"runs": [[{}, 2]]}}, "a text and a count"),
        ({"policy_versions": {"runs": 5}}, "policy_versions"),
        ({"policy_versions": None}, "policy_versions"),
    ],
)
def test_an_array_that_is_none_is_refused_by_its_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(AnswerInvalid, match=said):
        trajectories(page(**fields), ARRAYS)


@WRONG_ARRAYS
@pytest.mark.parametrize(
    "body", [b"", b"\x81", b"\xdd\xff\xff\xff\xff", b"\x05", b"\x91\x80", b"\x91" * 5000]
)
def test_a_page_that_is_none_is_refused(body: bytes) -> None:
    (one,) = trajectories(page(), ARRAYS)
    assert one.segments[0].response_ids.tolist() == [1, 2], "the page without an attack is read"
    assert not one.segments[0].response_ids.flags.writeable
    with pytest.raises(AnswerInvalid):
        trajectories(body, ARRAYS)


@WRONG_ARRAYS
@pytest.mark.parametrize(
    "group",
    [5, {}, {"trajectories": 5}, {"trajectories": [], "group_id": "g"}, {"trajectories": [{}], "x": 1}],
)
def test_a_group_that_is_none_is_refused(group: Any) -> None:
    headers = {"content-type": ARRAYS, "rollyard-cursor": "c", "rollyard-finished": "true"}
    call = group_page("job", "default", cursor="", wait=0.0, limit=1, informative=False)
    with pytest.raises(AnswerInvalid):
        call.parse(httpx.Response(200, headers=headers, content=bytes(msgpack.packb([group]))))


@WRONG_ARRAYS
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("response_ids", [1.5, 2.0]),
        ("response_ids", ["1", "2"]),
        ("response_ids", [[1], [2]]),
        ("response_ids", [2**70, 1]),
        ("response_ids", [True, False]),
        ("loss_mask", [0.5, 1]),
        ("logprobs", ["-0.5", "0"]),
        ("logprobs", [None, 0.0]),
        ("policy_versions", [1, 2]),
    ],
)
def test_json_lines_of_other_values_are_not_rounded_into_arrays(name: str, values: list[Any]) -> None:
    plain = {"prompt_ids": [1], "response_ids": [1, 2], "loss_mask": [1, 0], "logprobs": [-0.5, 0.0]}
    segment = plain | {"policy_versions": ["v1", ""]}
    line = json.dumps({"id": "r", "segments": [segment]}).encode()
    assert len(trajectories(line, "application/x-ndjson")) == 1
    line = json.dumps({"id": "r", "segments": [segment | {name: values}]}).encode()
    with pytest.raises(AnswerInvalid, match=name):
        trajectories(line, "application/x-ndjson")
