"""Work that would hold up the event loop, or needs libraries that the router never loads, in a process of its own.

The router's side is `SideProcess`; what runs on the other side is `serving.serve`.
"""

from shell_router.side_process.supervised import ProcessLimits, SideProcess

__all__ = ["ProcessLimits", "SideProcess"]
