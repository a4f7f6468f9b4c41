"""A table: the desired and the observed side of one kind of kernel object.

Rule 1: a key whose desired and observed values differ is pending or surplus, whatever the cause. No other data structure records
the remaining work.
Rule 2: if several owners desire one key, the owner with the lowest rank has the key and the other owners wait. When an owner
releases the key, the next owner gets the key. The rank is the owner itself, unless the table has a function that computes ranks.
Rule 3: an observed key that has no owner is removed only if it belongs to ipvsproxy, and if ``is_protected`` is false for the
key.

For most kinds of objects (set entries, addresses, sets, the device), only the presence of an object counts. The desired keys
nearly always equal the observed keys, and there may be hundreds of thousands of keys. To save memory, a ``PresenceTable`` stores
only those observed keys that are not desired. In addition, each desired key that is not pending counts as observed.
"""

import bisect
import itertools
import operator
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ipvsproxy.model.service import Owner
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once, choosing

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")


def always(_: object) -> bool:
    """Returns True for every key."""
    return True


class Conflict(NamedTuple):
    """A key that several owners desire.

    The fields of a conflict are the winner, the waiting owners in their order, and the reason why each owner waits. A reason
    completes a sentence that begins with the name of the winner.
    """

    key: Any
    winner: Owner
    waiting: tuple[Owner, ...]
    reasons: tuple[str, ...] = ()


class _Waiting(Generic[V]):
    """The owners that wait for one key, each with its desired value. Each search takes logarithmic time."""

    def __init__(self) -> None:
        self.turns: list[tuple[Any, V]] = []
        """The rank and the desired value of each waiting owner; the owner that gets the key next comes first."""
        self._ranks: dict[Owner, Any] = {}

    def put(self, owner: Owner, rank: Any, value: V) -> None:
        """Let an owner with the given rank and desired value wait for the key."""
        self.pop(owner)
        bisect.insort(self.turns, (rank, value), key=operator.itemgetter(0))
        self._ranks[owner] = rank

    def pop(self, owner: Owner) -> V | None:
        """Remove an owner from the waiting owners. Returns the value that the owner desired; None if the owner did not wait."""
        if owner not in self._ranks:
            return None
        return self.turns.pop(bisect.bisect_left(self.turns, self._ranks.pop(owner), key=operator.itemgetter(0)))[1]


class Table(Generic[K, V, W]):
    """The desired and the observed values of all keys of one kind.

    ``V`` is the type of a key's desired value, ``W`` the type of its observed value.
    """

    def __init__(
        self,
        owner_of: Callable[[V], Owner],
        differs: Callable[[V, W], bool],
        is_protected: Callable[[K], bool],
        unequal: "dict[Table[Any, Any, Any], None] | None" = None,
        rank: Callable[[V], Any] | None = None,
    ) -> None:
        """``differs`` compares a desired value with an observed value. Keys for which ``is_protected`` is true are never removed.

        While the table has pending or surplus keys, the table itself is a key of the mapping ``unequal``. ``rank`` maps a desired
        value to the rank of its owner; no two owners have the same rank.
        """
        self._rank: Callable[[V], Any] = rank or owner_of
        self._owner_of = owner_of
        self._differs = differs
        self._is_protected = is_protected
        self._unequal: dict[Table[Any, Any, Any], None] = {} if unequal is None else unequal
        # Only the methods of the table may change the following mappings.
        self.desired: dict[K, V] = {}
        """The values that the winning owners desire."""
        self.pending: dict[K, None] = {}
        """The desired keys whose desired and observed values differ, the oldest first."""
        self.observed: MutableMapping[K, W] = self._make_observed()
        """The last observed value of each key, including the keys of other programs."""
        self.foreign: set[K] = set()
        """The observed keys that do not belong to ipvsproxy: they have no witness, and ipvsproxy has never changed them."""
        self.surplus: dict[K, None] = {}
        """The observed keys that belong to ipvsproxy and have no owner, the oldest first."""
        self._waiting: dict[K, _Waiting[V]] = {}
        self._was_observed = False
        self._shown: set[K] | None = None
        """The keys that the current complete reading has shown, or that have changed since this reading began; None between
        readings."""
        self.drifted = 0
        """How many times, since the first observation, the observed value of a key has changed to a value that is not desired."""
        self._drifted_keys: list[K] = []

    def _make_observed(self) -> MutableMapping[K, W]:
        return {}

    def replace(self, owner: Owner, before: Mapping[K, V], after: Mapping[K, V]) -> set[Owner]:
        """Replace the former desired values of an owner (``before``) by new desired values.

        Returns the other owners that have gained or lost a key.
        """
        return at_once(replacing(owner, [(self, before, after)]))

    @property
    def contested(self) -> Collection[K]:
        """The keys that more than one owner desires.

        If the result is empty, each owner has all keys that it desires.
        """
        return self._waiting.keys()

    def desire(self, key: K, owner: Owner, value: V) -> Owner | None:
        """Record that an owner desires a key.

        Returns the other owner that loses or gains the key as a result, or None.
        """
        desired, loser = self.desired.get(key), None
        waiting = self._waiting.get(key)
        if desired is not None and (winner := self._owner_of(desired)) != owner:
            waiting = waiting or self._waiting.setdefault(key, _Waiting())
            rank, rank_of_winner = self._rank(value), self._rank(desired)
            if rank_of_winner < rank:
                waiting.put(owner, rank, value)
                return None
            waiting.pop(owner)
            waiting.put(winner, rank_of_winner, desired)
            loser = winner
        elif waiting is not None and waiting.turns[0][0] < (rank := self._rank(value)):
            heir = self._give_to_first(key, waiting)
            waiting.put(owner, rank, value)
            self.touch(key)
            return heir
        self.desired[key] = value
        self.touch(key)
        return loser

    def release(self, key: K, owner: Owner) -> Owner | None:
        """Record that an owner no longer desires a key. Returns the owner that gains the key, or None."""
        waiting, heir = self._waiting.get(key), None
        if waiting is None:
            self.desired.pop(key, None)
        elif waiting.pop(owner) is None:
            heir = self._give_to_first(key, waiting)
        if waiting is not None and not waiting.turns:
            del self._waiting[key]
        self.touch(key)
        return heir

    def _give_to_first(self, key: K, waiting: _Waiting[V]) -> Owner:
        _, value = waiting.turns[0]
        heir = self._owner_of(value)
        waiting.pop(heir)
        self.desired[key] = value
        return heir

    def owner_of(self, key: K) -> Owner | None:
        """The owner that has the key at present."""
        desired = self.desired.get(key)
        return None if desired is None else self._owner_of(desired)

    def desires(self, key: K) -> Sequence[V]:
        """The values that owners desire for a key.

        The owner of the first value has the key; the other owners wait for the key.
        """
        waiting = self._waiting.get(key)
        return (*filter(None, [self.desired.get(key)]), *((value for _, value in waiting.turns) if waiting else ()))

    def owners_of(self, key: K) -> Sequence[Owner]:
        """All owners that desire a key; the first owner has the key."""
        return tuple(map(self._owner_of, self.desires(key)))

    def observing(self, listing: Mapping[K, W], is_ours: Callable[[K], bool] = always) -> Iterator[None]:
        """Replaces all observed keys and their values by ``listing``; yields after every ``ITEMS_AT_ONCE`` keys.

        No other method may change the table between two steps. If a key belongs to ipvsproxy and is still present, it continues
        to belong to ipvsproxy, whatever ``is_ours`` returns. If the observed value is equal to the stored value, the table keeps
        the object that it already has.
        """
        self.begin_reading()
        yield from self.observing_some(listing, is_ours)
        gone = yield from self.ending_reading()
        yield from self.observing_some(gone, is_ours)
        self._was_observed = True

    def begin_reading(self) -> None:
        """Begins a complete reading, whose parts must be passed to ``observing_some``."""
        self._shown = set()

    def ending_reading(self) -> Generator[None, None, Mapping[K, None]]:
        """Ends a complete reading. Returns the observed keys that no longer exist, in a form that ``observing_some`` accepts.

        A key no longer exists if no part of the reading has the key, and no change of the key was tried since the reading began.
        If no reading has begun, no keys are returned.
        """
        shown, self._shown = self._shown, None
        gone = yield from choosing(lambda key: shown is not None and key not in shown, self.observed)
        return dict.fromkeys(gone)

    def note_change(self, key: K) -> None:
        """Records that a change of a key was tried, whatever its outcome. The current reading may have missed the change."""
        if self._shown is not None:
            self._shown.add(key)

    def observing_some(self, observed_now: Mapping[K, W | None], is_ours: Callable[[K], bool] = always) -> Iterator[None]:
        """Replaces the observed values of some keys; yields after each piece of work.

        A value of None means that the key is absent. Keys that are not passed stay as they are.
        """
        observed, foreign, shown = self.observed, self.foreign, self._shown
        for number, (key, value) in enumerate(observed_now.items(), 1):
            before = observed.get(key)
            if shown is not None and value is not None:
                shown.add(key)
            if key in foreign or (before is not value and before != value):
                if value is not None and (before is None or key in foreign) and not is_ours(key):
                    foreign.add(key)
                else:
                    foreign.discard(key)
                self._replace_observed(key, value, counts=self._was_observed and before != value)
            if number % ITEMS_AT_ONCE == 0:
                yield

    def notice(self, key: K, value: W) -> None:
        """Record the observed value of one key that certainly belongs to ipvsproxy."""
        self.note_change(key)
        self._replace_observed(key, value, counts=self.observed.get(key, value) != value)

    def _replace_observed(self, key: K, value: W | None, *, counts: bool = False) -> None:
        """Replace the observed value of a key.

        ``counts`` says whether a new value that differs from the desired value counts as drift.
        """
        differed = counts and (key in self.pending or key in self.surplus)
        if value is None:
            self.observed.pop(key, None)
        else:
            self.observed[key] = value
        self.touch(key)
        if counts and (key in self.pending or key in self.surplus):
            self.drifted += 1
            if not differed:
                self._drifted_keys.append(key)

    def take_drifted(self) -> Collection[K]:
        """The keys that have drifted since the last call.

        Keys whose desired and observed values already differed before the drift are left out.
        """
        keys, self._drifted_keys = self._drifted_keys, []
        return keys

    def confirm(self, key: K, value: W | None) -> None:
        """Record that this process has set a value in the kernel, or, if the value is None, has removed the key.

        From now on, the key belongs to ipvsproxy.
        """
        if self.foreign:
            self.foreign.discard(key)
        self.note_change(key)
        self._replace_observed(key, value)

    def exchange(self, key: K, value: W) -> None:
        """Replace the observed value of a key by ``value``, which the caller then changes.

        After the change, the caller calls ``confirm``.
        """
        self.observed[key] = value

    def touch(self, key: K) -> None:
        """Compare the desired and the observed value of a key again."""
        desired, observed = self.desired.get(key), self.observed.get(key)
        if desired is not None:
            differing, others = self.pending, self.surplus
            differs = observed is None or self._differs(desired, observed)
        else:
            differing, others = self.surplus, self.pending
            differs = observed is not None and key not in self.foreign and not self._is_protected(key)
        if differs:
            differing[key] = None
        elif key in differing:
            discard(differing, key)
        if key in others:
            discard(others, key)
        if self.pending or self.surplus:
            self._unequal[self] = None
        else:
            self._unequal.pop(self, None)


def discard(keys: dict[K, None], key: K) -> None:
    """Remove a key if it is in the dictionary.

    A dictionary that becomes empty is cleared, because walking an empty dictionary that once had 100,000 keys takes 60 µs.
    """
    keys.pop(key, None)
    if not keys:
        keys.clear()


class Present(MutableMapping[K, bool]):
    """The observed keys as a mapping; the value of each key is True.

    A desired key that is added to this mapping is no longer pending. A desired key that is removed from this mapping becomes
    pending.
    """

    __slots__ = ("_desired", "_pending", "undesired")

    def __init__(self, desired: Mapping[K, object], pending: dict[K, None]) -> None:
        """``pending`` contains exactly the desired keys that are not observed."""
        self._desired = desired
        self._pending = pending
        self.undesired: dict[K, None] = {}
        """The observed keys that are not desired."""

    def __contains__(self, key: object) -> bool:
        return key not in self._pending if key in self._desired else key in self.undesired

    def __getitem__(self, key: K) -> bool:
        if key in self:
            return True
        raise KeyError(key)

    def get(self, key: K, default: Any = None) -> Any:
        """Does the same as ``dict.get``.

        For an absent key, the inherited method takes 0.5 µs longer than this method, and a first reading contains many absent
        keys.
        """
        return True if key in self else default

    def __setitem__(self, key: K, value: bool) -> None:
        discard(self._pending, key)
        if key not in self._desired:
            self.undesired[key] = None

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        if key in self._desired:
            self._pending[key] = None
        else:
            discard(self.undesired, key)

    def __iter__(self) -> Iterator[K]:
        return itertools.chain(itertools.filterfalse(self._pending.__contains__, self._desired), self.undesired)

    def __len__(self) -> int:
        return len(self._desired) - len(self._pending) + len(self.undesired)


class PresenceTable(Table[K, Owner, bool]):
    """A table in which the desired value of a key is the owner of the key."""

    def __init__(self, is_protected: Callable[[K], bool], unequal: dict[Table[Any, Any, Any], None] | None = None) -> None:
        """A key is never removed while ``is_protected`` returns true for the key.

        ``unequal`` has the same meaning as in ``Table``.
        """
        super().__init__(lambda owner: owner, lambda _desired, _observed: False, is_protected, unequal)

    def _make_observed(self) -> "Present[K]":
        self._present = Present(self.desired, self.pending)
        return self._present

    def desire(self, key: K, owner: Owner, value: Owner) -> Owner | None:
        """Does the same as ``Table.desire``, and does not change whether the key is observed."""
        if key in self.desired or key in self._present.undesired:
            discard(self._present.undesired, key)
            return super().desire(key, owner, value)
        self.desired[key] = owner
        self.pending[key] = self._unequal[self] = None
        return None

    def release(self, key: K, owner: Owner) -> Owner | None:
        """Does the same as ``Table.release``, and does not change whether the key is observed."""
        if key in self._present:
            self._present.undesired[key] = None
        heir = super().release(key, owner)
        if key in self.desired:
            discard(self._present.undesired, key)
        return heir


def replacing(
    owner: Owner, parts: Iterable[tuple[Table[Any, Any, Any], Mapping[Any, Any], Mapping[Any, Any]]]
) -> Generator[None, None, set[Owner]]:
    """Calls ``Table.replace`` for several tables, each with former and new desired values; yields after each piece of work."""
    affected: set[Owner] = set()
    for table, before, after in parts:
        gone = itertools.filterfalse(after.__contains__, before)
        for number, key in enumerate(itertools.chain(gone, after), 1):
            value, other = after.get(key), None
            if value is None:
                other = table.release(key, owner)
            elif not before or before.get(key) != value:
                other = table.desire(key, owner, value)
            if other is not None:
                affected.add(other)
            if number % ITEMS_AT_ONCE == 0:
                yield
    return affected


def presence(keys: Iterable[K], owner: Owner) -> Mapping[K, Owner]:
    """Maps each key to ``owner``. A ``PresenceTable`` takes an owner's desired values in this form."""
    return dict.fromkeys(keys, owner)
