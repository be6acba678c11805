"""Parses commands from standard input with SGLang's own parser; run by an interpreter that has it.

Prints SGLang's version, and the names that our plugin's parts miss in it. Exits with argparse's
error at the first command that is refused.
"""

import argparse
import shlex
import sys

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# an older SGLang registers models that today's transformers knows by itself
CONFIG_MAPPING.register = lambda *_, **__: None

import sglang  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from shell_router.sglang_plugin import drafts, patches, routes, waiting_queue  # noqa: E402

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
for line in sys.stdin:
    words = shlex.split(line)
    parser.parse_args(words[words.index("sglang.launch_server") + 1 :])
parts = (
    patches.make_feature(),
    routes.FEATURE,
    waiting_queue.make_feature(None),
    drafts.make_feature(),
)
print(sglang.__version__, *(name for part in parts for name in part.missing()))
