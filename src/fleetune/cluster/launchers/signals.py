"""Signals that ask a launcher to stop, as messages to wait for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_AROUND_S = 0.05


class SignalInbox:
    """Collects the signals that arrive within the context, and wakes up who waits for one.

    Outside the main thread, where Python allows no handlers, it only waits, and looks around often.
    """

    def __init__(self) -> None:
        self._hears = threading.current_thread() is threading.main_thread()
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if not self._hears:
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            # What is ignored stays so (nohup ignores SIGHUP); but of an ignored SIGCHLD no status could be
            # read.
            if signal.getsignal(signum) is not signal.SIG_IGN or signum == signal.SIGCHLD:
                self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._hears:
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)

    def post(self, signum: signal.Signals) -> None:
        """Put a signal in by hand, from any thread: as if it had been received."""
        self._received.append(signum)
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def _receive(self, signum: int, _: object) -> None:
        self._received.append(signal.Signals(signum))

    def wait(self, timeout_s: float | None) -> Iterable[signal.Signals]:
        """Signals that asked to stop, in order; none when a rank ended or the time is over."""
        if not self._hears:
            timeout_s = min(_LOOK_AROUND_S, _LOOK_AROUND_S if timeout_s is None else timeout_s)
        select.select([self._reader], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        received, self._received = self._received, []
        return [signum for signum in received if signum != signal.SIGCHLD]


@contextlib.contextmanager
def stop_signals_to(put: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hand signals that ask to stop to a function, which must not block; those that are ignored stay so.

    Outside the main thread, where Python allows no handlers, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda number, _: put(signal.Signals(number))) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
