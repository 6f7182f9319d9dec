"""Chooses the replica for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import xxhash

from gateway.errors import NoReplica
from gateway.identity.prompt import IdentityMode, PromptIdentity
from gateway.placement.adaptive_key import AdaptiveKey, Split, boundary_at_most
from gateway.placement.bounds import Bounds
from gateway.placement.claims import Claim, LearnedClaims, PendingClaims
from gateway.placement.cost import CostModel
from gateway.placement.evictions import Evictions
from gateway.placement.index import PrefixIndex
from gateway.placement.option import Option, Reported
from gateway.placement.placement import Claims, Placement, Reason, ReplicaView
from gateway.placement.ring import HashRing
from gateway.placement.settings import PlacementSettings
from gateway.placement.walk import Runs


class Placer:
    """Places requests: the lowest cost, within the bounds, with the ring deciding between equals.

    *Keep together or spread.* A prompt whose held part reaches its ring key (`AdaptiveKey`), or that lacks no more than
    a prefill chunk, is kept with its holders: the walk that breaks ties starts where their arc of the circle begins.
    Any other prompt has a remainder worth a home of its own: the walk starts at the ring's first, and the hot prefix
    above its ring key, if any, counts as held by the first k replicas of that prefix's own ring order, k being what its
    traffic needs. Without that credit the one replica that holds the system prompt would draw every new conversation.

    *Ties.* Costs within `band_tokens` of prefill are equal. 128 tokens, 8 blocks: gateways whose views differ by a
    block or by a short request still agree, and it stays below the least that should count, the eviction of a prompt of
    512 tokens at the price that is assumed before any is known.

    *Eviction.* A full cache gives up what was used longest ago for what is new (`Evictions`). A replica that has room,
    or whose oldest blocks nobody is likely to use again, is cheaper. What requests placed before will push out of the
    prompt itself before its turn counts as missing, unless the agent's pool holds more of it than the cache.

    *Room to grow.* A short prompt after a hot prefix is as a rule a conversation's first, and will come back with more
    if conversations here do (`ReuseCurve.growth`). It is then not kept with the prefix's holders for being short: all
    that its traffic needs count as holders, and among those it has a home of its own. Eight conversations with one
    system prompt on three replicas with room for five each computed half as much again as they must when they were kept
    together until they evicted each other; so a tenth more (`tests/behaviours/test_placement.py`).

    *Spill.* When the best replica is not within its bounds, the next one in ring order that is, unless others that are
    cost less by more than the band: those hold a copy from an earlier spill. So a hot prefix is always copied to the
    same replicas, in the same order, and goes home when home is within its bounds. For that the price of eviction does
    not count where little is missing beside a copy: where copies go must not depend on which cache happens to have
    room. It does count where much is. If none is within them, the one with the least pressure serves.

    *Fetch.* What a replica holds in its own agent's pool counts as cached there. A replica that lacks blocks which a
    peer's pool serves is priced with the cheaper of fetching and computing them (`CostModel`), and the placement says
    what to fetch. What it lacks is judged by reports alone: a claim says that blocks are on their way, and whether they
    will be there in time is for its agent to find out.

    Owns the ring, the traffic window and the claims, and listens to the index. `place` decides and changes none of them
    (but the ring's members); `placed` commits a decision. One caller at a time.
    """

    def __init__(
        self,
        index: PrefixIndex,
        settings: PlacementSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or PlacementSettings()
        self.index = index
        self.ring = HashRing(self.settings.virtual_nodes)
        self.traffic = AdaptiveKey(self.settings)
        self.pending = PendingClaims(self.settings.pending_ttl_s, clock, grace_s=self.settings.report_grace_s)
        self.learned = LearnedClaims(self.settings.learned_ttl_s, clock)
        self.evictions = Evictions(index, clock)
        self._cost = CostModel(self.settings)
        self._known: dict[str, ReplicaView] = {}
        self._keyless = 0
        index.add_listener(self.pending)
        index.add_listener(self.evictions)

    def place(
        self,
        identity: PromptIdentity,
        views: Sequence[ReplicaView],
        *,
        exclude: Collection[str] = (),
        pinned: str | None = None,
        fetch: bool = True,
    ) -> Placement:
        """Where the request should go. Raises NoReplica when no view is left to choose from.

        `views` are the replicas that serve its model and may take requests; `exclude` those that were tried already;
        a weight of 0 takes nothing. `pinned` goes to that replica whatever its load. The bounds are those of the views
        that are left, so that a replica that failed does not lower the mean. Without `fetch` nothing is to be fetched.
        """
        self.pending.expire()
        self.evictions.catch_up()
        keys, tokens = identity.keys, identity.tokens
        options, runs = self._options(identity, views)
        usable = []
        for option in options.values():
            option.usable = option.view.weight > 0 and option.view.id not in exclude
            if option.usable:
                usable.append(option)
        if not usable or (pinned is not None and (pinned not in options or pinned in exclude)):
            raise NoReplica(f"no replica may take the request: {len(views)} serve its model, {len(exclude)} were tried")

        split = self.traffic.split(keys, len(views))
        best_cached = max(option.cached for option in usable)
        band = self.settings.band_tokens
        holders = [option for option in usable if option.cached > 0 and option.cached >= best_cached - band]
        chunk = self.settings.prefill_chunk_tokens
        small = tokens - best_cached <= chunk
        reached = bool(holders) and max(option.units for option in holders) >= split.depth
        grows = small and split.hot > 0 and not reached and tokens - best_cached + self.evictions.reuse.growth > chunk
        keep = best_cached > band and (reached or (small and not grows))
        # The depth of the walk's key. With a small remainder it depends on what is held alone, not on recent traffic:
        # the copies of a prefix are to be made in one order, before and after it is found to be hot.
        depth = boundary_at_most(min(option.units for option in holders)) if keep and small else split.depth
        key = keys[depth - 1] if keys else self._keyless_key()
        walk = [options[replica] for replica in self.ring.order(key, options)]
        start = 0
        if keep:
            held = [i for i, option in enumerate(walk) if option.usable and option.cached >= best_cached - band]
            start = _arc_start(held, len(walk))
        if fetch and self.settings.fetch and runs.served:
            self._plan_fetches(tokens, walk, exclude)
        self._rank(identity, split, options, keep, best_cached if grows else 0)

        bounds = Bounds([option.view for option in usable], self.settings)
        for option in usable:
            option.within = bounds.within(option.view, option.terms.prefill_s, option.cached)
        home = self._first([option for option in walk[start:] + walk[:start] if option.usable], _rank)
        position = walk.index(home)
        cyclic = walk[position:] + walk[:position]
        if pinned is not None:
            chosen, reason = options[pinned], Reason.PINNED
        else:
            chosen = home if home.within else self._spill(cyclic, bounds, _rank_of_copy if small else _rank)
            first = walk[0].view.id if depth == split.depth else self.ring.first(keys[split.depth - 1], options)
            reason = self._reason(chosen, home, first, best_cached, exclude)
        return Placement(
            replica=chosen.view.id,
            reason=reason,
            home=home.view.id,
            ring=[option.view.id for option in cyclic],
            predicted_cached_tokens=chosen.predicted,
            predicted_pool_tokens=chosen.pooled,
            reported_tokens=chosen.reported_tokens,
            trust=chosen.view.trust,
            predicted_ttft_s=max(chosen.terms.queue_s, chosen.terms.fetch_s) + chosen.terms.prefill_s,
            fetch=chosen.fetch,
            hot_units=split.hot,
            candidates=[option.candidate(i) for i, option in enumerate(walk)],
        )

    def placed(self, placement: Placement, identity: PromptIdentity) -> Claim:
        """Commits a placement: counts it as traffic and believes its prefix to be where it goes.

        Call it when the request is sent, once per attempt. When the attempt has ended say so: `answered` if it was
        answered in full, else `release`. It ends by itself when the replica reports the prompt's last block, or after
        `pending_ttl_s`.
        """
        keys = identity.keys
        if placement.reason is not Reason.RETRY:
            self.traffic.observe(keys)
            self._keyless += not keys
        view = self._known.get(placement.replica)
        claims = next(c.claims for c in placement.candidates if c.replica == placement.replica)
        if view is None or claims is Claims.NONE:
            return self.pending.claim(placement.replica, ())
        if claims is Claims.LEARNED:
            units = view.capacity_blocks * view.block_tokens // identity.unit_tokens
            self.learned.record(placement.replica, keys, units or self.settings.learned_units)
            return self.pending.claim(placement.replica, ())
        held = self.index.match(keys, {view.id: view.block_units}, use=True).get(view.id, 0)
        self.evictions.used(view, _blocks(view, keys))
        if (plan := placement.fetch) is not None and plan.counted and (source := self._known.get(plan.source)):
            blocks = _blocks(source, keys)[: plan.blocks]
            self.evictions.fetched(source, blocks, placement.hot_units // source.block_units)
        return self.pending.claim(placement.replica, keys, held, view.block_units)

    def answered(self, claim: Claim) -> None:
        """The request of a claim was answered in full: the prefix is there, whether it is reported yet or not."""
        self.pending.settle(claim)

    def release(self, claim: Claim) -> None:
        """Ends what `placed` began; a claim that is over already is no error."""
        self.pending.release(claim)

    def restarted(self, replica: str) -> None:
        """A replica without reports lost its cache: nothing placed there is believed any more."""
        self.pending.clear(replica)
        self.learned.clear(replica)
        self.evictions.forget(replica)

    def forget(self, replica: str) -> None:
        """A replica left for good; one that only is not ready keeps its points, so that its keys come back to it."""
        self.restarted(replica)
        self.ring.remove(replica)
        self._known.pop(replica, None)

    def check(self) -> None:
        """Asserts the conservation laws of everything it owns."""
        self.ring.check()
        self.traffic.check()
        self.pending.check()
        self.learned.check()
        self.evictions.check()

    # the steps of a decision

    def _options(self, identity: PromptIdentity, views: Sequence[ReplicaView]) -> tuple[dict[str, Option], Runs]:
        keys, tokens, unit = identity.keys, identity.tokens, identity.unit_tokens
        exact = identity.mode is IdentityMode.EXACT
        hashed = identity.mode is IdentityMode.HASH
        runs = Runs({}, {}, {})
        if exact:
            asked = {view.id: view.block_units for view in views if view.claims is Claims.REPORTS}
            if pools := [view.id for view in views if view.fetch is not None and view.claims is Claims.REPORTS]:
                runs = self.index.runs(keys, asked, pools)
            elif asked:
                matched = self.index.match(keys, asked)
                runs = Runs(matched, matched, {})
        options: dict[str, Option] = {}
        pending = self.pending if len(self.pending) else None
        for view in views:
            replica = view.id
            if self.ring.weight(replica) != view.weight:
                self.ring.set_weight(replica, view.weight)
            self._known[replica] = view
            units = blocks = 0
            reported = 0
            claims = Claims.NONE
            if not hashed and view.claims is not Claims.NONE:
                if exact and view.claims is Claims.REPORTS:
                    claims = Claims.REPORTS
                    reported = runs.resident.get(replica, 0)
                    units = int(runs.usable.get(replica, 0) * view.trust)
                    if pending is not None:
                        units = max(units, pending.match(replica, keys, view.block_units))
                        blocks = -(-pending.fresh_units(replica) // view.block_units)
                        pooled = runs.usable.get(replica, 0) > runs.resident.get(replica, 0)
                        if units and not pooled and 0 < view.capacity_blocks < view.held_blocks + blocks:
                            size = view.block_units
                            units = size * self.evictions.left(view, _blocks(view, keys), units // size, blocks)
                else:
                    claims = Claims.LEARNED
                    units = self.learned.match(replica, keys, view.block_units if exact else 1)
            # The engine always computes the last token, and it shares whole blocks only.
            block = view.block_tokens
            cached = min(units * unit, tokens - 1) // block * block if units else 0
            evicted = 0.0
            if claims is Claims.REPORTS:
                new = -(-tokens // block) - cached // block
                evicted = self.evictions.price(view, _blocks(view, keys), new, blocks)
            terms = self._cost.terms(view, tokens, cached, evicted)
            option = options[replica] = Option(view, claims, units, cached, evicted, terms)
            if reported:
                option.reported_tokens = min(reported * unit, (tokens - 1) // block * block)
            if view.fetch is not None and claims is Claims.REPORTS:
                most = (tokens - 1) // block * block
                option.reported = Reported._make(
                    min(int(run.get(replica, 0) * view.trust) * unit // block * block, most) for run in runs
                )
        return options, runs

    def _plan_fetches(self, tokens: int, walk: Sequence[Option], exclude: Collection[str]) -> None:
        """For each replica what it should fetch: from those of its namespace that serve most, in ring order, but not
        from one that has just failed."""
        best: dict[str, list[Option]] = {}
        for option in walk:
            served, state = option.reported.served, option.view.fetch
            if not served or state is None or option.view.id in exclude:
                continue
            most = best.setdefault(state.namespace, [])
            if most and served > most[0].reported.served:
                most.clear()
            if not most or served == most[0].reported.served:
                most.append(option)
        for option in walk:
            state = option.view.fetch
            if state is not None and option.claims is Claims.REPORTS and (sources := best.get(state.namespace)):
                self._plan_fetch(tokens, option, [source.view.id for source in sources], sources[0].reported.served)

    def _plan_fetch(self, tokens: int, option: Option, sources: Sequence[str], served: int) -> None:
        plan = self._cost.fetch(option.view, tokens, option.reported.usable, sources, served)
        if plan is None:
            return
        reach = option.reported.usable + plan.tokens
        if reach <= option.cached:
            plan = msgspec.structs.replace(plan, counted=False)
        option.fetch = plan
        if plan.counted:
            fetched = reach - option.cached
            option.terms = self._cost.terms(
                option.view, tokens, option.cached, option.evicted, fetched_tokens=fetched, fetch_s=plan.seconds
            )
            option.rank_s = option.terms.total_s

    def _keyless_key(self) -> int:
        # Prompts without a whole unit share nothing: spread them, the same way in every run.
        return xxhash.xxh3_64_intdigest(self._keyless.to_bytes(8, "little"))

    def _rank(
        self, identity: PromptIdentity, split: Split, options: dict[str, Option], keep: bool, shared: int
    ) -> None:
        if identity.mode is IdentityMode.HASH:
            # What is held is not known: the ring alone decides, as long as the bounds allow.
            for option in options.values():
                option.rank_s = 0.0
        elif split.hot and not keep:
            for replica in self.ring.order(identity.keys[split.hot - 1], options)[: split.hot_replicas]:
                option = options[replica]
                block = option.view.block_tokens
                credit = min(max(split.hot * identity.unit_tokens, shared), identity.tokens - 1) // block * block
                if credit > option.cached and option.claims is not Claims.NONE:
                    terms = self._cost.terms(option.view, identity.tokens, credit, option.evicted)
                    option.rank_s = min(option.rank_s, terms.total_s)

    def _first(self, walk: Sequence[Option], rank: Callable[[Option], float]) -> Option:
        """The first of the walk whose cost is within the band of the least."""
        best = min(walk, key=rank)
        limit = rank(best) + self.settings.band_tokens / best.view.prefill_tokens_per_s
        return next(option for option in walk if rank(option) <= limit)

    def _spill(self, cyclic: Sequence[Option], bounds: Bounds, rank: Callable[[Option], float]) -> Option:
        feasible = [option for option in cyclic if option.within]
        if feasible:
            return self._first(feasible, rank)
        return min((option for option in cyclic if option.usable), key=lambda option: bounds.pressure(option.view))

    def _reason(
        self,
        chosen: Option,
        home: Option,
        first: str | None,
        best_cached: int,
        exclude: Collection[str],
    ) -> Reason:
        if exclude:
            return Reason.RETRY
        if chosen is not home:
            return Reason.SPILL
        if chosen.claims is Claims.NONE:
            return Reason.FALLBACK
        if not best_cached:
            return Reason.COLD
        if chosen.cached < best_cached:
            return Reason.COST
        return Reason.HOME if chosen.view.id == first else Reason.LONGEST


def _blocks(view: ReplicaView, keys: Sequence[int]) -> Sequence[int]:
    """The keys of a prompt's whole blocks in the block size of a replica."""
    units = view.block_units
    return keys if units == 1 else keys[units - 1 :: units]


def _arc_start(positions: Sequence[int], circle: int) -> int:
    """Where on the circle the holders begin: after its longest stretch of others. `positions` ascend.

    Copies are made clockwise from home, so home is where their arc begins, also when it runs over the circle's end.
    """
    gaps = [(position - positions[i - 1]) % circle for i, position in enumerate(positions)]
    return positions[gaps.index(max(gaps))]


def _rank(option: Option) -> float:
    return option.rank_s


def _rank_of_copy(option: Option) -> float:
    """Without the price of eviction, or copies of a hot prefix would be everywhere; see `Placer`."""
    return max(0.0, option.rank_s - option.terms.eviction_s)
