"""A list as it arrives: its items one by one, so that memory is bounded by one item and not by the list.

An API server writes a list without spaces, and begins each item alike (``{"metadata":`` in k8s.io/api). In JSON, the end of one
such item and the beginning of the next, ``},{"metadata":``, cannot stand within a text, where quotation marks are escaped. It can
stand within an item, around objects of its own; then the part before it is no whole JSON value, and the item goes on.

What cannot be taken apart in this way is kept, and read as a whole at the end, with the same result.
"""

import re

from ipvsproxy.model.service import ObjectKind, Put, Rejected
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.api.decode import ListPage, UndecodableError

MOST_BYTES_BEFORE_ITEMS = 1 << 16
"""In a list of an API server, ``kind``, ``apiVersion`` and ``metadata`` stand before the items."""
MOST_FALSE_ENDS = 100
"""The most places in an item that look like its end and are not. After each of them, the item is read from its start."""

_BEFORE_ITEMS = re.compile(rb'"items":\[')
_BEGINNING = re.compile(rb'\{"[^"\\]{1,64}":')


class ListReader:
    """One answer to a list request, in the order of its bytes: ``feed`` for each piece of them, then ``finish``."""

    def __init__(self, kind: ObjectKind) -> None:
        self.resource_version = ""
        """The resource version of the list, which is known before ``feed`` returns an item."""
        self._kind = kind
        self._buffer = bytearray()
        self._before_items = b""
        self._end_of_item = b""  # empty until the first item has begun
        self._searched = 0  # no end of an item is in the buffer before this place
        self._false_ends = 0
        self._is_in_one_piece = False

    def feed(self, piece: bytes) -> list[Put | Rejected]:
        """The items that this piece completes. One that breaks the shape of its kind is a ``Rejected``."""
        self._buffer += piece
        if self._is_in_one_piece or not (self._end_of_item or self._begin()):
            return []
        events: list[Put | Rejected] = []
        begin = 0
        while (end := self._buffer.find(self._end_of_item, self._searched)) >= 0:
            self._searched = end + 1
            event = decode.decode_item(self._kind, bytes(self._buffer[begin : end + 1]))
            if event is not None:
                events.append(event)
                begin = self._searched = end + 2
                continue
            self._false_ends += 1
            if self._false_ends > MOST_FALSE_ENDS:
                self._is_in_one_piece = True
                break
        else:
            self._searched = max(begin, len(self._buffer) - len(self._end_of_item) + 1)
        del self._buffer[:begin]
        self._searched -= begin
        return events

    def finish(self) -> ListPage:
        """The items that are left, with version and continuation.

        Raises:
            UndecodableError: the answer was no list, or broke off. Items that ``feed`` has returned may be used all the same.
        """
        return decode.decode_list(self._kind, self._before_items + self._buffer)

    def _begin(self) -> bool:
        """Take the part before the items out of the buffer; False while the first item has not begun."""
        before_items = _BEFORE_ITEMS.search(self._buffer, 0, MOST_BYTES_BEFORE_ITEMS)
        item = _BEGINNING.match(self._buffer, before_items.end()) if before_items else None
        if before_items is None or item is None:
            self._is_in_one_piece = len(self._buffer) > MOST_BYTES_BEFORE_ITEMS
            return False
        before = bytes(self._buffer[: before_items.end()])
        try:
            self.resource_version = decode.decode_list(self._kind, before + b"]}").resource_version
        except UndecodableError:  # other brackets are open: these items are not those of the list; or what follows belongs to it
            self._is_in_one_piece = True
            return False
        self._before_items = before
        self._end_of_item = b"}," + item[0]
        del self._buffer[: before_items.end()]
        return True
