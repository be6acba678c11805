"""Python environments of public clients and routers, each built once under the user's cache folder.

Each program has an environment of its own: the pins of some exclude one another.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shell-router"
BUILD_LIMIT_S = 3600.0
ASK_LIMIT_S = 60.0
REASON_CHARACTERS = 300

Version = tuple[int, int]


class UnavailableError(Exception):
    """Why a program cannot be measured here, in one line."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program from the package index.

    Attributes:
        name: Its package.
        version: Its release, empty for the newest one on the index.
        command: Its executable; of the package's name if empty.
        python: The Python that it asks for; that of this process if None.
        beside: Requirements that are installed with it.
    """

    name: str
    version: str = ""
    command: str = ""
    python: Version | None = None
    beside: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class Installed:
    """A program's executable, and the release that is installed."""

    executable: Path
    version: str


def install(program: Program) -> Installed:
    """Return the program, from the cache or built now; raises UnavailableError."""
    python = sys.executable if program.python is None else find_python(program.python)
    key = hashlib.sha256(f"{python} {program}".encode()).hexdigest()[:12]
    folder = CACHE / f"neutral-{program.name}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _build(folder, python, program)
            (folder / "complete").touch()
    ask = f"from importlib.metadata import version; print(version({program.name!r}))"
    version = _run(str(folder / "bin" / "python"), "-c", ask, limit_s=ASK_LIMIT_S).strip()
    return Installed(folder / "bin" / (program.command or program.name), version)


def find_python(version: Version) -> str:
    """Return an interpreter of that version; raises UnavailableError."""
    dotted = ".".join(map(str, version))
    for candidate in _list_pythons(dotted):
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            if _run(candidate, "-c", ask, limit_s=ASK_LIMIT_S).strip() == dotted:
                return candidate
        except UnavailableError:
            continue  # pyenv has a command for versions that are not chosen, too, which fails
    raise UnavailableError(f"needs Python {dotted}, which is neither on PATH nor in ~/.pyenv")


def _list_pythons(dotted: str) -> Iterator[str]:
    on_path = shutil.which(f"python{dotted}")
    if on_path is not None:
        yield on_path
    for folder in sorted(Path.home().glob(f".pyenv/versions/{dotted}.*")):
        yield str(folder / "bin" / "python")


def _build(folder: Path, python: str, program: Program) -> None:
    print(f"building {folder}", file=sys.stderr, flush=True)
    _run(python, "-m", "venv", "--clear", str(folder), limit_s=BUILD_LIMIT_S)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    _run(*pip, program.requirement, *program.beside, limit_s=BUILD_LIMIT_S)


def _run(*command: str, limit_s: float) -> str:
    """Return what a command prints; raises UnavailableError with the end of its complaint."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit_s)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if not line.startswith("WARNING")]
        complaint = " ".join(lines)[-REASON_CHARACTERS:]
        raise UnavailableError(
            complaint or f"{command[0]} exited with {error.returncode}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)[:REASON_CHARACTERS]) from None
    return done.stdout
