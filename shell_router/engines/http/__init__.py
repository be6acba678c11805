"""An HTTP/1.1 client for the legs of a pair: no task, no copy and no parsing in Python on the way of a chunk.

A general client costs more per request than all else the router does for it (docs/performance.md). This one knows
POST and GET with bytes for a body, kept-alive connections, TLS, and limits; parsing is llhttp's, by `httptools`.
"""

from shell_router.engines.http.client import HttpClient
from shell_router.engines.http.endpoint import Endpoint
from shell_router.engines.http.exchange import Exchange

__all__ = ["Endpoint", "Exchange", "HttpClient"]
