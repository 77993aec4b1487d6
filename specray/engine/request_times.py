"""When a request's phases began, for traces of its server."""

from specray.engine.request import Request
from specray.outputs import RequestTimes


def request_times(request: Request, now: float, now_ns: int) -> RequestTimes:
    """The times of a request that has ended at `now` on the engine's clock, which is `now_ns` since 1970."""

    def since_1970(moment: float | None) -> int | None:
        return None if moment is None else now_ns - round((now - moment) * 1e9)

    arrived = since_1970(request.arrival)
    assert arrived is not None
    return RequestTimes(arrived, since_1970(request.started), since_1970(request.first_token), now_ns)
