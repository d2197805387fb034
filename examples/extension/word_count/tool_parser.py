"""The tool-call parser `at_sign`: a call is a line such as `@words {"path": "notes.txt"}`."""

import json
import re

from rollyard_pipeline.tool_parsers import ParsedCall, ParsedTurn

CALL = re.compile(r"^@(\w{1,64})[ \t]*(.*)$", re.MULTILINE)


class AtSignParser:
    def parse(self, text: str) -> ParsedTurn:
        calls = tuple(self._call(name, arguments) for name, arguments in CALL.findall(text))
        return ParsedTurn(CALL.sub("", text).strip(), calls)

    def _call(self, name: str, arguments: str) -> ParsedCall:
        # A parser never raises: a malformed call carries an error, which the model gets to see.
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ParsedCall(name, error=f"malformed tool call: {error}")
        if not isinstance(value, dict):
            return ParsedCall(name, error="malformed tool call: the arguments must be a JSON object")
        return ParsedCall(name, value)
