"""Pays for an agent, from its request's budget and from accounts that requests share."""

from collections.abc import Sequence

from agent_cache.accounts import AccountLimits, Accounts, Payment
from shell_router.core.budget import Allowance, Price, Purse
from shell_router.core.engine import value
from shell_router.errors import BudgetExceeded

BLOCK_TOKENS = 256
"""Tokens of output that are paid from accounts at a time; the unused ones are given back."""
NANOS = 1e9


@value
class Account:
    """A budget that several requests share.

    Attributes:
        name: Its name in the store.
        what: Its name in messages, as "this day".
        ttl_s: The time after which it is full again.
    """

    store: Accounts
    tenant: str
    name: str
    what: str
    budget: Allowance
    ttl_s: float

    @property
    def limits(self) -> AccountLimits:
        """The budget as the store counts it."""
        budget = self.budget
        nanos = -1 if budget.cost is None else int(budget.cost * NANOS)
        return AccountLimits(
            -1 if budget.calls is None else budget.calls,
            -1 if budget.tokens is None else budget.tokens,
            nanos,
            self.ttl_s,
        )


class Spending:
    """Pays for one agent's request to an engine.

    From accounts, blocks of output are paid before they are written, so that requests which run at
    the same time, at any router, stay within them but for one piece of each agent's stream.
    """

    def __init__(self, price: Price, purse: Purse | None, accounts: Sequence[Account]) -> None:
        self._price = price
        self._purse = purse
        self._accounts = accounts
        self._left = [0 for _ in accounts]
        self._token_nanos = round(NANOS * price.cost(0, 0, 1))

    async def begin(self, prompt_tokens: int, limit: int) -> int:
        """Pay the call and its prompt; return how many tokens its output may have, up to `limit`.

        Raises:
            BudgetExceeded: It cannot be paid together with a first token.
        """
        if self._purse is not None:
            limit = self._purse.begin(self._price, prompt_tokens, limit)
        nanos = round(NANOS * self._price.cost(prompt_tokens, 0, 0))
        more = min(limit, BLOCK_TOKENS)
        payment = Payment(1, prompt_tokens, nanos, more, self._token_nanos)
        for at in range(len(self._accounts)):
            try:
                await self._spend(at, payment)
            except BudgetExceeded:
                for earlier in self._accounts[:at]:
                    earlier.store.refund(earlier.tenant, earlier.name, prompt_tokens, nanos)
                self.close()
                raise
        return limit

    async def write(self, tokens: int, agent: str) -> None:
        """Pay for tokens of the output. Raises BudgetExceeded after the last one that is paid."""
        purse = self._purse
        if purse is not None:
            if purse.is_empty:
                raise purse.error(f"and agent {agent!r} writes")
            purse.pay(self._price.cost(0, 0, tokens), tokens)
        for at in range(len(self._accounts)):
            if self._left[at] <= 0:
                more = max(BLOCK_TOKENS, -self._left[at])
                await self._spend(at, Payment(0, 0, 0, more, self._token_nanos))
            self._left[at] -= tokens

    async def _spend(self, at: int, payment: Payment) -> None:
        account = self._accounts[at]
        paid = await account.store.spend(account.tenant, account.name, payment, account.limits)
        if not paid:
            raise BudgetExceeded(
                f"The budget of {account.what} is spent.",
                remedy="Ask the operator to raise it, or wait until it begins anew.",
            )
        self._left[at] += paid

    def close(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Give back what was paid and not used; cached tokens of the prompt may cost less."""
        price = self._price
        less = price.cost(prompt_tokens, 0, 0) - price.cost(prompt_tokens, cached_tokens, 0)
        if self._purse is not None:
            self._purse.pay(-less)
        for at, account in enumerate(self._accounts):
            unused = max(0, self._left[at])
            nanos = unused * self._token_nanos + round(NANOS * less)
            if unused or nanos:
                account.store.refund(account.tenant, account.name, unused, nanos)
            self._left[at] = 0
