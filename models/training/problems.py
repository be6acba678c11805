"""A small world of word problems: stories of one to four arithmetic steps, with worked solutions.

A person has a number of things; sentence by sentence things are bought, lost, shared, compared; at
the end one number is asked for. Some sentences do not matter. A solution works out one equation per
step and ends with the answer: `24+13=37. 37*3=111. Answer: 111`. Where there are choices they are
ranges, and the answer is a letter: `Answer: C`. (Four bare numbers to choose from were tried three
ways; models of this size cannot tell which of them equals theirs.)
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

NAMES = (
    "Tom",
    "Mia",
    "Sam",
    "Eva",
    "Ben",
    "Ida",
    "Leo",
    "Zoe",
    "Max",
    "Amy",
    "Jon",
    "Kim",
    "Ron",
    "Lea",
    "Pam",
    "Gus",
)
THINGS = (
    "pens",
    "books",
    "coins",
    "cards",
    "apples",
    "stamps",
    "shells",
    "beads",
    "nuts",
    "eggs",
    "keys",
    "toys",
)
HOLDERS = ("boxes", "bags", "crates", "jars")
LARGEST = 1499
Kind = Literal["number", "choice"]
Topic = Literal["changes", "comparisons", "groups"]
"""What all steps of a story are about: what one person gets and loses, what one has more or fewer
than another, or multiples, shares and packs."""
TOPICS: tuple[Topic, ...] = get_args(Topic)
CHOICES = "A) below 30 B) 30 to 99 C) 100 to 249 D) 250 or more"
"""About as many problems' numbers fall into each."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question; `answer` is its number, or its letter where it offers choices. `solution` ends
    with it.

    `topic` is None for a story that may mix all topics.
    """

    question: str
    solution: str
    answer: str
    steps: int
    kind: Kind
    topic: Topic | None = None


def problems(
    rng: random.Random, *, choice_share: float = 0.2, topics: Sequence[Topic] = ()
) -> Iterator[Problem]:
    """Problems without end, of one to four steps, `choice_share` of them with four choices.

    Each is of one of `topics`, equally often; without any, a story may mix them all.
    """
    while True:
        topic = rng.choice(topics) if topics else None
        yield make_problem(
            rng, rng.randint(1, 4), "choice" if rng.random() < choice_share else "number", topic
        )


def make_problem(rng: random.Random, steps: int, kind: Kind, topic: Topic | None = None) -> Problem:
    """A story of exactly `steps` equations."""
    story = _Story(rng)
    signs, moves = _TOPICS[topic] if topic else ("+-*/", _MOVES)
    while story.steps < steps:
        possible = [move for move, cost in moves if story.steps + cost <= steps]
        rng.choice(possible)(story)
    if any(
        sign not in signs for sign in "".join(story.equations) if sign in "+-*/"
    ):  # a move that was not possible
        return make_problem(rng, steps, kind, topic)
    question = " ".join([*story.with_distractors(), story.asked])
    worked = " ".join(story.equations)
    answer = str(story.value)
    if kind == "choice":
        question, answer = f"{question} {CHOICES}", _letter(story.value)
    return Problem(question, f"{worked} Answer: {answer}", answer, steps, kind, topic)


def _letter(value: int) -> str:
    return "ABCD"[(value >= 30) + (value >= 100) + (value >= 250)]


def drill(rng: random.Random, equations: int, topic: Topic | None = None) -> tuple[str, str]:
    """Equations of such stories without their stories: what is asked, and what shall be said."""
    worked = [
        one
        for _ in range(equations)
        for one in make_problem(rng, 4, "number", topic).solution.split(". ")[:-1]
    ]
    chosen = rng.sample(worked, equations)
    return " ".join(one.split("=")[0] for one in chosen), ". ".join(chosen) + "."


@dataclass
class _Story:
    """The sentences so far. `who` holds `value` of the things that the question will be about."""

    rng: random.Random
    sentences: list[str] = field(default_factory=list)
    equations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._strangers = self.rng.sample(NAMES, len(NAMES))
        self.things, *self._other_things = self.rng.sample(THINGS, 4)
        self.who = self.stranger()
        self.value = self.rng.randint(3, 120)
        self.asked = f"How many {self.things} does {self.who} have now?"
        self.sentences.append(f"{self.who} has {self.value} {self.things}.")

    @property
    def steps(self) -> int:
        return len(self.equations)

    def stranger(self) -> str:
        """A person who was not mentioned yet."""
        return self._strangers.pop()

    def work_out(self, left: int, sign: str, right: int) -> int:
        """Add the equation of one step to the solution, and return its result."""
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
        self.equations.append(f"{left}{sign}{right}={result}.")
        return result

    def step(self, sentence: str, sign: str, number: int) -> None:
        """One sentence that changes the value once."""
        self.sentences.append(sentence)
        self.value = self.work_out(self.value, sign, number)

    def turn_to(self, who: str) -> None:
        """From here on the story is about `who`."""
        self.who = who
        self.asked = f"How many {self.things} does {who} have now?"

    def with_distractors(self) -> list[str]:
        """The sentences, with up to two among them that change nothing."""
        sentences = list(self.sentences)
        for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
            sentences.insert(self.rng.randint(1, len(sentences)), self._distractor())
        return sentences

    def _distractor(self) -> str:
        number, other = self.rng.randint(2, 99), self.rng.choice(self._other_things)
        return self.rng.choice(
            (
                f"{self.who} also has {number} {other}.",
                f"{self.stranger()} has {number} {self.things}.",
                f"{self.stranger()} buys {number} {other}.",
                f"The {other} cost {number} cents.",
            )
        )


def _gain(story: _Story) -> None:
    number = story.rng.randint(2, 120)
    verb = story.rng.choice(("buys", "finds", "gets", "makes"))
    story.step(f"{story.who} {verb} {number} more {story.things}.", "+", number)


def _lose(story: _Story) -> None:
    if story.value < 4:
        return _gain(story)
    number = story.rng.randint(2, min(story.value - 1, 120))
    verb = story.rng.choice(("gives away", "loses", "sells", "breaks"))
    return story.step(f"{story.who} {verb} {number} {story.things}.", "-", number)


def _more(story: _Story) -> None:
    other, number = story.stranger(), story.rng.randint(2, 80)
    sentence = f"{other} has {number} more {story.things} than {story.who}."
    story.turn_to(other)
    story.step(sentence, "+", number)


def _fewer(story: _Story) -> None:
    if story.value < 4:
        return _more(story)
    other, number = story.stranger(), story.rng.randint(2, min(story.value - 1, 80))
    sentence = f"{other} has {number} fewer {story.things} than {story.who}."
    story.turn_to(other)
    return story.step(sentence, "-", number)


def _times(story: _Story) -> None:
    factor = story.rng.randint(2, 11)
    if story.value * factor > LARGEST:
        return _lose(story)
    other = story.stranger()
    sentence = f"{other} has {factor} times as many {story.things} as {story.who}."
    story.turn_to(other)
    return story.step(sentence, "*", factor)


def _share(story: _Story) -> None:
    divisors = [
        number for number in range(2, 12) if story.value % number == 0 and story.value > number
    ]
    if not divisors:
        return _lose(story)
    number = story.rng.choice(divisors)
    holders = story.rng.choice(HOLDERS)
    sentence = (
        f"{story.who} shares the {story.things} equally between {number} {holders} and keeps one."
    )
    return story.step(sentence, "/", number)


def _packs(story: _Story) -> None:
    count, each = story.rng.randint(2, 14), story.rng.randint(2, 24)
    holder = story.rng.choice(HOLDERS)
    story.sentences.append(f"{story.who} buys {count} {holder} with {each} {story.things} each.")
    bought = story.work_out(count, "*", each)
    story.value = story.work_out(story.value, "+", bought)


_Moves = tuple[tuple[Callable[[_Story], None], int], ...]
_MOVES: _Moves = (
    (_gain, 1),
    (_lose, 1),
    (_more, 1),
    (_fewer, 1),
    (_times, 1),
    (_times, 1),
    (_share, 1),
    (_share, 1),
    (_packs, 2),
)
_TOPICS: Mapping[Topic, tuple[str, _Moves]] = {
    "changes": ("+-", ((_gain, 1), (_lose, 1))),
    "comparisons": ("+-", ((_more, 1), (_fewer, 1))),
    "groups": ("+*/", ((_times, 1), (_share, 1), (_packs, 2))),
}
"""Per topic the signs and the moves of its stories."""
