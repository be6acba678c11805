"""A file on a disk that runs full."""

import errno
import io
import os


class FillingDisk(io.BytesIO):
    """Takes bytes as long as there is room, as a raw file does: a part of what is written, then nothing."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, content: object) -> int:
        assert isinstance(content, bytes)
        taken = content[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        return super().write(taken)
