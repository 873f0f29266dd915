"""TLS over a socket: small messages in the event loop, bulk in threads.

asyncio's transports encrypt and decrypt all bytes in the event loop, at one to two seconds per GB.
Here the loop handles only headers and small messages. Once a large body has begun, a reader thread
of the connection reads, decrypts and checks the rest; a writer thread encrypts and writes large
messages. One thread at a time uses the parser, so messages are parsed in order. An SSL object must
not be used by two threads at once, so a lock is held for each read and each write.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from protocol.base import limits
from protocol.wire import dial, frames
from protocol.wire.transport import Channel, ParseResult

_READ_BYTES: Final = 32 * limits.KIB
"""Maximum size of one read in the event loop."""
_PIECE_BYTES: Final = 256 * limits.KIB
"""Maximum size of one read or one encryption in a thread."""
_UNHANDLED_BYTES: Final = limits.MIB
"""Maximum size of the bodies that the thread has read and the loop has not handled: then the thread
stops."""
_NEXT_BODY_S: Final = 0.02
"""How long a thread waits for the next body before the event loop watches the socket again."""
_LINGER_S: Final = limits.GOODBYE_TIMEOUT_MS / 1000
"""How long to wait for the peer to close, once writing is shut down or has failed."""
_FLUSH_S: Final = 30.0
"""How long `close` waits for the peer to read everything."""
_MIN_DIAL_S: Final = 1.0
"""Minimum time for dialing the next address after a failed handshake."""
_SELECTOR: Final[type[Any]] = getattr(selectors, "PollSelector", selectors.SelectSelector)
"""Not epoll, which would need another file descriptor."""


async def _shake_hands(endpoint: ssl.SSLSocket) -> None:
    """Do the TLS handshake; raises OSError (ssl.SSLError) if it fails."""
    loop = asyncio.get_running_loop()
    while True:
        ready = asyncio.Event()
        try:
            endpoint.do_handshake()
        except ssl.SSLWantReadError:
            add, remove = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        else:
            return
        add(endpoint, ready.set)
        try:
            await ready.wait()
        finally:
            remove(endpoint)


class _Thread:
    """A daemon thread that runs work items in order; it starts with the first item, and is not
    joined."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_started = False

    def do(self, work: Callable[[], None]) -> None:
        if not self._has_started:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._has_started = True
        self._work.put(work)

    def end(self) -> None:
        if self._has_started:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it refers to the transport


class TlsTransport(asyncio.Transport):
    """The transport of a connection after its TLS handshake.

    Args:
        endpoint: The non-blocking socket; owned by the transport from now on.
        channel: The protocol that reads and writes.
    """

    def __init__(self, endpoint: ssl.SSLSocket, channel: Channel) -> None:
        super().__init__({
            "socket": endpoint,
            "sockname": endpoint.getsockname(),
            "peername": endpoint.getpeername(),
            "ssl_object": endpoint,
        })  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._tls_lock = threading.Lock()
        self._channel = channel
        self._closing = self._is_lost = False
        self._reader = _Thread("bulk in")
        self._reading = False
        """Whether the reader thread is reading a body, and using the parser."""
        self._paused = False
        self._watched = False
        """Whether the event loop watches the socket for data to read."""
        self._parsed: deque[ParseResult] = deque()
        """Messages parsed by the reader thread, to be handled by the event loop."""
        self._unhandled_bytes = 0
        self._selectors: dict[int, Any] = {}
        """One selector for each thread, by event; they use no file descriptor."""
        self._socket_error: OSError | None = None
        """An error of reading. Deferred: data received before it must be delivered first."""
        self._at_eof = False
        """Whether the peer closed the connection within a body."""
        self._writer = _Thread("bulk out")
        self._out_lock = threading.Lock()
        self._out: deque[frames.Buffer] = deque()
        self._out_bytes = 0
        self._writing = False
        """Whether the writer thread is draining `_out`."""
        self._unsent: deque[frames.Buffer] = deque()
        """Data of the event loop that the socket has not accepted yet."""
        self._high_bytes = self._low_bytes = 0
        self._full = False
        self._error: OSError | None = None
        """Why writing failed. Reading continues: the peer may have sent a reason before it left."""
        self._is_finished = False
        self._timer: asyncio.TimerHandle | None = None
        """Ends the connection even if the peer does nothing."""
        self.set_write_buffer_limits()

    def begin(self) -> None:
        """Connect the channel, and read data that arrived with the handshake."""
        self._channel.connection_made(self)
        self._loop.call_soon(self._continue_reading)

    # asyncio.ReadTransport

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def pause_reading(self) -> None:
        self._paused = True
        self._watch(False)

    def resume_reading(self) -> None:
        self._paused = False
        if not (self._closing or self._reading):
            self._loop.call_soon(self._continue_reading)

    def _watch(self, should_watch: bool) -> None:  # noqa: FBT001
        if should_watch == self._watched or self._is_lost:
            return
        self._watched = should_watch
        if should_watch:
            self._loop.add_reader(self._endpoint, self._on_readable)
        else:
            self._loop.remove_reader(self._endpoint)

    def _may_read(self) -> bool:
        return not (self._paused or self._closing or self._reading)

    def _continue_reading(self) -> None:
        """Handle messages parsed meanwhile, and continue reading."""
        if not self._may_read():
            return
        with self._fail_on_error():
            self._handle_parsed()
            if self._at_eof and self._may_read():
                self._handle_eof()
            self._read_available()

    def _handle_parsed(self) -> None:
        """Handle messages that the thread has parsed, unless reading is paused."""
        while self._parsed and not (self._paused or self._closing):
            parsed = self._parsed.popleft()
            self._channel.handle(parsed)

    def _on_readable(self) -> None:
        with self._fail_on_error():
            self._read_available()

    @contextlib.contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        """End the connection if the block raises: otherwise it would stay open, unread."""
        try:
            yield
        except Exception:
            self._end(None)
            raise

    def _read_available(self) -> None:
        """Decrypt and parse available data; hand a large body to the reader thread."""
        while self._may_read():
            if self._channel.connection.missing_body_bytes >= limits.BULK_BYTES:
                self._watch(False)
                self._reader.do(self._read_bulk)
                self._reading = True
                return
            try:
                count = self._decrypt(self._channel.get_buffer(-1))
            except OSError as error:
                self._end(error)
                return
            if count is None:
                self._watch(True)
                return
            if not count:
                self._handle_eof()
                return
            self._channel.buffer_updated(count)

    def _handle_eof(self) -> None:
        """Handle the end of the peer's data."""
        self._watch(False)
        self._channel.eof_received()
        self.close()

    def _decrypt(self, into: memoryview) -> int | None:
        """Decrypt into a buffer; return the byte count, 0 at the end of the data, None if no data
        is available now."""
        filled = 0
        if self._socket_error is not None:
            raise self._socket_error
        read, lock = self._endpoint.read, self._tls_lock
        while filled < len(into):
            try:
                with lock:  # one record at a time, so that the other direction can continue
                    count = read(len(into) - filled, into[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return filled  # if data was read, the next call finds the end
            except OSError as error:
                self._socket_error = error
                break
            if not count:
                return filled
            filled += int(count)  # typeshed: bytes without a buffer
        if self._socket_error is not None and not filled:
            raise self._socket_error
        return filled or None

    def _read_bulk(self) -> None:
        """In the reader thread: read a body, and further bodies if they follow at once."""
        error: Exception | None = None
        try:
            connection = self._channel.connection
            while True:
                size = connection.missing_body_bytes
                parsed = self._read_body()
                if not parsed.is_empty:
                    self._unhandled_bytes += size
                    self._call_later(partial(self._parsed_in_thread, parsed, size))
                if not self._next_body_began(parsed):
                    break
        except Exception as read_error:  # noqa: BLE001 -- the event loop raises it
            error = read_error
        self._call_later(lambda: self._on_bulk_read(error))

    def _read_body(self) -> ParseResult:
        """Read the rest of a body; return the messages that it completes."""
        filled = 0
        buffer = self._channel.get_buffer(-1)
        while filled < len(buffer) and not self._is_lost:
            count = self._decrypt(buffer[filled:])
            if count == 0:
                self._at_eof = True
                break
            if count is not None:
                filled += count
                self._channel.note_received(count)
                continue
            self._wait(selectors.EVENT_READ)
        return self._channel.parse(filled) if filled else ParseResult([])

    def _next_body_began(self, parsed: ParseResult) -> bool:
        """Read on in the thread, and return whether another large body has begun.

        After any other message the event loop parses: how it handles that message may decide how
        the next one is checked.
        """
        if parsed.error is not None or self._unhandled_bytes > _UNHANDLED_BYTES:
            return False
        if not all(received.message.body == "values" for received in parsed.received):
            return False
        if self._at_eof or self._paused or self._closing:
            return False
        buffer = self._channel.get_buffer(-1)
        try:
            count = self._decrypt(buffer)
            if count is None and self._wait(selectors.EVENT_READ, _NEXT_BODY_S):
                count = self._decrypt(buffer)
        except OSError:
            return False  # the event loop gets the error again, after earlier messages
        if not count:
            self._at_eof = count == 0
            return False
        self._channel.note_received(count)
        parsed = self._channel.parse(count)
        if not parsed.is_empty:
            self._call_later(partial(self._parsed_in_thread, parsed, 0))
            return False
        return self._channel.connection.missing_body_bytes >= limits.BULK_BYTES

    def _wait(self, event: int, timeout_s: float | None = None) -> bool:
        """Wait in a thread until the socket can be read or written; return whether it can."""
        if (selector := self._selectors.get(event)) is None:
            selector = self._selectors[event] = _SELECTOR()
            selector.register(self._endpoint, event)
        return bool(selector.select(timeout_s))

    def _parsed_in_thread(self, parsed: ParseResult, size: int) -> None:
        self._unhandled_bytes -= size
        if self._is_lost:
            return
        self._parsed.append(parsed)
        with self._fail_on_error():
            self._handle_parsed()

    def _on_bulk_read(self, error: Exception | None) -> None:
        self._reading = False
        if self._is_lost:
            self._release()
            return
        if isinstance(error, OSError):
            self._end(error)
        elif error is not None:
            self._end(None)
            raise error
        elif self._closing:
            self._discard_input()
        elif not self._paused:
            self._continue_reading()

    def _call_later(self, callback: Callable[[], None]) -> None:
        """Schedule a call from a thread; close everything if the event loop has ended."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._reader.end()
            self._writer.end()
            self._endpoint.close()

    # asyncio.WriteTransport

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = limits.WRITE_HIGH_WATER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._out_bytes + sum(map(len, self._unsent))

    def write(self, data: frames.Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Sequence[frames.Buffer]) -> None:  # type: ignore[override]
        if self._closing or self._error is not None:
            return
        with self._out_lock:
            self._out.extend(list_of_data)
            self._out_bytes += sum(map(len, list_of_data))
            is_writing = self._writing
        if not is_writing and not self._unsent:
            self._write_pending()
        if self._out_bytes > self._high_bytes and not self._full:
            self._full = True
            self._channel.pause_writing()

    def _write_pending(self) -> None:
        """Encrypt and write pending data; hand large data to the writer thread."""
        if self._out_bytes >= limits.BULK_BYTES:
            try:
                with self._out_lock:  # the thread resets `_writing` under this lock
                    self._writer.do(self._write_bulk)
                    self._writing = True
            except RuntimeError as error:  # this process may have no more threads
                self._end(OSError(str(error)))
            return
        self._unsent.append(b"".join(self._out))  # one TLS record for all
        self._out.clear()
        self._out_bytes = 0
        self._write_small()

    def _write_small(self) -> None:
        try:
            while self._unsent:
                if data := self._unsent[0]:
                    with self._tls_lock:
                        count = self._endpoint.write(data)
                    if count < len(data):
                        self._unsent[0] = data[count:]
                        continue
                self._unsent.popleft()
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            self._loop.add_writer(self._endpoint, self._on_writable)
        except OSError as error:
            self._stop_writing(error)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._endpoint)
        self._write_small()
        if not self._unsent and not self._is_lost:
            self._buffer_drained()

    def _buffer_drained(self) -> None:
        """Resume after writing: pending data is below the limit, or gone."""
        if self._is_lost:
            return
        if self._full and self._out_bytes <= self._low_bytes:
            self._full = False
            self._channel.resume_writing()
        if self._writing or self._unsent:
            return
        if self._out:
            self._write_pending()
        elif self._closing:
            self._finish()

    def _write_bulk(self) -> None:
        """In the writer thread: write until no data is pending."""
        error: Exception | None = None
        try:
            while (buffer := self._next_buffer()) is not None:
                view = memoryview(buffer).cast("B")
                for start in range(0, len(view), _PIECE_BYTES):
                    self._write_piece(view[start : start + _PIECE_BYTES])
        except Exception as write_error:  # noqa: BLE001 -- the event loop handles it
            error = write_error
        self._call_later(lambda: self._on_bulk_written(error))

    def _next_buffer(self) -> frames.Buffer | None:
        with self._out_lock:
            if not self._out:
                self._writing = False  # from here on the event loop writes
            return self._out.popleft() if self._out else None

    def _write_piece(self, piece: memoryview) -> None:
        size = len(piece)
        while piece:
            if self._is_lost:
                raise ConnectionAbortedError
            try:
                with self._tls_lock:
                    piece = piece[self._endpoint.write(piece) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._wait(selectors.EVENT_WRITE)
        with self._out_lock:
            self._out_bytes -= size
            has_room = self._full and self._out_bytes <= self._low_bytes
        if has_room:
            self._call_later(self._buffer_drained)

    def _on_bulk_written(self, error: Exception | None) -> None:
        if error is not None:
            self._writing = False
        if self._is_lost:
            self._release()
        elif isinstance(error, OSError):
            self._stop_writing(error)
        elif error is not None:
            self._end(None)
            raise error
        else:
            self._buffer_drained()

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing; keep reading for a while, as the peer's last data may still be unread."""
        if self._closing or self._paused:
            self._end(error)
            return
        self._error = error
        self._discard()
        self._end_after(_LINGER_S)

    # The end.

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Stop reading; end once everything is written."""
        if self._closing:
            return
        self._closing = True
        self._watch(False)
        self._end_after(_FLUSH_S)
        self._buffer_drained()
        self._discard_input()

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._end, None)

    def abort(self) -> None:
        """End at once."""
        self._end(None)

    def _finish(self) -> None:
        """Shut down writing, and wait for the peer to close.

        Closing earlier could reset the connection before the peer has read the last data.
        """
        if self._error is not None:
            self._end(None)
            return
        if self._is_finished:
            return
        self._is_finished = True
        with contextlib.suppress(OSError):
            with self._tls_lock, contextlib.suppress(ssl.SSLError):
                self._endpoint.unwrap()
            socket.socket.shutdown(self._endpoint, socket.SHUT_WR)
        self._end_after(_LINGER_S)
        self._discard_input()

    def _discard_input(self) -> None:
        if self._closing and not (self._is_lost or self._reading):
            self._loop.add_reader(self._endpoint, self._drop)

    def _drop(self) -> None:
        """Discard data that arrives after `close`."""
        try:
            if socket.socket.recv(self._endpoint, _READ_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(None)
            return
        if self._is_finished:
            self._end(None)
        else:  # the peer closed its side, but may still read
            self._loop.remove_reader(self._endpoint)

    def _end(self, error: OSError | None) -> None:
        if self._is_lost:
            return
        self._closing = self._is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._endpoint)
        self._loop.remove_writer(self._endpoint)
        self._discard()
        with contextlib.suppress(OSError):  # wakes the threads
            socket.socket.shutdown(self._endpoint, socket.SHUT_RDWR)
        self._loop.call_soon(self._channel.connection_lost, error or self._error)
        self._release()

    def _discard(self) -> None:
        with self._out_lock:
            self._out.clear()
            self._out_bytes = 0
        self._unsent.clear()

    def _release(self) -> None:
        """Close the socket once no thread uses it: its descriptor may be reused at once."""
        if not (self._reading or self._writing):
            self._endpoint.close()
            self._reader.end()
            self._writer.end()


async def secure(
    endpoint: socket.socket,
    context: ssl.SSLContext,
    channel: Channel,
    *,
    server_side: bool,
    timeout_s: float,
) -> None:
    """Do the TLS handshake on a connected non-blocking socket, and start reading.

    Raises:
        OSError: The handshake failed (ssl.SSLError, TimeoutError); the socket is closed.
    """
    secured = context.wrap_socket(
        endpoint,
        server_side=server_side,
        do_handshake_on_connect=False,
        suppress_ragged_eofs=False,
    )
    try:
        async with asyncio.timeout(timeout_s):
            await _shake_hands(secured)
    except TimeoutError:
        secured.close()
        raise TimeoutError(f"no answer to the TLS handshake for {timeout_s:.0f} s") from None
    except BaseException:
        secured.close()
        raise
    TlsTransport(secured, channel).begin()


async def connect(
    host: str, port: int, context: ssl.SSLContext, channel: Channel, *, timeout_s: float
) -> None:
    """Connect to the first address of the host that answers, over TLS.

    Args:
        host: A name or an IP address.
        port: The port, at each address of the host.
        context: The client's TLS context.
        channel: The protocol of the connection.
        timeout_s: The limit for name resolution and connection, and for each handshake.

    Raises:
        OSError: No address answers, or the handshake failed.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    addresses = await dial.resolve(host, port, timeout_s)
    while True:
        remaining_s = deadline_s - loop.time()
        endpoint, address = await dial.connect_first(addresses, max(remaining_s, _MIN_DIAL_S))
        addresses.remove(address)
        try:
            await secure(endpoint, context, channel, server_side=False, timeout_s=timeout_s)
        except BaseException as error:
            endpoint.close()
            # Another address may have a working route; but a server without TLS has TLS nowhere.
            if not addresses or not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
                raise
        else:
            return
