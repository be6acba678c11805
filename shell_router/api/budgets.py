"""The accounts of tenants' days and programs, whose budgets their keys set."""

import datetime
from collections.abc import Callable, Iterator, Mapping

from agent_cache.accounts import Accounts
from shell_router.config import ApiKey
from shell_router.core.budget import Allowance
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.moa.spending import Account

DAY_S = 86_400.0


class TenantBudgets:
    """Finds the accounts that a request spends from. Of a tenant's keys the tightest budget holds.

    `store` keeps what was spent, and `wall` gives Unix time.
    """

    def __init__(self, store: Accounts, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._daily: dict[str, Allowance] = {}
        self._of_program: dict[str, Allowance] = {}

    def take(self, keys: Mapping[bytes, ApiKey]) -> None:
        """Let the budgets of these keys hold from now on, and no others."""
        self._daily.clear()
        self._of_program.clear()
        for key in keys.values():
            tenant = key.tenant or ""
            for budgets, budget in (
                (self._daily, key.daily_budget),
                (self._of_program, key.program_budget),
            ):
                if budget is not None:
                    budgets[tenant] = budgets.get(tenant, Allowance()).tighten(budget)

    def limits(self, tenant: str) -> bool:
        """Return whether the tenant has a budget."""
        return tenant in self._daily or tenant in self._of_program

    def list_accounts(self, asked: MoaRequest | AgentRequest) -> Iterator[Account]:
        """Yield the accounts of the request's day, in UTC, and of its program or session."""
        tenant = asked.tenant
        if tenant in self._daily:
            day = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC).date()
            name = f"day/{day}"
            yield Account(self._store, tenant, name, str(day), self._daily[tenant], 2 * DAY_S)
        program = ""
        if isinstance(asked, AgentRequest):
            program = asked.program
        elif asked.session is not None:
            program = asked.session.prefix or asked.session.id
        if program and tenant in self._of_program:
            what = f"program {program!r}"
            budget = self._of_program[tenant]
            yield Account(self._store, tenant, f"program/{program}", what, budget, DAY_S)
