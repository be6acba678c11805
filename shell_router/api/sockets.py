"""The sockets that a server will listen on, taken before it is there."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def bound_sockets(host: str = "127.0.0.1", port: int = 0) -> Iterator[list[socket.socket]]:
    """One socket per address of `host`, all on one port, free where `port` is 0; closed in the end.

    They are bound and do not listen yet: nobody else can take the port, and clients are refused until a server
    listens. Addresses that this machine lacks are left out while there are others. Raises OSError.
    """
    with ExitStack() as stack:
        taken: list[socket.socket] = []
        lacking: OSError | None = None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = taken[0].getsockname()[1] if taken else port
            try:
                taken.append(stack.enter_context(_bound(family, (address[0], chosen, *address[2:]))))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
        if not taken:
            raise lacking or OSError(errno.EADDRNOTAVAIL, "no address")
        yield taken


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one
