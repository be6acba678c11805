"""Users who talk: every request repeats what was said before, as in ShareGPT's conversations.

The file itself does not come along. Assumed: a conversation has a geometric number of turns, 4 in the mean; a message
and an answer are log-normal with means of 150 and 250 tokens; the next message comes 20 s after the last in the mean.
"""

from random import Random

from balancing.lengths import Request, log_normal

TURNS, MESSAGE, ANSWER, PAUSE_S, LONGEST = 4, 150, 250, 20.0, 8000


def conversations(count: int, per_s: float, seed: int) -> list[Request]:
    """So many requests of as many users as that takes, `per_s` of them a second in the mean."""
    draws, found, begun_s = Random(f"conversations/{seed}"), list[Request](), 0.0
    while len(found) < count:
        begun_s += draws.expovariate(per_s / TURNS)
        found += _conversation(f"user-{len(found)}", begun_s, draws)
    return sorted(found, key=lambda one: one.at_s)[:count]


def _conversation(user: str, at_s: float, draws: Random) -> list[Request]:
    turns, said = list[Request](), 0
    while said < LONGEST:
        prompt, answer = said + 1 + round(log_normal(draws, MESSAGE)), 1 + round(log_normal(draws, ANSWER))
        turns.append(Request(at_s, user, prompt, answer, old=prompt))
        if draws.random() < 1 / TURNS:
            break
        said, at_s = prompt + answer, at_s + draws.expovariate(1 / PAUSE_S)
    return turns
