"""Compare the clocks of all ranks with rank 0's, over sockets of their own: gloo's round trips take milliseconds."""

import contextlib
import secrets
import socket
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recmill.observe import recorder

if TYPE_CHECKING:
    from recmill.world import World

_TRIPS = 64  # less than a millisecond on one machine
_SECONDS = 5.0  # without an answer, a rank is left out: the run does not depend on its clock
_TURN_SECONDS = 30.0  # until all ranks before this one are done
_TIME = struct.Struct("<q")


@dataclass(frozen=True)
class Offset:
    """What to add to a rank's time to get rank 0's, measured at the rank's `unix_ns`; off by `error_ns` at most."""

    unix_ns: int
    offset_ns: int
    error_ns: int


def measure(world: "World", host: str) -> dict[str, Any] | None:
    """Return this rank's offset; None if it cannot be measured. All ranks take part; rank 0 listens on `host`."""
    if world.size == 1:
        return asdict(Offset(recorder.unix_ns(), 0, 0))
    if not world.is_main:
        place = world.broadcast(("", 0, b""))
        return asdict(found) if place[1] and (found := _ask(*place)) else None
    token = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        listener = None
        with contextlib.suppress(OSError):
            listener = stack.enter_context(socket.create_server((host, 0), backlog=world.size))
        world.broadcast((host, listener.getsockname()[1] if listener else 0, token))
        if listener:
            _answer(listener, token, world.size - 1)
    return asdict(Offset(recorder.unix_ns(), 0, 0))


def _answer(listener: socket.socket, token: bytes, peers: int) -> None:
    """Send our time whenever a peer asks for it, one peer after the other."""
    listener.settimeout(_SECONDS)
    while peers:
        with contextlib.suppress(ConnectionError):
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_SECONDS)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if _received(connection, len(token)) != token:
                        continue  # not one of ours
                    peers -= 1
                    while connection.recv(1):
                        connection.sendall(_TIME.pack(recorder.unix_ns()))
            except TimeoutError:
                return


def _ask(host: str, port: int, token: bytes) -> Offset | None:
    """Return the offset of the fastest round trip: half of its duration bounds the error."""
    trips = []
    with (
        contextlib.suppress(OSError, struct.error),
        socket.create_connection((host, port), _TURN_SECONDS) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        for _ in range(_TRIPS):
            sent = recorder.unix_ns()
            connection.sendall(b"?")
            (theirs,) = _TIME.unpack(_received(connection, _TIME.size))
            came = recorder.unix_ns()
            middle = (sent + came) // 2
            trips.append(Offset(middle, theirs - middle, (came - sent) // 2 + 1))
    return min(trips, key=lambda trip: trip.error_ns) if trips else None


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data
