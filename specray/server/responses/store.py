"""Responses that one ingress replica keeps in memory for `previous_response_id`, by client and up to a limit."""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from specray.server.errors import ApiError, short_repr
from specray.server.responses.items import ITEMS, AnyItem

Json = dict[str, Any]


class StoredResponse(NamedTuple):
    reply: Json
    items: list[AnyItem]  # the conversation up to its end
    num_bytes: int  # size of the reply and of all items, also of those that other responses share


class ResponseStore:
    """Keeps up to `max_bytes`; then the client that takes most loses the response that it used longest ago."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_client: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        self._num_bytes: defaultdict[str, int] = defaultdict(int)

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def add(self, tenant: str, reply: Json, conversation: Sequence[AnyItem]) -> None:
        """Keep a reply. `conversation` is its input, with that of the responses before it."""
        items = [*conversation, *ITEMS.validate_python(reply["output"])]
        num_bytes = len(json.dumps(reply)) + sum(len(item.model_dump_json()) for item in items)
        self._by_client[tenant][reply["id"]] = StoredResponse(reply, items, num_bytes)
        self._num_bytes[tenant] += num_bytes
        while sum(self._num_bytes.values()) > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self.delete(largest, next(iter(self._by_client[largest])))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """ApiError (404) if this client has no such response here."""
        if (found := self._find(tenant, response_id)) is None:
            reason = (
                "it is another client's, was dropped for newer ones, or is on another ingress replica"
                if self.is_enabled
                else "this server stores none; see server.response_store_mib"
            )
            raise ApiError(
                404,
                f"response {short_repr(response_id)} is not stored: {reason}; send the whole conversation in input",
                "previous_response_id",
                "previous_response_not_found",
            )
        self._by_client[tenant].move_to_end(response_id)
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """ApiError (404) if this client has no such response here."""
        self._num_bytes[tenant] -= self.get(tenant, response_id).num_bytes
        del self._by_client[tenant][response_id]
        if not self._by_client[tenant]:
            del self._by_client[tenant], self._num_bytes[tenant]

    def _find(self, tenant: str, response_id: str) -> StoredResponse | None:
        return self._by_client[tenant].get(response_id) if tenant in self._by_client else None
