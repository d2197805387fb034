"""How the formats of calls are explained in a system prompt, in the words of the models' own templates.

A model whose chat template knows no tools is offered them in this way. Each text is what the templates of the
format's models say, so that a model that has seen the format finds it as it knows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""The offered tools, in OpenAI's form (`{"type": "function", "function": {…}}`)."""

HERMES: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501 - the words of Qwen's templates

QWEN_CODER: Final = """\
# Tools

You have access to the following functions:

<tools>
{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested \
within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, \
but NOT after
</IMPORTANT>"""

GLM: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
<arg_key>{{arg-key-2}}</arg_key>
<arg_value>{{arg-value-2}}</arg_value>
...
</tool_call>"""

LLAMA_JSON: Final = """\
Given the following functions, please respond with a JSON for a function call with its proper arguments that \
best answers the given prompt.

Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. \
Do not use variables.

{tools}"""

PYTHONIC: Final = """\
Here is a list of functions in JSON format that you can invoke.

{tools}

If you decide to invoke any of the function(s), you MUST put it in the format of \
[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]. \
You SHOULD NOT include any other text in the response if you invoke functions."""

MISTRAL: Final = """\
[AVAILABLE_TOOLS][{tools}][/AVAILABLE_TOOLS]

To call tools, respond with a JSON list in the format \
[TOOL_CALLS][{{"name": function name, "arguments": dictionary of argument name and its value}}]"""

DEEPSEEK: Final = """\
## Tools
You have access to the following tools:

{tools}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>\
{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""


def json_text(value: object) -> str:
    """Return a value as JSON, with its characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def described(words: str, tools: Tools, separator: str = "\n") -> str:
    """Return the words of a format with the tools as JSON in them, which are separated by `separator`."""
    return words.format(tools=separator.join(map(json_text, tools)))
