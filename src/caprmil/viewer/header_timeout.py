"""A protocol of uvicorn that closes connections whose request does not arrive.

uvicorn waits without end for the first line and the headers of a request. A client that sends a
byte now and then would keep its connection, and many of them all that the process may have.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # for the first line and the headers of a request


class TimedProtocol(H11Protocol):
    """Closes a connection if the headers of a request are not complete in time."""

    seconds = HEADER_SECONDS
    header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Run the clock from the first byte of a request to the end of its headers."""
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(self.seconds, self._expire)

    def _stop(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def _expire(self) -> None:
        self.header_timer = None
        if not self.transport.is_closing():
            self.transport.close()
