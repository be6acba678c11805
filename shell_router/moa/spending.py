"""Pays for an agent, from its request's budget and from accounts that requests share."""

import asyncio
from collections.abc import Sequence
from functools import partial

from agent_cache.accounts import AccountLimits, Accounts, Payment
from shell_router.core.budget import Allowance, Price, Purse
from shell_router.core.engine import Finish, value
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

    async def spend(self, payment: Payment) -> int:
        """Pay, and return how many of `more` tokens were paid. Raises BudgetExceeded."""
        # when cancelled here, Redis may still take the payment
        task = asyncio.ensure_future(
            self.store.spend(self.tenant, self.name, payment, self._count_limits())
        )
        try:
            paid = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._refund_late, payment))
            raise
        if not paid:
            raise BudgetExceeded(
                f"The budget of {self.what} is spent.",
                remedy="Ask the operator to raise it, or wait until it begins anew.",
            )
        return paid

    def refund(self, calls: int, tokens: int, nanos: int) -> None:
        """See `Accounts.refund`."""
        self.store.refund(self.tenant, self.name, calls, tokens, nanos)

    def _refund_late(self, payment: Payment, task: asyncio.Future[int]) -> None:
        if not task.cancelled() and task.exception() is None and (paid := task.result()):
            nanos = payment.nanos + paid * payment.token_nanos
            self.refund(payment.calls, payment.tokens + paid, nanos)

    def _count_limits(self) -> AccountLimits:
        """Return the budget as the store counts it."""
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

    Args:
        price: The model's price.
        purse: Pays from the request's budget.
        accounts: Pay from budgets of several requests.
    """

    def __init__(self, price: Price, purse: Purse | None, accounts: Sequence[Account]) -> None:
        self._price = price
        self._purse = purse
        self._accounts = accounts
        self._paid_tokens: float | None = None
        self._left = [0 for _ in accounts]
        self._token_nanos = round(NANOS * price.cost(0, 0, 1))
        self._prompt_tokens = 0
        self._written = 0
        self._limit = self._most = 0

    async def begin(self, prompt_tokens: int, limit: int, paid_tokens: float | None = None) -> int:
        """Pay the call and its prompt; return how many tokens its output may have, up to `limit`.

        If an earlier attempt at the run began it, that has paid the call, the prompt and
        `paid_tokens` of the output from accounts.

        Raises:
            BudgetExceeded: It cannot be paid together with a first token.
        """
        self._paid_tokens = paid_tokens
        self._prompt_tokens = prompt_tokens
        self._limit = self._most = limit
        cost = self._price.cost(prompt_tokens, 0, 0)
        if self._purse is not None:
            self._limit = self._purse.begin(self._price, prompt_tokens, limit)
        if paid_tokens is not None:
            return self._limit
        try:
            await self._begin_accounts(prompt_tokens, round(NANOS * cost))
        except BaseException:
            if self._purse is not None:
                self._purse.pay(-cost, -prompt_tokens, calls=-1)
            raise
        return self._limit

    async def _begin_accounts(self, prompt_tokens: int, nanos: int) -> None:
        """Pay from all accounts, or from none."""
        more = min(self._limit, BLOCK_TOKENS)
        payment = Payment(1, prompt_tokens, nanos, more, self._token_nanos)
        begun = 0
        try:
            for at, account in enumerate(self._accounts):
                self._left[at] = await account.spend(payment)
                begun += 1
        except BaseException:
            for account in self._accounts[:begun]:
                account.refund(1, prompt_tokens, nanos)
            self._settle_accounts(0, 0.0)
            raise

    async def write(self, tokens: int, agent: str) -> None:
        """Pay for tokens of the output. Raises BudgetExceeded after the last one that is paid."""
        purse = self._purse
        if purse is not None:
            purse.require_token(agent)
            purse.pay(self._price.cost(0, 0, tokens), tokens)
        self._written += tokens
        if self._paid_tokens is not None:
            paid_before = min(tokens, self._paid_tokens)
            self._paid_tokens -= paid_before
            tokens -= int(paid_before)
            if not tokens:
                return
        for at, account in enumerate(self._accounts):
            if self._left[at] <= 0:
                more = max(BLOCK_TOKENS, -self._left[at])
                self._left[at] += await account.spend(Payment(0, 0, 0, more, self._token_nanos))
            self._left[at] -= tokens

    def close(self, finish: Finish | None = None) -> None:
        """Give back what was paid and not used, and settle what the engine has counted otherwise.

        Engines may find a part of the prompt cached, count the prompt by another tokenizer, and
        write tokens that they do not send, as thinking.

        Raises:
            BudgetExceeded: The output ended where the request's budget did.
        """
        if finish is None:
            self._settle_accounts(0, 0.0)
            return
        price = self._price
        written = self._written
        tokens = finish.prompt_tokens - self._prompt_tokens + finish.completion_tokens - written
        cost = price.cost(finish.prompt_tokens, finish.cached_tokens, finish.completion_tokens)
        cost -= price.cost(self._prompt_tokens, 0, written)
        if self._purse is not None:
            self._purse.pay(cost, tokens)
        if self._paid_tokens:  # an earlier attempt has settled it
            tokens = 0
            cost = 0.0
        self._settle_accounts(tokens, cost)
        if self._purse is not None and finish.reason == "length" and self._limit < self._most:
            raise self._purse.make_error("and the output ended there")

    def _settle_accounts(self, tokens: int, cost: float) -> None:
        """Pay for this number of further tokens, and give back what was paid ahead."""
        for at, account in enumerate(self._accounts):
            unused = max(0, self._left[at])
            self._left[at] = 0
            nanos = unused * self._token_nanos - round(NANOS * cost)
            if unused - tokens or nanos:
                account.refund(0, unused - tokens, nanos)
