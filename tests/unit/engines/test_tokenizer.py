"""Ids that may be prefilled before the text is complete, fingerprints, and chat templates."""

import asyncio
import copy
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shell_router.core.control_text import BREAK
from shell_router.core.engine import JoinedText
from shell_router.engines.stable_prefix import StablePrefix
from shell_router.engines.tokenizer import KEPT_BYTES, HfTokenizer, id_fingerprint
from shell_router.errors import ConfigError, InvalidRequest, PromptRefused
from tests.fakes.tokenizers_of_every_kind import KINDS, trained, write_folder

TRICKY = [
    "word", "We", "'", "'re", "'l", "l", "’s", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "1", "234", "5678",
    "3.14", ",", ".", "!\n", "...", "-", "<", "<|", "<|im_", "im_end|>", "end|>", "<|im_end|>", "<|endoftext",
    "<think>", "</think", "e", "\u0301", "\u0327", "é", "ß", "東京", "は", "ᄀ", "ᅡ", "ᆨ", "한", "😀", "\u200d", "\ufe0f",
    "👍🏽", "\ufffd", "Привет", "ABc", "İ", "ﬁ", "ſ", "|", "\u00a0", "\u2028", "_", "/", "//\n", "▁", "٣", "½",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(TRICKY) | st.text(max_size=3), max_size=14).map("".join)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 1 < 2 & 3 > 2?\n"},
    {"role": "assistant", "content": "Yes — “naturally”."},
    {"role": "user", "content": "<think>why</think>"},
]
CHATML = (
    "{%- for message in messages %}\n    {%- if loop.first and message.role != 'system' %}\n     "
    "   {{- 'default' }}\n"
    "    {%- endif %}\n{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim + "
    "eos_token }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{{ messages | "
    "tojson }}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    return {
        kind: HfTokenizer.from_folder(write_folder(tmp_path_factory.mktemp(kind), kind))
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=TEXTS)
def test_no_continuation_changes_stable_ids(
    folders: dict[str, HfTokenizer], kind: str, text: str
) -> None:
    tokenizer = folders[kind]
    ids = tokenizer.encode(text)
    for cut in range(len(text)):
        stable = tokenizer.encode_stable(text[:cut])
        assert stable == ids[: len(stable)], text[:cut]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "across_words"])
def test_nearly_all_of_a_longer_text_is_stable(folders: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = folders[kind]
    text = "The quick brown fox can't jump, we are sure. " * 20
    assert len(tokenizer.encode(text)) - len(tokenizer.encode_stable(text)) <= 12


def test_where_merges_cross_words_nothing_is_stable_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = HfTokenizer.from_folder(write_folder(tmp_path, "across_words"))
    assert tokenizer.encode_stable("The quick brown fox can jump over dogs") == []
    assert "merges across words" in caplog.text


@pytest.mark.parametrize(
    "tail", ["<", "<|", "<|im_", "<|im_end|", "   <|im_e", "\ufffd", "  \n ", "12345", "'r", " don"]
)
def test_an_undecided_tail_is_held_back(folders: dict[str, HfTokenizer], tail: str) -> None:
    tokenizer = folders["qwen"]
    head = "Some words that come before it "
    held = tokenizer.encode_stable(head + tail)
    assert 0 < len(held) < len(tokenizer.encode(head))


def test_special_tokens_in_the_text_are_recognised(folders: dict[str, HfTokenizer]) -> None:
    tokenizer = folders["qwen"]
    assert tokenizer.encode("<|im_end|>") == [trained("qwen").token_to_id("<|im_end|>")]


@pytest.mark.parametrize("kind", ["qwen", "gpt2", "llama3"])
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    ours = HfTokenizer.from_folder(write_folder(tmp_path, kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [
        "",
        "Hello, world!",
        "<|im_start|>user\nIt's 12345 → 東京<|im_end|>\n",
        "".join(TRICKY),
    ]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen")
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    found["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    assert len(HfTokenizer.from_folder(tmp_path).encode("one two three four five")) > 2


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{{ bos_token }}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    ],
)
def test_chats_render_as_transformers_renders_them(tmp_path: Path, template: str) -> None:
    write_folder(tmp_path, "qwen", bos_token={"__type": "AddedToken", "content": "<|endoftext|>"})
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert HfTokenizer.from_folder(tmp_path).render_chat(MESSAGES) == expected


@pytest.mark.parametrize("given_as", ["text", "named"])
def test_a_template_in_the_configuration_is_found(tmp_path: Path, given_as: str) -> None:
    template = "{{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    write_folder(tmp_path, "qwen", chat_template=template if given_as == "text" else named)
    assert HfTokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "Be brief."


def test_a_template_may_write_the_date(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen", chat_template="{{ strftime_now('%d %b %Y') }}")
    tokenizer = HfTokenizer.from_folder(tmp_path, now=lambda: datetime(2026, 11, 5))
    assert tokenizer.render_chat(MESSAGES) == "05 Nov 2026"


def test_a_template_that_refuses_the_messages_is_the_clients_error(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen", chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        HfTokenizer.from_folder(tmp_path).render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("template", "option"),
    [
        ("{{ 'a'.split(x) }}", ""),
        ("{% for one in range(x) %}{% endfor %}", 10**6),
        ("{{ 1 // x }}", 0),
        ("{{ strftime_now(x) }}", "\ud800"),
    ],
)
def test_an_option_that_the_template_cannot_take_is_the_clients_error(
    tmp_path: Path, template: str, option: object
) -> None:
    write_folder(tmp_path, "qwen", chat_template=template)
    with pytest.raises(InvalidRequest, match="chat template refuses") as refused:
        HfTokenizer.from_folder(tmp_path).render_chat(MESSAGES, options={"x": option})
    str(refused.value).encode()  # it is sent


def test_a_request_cannot_replace_what_a_template_writes_after_every_message(
    tmp_path: Path,
) -> None:
    tokenizer = HfTokenizer.from_folder(write_folder(tmp_path, "qwen", chat_template=CHATML))
    with pytest.raises(InvalidRequest, match="chat_template_kwargs sets 'eos_token'"):
        tokenizer.render_chat(MESSAGES, options={"eos_token": "x" * 2**20})


def test_a_template_cannot_reach_into_the_process(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen", chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest):
        HfTokenizer.from_folder(tmp_path).render_chat(MESSAGES)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = HfTokenizer.from_folder(write_folder(tmp_path, "qwen"))
    with pytest.raises(PromptRefused, match=r"chat_template\.jinja"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_broken_file_is_named(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, "qwen")
    (tmp_path / file).write_text("{{{ broken")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        HfTokenizer.from_folder(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        HfTokenizer.from_folder(tmp_path / "nowhere")


def test_fingerprints_follow_what_decides_ids_and_nothing_else() -> None:
    found = json.loads(trained("qwen").to_str())
    same = {
        **found,
        "decoder": None,
        "truncation": {"max_length": 3},
        "post_processor": None,
        "version": "9",
    }
    spelled = {
        **found,
        "model": {
            **found["model"],
            "merges": [" ".join(merge) for merge in found["model"]["merges"]],
        },
    }
    others = [
        {**found, "normalizer": None},
        {**found, "added_tokens": found["added_tokens"][1:]},
        {**found, "pre_tokenizer": None},
        {**found, "model": {**found["model"], "merges": found["model"]["merges"][1:]}},
        json.loads(trained("llama3").to_str()),
    ]
    assert id_fingerprint(found) == id_fingerprint(same) == id_fingerprint(spelled)
    assert len({id_fingerprint(found), *map(id_fingerprint, others)}) == 6


class Counting:
    """Gives an id per character, and counts the texts."""

    asked = 0

    def encode_batch_fast(
        self, texts: list[str], add_special_tokens: bool
    ) -> list[SimpleNamespace]:
        self.asked += len(texts)
        return [SimpleNamespace(ids=[1] * len(text)) for text in texts]


def test_of_the_texts_and_ids_that_are_kept_the_newest_stay_within_a_number_of_bytes() -> None:
    counting = Counting()
    tokenizer = HfTokenizer(counting, "", StablePrefix({}), None, "")  # type: ignore[arg-type]

    def is_kept(text: str) -> bool:
        before = counting.asked
        return len(tokenizer.encode(text)) == len(text) and counting.asked == before

    characters = (
        KEPT_BYTES // 8 // 5
    )  # with four bytes for the id of each, an eighth of what may be kept
    texts = [str(number).zfill(characters) for number in range(12)]
    assert not any(map(is_kept, texts))
    assert [is_kept(text) for text in reversed(texts)] == [True] * 7 + [False] * 5
    assert is_kept(texts[5]), "it was asked again, and so older ones left"
    too_long = "x" * (KEPT_BYTES // 16)
    assert not is_kept(too_long) and not is_kept(too_long) and is_kept(texts[0]), (
        "one may not push out all others"
    )


async def test_the_event_loop_runs_on_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = HfTokenizer.from_folder(write_folder(tmp_path, "qwen"))
    for encode in (tokenizer.encode, tokenizer.encode_stable):
        working = asyncio.create_task(asyncio.to_thread(encode, "several words " * 50_000))
        turns = 0
        while not working.done():
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 5


WRITES = "{% for m in messages %}{{ m.role }}={{ m.content }}|{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}" + WRITES
)
SYSTEM_FIRST = (
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('system first') }}"
    "{% endif %}{% endfor %}" + WRITES
)
TURNS = [("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e")]


@pytest.mark.parametrize(
    ("template", "last", "text"),
    [
        (WRITES, "user", "system=a|system=b|user=c|assistant=d|system=e|user=f|"),
        (SYSTEM_FIRST, "user", "system=a\n\nb|user=c|assistant=d|user=e\n\nf|"),
        (SYSTEM_FIRST, "tool", "system=a\n\nb|user=c\n\ne|assistant=d|tool=f|"),
        (NO_SYSTEM, "user", "user=a\n\nb\n\nc|assistant=d|user=e\n\nf|"),
        (NO_SYSTEM, "tool", "user=a\n\nb\n\nc\n\ne|assistant=d|tool=f|"),
    ],
    ids=["takes all", "takes the first", "no later turn", "takes none", "none, no later turn"],
)
def test_system_messages_stay_where_the_template_takes_them_or_go_into_the_users_turns(
    tmp_path: Path, template: str, last: str, text: str
) -> None:
    tokenizer = HfTokenizer.from_folder(write_folder(tmp_path, "qwen", chat_template=template))
    chat = [{"role": role, "content": content} for role, content in [*TURNS, (last, "f")]]
    assert tokenizer.render_chat(chat) == text


READS = (
    "{%% for message in messages[%d:][:1] %%}{%% for part in %s %%}[{{ part.text }}]{%% endfor %%}"
    "{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content }}", "one two"),
        (READS % (0, "message['content']"), "[one][two]"),
        (READS % (0, "message.content | list"), "[one][two]"),
        ("{# image #}{{ messages[0].content | length }}", "2"),
        ("{# image #}{{ messages[1].content }}", "one two"),
    ],
    ids=["one text", "parts", "a list of parts", "images", "a tool's result"],
)
def test_a_template_that_reads_parts_gets_them(tmp_path: Path, template: str, text: str) -> None:
    folder = write_folder(tmp_path, "qwen", chat_template=template)
    parts = JoinedText.of(["one", "two"])
    chat = [{"role": role, "content": copy.deepcopy(parts)} for role in ("user", "tool")]
    for quotes_chats in (False, True):
        tokenizer = HfTokenizer.from_folder(folder, quotes_chats=quotes_chats)
        assert tokenizer.render_chat(chat) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=TEXTS)
def test_a_quoted_text_has_no_control_token_and_keeps_all_others(
    folders: dict[str, HfTokenizer], kind: str, text: str
) -> None:
    tokenizer = folders[kind]
    quoted = tokenizer.control.quote(text)
    unknown = {0}  # the special token of what is not in the vocabulary, in the kinds that have one
    control = tokenizer.control.plain_ids.keys() - unknown
    assert control.isdisjoint(tokenizer.encode(quoted))
    assert quoted.replace(BREAK, "") == text.replace(BREAK, "")
    stable = tokenizer.encode_stable(quoted)
    assert stable == tokenizer.encode(quoted)[: len(stable)]


@pytest.mark.parametrize("quotes_chats", [False, True])
def test_control_tokens_that_chats_spell_stay_text_where_asked_for(
    tmp_path: Path, quotes_chats: bool
) -> None:
    folder = write_folder(tmp_path, "qwen", chat_template=WRITES)
    tokenizer = HfTokenizer.from_folder(folder, quotes_chats=quotes_chats)
    (end,) = tokenizer.encode("<|im_end|>")
    chat = [{"role": "user", "content": "a<|im_end|>"}]
    ids = tokenizer.encode(tokenizer.render_chat(chat))
    assert ids.count(end) == (0 if quotes_chats else 1)
    assert tokenizer.control.replace_ids([end, 5]) == [5]
