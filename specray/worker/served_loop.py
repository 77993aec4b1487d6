"""Rank 0 runs steps for a router at the other end of a channel: plans arrive, and results leave, while others run."""

import contextlib

from specray.channel import Channel, ChannelClosedError
from specray.step_wire import pack, unpack_plan
from specray.worker.step_loop import StepLoop

MAX_STARTED = 2  # steps that the device has at once: it does not wait for the host between them
_POLL_S = 2e-5  # the host waits for the device and for the next plan by turns


class ServedLoop(StepLoop):
    """Submits the plans that arrive to itself."""

    def serve(self, channel: Channel) -> None:
        """Run the plans that arrive, until the other end closes the channel."""
        while True:
            with contextlib.suppress(ChannelClosedError):
                self._receive(channel)
                channel.send(pack(self._finish()))
                self._go_on()  # while the result is on its way
                continue
            return

    def _receive(self, channel: Channel) -> None:
        """Begin the steps whose plans arrive while the oldest one runs, of which there is one when it returns."""
        self._begin()
        while not self._plans and self._failure is None and self.worker.num_started < MAX_STARTED:
            has_result = bool(self.worker.num_started) and self.worker.has_result()
            wait = 0.0 if has_result else _POLL_S if self.worker.num_started else None
            if channel.poll(wait):
                self.submit(unpack_plan(channel.recv()))
                self._begin()
            elif has_result:
                return
