"""TLS over a socket: small messages in the event loop, bulk in threads.

asyncio's own transports encrypt and decrypt all bytes in the event loop, one to two seconds of it
for each GB. Here the loop does so for headers and small messages alone. Once a large body has
begun, the rest of it is read, decrypted and checked in a thread of the connection's; large messages
are encrypted and written in another. The parser is in one thread at a time, and in order, as if all
were done in the loop. An SSL object must not be used by two threads at once: a lock holds for a
piece.
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
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.base import limits
from protocol.wire import dial, frames
from protocol.wire.transport import Channel, Parsed

_READ_BYTES: Final = 32 * limits.KIB
"""In the event loop at once."""
_PIECE_BYTES: Final = 256 * limits.KIB
"""Read or encrypted at once in a thread."""
_LINGER_S: Final = limits.GOODBYE_TIMEOUT_MS / 1000
"""Until the peer ends too, once it was told all, or what it has said last was read."""
_FLUSH_S: Final = 30.0
"""Until it has read all, after `close`."""
_LEAST_DIAL_S: Final = 1.0
"""For the next address, after a handshake at one has come to nothing."""
_SELECTOR: Final[type[Any]] = getattr(selectors, "PollSelector", selectors.SelectSelector)
"""Not epoll's, which takes a descriptor of its own."""


@dataclass(slots=True)
class _Secured:
    """TLS between two buffers."""

    context: ssl.SSLContext
    server_side: bool
    incoming: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    outgoing: ssl.MemoryBIO = field(default_factory=ssl.MemoryBIO)
    tls: ssl.SSLObject = field(init=False)

    def __post_init__(self) -> None:
        self.tls = self.context.wrap_bio(self.incoming, self.outgoing, self.server_side)

    async def shake_hands(self, endpoint: socket.socket) -> None:
        """Raises OSError (ssl.SSLError) if it comes to nothing."""
        loop = asyncio.get_running_loop()
        done = False
        while not done:
            try:
                self.tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            finally:  # what is wrong is told to the peer, too
                if self.outgoing.pending:
                    await loop.sock_sendall(endpoint, self.outgoing.read())
            if not done:
                data = await loop.sock_recv(endpoint, _READ_BYTES)
                if not data:
                    raise ConnectionResetError("the peer closed the connection")
                self.incoming.write(data)


class _Thread:
    """Does one thing after the other, once there is any; nobody waits for its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun = False

    def do(self, work: Callable[[], None]) -> None:
        if not self._begun:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._begun = True
        self._work.put(work)

    def end(self) -> None:
        if self._begun:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # with it the transport


class TlsTransport(asyncio.Transport):
    """One end of a connection whose TLS handshake is done.

    Args:
        endpoint: The socket, which does not block; it belongs to the transport from then on.
        secured: TLS on it.
        channel: Who reads and writes.
    """

    def __init__(self, endpoint: socket.socket, secured: _Secured, channel: Channel) -> None:
        super().__init__({
            "socket": endpoint,
            "sockname": endpoint.getsockname(),
            "peername": endpoint.getpeername(),
            "ssl_object": secured.tls,
        })  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._tls, self._incoming, self._outgoing = secured.tls, secured.incoming, secured.outgoing
        self._tls_lock = threading.Lock()
        self._channel = channel
        self._closing = self._lost = False
        self._raw = memoryview(bytearray(_READ_BYTES))
        self._reader = _Thread("bulk in")
        self._reading = False
        """The thread has a body, and with it the parser."""
        self._paused = False
        self._watched = False
        self._parsed: Parsed | None = None
        """A body that came while nothing was to be read."""
        self._broken: ssl.SSLError | None = None
        """What came is no TLS; it is told once what came before is heard."""
        self._ended = False
        """The peer has ended in the midst of a body."""
        self._writer = _Thread("bulk out")
        self._out_lock = threading.Lock()
        self._out: deque[frames.Buffer] = deque()
        self._out_bytes = 0
        self._writing = False
        """The thread writes what there is, until there is nothing."""
        self._encrypted = memoryview(b"")
        """What the socket did not take yet, of what the event loop wrote."""
        self._high_bytes = self._low_bytes = 0
        self._full = False
        self._error: OSError | None = None
        """Why nothing can be written any more: the peer has gone, but may have said why before."""
        self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        """Until this ends whatever the peer does."""
        self.set_write_buffer_limits()

    def begin(self) -> None:
        """The channel has its transport; what came with the handshake is read at once."""
        self._channel.connection_made(self)
        self._loop.call_soon(self._go_on)

    # asyncio.ReadTransport

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def pause_reading(self) -> None:
        self._paused = True
        self._watch(False)

    def resume_reading(self) -> None:
        self._paused = False
        if not (self._closing or self._reading):
            self._loop.call_soon(self._go_on)

    def _watch(self, wanted: bool) -> None:  # noqa: FBT001
        if wanted == self._watched or self._lost:
            return
        self._watched = wanted
        if wanted:
            self._loop.add_reader(self._endpoint, self._readable)
        else:
            self._loop.remove_reader(self._endpoint)

    def _may_read(self) -> bool:
        return not (self._paused or self._closing or self._reading)

    def _go_on(self) -> None:
        """Hear what came meanwhile, and read."""
        if not self._may_read():
            return
        parsed, self._parsed = self._parsed, None
        with self._ending_if_it_fails():
            if parsed is not None:
                self._channel.hear(parsed)
            if self._ended and self._may_read():
                self._eof()
            self._read_on()

    def _readable(self) -> None:
        try:
            self._receive(self._raw)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        with self._ending_if_it_fails():
            self._read_on()

    @contextlib.contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        """An error of our own must not leave a connection that nobody reads."""
        try:
            yield
        except Exception:
            self._end(None)
            raise

    def _receive(self, raw: memoryview) -> None:
        """What has come, to be decrypted."""
        count = self._endpoint.recv_into(raw)
        with self._tls_lock:
            if count:
                self._incoming.write(raw[:count])
            else:
                self._incoming.write_eof()

    def _read_on(self) -> None:
        """Decrypt and parse what has come; a large body is the thread's."""
        while self._may_read():
            if self._channel.connection.rest_of_body >= limits.BULK_BYTES:
                self._watch(False)
                self._reader.do(self._read_body)
                self._reading = True
                return
            try:
                count = self._decrypt(self._channel.get_buffer(-1))
            except ssl.SSLError as error:
                self._end(error)
                return
            if count is None:
                self._watch(True)
                return
            if not count:
                self._eof()
                return
            self._channel.buffer_updated(count)

    def _eof(self) -> None:
        """The peer says no more."""
        self._watch(False)
        self._channel.eof_received()
        self.close()

    def _decrypt(self, into: memoryview) -> int | None:
        """How many bytes there were; 0 at the end of the connection, None if more must come."""
        filled = 0
        if self._broken is not None:
            raise self._broken
        with self._tls_lock:
            while filled < len(into):
                try:
                    count = self._tls.read(len(into) - filled, into[filled:])
                except ssl.SSLWantReadError:
                    break
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return filled  # if there was anything, the end is found the next time
                except ssl.SSLError as error:
                    self._broken = error
                    break
                if not count:
                    return filled
                filled += int(count)  # with a buffer it is a number
        if self._broken is not None and not filled:
            raise self._broken
        return filled or None

    def _read_body(self) -> None:
        """In its thread: the rest of a body, and whatever it completes."""
        filled = 0
        parsed: Parsed | None = None
        error: Exception | None = None
        try:
            buffer = self._channel.get_buffer(-1)
            raw = memoryview(bytearray(min(len(buffer) + limits.KIB, _PIECE_BYTES)))
            with _SELECTOR() as readable:
                readable.register(self._endpoint, selectors.EVENT_READ)
                while filled < len(buffer) and not self._lost:
                    count = self._decrypt(buffer[filled:])
                    if count == 0:
                        self._ended = True
                        break
                    if count is not None:
                        filled += count
                        self._channel.came(count)
                        continue
                    readable.select()
                    with contextlib.suppress(BlockingIOError, InterruptedError):
                        self._receive(raw)
            if filled:
                parsed = self._channel.parse(filled)
        except Exception as wrong:  # noqa: BLE001 -- the event loop is told
            error = wrong
        self._tell(lambda: self._body_read(parsed, error))

    def _body_read(self, parsed: Parsed | None, error: Exception | None) -> None:
        self._reading = False
        if self._lost:
            self._release()
            return
        self._parsed = parsed
        if isinstance(error, OSError):
            self._end(error)
        elif error is not None:
            self._end(None)
            raise error
        elif self._closing:
            self._drop_what_comes()
        elif not self._paused:
            self._go_on()

    def _tell(self, what: Callable[[], None]) -> None:
        """From a thread. An event loop that is over hears nothing."""
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            self._reader.end()
            self._writer.end()
            self._endpoint.close()

    # asyncio.WriteTransport

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = limits.WRITE_HIGH_WATER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._out_bytes + len(self._encrypted)

    def write(self, data: frames.Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Sequence[frames.Buffer]) -> None:  # type: ignore[override]
        if self._closing or self._error is not None:
            return
        with self._out_lock:
            self._out.extend(list_of_data)
            self._out_bytes += sum(map(len, list_of_data))
            writing = self._writing
        if not writing and not self._encrypted:
            self._write_on()
        if self._out_bytes > self._high_bytes and not self._full:
            self._full = True
            self._channel.pause_writing()

    def _write_on(self) -> None:
        """Encrypt and write what there is; what is large is the thread's."""
        if self._out_bytes >= limits.BULK_BYTES:
            try:
                with self._out_lock:  # where the thread ends with it
                    self._writer.do(self._write_bulk)
                    self._writing = True
            except RuntimeError as error:  # this process may have no more threads
                self._end(OSError(str(error)))
            return
        try:
            with self._tls_lock:
                for buffer in filter(len, self._out):
                    self._tls.write(buffer)
                self._encrypted = memoryview(self._outgoing.read())
        except ssl.SSLError as error:
            self._end(error)
            return
        self._out.clear()
        self._out_bytes = 0
        self._write_encrypted()

    def _write_encrypted(self) -> None:
        try:
            sent = self._endpoint.send(self._encrypted) if self._encrypted else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._unwritable(error)
            return
        self._encrypted = self._encrypted[sent:]
        if self._encrypted:
            self._loop.add_writer(self._endpoint, self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._endpoint)
        self._write_encrypted()
        if not self._encrypted and not self._lost:
            self._written()

    def _written(self) -> None:
        """There is room again, or nothing left."""
        if self._lost:
            return
        if self._full and self._out_bytes <= self._low_bytes:
            self._full = False
            self._channel.resume_writing()
        if self._writing or self._encrypted:
            return
        if self._out:
            self._write_on()
        elif self._closing:
            self._finish()

    def _write_bulk(self) -> None:
        """In its thread: write, until nothing is left."""
        error: Exception | None = None
        try:
            with _SELECTOR() as writable:
                writable.register(self._endpoint, selectors.EVENT_WRITE)
                while (buffer := self._next()) is not None:
                    view = memoryview(buffer).cast("B")
                    for at in range(0, len(view), _PIECE_BYTES):
                        self._write_piece(view[at : at + _PIECE_BYTES], writable)
        except Exception as wrong:  # noqa: BLE001 -- the event loop is told
            error = wrong
        self._tell(lambda: self._bulk_written(error))

    def _next(self) -> frames.Buffer | None:
        with self._out_lock:
            if not self._out:
                self._writing = False  # from here on the event loop writes
            return self._out.popleft() if self._out else None

    def _write_piece(self, piece: memoryview, writable: Any) -> None:
        with self._tls_lock:
            self._tls.write(piece)
            encrypted = memoryview(self._outgoing.read())
        while encrypted:
            if self._lost:
                raise ConnectionAbortedError
            try:
                encrypted = encrypted[self._endpoint.send(encrypted) :]
            except (BlockingIOError, InterruptedError):
                writable.select()
        with self._out_lock:
            self._out_bytes -= len(piece)
            room = self._full and self._out_bytes <= self._low_bytes
        if room:
            self._tell(self._written)

    def _bulk_written(self, error: Exception | None) -> None:
        if error is not None:
            self._writing = False
        if self._lost:
            self._release()
        elif isinstance(error, OSError):
            self._unwritable(error)
        elif error is not None:
            self._end(None)
            raise error
        else:
            self._written()

    def _unwritable(self, error: OSError) -> None:
        """The peer has gone. What it said last may wait to be read, and ends with an error too."""
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
        """Read no more; end once all is written."""
        if self._closing:
            return
        self._closing = True
        self._watch(False)
        self._end_after(_FLUSH_S)
        self._written()
        self._drop_what_comes()

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._end, None)

    def abort(self) -> None:
        """End at once."""
        self._end(None)

    def _finish(self) -> None:
        """All is written: say so, and wait a little until the peer ends too. To end before it has
        read what was said last could keep that from it."""
        if self._error is not None:
            self._end(None)
            return
        if self._finished:
            return
        self._finished = True
        with contextlib.suppress(OSError):
            with self._tls_lock:
                with contextlib.suppress(ssl.SSLError):
                    self._tls.unwrap()
                last = self._outgoing.read()
            with contextlib.suppress(BlockingIOError, InterruptedError):
                self._endpoint.send(last)
            self._endpoint.shutdown(socket.SHUT_WR)
        self._end_after(_LINGER_S)
        self._drop_what_comes()

    def _drop_what_comes(self) -> None:
        if self._closing and not (self._lost or self._reading):
            self._loop.add_reader(self._endpoint, self._drop)

    def _drop(self) -> None:
        """Nobody reads this any more."""
        try:
            if self._endpoint.recv_into(self._raw):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(None)
            return
        if self._finished:
            self._end(None)
        else:  # it reads on, perhaps
            self._loop.remove_reader(self._endpoint)

    def _end(self, error: OSError | None) -> None:
        if self._lost:
            return
        self._closing = self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._endpoint)
        self._loop.remove_writer(self._endpoint)
        self._discard()
        with contextlib.suppress(OSError):  # wakes the threads
            self._endpoint.shutdown(socket.SHUT_RDWR)
        self._loop.call_soon(self._channel.connection_lost, error or self._error)
        self._release()

    def _discard(self) -> None:
        with self._out_lock:
            self._out.clear()
            self._out_bytes = 0
        self._encrypted = memoryview(b"")

    def _release(self) -> None:
        """The socket's number may be another's as soon as it is closed: not while one uses it."""
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
    """Do the handshake on a connected socket that does not block, and begin to read.

    Raises:
        OSError: It came to nothing (ssl.SSLError, TimeoutError); the socket is left open.
    """
    secured = _Secured(context, server_side)
    try:
        async with asyncio.timeout(timeout_s):
            await secured.shake_hands(endpoint)
    except TimeoutError:
        raise TimeoutError(f"no answer to the TLS handshake for {timeout_s:.0f} s") from None
    TlsTransport(endpoint, secured, channel).begin()


async def connect(
    host: str, port: int, context: ssl.SSLContext, channel: Channel, *, timeout_s: float
) -> None:
    """Connect to the first address of the host that answers, over TLS.

    Args:
        host: A name or an IP address.
        port: At each address of the host.
        context: A client's.
        channel: Hears what comes.
        timeout_s: For name and connection, and again for the handshake at each address.

    Raises:
        OSError: None does, or the handshake came to nothing.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    addresses = await dial.resolve(host, port, timeout_s)
    while True:
        left_s = until_s - loop.time()
        endpoint, address = await dial.connect_first(addresses, max(left_s, _LEAST_DIAL_S))
        addresses.remove(address)
        try:
            await secure(endpoint, context, channel, server_side=False, timeout_s=timeout_s)
        except BaseException as error:
            endpoint.close()
            # Another address may lead there by another path; what speaks no TLS does so nowhere.
            if not addresses or not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
                raise
        else:
            return
