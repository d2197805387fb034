"""The client of the exec server.

Example:
    client = await ExecClient.connect("unix:/run/sandbox.sock")
    result = await client.bash("echo hi")
    assert result.text() == "hi\\n" and result.exit_code == 0
    await client.close()
"""

from rollyard_sandbox.client.exec_client import ExecClient, RunningCommand
from rollyard_sandbox.client.results import DirEntry, EvalPlace, ExecResult, FileContent, ServerInfo
from rollyard_sandbox.client.work_folder import TreeEntry, WorkFolder

__all__ = [
    "DirEntry",
    "EvalPlace",
    "ExecClient",
    "ExecResult",
    "FileContent",
    "RunningCommand",
    "ServerInfo",
    "TreeEntry",
    "WorkFolder",
]
