"""Channels between processes: order, kinds, nothing lost before the other side is there."""
import msgspec
import pytest
import zmq

from sglane.plan.io_struct import AbortRequest, FinishRequest, GenerateRequest, SamplingParams, ToPlanner
from sglane.utils.ipc import Receiver, Sender

MESSAGES = [
    FinishRequest("a", 3),
    GenerateRequest(rid="b", input_ids=b"\x01\x00\x00\x00", sampling=SamplingParams(max_new_tokens=4, logit_bias={7: -1.5})),
    AbortRequest(abort_all=True),
]


@pytest.fixture
def channel(tmp_path):
    context = zmq.Context()
    address = f"ipc://{tmp_path}/socket"
    receiver = Receiver(context, address, ToPlanner)
    sender = Sender(context, address)
    yield sender, receiver
    sender.close()
    receiver.close()
    context.term()


def test_messages_arrive_in_order_and_whole(channel):
    sender, receiver = channel
    for message in MESSAGES:
        sender.send(message)
    assert receiver.poll(2000)
    assert [receiver.recv() for _ in MESSAGES] == MESSAGES
    assert not receiver.poll(0)


def test_drain_takes_all_that_is_there_and_does_not_wait(channel):
    sender, receiver = channel
    assert receiver.drain() == []
    for _ in range(500):
        sender.send(MESSAGES[0])
    found = []
    while len(found) < 500:
        assert receiver.poll(2000)
        found += receiver.drain()
    assert found == [MESSAGES[0]] * 500


def test_a_sender_may_come_first(tmp_path):
    context = zmq.Context()
    address = f"ipc://{tmp_path}/socket"
    sender = Sender(context, address)
    sender.send(MESSAGES[0])
    receiver = Receiver(context, address, ToPlanner)
    assert receiver.poll(5000)
    assert receiver.recv() == MESSAGES[0]
    sender.close()
    receiver.close()
    context.term()


def test_a_message_of_another_kind_is_refused(channel):
    sender, receiver = channel
    sender.send({"type": "nonsense"})
    assert receiver.poll(2000)
    with pytest.raises(msgspec.ValidationError):
        receiver.recv()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_receiver_listens_at_two_addresses(tmp_path, host):
    context = zmq.Context()
    receiver = Receiver(context, f"ipc://{tmp_path}/socket", ToPlanner, f"tcp://{host}:*")
    assert receiver.address.startswith(f"tcp://{host}:") and "*" not in receiver.address
    senders = [Sender(context, address) for address in (f"ipc://{tmp_path}/socket", receiver.address)]
    for number, sender in enumerate(senders):
        sender.send(FinishRequest("a", number))
    assert {receiver.recv().num_output_tokens for _ in senders} == {0, 1}
    for sender in senders:
        sender.close()
    receiver.close()
    context.term()
