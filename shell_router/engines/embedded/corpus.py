"""English-like text, generated from word lists, for training the tokenizer of a made-up checkpoint."""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "agent answer apple bridge castle cloud cluster coin corner engine farmer field flower forest garden harbor "
    "island journey kettle ladder lantern layer letter market meadow memory mirror morning mountain music number "
    "ocean orange paper pattern pencil picture planet pocket problem question rabbit reason river school season "
    "shadow signal silver solution station story student summer sunset table teacher theory thunder token tower "
    "traveler tree valley village voice water weather window winter wonder writer"
)
VERBS = _words(
    "asks becomes begins builds carries changes counts crosses draws explains finds follows gives grows hears helps "
    "holds keeps knows learns leaves makes measures meets moves needs opens paints reads remembers sees shows solves "
    "speaks starts takes tells thinks turns watches writes"
)
ADJECTIVES = _words(
    "ancient bright broken calm careful clever cold distant early empty final gentle golden green happy heavy hidden "
    "large little lonely narrow patient quick quiet round second sharp simple slow small strange strong sudden "
    "third warm whole wide young"
)
LINKS = ("and", "because", "before", "but", "so", "then", "when", "while", "after", "although")
OPENERS = ("the", "a", "every", "this", "that", "some", "one", "no")


def english_like(rng: random.Random, *, sentences: int, first_word: int = 0, last_word: int | None = None) -> str:
    """`sentences` sentences; a slice of each word list (`first_word:last_word`) gives another vocabulary."""
    words = [list(kind[first_word:last_word]) for kind in (NOUNS, VERBS, ADJECTIVES)]
    return " ".join(_sentence(rng, *words) for _ in range(sentences))


def _sentence(rng: random.Random, nouns: list[str], verbs: list[str], adjectives: list[str]) -> str:
    clauses = [_clause(rng, nouns, verbs, adjectives) for _ in range(rng.randint(1, 3))]
    text = clauses[0]
    for clause in clauses[1:]:
        text += f", {rng.choice(LINKS)} {clause}"
    return text[0].upper() + text[1:] + rng.choice((".", ".", "!", "?"))


def _clause(rng: random.Random, nouns: list[str], verbs: list[str], adjectives: list[str]) -> str:
    subject = f"{rng.choice(OPENERS)} {rng.choice(adjectives)} {rng.choice(nouns)}"
    return f"{subject} {rng.choice(verbs)} {rng.choice(OPENERS)} {rng.choice(nouns)}"
