"""What passes between a run and its engine's process: requests, events, weights, and messages larger than a buffer."""

from __future__ import annotations

import json
import math
import socket
import threading

import numpy as np
import pytest

from sortedrl.channel import Channel, ChannelClosed, Numbers
from sortedrl.engine.base import (
    Delta,
    EngineEvent,
    Failed,
    Finished,
    Partial,
    Request,
    Sampling,
    SegmentDelta,
    Span,
    Verified,
)
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.engine.pool.shared_weights import SharedWeights
from sortedrl.engine.pool.wire import pack_report, pack_requests, unpack_report, unpack_requests
from sortedrl.records import FinishReason, Mode, Segment

THIRD = math.log(1 / 3)
SAMPLING = Sampling(temperature=0.7, stop_tokens=(0, 5), top_k=3, top_p=0.9, min_p=0.1, stop_strings=("x\n", "é"))
REQUESTS = [
    Request(1, 2, [3, 4], 9, 2**63 - 1, SAMPLING, Mode.REPLAY, [7, 8, 9], [Span(0, 2), Span(1, 1, True)], 0.25),
    Request(2, 1, [5], 4, 0, Sampling()),
]
EVENTS: list[EngineEvent] = [
    Verified(1, 2, 0.5, 3, 2),
    Delta(1, 2, 0.5, 2, [9, 1], [THIRD, -0.0], 4, 0.125, 1),
    SegmentDelta(3, 1, 0.75, 1, [Segment(3, [1], [THIRD], 0.5), Segment(4, [2, 2], [0.0, 0.0], 0.0, True)]),
    Finished(3, 1, 1.0, FinishReason.STOP, 4, [Segment(4, [6], [-1e-300], 0.25)]),
    Finished(4, 1, 1.0, FinishReason.LENGTH),
    Partial(5, 1, 1.0),
    Failed(6, 3, 2.0, 'it said "no"\nand stopped'),
]


def sent(header: object) -> object:
    return json.loads(json.dumps(header))


def test_requests_arrive_as_they_were() -> None:
    numbers = Numbers()
    packed = sent(pack_requests(REQUESTS, numbers))
    assert isinstance(packed, list)
    first, second = unpack_requests(packed, Numbers(bytes(numbers.data)))
    assert first == REQUESTS[0]
    assert (second.prompt, list(second.cached), list(second.spans)) == ([5], [], [])
    assert (second.sampling, second.mode, second.seed) == (Sampling(), Mode.FRESH, 0)


def test_events_arrive_as_they_were() -> None:
    numbers = Numbers()
    packed = sent(pack_report(Report(number=7, events=EVENTS), numbers))
    assert isinstance(packed, list)
    assert unpack_report(packed, Numbers(bytes(numbers.data))) == Report(number=7, events=EVENTS)


@pytest.fixture
def ends() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)


def test_two_ends_that_send_more_than_the_buffers_hold(ends: tuple[Channel, Channel]) -> None:
    data = bytes(range(256)) * 2**14  # 4 MiB
    received: list[bytes] = []

    def talk(end: Channel) -> None:
        for number in range(3):
            end.send([number], data)
        for number in range(3):
            message = end.receive(None)
            assert message is not None
            assert message.header == [number]
            received.append(message.data)

    other = threading.Thread(target=talk, args=(ends[1],))
    other.start()
    talk(ends[0])
    other.join()
    assert received == [data] * 6


def test_an_end_that_is_closed_is_told(ends: tuple[Channel, Channel]) -> None:
    ends[1].send(["last"])
    ends[1].close()
    assert ends[0].receive() == (["last"], b"")
    with pytest.raises(ChannelClosed):
        ends[0].receive(None)


def test_nothing_there(ends: tuple[Channel, Channel]) -> None:
    assert ends[0].receive() is None
    assert ends[0].receive(0.001) is None


def test_weights_are_shared_and_may_grow() -> None:
    ours = SharedWeights()
    theirs = SharedWeights(ours.fd)
    small = {"a": np.arange(3, dtype=np.float32)}
    assert theirs.read(ours.write(small))["a"].tolist() == [0, 1, 2]
    large = {"a": np.arange(5000, dtype=np.float32).reshape(50, 100), "b": np.array([-7, 8], dtype=np.int16)}
    places = ours.write(large)
    read = theirs.read(places)
    assert np.array_equal(read["a"], large["a"])
    assert read["b"].tolist() == [-7, 8]
    large["b"][0] = 1
    ours.write(large)
    assert read["b"].tolist() == [1, 8], "one memory, not a copy"
    ours.close()
