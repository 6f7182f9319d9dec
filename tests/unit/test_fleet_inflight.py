"""Load counters are sums over open tickets, whatever way the tickets go."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from gateway.fleet.inflight import InFlight, Ticket


class Tickets(RuleBasedStateMachine):
    """Any order of admissions, first tokens and ends, each repeated at will, against a plain dictionary."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.load = InFlight()
        self.open: dict[int, int] = {}

    @rule(target=tickets, tokens=st.integers(0, 10_000))
    def admit(self, tokens: int) -> Ticket:
        ticket = self.load.admit(tokens)
        self.open[id(ticket)] = tokens
        return ticket

    @rule(ticket=tickets)
    def first_token(self, ticket: Ticket) -> None:
        ticket.prefilled()
        if id(ticket) in self.open:
            self.open[id(ticket)] = 0

    @rule(ticket=tickets)
    def finish(self, ticket: Ticket) -> None:
        ticket.finish()
        self.open.pop(id(ticket), None)

    @invariant()
    def sums(self) -> None:
        self.load.check()
        assert self.load.sequences == len(self.open)
        assert self.load.prefill_tokens == sum(self.open.values())


TestTickets = Tickets.TestCase


def test_an_end_before_the_first_token_frees_both() -> None:
    load = InFlight()
    ticket = load.admit(500)
    other = load.admit(7)
    assert (load.sequences, load.prefill_tokens) == (2, 507)
    ticket.finish()
    ticket.prefilled()
    ticket.finish()
    assert (load.sequences, load.prefill_tokens) == (1, 7)
    other.finish()
    assert (load.sequences, load.prefill_tokens) == (0, 0)
