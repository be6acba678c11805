from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shell_router.standins.simulated.text import CALL, SimulatedTokenizer, Written, filler

TOKENIZER = SimulatedTokenizer()
TEXTS = st.text(alphabet=st.sampled_from("一丁七abc de.\n"), max_size=30)


@given(st.integers(0, 200_000), st.text(max_size=5))
def test_filler_has_a_token_per_character(tokens: int, seed: str) -> None:
    text = filler(tokens, seed)
    assert len(text) == tokens == len(TOKENIZER.encode(text))
    assert filler(tokens + 10, seed).startswith(text)


def test_fillers_of_different_seeds_differ() -> None:
    assert filler(20, "one") != filler(20, "other")


def test_other_text_has_a_token_for_four_characters() -> None:
    assert len(TOKENIZER.encode("Now your answer:")) == 4
    assert len(TOKENIZER.encode("一Now一")) == 3


@given(TEXTS, TEXTS)
def test_stable_tokens_stay_whatever_follows(text: str, more: str) -> None:
    stable = TOKENIZER.encode_stable(text)
    assert TOKENIZER.encode(text + more)[: len(stable)] == stable
    assert len(stable) >= len(TOKENIZER.encode(text)) - 1


@given(TEXTS)
def test_an_output_has_the_tokens_of_its_text(text: str) -> None:
    written = Written.of(text, -0.1)
    assert len(written) == len(TOKENIZER.encode(text))
    assert written.part(0, len(written)) == (tuple(TOKENIZER.encode(text)), text)


@given(st.integers(0, 200), st.text(max_size=5), TEXTS, st.lists(st.integers(0, 220), max_size=4))
def test_an_output_after_filler_ends_as_it_should_however_it_is_cut(
    tokens: int, seed: str, end: str, cuts: list[int]
) -> None:
    written, last = Written.after_filler(tokens, seed, end, -0.1), TOKENIZER.encode(end)
    begin = filler(tokens - len(last), seed)
    assert len(written) == max(tokens, len(last))
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    parts = [written.part(start, stop) for start, stop in pairwise(places)]
    assert [len(ids) for ids, _ in parts] == [stop - start for start, stop in pairwise(places)]
    assert "".join(text for _, text in parts) == begin + end
    assert [number for ids, _ in parts for number in ids] == TOKENIZER.encode(begin) + last


def test_a_call_stands_in_later_prompts_as_its_root_wrote_it() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    prompt = TOKENIZER.render_chat([])
    assert TOKENIZER.render_chat([called]).startswith(f"{prompt}{CALL}<|im_end|>")


def test_a_chat_names_its_roles() -> None:
    chat = TOKENIZER.render_chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    )
    assert chat == (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )
