"""An agent of one's own: the OpenAI SDK, a shell and a loop. It knows of Rollyard only the folder's name."""

import json
import os
import secrets
import subprocess
import termios

from openai import BadRequestError, OpenAI

FOLDER, MODEL = os.environ["ROLLYARD_HARNESS"], os.environ["OPENAI_MODEL"]
FIELDS = {"bash": "command", "submit": "answer"}


def tool(name: str, description: str, meaning: str) -> dict:
    properties = {FIELDS[name]: {"type": "string", "description": meaning}}
    schema = {"type": "object", "properties": properties, "required": [FIELDS[name]]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("bash", "Run a command in a persistent bash session and get its output.", "The command to run."),
    tool("submit", "Submit the final answer and end the task.", "The final answer."),
]
terminal, end = os.openpty()
modes = termios.tcgetattr(end)
modes[1], modes[3] = modes[1] & ~termios.OPOST, modes[3] & ~termios.ECHO
termios.tcsetattr(end, termios.TCSANOW, modes)
termios.tcsetwinsize(end, (50, 512))
words, quiet = ["setsid", "-c", "bash", "--norc", "--noprofile", "--noediting", "-i"], {"PS1": "", "PS2": ""}
subprocess.Popen(words, stdin=end, stdout=end, stderr=end, env=os.environ | quiet)


def bash(command: str) -> str:
    with open(f"{FOLDER}/command", "w") as file:
        file.write(command)
    mark, printed = secrets.token_hex(16), b""
    os.write(terminal, f'eval -- "$(< {FOLDER}/command)" </dev/null; echo {mark} $?\n'.encode())
    while mark.encode() not in printed or not printed.endswith(b"\n"):
        printed += os.read(terminal, 65536)
    output, _, status = printed.decode(errors="replace").rpartition(mark)
    note = f"[exit code {int(status)}]" if int(status) else ""
    return "\n".join(filter(None, [output.rstrip("\r\n"), note])) or "(no output)"


def observed(call) -> str:
    name, field = call.function.name, FIELDS.get(call.function.name)
    if error := getattr(call, "rollyard_error", ""):  # The model wrote something that is no call.
        return f"error: {error}"
    if field is None:
        return f"error: unknown tool '{name}'; tools: {', '.join(FIELDS)}"
    arguments = json.loads(call.function.arguments)
    if field not in arguments:
        return f"error: argument '{field}' is missing; expected {field}"
    return bash(arguments[field]) if name == "bash" else "submitted"


with open(f"{FOLDER}/messages.json") as file:
    client, messages, result = OpenAI(), json.load(file), ""
while result != "submitted":
    try:
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    except BadRequestError as error:  # This is a limit of the job, such as that of turns.
        raise SystemExit(str(error)) from error
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    if reply.choices[0].finish_reason != "tool_calls":
        break
    for call in reply.choices[0].message.tool_calls:
        result = observed(call)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(f"{call.function.name}: {result}")
        if result == "submitted":
            break
