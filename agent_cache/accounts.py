"""Accounts that several requests, or several processes, spend from together."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MOST_ACCOUNTS = 100_000


@dataclass(frozen=True, slots=True)
class Payment:
    """A payment of calls and tokens, and of up to `more` tokens besides if the account has them.

    Attributes:
        nanos: The cost of the `tokens`, in billionths of a dollar.
        more: At least one of them must be payable.
        token_nanos: The cost of each of `more`.
    """

    calls: int
    tokens: int
    nanos: int
    more: int
    token_nanos: int


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """The most that an account may spend in `ttl_s` seconds; -1 is no limit."""

    calls: int
    tokens: int
    nanos: int
    ttl_s: float


def count_payable(spent: tuple[int, int, int], payment: Payment, limits: AccountLimits) -> int:
    """Return how many of `more` tokens the account can pay, 0 if not even the rest.

    `spent` are its calls, tokens and nanodollars so far.
    """
    calls, tokens, nanos = spent
    more = payment.more
    if 0 <= limits.calls < calls + payment.calls:
        return 0
    if limits.tokens >= 0:
        more = min(more, limits.tokens - tokens - payment.tokens)
    if limits.nanos >= 0:
        left = limits.nanos - nanos - payment.nanos
        if payment.token_nanos:
            more = min(more, left // payment.token_nanos)
        elif left < 0:
            return 0
    return max(0, more)


class Accounts(Protocol):
    """A store of what accounts have spent."""

    async def spend(self, tenant: str, name: str, payment: Payment, limits: AccountLimits) -> int:
        """Pay, and return how many of `more` tokens were paid; 0 if nothing was.

        An account is empty again `limits.ttl_s` after it was first spent from.
        """
        ...

    def refund(self, tenant: str, name: str, calls: int, tokens: int, nanos: int) -> None:
        """Give back what was paid and not used; what is negative is paid, whatever the limits."""
        ...


class MemoryAccounts:
    """The accounts of one process; the longest unused is forgotten beyond MOST_ACCOUNTS."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: OrderedDict[tuple[str, str], tuple[float, tuple[int, int, int]]] = (
            OrderedDict()
        )

    async def spend(self, tenant: str, name: str, payment: Payment, limits: AccountLimits) -> int:
        """See `Accounts`."""
        ends_s, spent = self._find(tenant, name, limits)
        more = count_payable(spent, payment, limits)
        if more:
            self._add(tenant, name, ends_s, spent, _sum(payment, more))
        return more

    def refund(self, tenant: str, name: str, calls: int, tokens: int, nanos: int) -> None:
        """See `Accounts`."""
        ends_s, spent = self._spent.get((tenant, name), (0.0, (0, 0, 0)))
        if ends_s:
            self._add(tenant, name, ends_s, spent, (-calls, -tokens, -nanos))

    def _find(
        self, tenant: str, name: str, limits: AccountLimits
    ) -> tuple[float, tuple[int, int, int]]:
        now_s = self._clock()
        found = self._spent.get((tenant, name))
        if found is None or found[0] <= now_s:
            return now_s + limits.ttl_s, (0, 0, 0)
        return found

    def _add(
        self,
        tenant: str,
        name: str,
        ends_s: float,
        spent: tuple[int, int, int],
        more: tuple[int, int, int],
    ) -> None:
        calls, tokens, nanos = (max(0, a + b) for a, b in zip(spent, more, strict=True))
        self._spent[tenant, name] = ends_s, (calls, tokens, nanos)
        self._spent.move_to_end((tenant, name))
        if len(self._spent) > MOST_ACCOUNTS:
            self._spent.popitem(last=False)


def _sum(payment: Payment, more: int) -> tuple[int, int, int]:
    return payment.calls, payment.tokens + more, payment.nanos + more * payment.token_nanos
