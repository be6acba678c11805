"""Where requests of one kind go, with the part of their head that never changes."""

from base64 import b64encode
from dataclasses import dataclass

from yarl import URL

Origin = tuple[str, int, bool]
"""Host, port, and whether TLS is spoken: what a connection can be used for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method at one URL."""

    origin: Origin
    head: bytes

    def request(self, body: bytes | None) -> bytes:
        """The whole request as it goes over the wire."""
        if body is None:
            return self.head + b"\r\n"
        return b"%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (self.head, len(body), body)


def endpoint(method: str, url: URL) -> Endpoint:
    """Read `url` once. A user and a password in it become basic authentication; raises ValueError without a host."""
    if url.host is None or url.port is None:
        raise ValueError(f"{url} names no host")
    head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
    if url.user is not None:
        secret = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        head += f"Authorization: Basic {secret}\r\n"
    return Endpoint((url.host, url.port, url.scheme == "https"), head.encode())
