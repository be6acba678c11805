# ruff: noqa: F401
"""Modules for the fork server to import, so that an embedded server starts within milliseconds."""

import os

from shell_router.standins.embedded.settings import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # these libraries read it when they are imported

# transformers imports the two models when a checkpoint loads: 2 s in each server
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3

import shell_router.standins.embedded.server
