"""Desired and observed: the two sides of one kind of kernel object.

Rule 1: a key whose two sides differ is pending or surplus, whatever made them differ: a change, drift, a failure. There is no
other memory of work to do.
Rule 2: if several owners desire one key, the owner of the lowest rank has it and the others wait; when it leaves, the next one
has the key. The rank is the owner itself, unless the table gets a function for it.
Rule 3: an observed key without an owner is removed only if it is ours, and not protected.

Of most kinds only presence counts: entries of sets, addresses, sets, the device. Their two sides nearly always agree, and there
may be hundreds of thousands of keys. So a ``PresenceTable`` does not store the observed side: it is the desired keys without the
pending ones, and the undesired keys beside them.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic, NamedTuple, TypeVar

from ipvsproxy.model.service import Owner
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once

MOST_FORMER_TURNS = 8
"""Former turns that the heap of a key may hold beyond one for each owner that waits."""

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")


class Conflict(NamedTuple):
    """A key that several owners desire: the winner, the waiting owners in their order, and the reason for each if it is known.

    A reason is a text to put after the name of the winner.
    """

    key: Any
    winner: Owner
    waiting: tuple[Owner, ...]
    reasons: tuple[str, ...] = ()


class _Waiting(Generic[V]):
    """The owners that wait for one key, each with its desired value. To find the next one takes a logarithmic time."""

    def __init__(self) -> None:
        self._values: dict[Owner, V] = {}
        self._turns: dict[Owner, tuple[Any, Owner]] = {}
        self._heap: list[tuple[Any, Owner]] = []
        """All turns, and former ones of owners that are gone or have another rank now."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._turns

    def put(self, owner: Owner, rank: Any, value: V) -> None:
        """Let an owner of this rank wait with this value."""
        self._values[owner] = value
        if self._turns.get(owner) != (turn := (rank, owner)):
            self._turns[owner] = turn
            heapq.heappush(self._heap, turn)
            if len(self._heap) > 2 * len(self._turns) + MOST_FORMER_TURNS:
                self._heap = sorted(self._turns.values())

    def rank(self, owner: Owner, rank: Any) -> None:
        """Give a waiting owner another rank."""
        self.put(owner, rank, self._values[owner])

    def pop(self, owner: Owner) -> V | None:
        """End the wait of an owner. Returns its value; None if it does not wait."""
        self._turns.pop(owner, None)
        return self._values.pop(owner, None)

    def first(self) -> tuple[Any, Owner]:
        """Rank and owner of the next one."""
        while self._turns.get(self._heap[0][1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0]

    def in_turn(self) -> Iterator[Owner]:
        """All owners, the next one first."""
        return (owner for _, owner in sorted(self._turns.values()))


class Table(Generic[K, V, W]):
    """All keys of one kind. ``V`` is the desired value of a key, ``W`` its observed value."""

    def __init__(
        self,
        owner_of: Callable[[V], Owner],
        differs: Callable[[V, W], bool],
        is_protected: Callable[[K], bool],
        unequal: "dict[Table[Any, Any, Any], None] | None" = None,
        rank: Callable[[K, Owner], Any] = lambda _, owner: owner,
    ) -> None:
        """``differs`` compares a desired value with an observed one. Protected keys are never removed.

        The table is in ``unequal`` while it has pending or surplus keys. ``rank`` gives the rank of an owner for a key; when it
        has changed, call ``rank_again`` for each key that the owner desires.
        """
        self._rank = rank
        self._owner_of = owner_of
        self._differs = differs
        self._is_protected = is_protected
        self._unequal: dict[Table[Any, Any, Any], None] = {} if unequal is None else unequal
        self._desired: dict[K, V] = {}
        self._waiting: dict[K, _Waiting[V]] = {}
        self._observed: MutableMapping[K, W] = {}
        self._foreign: set[K] = set()
        self._pending: dict[K, None] = {}
        self._surplus: dict[K, None] = {}
        self._was_observed = False
        self._shown: set[K] | None = None
        """The keys that the complete reading under way has shown, and those changed since it began; None between readings."""
        self.drifted = 0
        """The number of drifted keys since the first observation: observed otherwise than before, and not as desired."""
        self._drifted_keys: list[K] = []
        self._known_to_differ: Collection[K] = ()

    @property
    def desired(self) -> Mapping[K, V]:
        """The values that the winning owners desire."""
        return self._desired

    @property
    def observed(self) -> Mapping[K, W]:
        """The last observed values, foreign keys included."""
        return self._observed

    @property
    def foreign(self) -> Collection[K]:
        """Observed keys that are not ours: without a witness, and never changed by us."""
        return self._foreign

    @property
    def pending(self) -> Collection[K]:
        """Desired keys whose two sides differ, oldest first."""
        return self._pending

    @property
    def surplus(self) -> Collection[K]:
        """Observed keys of ours without an owner, oldest first. At a start these may be all keys, so they are kept apart."""
        return self._surplus

    def conflicts(self) -> Iterator[Conflict]:
        """All keys that more than one owner desires."""
        return filter(None, map(self.conflict, self._waiting))

    def conflict(self, key: K) -> Conflict | None:
        """The conflict about one key, if more than one owner desires it."""
        waiting = self._waiting.get(key)
        return None if waiting is None else Conflict(key, self._owner_of(self._desired[key]), tuple(waiting.in_turn()))

    def replace(self, owner: Owner, before: Mapping[K, V], after: Mapping[K, V]) -> set[Owner]:
        """Replace the former desired values of an owner (``before``). Returns the other owners that gained or lost a key."""
        return at_once(self.replacing(owner, before, after))

    def replacing(self, owner: Owner, before: Mapping[K, V], after: Mapping[K, V]) -> Generator[None, None, set[Owner]]:
        """As ``replace``, in steps."""
        affected: set[Owner | None] = set()
        for number, key in enumerate(before, 1):
            if key not in after:
                affected.add(self.release(key, owner))
            if number % ITEMS_AT_ONCE == 0:
                yield
        for number, (key, value) in enumerate(after.items(), 1):
            if before.get(key) != value:
                affected.add(self.desire(key, owner, value))
            if number % ITEMS_AT_ONCE == 0:
                yield
        return {other for other in affected if other}

    @property
    def contested(self) -> int:
        """The number of keys that more than one owner desires; without one, each owner has all keys that it desires."""
        return len(self._waiting)

    def desire(self, key: K, owner: Owner, value: V) -> Owner | None:
        """Let an owner desire a key. Returns the owner that loses it, if any."""
        desired, loser = self._desired.get(key), None
        if desired is not None and (winner := self._owner_of(desired)) != owner:
            waiting = self._waiting.setdefault(key, _Waiting())
            rank, rank_of_winner = self._rank(key, owner), self._rank(key, winner)
            if rank_of_winner < rank:
                waiting.put(owner, rank, value)
                return None
            waiting.pop(owner)
            waiting.put(winner, rank_of_winner, desired)
            loser = winner
        self._desired[key] = value
        self.touch(key)
        return loser

    def release(self, key: K, owner: Owner) -> Owner | None:
        """End an owner's desire for a key. Returns the owner that gains it, if any."""
        waiting, heir = self._waiting.get(key), None
        if waiting is None:
            self._desired.pop(key, None)
        elif waiting.pop(owner) is None:
            heir = self._give_to_first(key, waiting)
        if not waiting:
            self._waiting.pop(key, None)
        self.touch(key)
        return heir

    def rank_again(self, key: K, owner: Owner) -> set[Owner]:
        """Give a key to its owner of the lowest rank after that of this owner has changed.

        Returns the owners that lost and gained it.
        """
        waiting = self._waiting.get(key)
        if waiting is None:
            return set()
        if owner in waiting:
            waiting.rank(owner, self._rank(key, owner))
        desired = self._desired[key]
        winner = self._owner_of(desired)
        rank = self._rank(key, winner)
        if rank < waiting.first()[0]:
            return set()
        heir = self._give_to_first(key, waiting)
        waiting.put(winner, rank, desired)
        self.touch(key)
        return {winner, heir}

    def _give_to_first(self, key: K, waiting: _Waiting[V]) -> Owner:
        _, heir = waiting.first()
        value = waiting.pop(heir)
        assert value is not None, "it was waiting"  # noqa: S101 - for the type checker
        self._desired[key] = value
        return heir

    def owner_of(self, key: K) -> Owner | None:
        """The owner that has the key."""
        desired = self._desired.get(key)
        return None if desired is None else self._owner_of(desired)

    def is_owned_by(self, key: K, owner: Owner) -> bool:
        """Whether this owner has the key."""
        return self.owner_of(key) == owner

    def owners_of(self, key: K) -> Sequence[Owner]:
        """All owners that desire a key; the first one has it."""
        desired = self._desired.get(key)
        if desired is None:
            return ()
        waiting = self._waiting.get(key)
        return (self._owner_of(desired), *(waiting.in_turn() if waiting else ()))

    def observe(self, listing: Mapping[K, W], is_ours: Callable[[K], bool]) -> None:
        """Replace the observed side. An observed key of ours that is still there stays ours."""
        for _ in self.observing(listing, is_ours):
            pass

    def observing(self, listing: Mapping[K, W], is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observe``, in steps of ``ITEMS_AT_ONCE`` keys. Nothing else may be done to the table between two steps.

        An equal value keeps the known object.
        """
        self.begin_reading()
        yield from self.observing_some(listing, is_ours)
        gone = yield from self.ending_reading()
        yield from self.observing_some(gone, is_ours)
        self._was_observed = True

    def observing_all(self, keys: AbstractSet[K], value: W, is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observing``; all observed keys have this value."""
        return self.observing(dict.fromkeys(keys, value), is_ours)

    def begin_reading(self) -> None:
        """Begins a complete reading, whose parts are passed to ``observing_some``."""
        self._shown = set()

    def ending_reading(self) -> Generator[None, None, Mapping[K, None]]:
        """Ends a complete reading. Returns the observed keys that are gone, for ``observing_some``.

        A key is gone if no part has shown it, and no change was tried since the reading began. Nothing is gone if no reading has
        begun.
        """
        shown, self._shown = self._shown, None
        gone: dict[K, None] = {}
        for number, key in enumerate(self._observed if shown is not None else (), 1):
            if shown is not None and key not in shown:
                gone[key] = None
            if number % ITEMS_AT_ONCE == 0:
                yield
        return gone

    def note_change(self, key: K) -> None:
        """Notes that a change of this key was tried, with any outcome: a reading under way may have missed it."""
        if self._shown is not None:
            self._shown.add(key)

    def observing_some(self, observed_now: Mapping[K, W | None], is_ours: Callable[[K], bool]) -> Iterator[None]:
        """As ``observing``, for some keys: None for an absent one. Other keys do not change."""
        observed, foreign, shown = self._observed, self._foreign, self._shown
        self._known_to_differ = {key for key in observed_now if key in self._pending or key in self._surplus}
        for number, (key, value) in enumerate(observed_now.items(), 1):
            before = observed.get(key)
            if shown is not None and value is not None:
                shown.add(key)
            if key in foreign or (before is not value and before != value):
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
            if number % ITEMS_AT_ONCE == 0:
                yield

    def notice(self, key: K, value: W) -> None:
        """Take in the observed value of one key that can only be ours."""
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
        """The keys that have drifted since the last call, without keys that already differed before."""
        keys, self._drifted_keys = self._drifted_keys, []
        return keys

    def confirm(self, key: K, value: W | None) -> None:
        """Record that we have set this value in the kernel, or (None) removed the key: it is ours now."""
        if self._foreign:
            self._foreign.discard(key)
        self.note_change(key)
        if value is None:
            self._observed.pop(key, None)
        else:
            self._observed[key] = value
        self.touch(key)

    def exchange(self, key: K, value: W) -> None:
        """Replace an observed value by an equal one that is about to change; ``confirm`` it after the change."""
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
    """Clear an empty dictionary.

    Until then, Python walks it at its largest size: 60 µs after 100,000 keys.
    """
    if not emptied:
        emptied.clear()


class Present(MutableMapping[K, bool]):
    """The observed keys; the value of each is True.

    Adding a desired key takes it from the pending ones; removing it puts it among them.
    """

    __slots__ = ("_desired", "_pending", "undesired")

    def __init__(self, desired: Mapping[K, object], pending: dict[K, None]) -> None:
        """``pending`` are exactly the desired keys that are not observed."""
        self._desired = desired
        self._pending = pending
        self.undesired: dict[K, None] = {}
        """The observed keys without an owner."""

    def __contains__(self, key: object) -> bool:
        return key not in self._pending if key in self._desired else key in self.undesired

    def __getitem__(self, key: K) -> bool:
        if key in self:
            return True
        raise KeyError(key)

    def get(self, key: K, default: Any = None) -> Any:
        """As of a dictionary. The inherited method takes 0.5 µs more for an absent key, and a first reading has many."""
        return True if key in self else default

    def __setitem__(self, key: K, value: bool) -> None:
        if key in self._pending:
            del self._pending[key]
            shrink(self._pending)
        elif key not in self._desired:
            self.undesired[key] = None

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self._desired:
            self._pending[key] = None
        else:
            self.forget(key)

    def forget(self, key: K) -> None:
        """Remove a key from ``undesired``, if it is there."""
        if key in self.undesired:
            del self.undesired[key]
            shrink(self.undesired)

    def __iter__(self) -> Iterator[K]:
        return itertools.chain(itertools.filterfalse(self._pending.__contains__, self._desired), self.undesired)

    def __len__(self) -> int:
        return len(self._desired) - len(self._pending) + len(self.undesired)


class PresenceTable(Table[K, Owner, bool]):
    """A table whose desired value of a key is the owner itself."""

    def __init__(self, is_protected: Callable[[K], bool], unequal: dict[Table[Any, Any, Any], None] | None = None) -> None:
        """A key for which ``is_protected`` is true is never removed. ``unequal`` as in ``Table``."""
        super().__init__(lambda owner: owner, lambda _desired, _observed: False, is_protected, unequal)
        self._observed = self._present = Present(self._desired, self._pending)

    def desire(self, key: K, owner: Owner, value: Owner) -> Owner | None:
        """As in ``Table``; an observed, undesired key stays observed, and an absent one stays absent."""
        if key not in self._desired and key not in self._present:
            self._pending[key] = None
        loser = super().desire(key, owner, value)
        self._present.forget(key)
        return loser

    def release(self, key: K, owner: Owner) -> Owner | None:
        """As in ``Table``; an observed key stays observed."""
        if key in self._present:
            self._present.undesired[key] = None
        heir = super().release(key, owner)
        if key in self._desired:
            self._present.forget(key)
        return heir


def presence(keys: Iterable[K], owner: Owner) -> Mapping[K, Owner]:
    """The desired side of an owner in a table of presence."""
    return dict.fromkeys(keys, owner)
