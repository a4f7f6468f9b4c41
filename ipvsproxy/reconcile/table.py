"""Desired and observed: the two sides of one kind of kernel object.

Rule 1: a key whose two sides differ is pending or surplus, whatever made them differ: a change, drift, a failure. Nothing else
is remembered of what has yet to be done.
Rule 2: where several owners want one key, the one of the lowest rank has it and the others wait; when it goes, the next one has
it. The rank is the owner itself, unless the table is told otherwise.
Rule 3: what was observed and nobody wants is removed only if it is ours, and not protected.
"""

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic, NamedTuple, TypeVar

from ipvsproxy.model.kernel import Owner

KEYS_AT_ONCE = 100
"""How many keys are compared without a pause: a few tenths of a millisecond of work."""

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")


class Conflict(NamedTuple):
    """Several owners want one key: who has it, who waits, in their order, and, where it is known, why each of these does.

    A reason is to be put after the name of the winner.
    """

    key: Any
    winner: Owner
    waiting: tuple[Owner, ...]
    reasons: tuple[str, ...] = ()


class Table(Generic[K, V, W]):
    """All keys of one kind. ``V`` is what an owner wants of a key, ``W`` is what was observed of it."""

    def __init__(
        self,
        owner_of: Callable[[V], Owner],
        differs: Callable[[V, W], bool],
        is_protected: Callable[[K], bool],
        unequal: "dict[Table[Any, Any, Any], None] | None" = None,
        rank: Callable[[K, Owner], Any] = lambda _, owner: owner,
    ) -> None:
        """``differs`` compares what is wanted with what is there. Protected keys are never removed, whoever made them.

        The table is in ``unequal`` while it has pending or surplus keys. ``rank`` tells who goes first; where it has changed,
        call ``rank_again``.
        """
        self._rank = rank
        self._owner_of = owner_of
        self._differs = differs
        self._is_protected = is_protected
        self._unequal: dict[Table[Any, Any, Any], None] = {} if unequal is None else unequal
        self._desired: dict[K, V] = {}
        self._waiting: dict[K, dict[Owner, V]] = {}
        self._observed: MutableMapping[K, W] = {}
        self._foreign: set[K] = set()
        self._pending: dict[K, None] = {}
        self._surplus: dict[K, None] = {}
        self._was_observed = False
        self.drifted = 0
        """How many keys were found otherwise than believed, and not as wanted, since the first observation."""
        self._drifted_keys: list[K] = []
        self._known_to_differ: Collection[K] = ()

    @property
    def desired(self) -> Mapping[K, V]:
        """What the winning owners want."""
        return self._desired

    @property
    def observed(self) -> Mapping[K, W]:
        """What is believed to be there, foreign keys included."""
        return self._observed

    @property
    def foreign(self) -> Collection[K]:
        """Observed keys that are not ours: neither known as such, nor ever changed by us."""
        return self._foreign

    @property
    def pending(self) -> Collection[K]:
        """Wanted keys whose two sides differ, oldest first."""
        return self._pending

    @property
    def surplus(self) -> Collection[K]:
        """Keys of ours that are there and that nobody wants, oldest first; kept apart, because at a start these may be all."""
        return self._surplus

    def conflicts(self) -> Iterator[Conflict]:
        """All keys that more than one owner wants."""
        for key, waiting in self._waiting.items():
            yield Conflict(key, self._owner_of(self._desired[key]), tuple(self._in_turn(key, waiting)))

    def replace(self, owner: Owner, before: Mapping[K, V], after: Mapping[K, V]) -> set[Owner]:
        """Replace what this owner wanted (``before``) by what it wants now; returns other owners who gained or lost a key."""
        affected: set[Owner | None] = set()
        for key in before:
            if key not in after:
                affected.add(self.release(key, owner))
        for key, value in after.items():
            if before.get(key) != value:
                affected.add(self.desire(key, owner, value))
        return {other for other in affected if other}

    @property
    def is_contested(self) -> bool:
        """Whether any key is wanted by more than one owner; else each owner has all that it claimed."""
        return bool(self._waiting)

    def desire(self, key: K, owner: Owner, value: V) -> Owner | None:
        """Have an owner want a key; returns another owner who lost it by this."""
        if key not in self._observed and self._desired.setdefault(key, value) is value:
            # As for all keys of a new Service: nothing is to be compared.
            self._pending[key] = None
            self._unequal[self] = None
            return None
        held, loser = self._desired.get(key), None
        if held is not None and (owner_of := self._owner_of(held)) != owner:
            waiting = self._waiting.setdefault(key, {})
            if self._rank(key, owner_of) < self._rank(key, owner):
                waiting[owner] = value
                return None
            waiting[owner_of] = held
            loser = owner_of
        self._desired[key] = value
        self.touch(key)
        return loser

    def release(self, key: K, owner: Owner) -> Owner | None:
        """Have an owner want a key no more; returns another owner who gained it by this."""
        waiting, heir = self._waiting.get(key), None
        if waiting is None:
            self._desired.pop(key, None)
        elif waiting.pop(owner, None) is None:
            heir = self._in_turn(key, waiting)[0]
            self._desired[key] = waiting.pop(heir)
        if not waiting:
            self._waiting.pop(key, None)
        self.touch(key)
        return heir

    def rank_again(self, key: K) -> set[Owner]:
        """Have the lowest owner of a key have it, if ranks have changed; returns who lost it and who gained it."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return set()
        held, first = self._desired[key], self._in_turn(key, waiting)[0]
        owner_of = self._owner_of(held)
        if self._rank(key, owner_of) < self._rank(key, first):
            return set()
        self._desired[key] = waiting.pop(first)
        waiting[owner_of] = held
        self.touch(key)
        return {owner_of, first}

    def _in_turn(self, key: K, owners: Iterable[Owner]) -> list[Owner]:
        return sorted(owners, key=lambda owner: self._rank(key, owner))

    def owner_of(self, key: K) -> Owner | None:
        """The owner who has the key."""
        held = self._desired.get(key)
        return None if held is None else self._owner_of(held)

    def is_owned_by(self, key: K, owner: Owner) -> bool:
        """Whether this owner has the key."""
        return self.owner_of(key) == owner

    def owners_of(self, key: K) -> Sequence[Owner]:
        """All owners who want a key, the one who has it first."""
        held = self._desired.get(key)
        if held is None:
            return ()
        return (self._owner_of(held), *self._in_turn(key, self._waiting.get(key, ())))

    def observe(self, listing: Mapping[K, W], is_ours: Callable[[K], bool]) -> None:
        """Replace all that is believed to be there. What was believed to be ours, and is there, stays ours."""
        for _ in self.observing(listing, is_ours):
            pass

    def observing(self, listing: Mapping[K, W], is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observe``, with a pause after each ``KEYS_AT_ONCE`` keys. Nothing else may be done to the table meanwhile.

        Only keys that came or went, or whose value is another object than the one that is believed to be there, are compared;
        an equal one stays the object that it is.
        """
        return self._observing(listing, listing.items(), is_ours)

    def observing_all(self, keys: AbstractSet[K], value: W, is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observing``, where all keys that are there have this value."""
        return self._observing(keys, zip(keys, itertools.repeat(value), strict=False), is_ours)

    def _observing(self, keys: Container[K], listing: Iterable[tuple[K, W]], is_ours: Callable[[K], bool]) -> Iterator[None]:
        observed, foreign = self._observed, self._foreign
        suspects: dict[K, W | None] = {}
        remaining = iter(observed)
        while believed := list(itertools.islice(remaining, KEYS_AT_ONCE)):
            suspects |= {key: None for key in believed if key not in keys}
            yield
        for number, (key, value) in enumerate(listing, 1):
            if observed.get(key) is not value or key in foreign:
                suspects[key] = value
            if number % KEYS_AT_ONCE == 0:
                yield
        yield from self.observing_some(suspects, is_ours)
        self._was_observed = True

    def observing_some(self, observed_now: Mapping[K, W | None], is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observing``, of some keys, None for one that is not there: of others nothing is known."""
        observed, foreign = self._observed, self._foreign
        self._known_to_differ = {key for key in observed_now if key in self._pending or key in self._surplus}
        for number, (key, value) in enumerate(observed_now.items(), 1):
            before = observed.get(key)
            if key in foreign or before != value:
                if value is None:
                    del observed[key]
                    foreign.discard(key)
                else:
                    if (before is None or key in foreign) and not is_ours(key):
                        foreign.add(key)
                    else:
                        foreign.discard(key)
                    observed[key] = value
                self.touch(key)
                if self._was_observed:
                    self._count_drift(key, before)
            if number % KEYS_AT_ONCE == 0:
                yield

    def notice(self, key: K, value: W) -> None:
        """Book what was seen of one key that can only be ours."""
        before = self._observed.get(key)
        self._known_to_differ = [key] if key in self._pending or key in self._surplus else []
        self.confirm(key, value)
        if before is not None:
            self._count_drift(key, before)

    def _count_drift(self, key: K, before: W | None) -> None:
        if (key in self._pending or key in self._surplus) and self._observed.get(key) != before:
            self.drifted += 1
            if key not in self._known_to_differ:
                self._drifted_keys.append(key)

    def take_drifted(self) -> Collection[K]:
        """The keys that were counted in ``drifted`` since this was called last, without those that differed already before."""
        keys, self._drifted_keys = self._drifted_keys, []
        return keys

    def confirm(self, key: K, value: W | None) -> None:
        """Book that we made the kernel hold this value, or (None) that it does not hold the key: it is ours now."""
        if self._foreign:
            self._foreign.discard(key)
        if value is None:
            self._observed.pop(key, None)
        else:
            self._observed[key] = value
        self.touch(key)

    def confirm_all(self, keys: Iterable[K], value: W) -> None:
        """As ``confirm``, of several keys that were pending and now hold the same."""
        if self._foreign:
            self._foreign.difference_update(keys)
        observed, desired, pending, differs = self._observed, self._desired, self._pending, self._differs
        for key in keys:
            observed[key] = value
            one = desired.get(key)
            if one is None or key not in pending or differs(one, value):
                self.touch(key)
            else:
                del pending[key]
        shrink(pending)
        self._note_inequality()

    def exchange(self, key: K, value: W) -> None:
        """Put an equal object, which is about to change, in the place of an observed one; ``confirm`` it when it has changed."""
        self._observed[key] = value

    def touch(self, key: K) -> None:
        """Compare the two sides of a key again."""
        desired, observed = self._desired.get(key), self._observed.get(key)
        if desired is not None:
            differs = observed is None or self._differs(desired, observed)
            is_pending, is_surplus = differs, False
        else:
            is_pending, is_surplus = False, observed is not None and key not in self._foreign and not self._is_protected(key)
        if is_pending:
            self._pending[key] = None
        elif key in self._pending:
            del self._pending[key]
            shrink(self._pending)
        if is_surplus:
            self._surplus[key] = None
        elif key in self._surplus:
            del self._surplus[key]
            shrink(self._surplus)
        self._note_inequality()

    def _note_inequality(self) -> None:
        if self._pending or self._surplus:
            self._unequal[self] = None
        elif self in self._unequal:
            del self._unequal[self]


def shrink(emptied: dict[K, None]) -> None:
    """A dictionary that was large is walked at its old size for ever, unless it is told that it is empty."""
    if not emptied:
        emptied.clear()
