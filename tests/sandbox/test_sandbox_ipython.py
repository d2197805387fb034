"""Cells in the sandbox's kernel."""

from __future__ import annotations

import asyncio
import glob

import pytest
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import BadRequest
from rollyard_testing.pace import patience

pytest.importorskip("ipykernel")


@pytest.fixture
async def kernel(client: ExecClient) -> ExecClient:
    await client.ipython("import os, sys, time, signal")
    return client


async def test_cells(client: ExecClient) -> None:
    assert (await client.info()).ipython
    first = await client.ipython("x = 6 * 7\nx")
    assert (first.exit_code, first.output, first.result) == (0, b"42\n", "42")
    mixed = await client.ipython(
        "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr, flush=True)\nx + 1"
    )
    assert (mixed.output, mixed.result) == (b"out\nerr\n43\n", "43")
    failed = await client.ipython("print('before')\n1/0")
    assert (failed.exit_code, failed.result) == (1, "")
    assert failed.output.startswith(b"before\n")
    assert failed.text().endswith("ZeroDivisionError: division by zero\n")
    assert "\x1b" not in failed.text()
    syntax = await client.ipython("if True")
    assert (syntax.exit_code, "SyntaxError" in syntax.text()) == (1, True)
    moved = await client.ipython("import os; os.chdir('/usr')")
    assert moved.cwd == "/usr"
    many = await client.ipython("for i in range(100000): print(i)", max_output=1000)
    assert many.truncated_bytes == 588_890 - 1000
    assert many.output.startswith(b"0\n1\n")
    assert many.output.endswith(b"99998\n99999\n")


async def test_a_timeout_interrupts_and_keeps_state(kernel: ExecClient) -> None:
    await kernel.ipython("x = 'kept'")
    result = await kernel.ipython("print('partial'); time.sleep(100)", timeout=0.5)
    assert (result.exit_code, result.timed_out, result.killed, result.shell_restarted) == (
        1,
        True,
        False,
        False,
    )
    assert result.output.startswith(b"partial\n")
    assert "KeyboardInterrupt" in result.text()
    assert (await kernel.ipython("x")).result == "'kept'"


async def test_a_stuck_kernel_is_replaced(kernel: ExecClient) -> None:
    result = await kernel.ipython(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", timeout=0.5
    )
    assert (result.timed_out, result.killed, result.shell_restarted) == (True, True, True)
    assert (await kernel.ipython("'os' in globals()")).result == "False"


async def test_a_dying_kernel_is_a_result(kernel: ExecClient) -> None:
    result = await kernel.ipython("print('last', flush=True); os._exit(7)")
    assert (result.exit_code, result.shell_restarted, result.timed_out) == (7, True, False)
    assert (await kernel.ipython("1 + 1")).result == "2"
    result = await kernel.ipython("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (result.exit_code, result.killed) == (137, False)


async def test_one_cell_at_a_time_and_cancelling(kernel: ExecClient) -> None:
    task = asyncio.create_task(kernel.ipython("open('on', 'w').write('1'); time.sleep(300)"))
    await kernel.run(["sh", "-c", "until [ -s on ]; do sleep 0.01; done"])
    with pytest.raises(BadRequest) as busy:
        await kernel.ipython("1")
    assert busy.value.reason == "SessionBusy"
    assert (await kernel.bash("echo beside")).text() == "beside\n"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # The interrupted cell ends within its grace time, and the kernel keeps its state.
    async with asyncio.timeout(patience(20)):
        while True:
            try:
                result = await kernel.ipython("'time' in globals()")
                break
            except BadRequest as refusal:
                if refusal.reason != "SessionBusy":
                    raise
                await asyncio.sleep(0.02)
    assert result.result == "True"


async def test_kill_all_ends_the_kernel_and_leaves_no_files(kernel: ExecClient) -> None:
    before = await kernel.ipython("os.getpid()")
    assert await kernel.kill_all() >= 1
    after = await kernel.ipython("import os; os.getpid()")
    assert before.result != after.result
    assert not after.shell_restarted
    folder = (await kernel.ipython("import sys; os.environ['IPYTHONDIR']")).result.strip("'")
    assert glob.glob(f"{folder}/*")
    await kernel.shutdown()


async def test_a_cell_that_kill_all_ends_was_killed(kernel: ExecClient) -> None:
    task = asyncio.create_task(kernel.ipython("open('on', 'w').write('1'); time.sleep(300)"))
    await kernel.run(["sh", "-c", "until [ -s on ]; do sleep 0.01; done"])
    await kernel.kill_all()
    result = await task
    assert (result.exit_code, result.killed, result.timed_out) == (137, True, False)
    after = await kernel.ipython("'time' in globals()")
    assert (after.result, after.killed, after.shell_restarted) == ("False", False, False)


async def test_a_module_in_the_work_folder_does_not_break_the_kernel(client: ExecClient) -> None:
    await client.write_file("json.py", b"raise SystemExit('hijacked')")
    await client.write_file("mine.py", b"VALUE = 5")
    assert (await client.ipython("import mine; mine.VALUE")).result == "5"


STRANGE = (
    "'stream', {'nope': 1}", "'stream', {'text': 7}", r"""'stream', '{"text": "\\ud800"}'""",
    "'stream', '[]'",
    "'error', {'traceback': 5}", "'error', {'traceback': [{}]}", "'execute_result', {'data': 3}",
    "'execute_result', {'data': {'text/plain': []}}", "'status', {}", "'status', {'execution_state': {}}",
)  # fmt: skip


HOSTILE_KERNEL = pytest.mark.attack(
    "a notebook kernel sends messages that are none of a kernel's, or sends without end, so that a tool's "
    "time limit is not kept",
    boundary="sandbox",
    surface="exec server",
    stopped_by="no field is taken for what the protocol says it is, and what comes after the limit is "
    "bounded",
)


@HOSTILE_KERNEL
async def test_a_kernel_may_send_what_it_likes(kernel: ExecClient) -> None:
    """Code in a cell has the kernel's key; what it sends is read with care, and the time limit holds."""
    for strange in STRANGE:
        sent = await kernel.ipython(
            f"k = get_ipython().kernel; k.session.send(k.iopub_socket, {strange}); print('sent')",
            timeout=patience(10),
        )
        assert (sent.exit_code, sent.timed_out, sent.text()[-5:]) == (0, False, "sent\n"), strange
    limited = await kernel.ipython("time.sleep(100)", timeout=0.5)
    assert (limited.timed_out, limited.killed) == (True, False)


@HOSTILE_KERNEL
async def test_a_kernel_that_never_stops_sending_is_interrupted_in_time(kernel: ExecClient) -> None:
    result = await kernel.ipython(
        "k = get_ipython().kernel\nwhile True: k.session.send(k.iopub_socket, 'nothing', {})", timeout=1.0
    )
    assert result.timed_out
    assert result.seconds < patience(20)
    assert (await kernel.ipython("1 + 1")).result == "2"
