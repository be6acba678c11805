"""Prices of tokens, and what requests may spend."""

from dataclasses import dataclass, fields
from typing import Annotated, Self

from annotated_types import Ge, Gt

from shell_router.errors import BudgetExceeded

PER_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars for a million tokens of a model."""

    input: Annotated[float, "For tokens of prompts.", Ge(0)]
    output: Annotated[float, "For tokens of outputs, thinking included.", Ge(0)]
    cached: Annotated[
        float | None,
        "For tokens of prompts that an engine finds cached; as `input` by default.",
        Ge(0),
    ] = None

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        """Return the dollars that a request costs; `cached_tokens` are some of the prompt's."""
        cached = self.input if self.cached is None else self.cached
        new_tokens = prompt_tokens - cached_tokens
        dollars = new_tokens * self.input + cached_tokens * cached + completion_tokens * self.output
        return dollars / PER_MILLION


FREE = Price(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The most that several requests may spend together; None is no limit."""

    calls: Annotated[int | None, "Requests to engines.", Ge(1)] = None
    tokens: Annotated[int | None, "Tokens of prompts and outputs.", Ge(1)] = None
    cost: Annotated[float | None, "Dollars, by the models' prices.", Gt(0)] = None

    def tighten(self, other: Self) -> Self:
        """Return what is within both."""
        least = {}
        for limit in fields(self):
            limits = (getattr(self, limit.name), getattr(other, limit.name))
            least[limit.name] = min((each for each in limits if each is not None), default=None)
        return type(self)(**least)


@dataclass(frozen=True, slots=True)
class Budget(Allowance):
    """The most that a request may spend on all of its agents; None is no limit."""

    seconds: Annotated[float | None, "Time from the request's arrival.", Gt(0)] = None


UNLIMITED = Budget()


class Purse:
    """Pays for the agents of one run, or of several, out of one budget.

    Calls and tokens of prompts are paid before an engine is asked, tokens of outputs as they come.
    So calls never exceed the budget, and of tokens at most those of the last pieces do that agents
    at work have sent at once.

    Attributes:
        calls: Engine requests that were begun.
        tokens: Tokens of their prompts and outputs so far.
        cost: Their dollars so far.

    Args:
        budget: The most that may be spent.
        outer: Pays for the same agents and for others.
    """

    def __init__(self, budget: Budget, outer: "Purse | None" = None) -> None:
        self.budget = budget
        self.calls = 0
        self.tokens = 0
        self.cost = 0.0
        self._outer = outer

    def _list_purses(self) -> "list[Purse]":
        outer = [] if self._outer is None else self._outer._list_purses()
        return [self, *outer]

    def _lacks(self, calls: int, tokens: int, cost: float) -> bool:
        budget = self.budget
        return (
            (budget.calls is not None and self.calls + calls > budget.calls)
            or (budget.tokens is not None and self.tokens + tokens > budget.tokens)
            or (budget.cost is not None and self.cost + cost > budget.cost)
        )

    def begin(self, price: Price, prompt_tokens: int, limit: int) -> int:
        """Pay a call and its prompt; return how many tokens its output may have, up to `limit`.

        Raises:
            BudgetExceeded: It cannot be paid together with a first token of output.
        """
        cost = price.cost(prompt_tokens, 0, 0)
        token_cost = price.cost(0, 0, 1)
        purses = self._list_purses()
        for purse in purses:
            if purse._lacks(1, prompt_tokens + 1, cost + token_cost):
                why = f"and a call with a prompt of {prompt_tokens} tokens is to begin"
                raise purse.make_error(why)
        self.pay(cost, prompt_tokens, calls=1)
        for purse in purses:
            budget = purse.budget
            if budget.tokens is not None:
                limit = min(limit, budget.tokens - purse.tokens)
            if budget.cost is not None and token_cost:
                limit = min(limit, int((budget.cost - purse.cost) / token_cost))
        return max(1, limit)  # the first token is payable, whatever the rounding

    def require_token(self, agent: str) -> None:
        """Raise BudgetExceeded unless a further token of the agent's output can be paid."""
        for purse in self._list_purses():
            if purse._lacks(0, 1, 0.0):
                raise purse.make_error(f"and agent {agent!r} writes")

    def pay(self, cost: float, tokens: int, calls: int = 0) -> None:
        """Pay for what an agent has got; what is negative gives back what was too much."""
        for purse in self._list_purses():
            purse.calls += calls
            purse.tokens += tokens
            purse.cost += cost

    def make_error(self, why: str) -> BudgetExceeded:
        """Return the error that says what was spent of which budget."""
        budget = self.budget
        spent = {"calls": self.calls, "tokens": self.tokens, "cost": round(self.cost, 9)}
        figures = [
            f"{name} {used:,.10g} of {getattr(budget, name):,.10g}"
            for name, used in spent.items()
            if getattr(budget, name) is not None
        ]
        return BudgetExceeded(
            f"The budget is spent ({', '.join(figures) or 'time'}), {why}.",
            remedy="Raise `budget`, or ask a smaller topology.",
        )
