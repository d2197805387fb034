"""The history and the tools of a call of Google's generateContent.

As in all of Google's JSON, names of fields may be in camelCase or in snake_case, numbers may be strings, an
object may stand for a list of one, and a field that is null counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from rollyard_pipeline.gateway.calls import MAX_CALL_MESSAGES, MAX_CALL_TOOLS, HistoryCall, HistoryMessage
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.base import ERROR_FIELD
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    MAX_SCHEMA_DEPTH,
    OfferedTools,
    flag_of,
    list_of,
    object_of,
    text_of,
)
from rollyard_pipeline.gateway.protocols.objects import (
    history_call,
    json_bytes,
    listed_tools,
    merged,
    refused,
)

Names = Mapping[str, str]
"""The fields of an object: the camelCase name of each by both of its names."""


def names_of(fields: str) -> Names:
    """Return the names of fields, which are separated by spaces and in camelCase."""
    names = {}
    for field in fields.split():
        names[field] = names[re.sub(r"[A-Z]", lambda upper: f"_{upper[0].lower()}", field)] = field
    return names


_CONTENT: Final = names_of("role parts")
_PART: Final = names_of(
    "text thought thoughtSignature functionCall functionResponse inlineData fileData executableCode"
    " codeExecutionResult toolCall toolResponse videoMetadata partMetadata mediaResolution mediaProcessing"
)
_BESIDE: Final = frozenset(
    {"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"}
)
"""The fields of a part that say something of its one other field. None of them is shown to the model."""
_CALL: Final = {**names_of("id name args partialArgs willContinue"), ERROR_FIELD: ERROR_FIELD}
_RESPONSE: Final = names_of("id name response willContinue scheduling parts")
_TOOL: Final = names_of(
    "functionDeclarations googleSearch googleSearchRetrieval codeExecution urlContext googleMaps fileSearch"
    " computerUse enterpriseWebSearch retrieval parallelAiSearch exaAiSearch mcpServers"
)
_DECLARATION: Final = names_of(
    "name description behavior parameters parametersJsonSchema response responseJsonSchema"
)
_SCHEMA: Final = {
    **names_of(
        "type format title description nullable enum maxItems minItems properties required minProperties"
        " maxProperties minLength maxLength pattern example anyOf propertyOrdering default items minimum"
        " maximum additionalProperties"
    ),
    **dict.fromkeys(("ref", "$ref"), "$ref"),
    **dict.fromkeys(("defs", "$defs"), "$defs"),
}
_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})


def known(value: object, names: Names, field: str) -> dict[str, Any]:
    """Return the fields of an object under their camelCase names, without those that are null.

    Raises:
        CallError: The value is no object, or has a field that the real service does not know.
    """
    fields = {}
    for name, one in object_of(value, field or "the body").items():
        own = names.get(name)
        if own is None:
            shown = name[:MAX_LABEL]
            at = f" at '{field}'" if field else ""
            message = f'Invalid JSON payload received. Unknown name "{shown}"{at}: Cannot find field.'
            raise CallError("invalid", message, param=f"{field}.{shown}" if field else shown)
        if one is not None:
            if own in fields:
                raise refused(f"{field}.{name}" if field else name, "the field is set twice")
            fields[own] = one
    return fields


def repeated(value: object, field: str, most: int) -> list[Any]:
    """Return a list. An object in its place is a list of one."""
    return [value] if isinstance(value, dict) else list_of(value, field, most)


def whole_number(value: object, field: str) -> int:
    """Return a whole number, which may be written as a string or with a fraction of zero."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(field, "Invalid value, an integer is needed")
    return value


def read_contents(system: object, contents: object) -> tuple[HistoryMessage, ...]:
    """Return the history.

    The contents of a model that follow each other are one message, and its texts are joined with nothing
    between them, because clients keep each piece of a stream as a part or as a content.
    """
    history: list[HistoryMessage] = []
    if system is not None:
        _, parts = _parts(system, "system_instruction")
        text = "\n".join(_text(part, field) for field, part in parts)
        history.append(HistoryMessage("system", text))
    messages = repeated(contents, "contents", MAX_CALL_MESSAGES)
    if not messages:
        raise refused("contents", "contents are required")
    for number, content in enumerate(messages):
        field = f"contents[{number}]"
        role, parts = _parts(content, field)
        if role == "model":
            history.append(_said(parts))
        elif role in ("user", "function"):
            _add_user(parts, history)
        else:
            raise refused(f"{field}.role", "Please use a valid role: user, model.")
    return tuple(merged(history, ""))


def _parts(content: object, field: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the role of a content, and each part with its field."""
    fields = known(content, _CONTENT, field)
    parts = []
    for number, one in enumerate(repeated(fields.get("parts", []), f"{field}.parts", MAX_CALL_MESSAGES)):
        at = f"{field}.parts[{number}]"
        part = known(one, _PART, at)
        kinds = part.keys() - _BESIDE
        if len(kinds) > 1:
            raise refused(at, f"a part has one kind of data, and not {' and '.join(sorted(kinds))}")
        parts.append((at, part))
    return text_of(fields.get("role", "user"), f"{field}.role"), parts


def _text(part: Mapping[str, Any], field: str) -> str:
    """Return the text of a part."""
    if "text" in part:
        return text_of(part["text"], f"{field}.text")
    kind = next(iter(part.keys() - _BESIDE), None)
    if kind is None:
        return ""
    if kind in ("inlineData", "fileData"):
        raise refused(f"{field}.{kind}", "the model reads no images, audio or files; leave the part out")
    raise refused(f"{field}.{kind}", "such a part cannot be read in a content of this role")


def _said(parts: list[tuple[str, dict[str, Any]]]) -> HistoryMessage:
    """Return what a model said."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[HistoryCall] = []
    for field, part in parts:
        if "functionCall" in part:
            field = f"{field}.functionCall"
            call = known(part["functionCall"], _CALL, field)
            name = text_of(call.get("name", ""), f"{field}.name")
            arguments = object_of(call.get("args", {}), f"{field}.args")
            calls.append(history_call(_call_id(call, field), name, arguments))
        elif part.get("thought") is not None and flag_of(part["thought"], f"{field}.thought"):
            thoughts.append(_text(part, field))
        else:
            texts.append(_text(part, field))
    return HistoryMessage("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _add_user(parts: list[tuple[str, dict[str, Any]]], history: list[HistoryMessage]) -> None:
    """Add a user's content: the results of tools first, then the text, if there is any or nothing else."""
    texts: list[str] = []
    results = 0
    for field, part in parts:
        if "functionResponse" in part:
            history.append(_response(part["functionResponse"], f"{field}.functionResponse"))
            results += 1
        else:
            texts.append(_text(part, field))
    if texts or not results:
        history.append(HistoryMessage("user", "\n".join(texts)))


def _response(value: object, field: str) -> HistoryMessage:
    """Return the result of a call: the `output` or the `error` of the response, else the whole response."""
    fields = known(value, _RESPONSE, field)
    if fields.get("parts"):
        raise refused(f"{field}.parts", "the model reads no images, audio or files; leave it out")
    response = object_of(fields.get("response", {}), f"{field}.response")
    only = next(iter(response)) if len(response) == 1 else ""
    shown = response[only] if only in ("output", "error") else response
    return HistoryMessage(
        "tool",
        shown if isinstance(shown, str) else json_bytes(shown).decode(),
        call_id=_call_id(fields, field),
        name=text_of(fields.get("name", ""), f"{field}.name"),
        failed=only == "error",
    )


def _call_id(fields: Mapping[str, Any], field: str) -> str:
    call_id = text_of(fields.get("id", ""), f"{field}.id")
    if len(call_id) > MAX_LABEL:
        raise refused(f"{field}.id", f"at most {MAX_LABEL} characters are accepted")
    return call_id


def read_declarations(value: object) -> tuple[tuple[Mapping[str, Any], ...], list[str]]:
    """Return the functions that the harness itself runs, and the names of the tools that are left out.

    Those run on Google's servers, so that the model cannot call them.
    """
    functions = OfferedTools("_.:-")
    left_out: set[str] = set()
    for number, one in enumerate(listed_tools([value] if isinstance(value, dict) else value)):
        tool = known(one, _TOOL, f"tools[{number}]")
        if "computerUse" in tool:
            why = "only Google's models know this tool; declare functions instead"
            raise refused(f"tools[{number}].computerUse", why)
        field = f"tools[{number}].function_declarations"
        declarations = tool.pop("functionDeclarations", [])
        left_out.update(tool)
        for place, declaration in enumerate(repeated(declarations, field, MAX_CALL_TOOLS)):
            _add_function(functions, declaration, f"{field}[{place}]")
    return tuple(functions.schemas), sorted(left_out)


def _add_function(functions: OfferedTools, value: object, field: str) -> None:
    declaration = known(value, _DECLARATION, field)
    written, parameters = declaration.get("parametersJsonSchema"), declaration.get("parameters")
    if written is not None and parameters is not None:
        raise refused(f"{field}.parameters", "give it or parametersJsonSchema, and not both")
    if parameters is not None:
        schema: Mapping[str, Any] | None = json_schema(parameters, f"{field}.parameters")
    else:
        schema = written
    functions.add(declaration.get("name"), declaration.get("description"), schema, field)


def json_schema(value: object, field: str, depth: int = 0) -> dict[str, Any]:
    """Return the JSON schema that means the same as one of Google's.

    Google's types are in capitals, and `nullable` is a field of its own. `propertyOrdering` is left out.
    """
    if depth > MAX_SCHEMA_DEPTH:
        raise refused(field, f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    schema: dict[str, Any] = {}
    fields = known(value, _SCHEMA, field)
    for name, one in fields.items():
        at = f"{field}.{name}"[:MAX_LABEL]
        match name:
            case "type":
                kind = text_of(one, at).lower()
                if kind in _TYPES:
                    schema[name] = kind
                elif kind != "type_unspecified":
                    raise refused(at, f"Invalid value, one of {', '.join(sorted(_TYPES))} is needed")
            case "properties" | "$defs":
                inner = object_of(one, at)
                schema[name] = {
                    key: json_schema(each, f"{at}.{key}"[:MAX_LABEL], depth + 1)
                    for key, each in inner.items()
                }
            case "items":
                schema[name] = json_schema(one, at, depth + 1)
            case "additionalProperties":
                schema[name] = one if isinstance(one, bool) else json_schema(one, at, depth + 1)
            case "anyOf":
                schema[name] = [
                    json_schema(each, at, depth + 1) for each in repeated(one, at, MAX_CALL_TOOLS)
                ]
            case "maxItems" | "minItems" | "maxLength" | "minLength" | "maxProperties" | "minProperties":
                schema[name] = whole_number(one, at)
            case "example":
                schema["examples"] = [one]
            case "nullable" | "propertyOrdering":
                pass
            case _:
                schema[name] = one
    if fields.get("nullable") and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    return schema
