"""The engine thread, which runs the scheduler and takes requests and commands from other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rollyard_engine.errors import EngineError, EngineStopped
from rollyard_engine.generation.scheduler import Scheduler
from rollyard_engine.generation.sequence import Sequence

T = TypeVar("T")

IDLE_WAIT_SECONDS: Final = 1.0
RETRY_AFTER_SECONDS: Final = 1


@dataclass(frozen=True, slots=True)
class _Command:
    """A call to run between two steps, and the future that receives its outcome."""

    run: Callable[[Scheduler], Any]
    outcome: Future[Any]


class EngineThread:
    """A thread that owns a ``Scheduler``. All methods may be called from any thread.

    ``notify`` is called on the engine thread after each step, with the sequences that have progressed.
    """

    def __init__(
        self, scheduler: Scheduler, *, max_waiting: int, notify: Callable[[list[Sequence]], None]
    ) -> None:
        self._scheduler = scheduler
        self._max_outstanding = scheduler.limits.max_num_seqs + max_waiting
        self._notify = notify
        self._wake = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._commands: deque[_Command] = deque()
        self._outstanding = 0
        self._stopping = False
        self._stopped = False
        # The thread is a daemon, so a model call that does not return cannot delay the end of the process.
        self._thread = threading.Thread(target=self._run, name="rollyard-engine", daemon=True)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for reading its counters. It may be changed through ``call`` only."""
        return self._scheduler

    @property
    def alive(self) -> bool:
        """Whether requests are still being served."""
        return self._thread.is_alive() and not self._stopped

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return max(0, self._outstanding - len(self._scheduler.running))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Abort all requests, end the thread, and return whether it ended within ``timeout`` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            EngineError: The server has as many requests as it accepts.
            EngineStopped: The engine is shutting down or has failed.
        """
        with self._wake:
            self._check_alive()
            if self._outstanding >= self._max_outstanding:
                raise EngineError(
                    f"the server has {self._outstanding} requests running and waiting and accepts no more; "
                    f"retry after {RETRY_AFTER_SECONDS} s",
                    reason="QueueFull",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            self._outstanding += 1
            self._inbox.append(sequence)
            self._wake.notify()

    def call(self, run: Callable[[Scheduler], T]) -> Future[T]:
        """Run a function on the scheduler between two steps.

        Returns:
            A future with what the function returns or raises.
        """
        outcome: Future[T] = Future()
        with self._wake:
            self._check_alive()
            self._commands.append(_Command(run, outcome))
            self._wake.notify()
        return outcome

    def _check_alive(self) -> None:
        if self._stopping or self._stopped:
            raise EngineStopped("the engine is shutting down or has failed")

    def _run(self) -> None:
        failure: EngineError = EngineStopped("the engine has stopped")
        try:
            while self._turn():
                pass
        except Exception as error:
            failure = EngineStopped(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._close(failure)

    def _turn(self) -> bool:
        """Wait for work, take new requests, run one step, and return whether the thread continues."""
        scheduler = self._scheduler
        with self._wake:
            while not (self._inbox or self._commands or self._stopping or scheduler.has_work):
                self._wake.wait(IDLE_WAIT_SECONDS)
            for sequence in self._inbox:
                scheduler.add(sequence)
            self._inbox.clear()
            commands = tuple(self._commands)
            self._commands.clear()
            stopping = self._stopping
        for command in commands:
            _execute(command, scheduler)
        if stopping:
            scheduler.abort_ids(None)
            scheduler.resume()
        elif scheduler.has_work:
            scheduler.step()
        self._report(scheduler.take_progressed())
        return not stopping

    def _report(self, progressed: list[Sequence]) -> None:
        if not progressed:
            return
        ended = sum(sequence.finished for sequence in progressed)
        if ended:
            with self._wake:
                self._outstanding -= ended
        self._notify(progressed)

    def _close(self, failure: EngineError) -> None:
        """Fail all requests and commands that are left, because they would otherwise wait forever."""
        with self._wake:
            self._stopped = True
            sequences = [*self._inbox, *self._scheduler.running, *self._scheduler.waiting]
            commands = tuple(self._commands)
            self._inbox.clear()
            self._commands.clear()
        for command in commands:
            if command.outcome.set_running_or_notify_cancel():
                command.outcome.set_exception(failure)
        self._scheduler.resume()  # This completes a pause that callers still wait for.
        for sequence in sequences:
            sequence.error = failure
        if sequences:
            self._notify(sequences)


def _execute(command: _Command, scheduler: Scheduler) -> None:
    if not command.outcome.set_running_or_notify_cancel():
        return
    try:
        command.outcome.set_result(command.run(scheduler))
    except EngineError as error:
        command.outcome.set_exception(error)
