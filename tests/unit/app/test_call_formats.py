"""The format in which a model writes calls of tools, inferred from its chat template."""

from pathlib import Path

import pytest

from shell_router.app.model_files import ModelFiles
from shell_router.engines.tokenizer import HfTokenizer
from tests.fakes.tokenizers_of_every_kind import write_folder

PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
QWEN = (
    PLAIN + "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
)
SMOL = PLAIN + (
    "{% if tools %}{{ tools | tojson }} Answer as <tool_call>"
    '{"name": <name>, "arguments": <object>}</tool_call>.{% endif %}'
)
GLM = PLAIN + "{% if tools %}<tool_call>{function-name}<arg_key>{arg-key}</arg_key>{% endif %}"
CODER = PLAIN + "{% if tools %}<tool_call>\n<function=example>{% endif %}"
REFUSING = PLAIN + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (QWEN, "hermes"),
        (SMOL, "hermes"),
        (GLM, None),
        (CODER, None),
        (PLAIN, None),
        (REFUSING, None),
        (None, None),
    ],
    ids=["qwen", "smol", "glm", "coder", "plain", "refusing", "without"],
)
def test_the_format_of_calls_is_the_templates(
    tmp_path: Path, template: str | None, parser: str | None
) -> None:
    settings = {} if template is None else {"chat_template": template}
    folder = write_folder(tmp_path, "gpt2", **settings)
    files = ModelFiles(folder, HfTokenizer.from_folder(folder), 100, 100)
    assert files.infer_call_parser() == parser
