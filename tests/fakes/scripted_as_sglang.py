"""A scripted server with SGLang's command line.

Run `python scripted_as_sglang.py --disaggregation-mode ROLE --port PORT`.
"""

import argparse
import asyncio
import sys

from benchmarks.scripted.run import ScriptedSettings
from benchmarks.scripted.server import ScriptedServer


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disaggregation-mode", required=True, choices=("prefill", "decode"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    given, _ = parser.parse_known_args()
    settings = ScriptedSettings(
        given.disaggregation_mode,
        vocabulary=30,
        memory_saver=given.enable_memory_saver,
        cpu_backup=given.enable_weights_cpu_backup,
    )
    server = ScriptedServer(settings)
    await server.start(given.port)
    while not server.memory.died:  # noqa: ASYNC110 - a mistake ends it, as it ends SGLang
        await asyncio.sleep(0.02)
    sys.exit(server.memory.died)


if __name__ == "__main__":
    asyncio.run(main())
