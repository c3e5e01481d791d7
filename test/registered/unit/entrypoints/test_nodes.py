"""The door of node 0, over real sockets: who gets in, who is refused, who is missing, silent or lost."""
import asyncio
import struct
from contextlib import asynccontextmanager

import pytest

from kits.nodes import free_ports
from sglane.configs.model_config import load_model_config
from sglane.entrypoints import door as door_module
from sglane.entrypoints.door import DOOR_OFFSET, RESULTS_OFFSET, Door, NodeFailure
from sglane.entrypoints.node_facts import differences, facts_of
from sglane.entrypoints.worker_node import Link, NodeEnds
from sglane.plan.io_struct import Endpoints
from sglane.plan.nodes import Alive, Farewell, Hello, Lifeline, Refusal, StopWish, Trouble, Vocabulary, VocabularyKept, Welcome
from sglane.server_args import NODE_FLAGS, ConfigError, ServerArgs, parse_args
from sglane.utils.addresses import HostPort

FACTS = {"the version": "1", "--page-size": "64", "--dtype": "auto"}
ENDPOINTS = Endpoints(to_planner="ipc:///a", to_front="ipc:///b", to_executors=["ipc:///c"] * 2, from_executors="ipc:///d", rendezvous="file:///e")


def node_args(nnodes=2, **more) -> ServerArgs:
    port = free_ports("127.0.0.1")
    return ServerArgs(nnodes=nnodes, cp_size=nnodes, enable_cp_shared_kv=True, dist_init_addr=f"127.0.0.1:{port}", **more).resolve()


@asynccontextmanager
async def opened(args):
    door = Door(args, FACTS)
    await door.open(ENDPOINTS)
    try:
        yield door
    finally:
        door.say_farewell(Farewell(0, "the test ends", True))
        await door.close(0.1)


async def join(args, node_rank=1, facts=FACTS):
    """A node's connection, and what it is told."""
    address = args.dist_address().at(DOOR_OFFSET)
    link = Link(*await asyncio.open_connection(address.host, address.port))
    link.send(Hello(node_rank, facts))
    return link, await link.receive()


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def failure(door) -> str:
    try:
        door.check()
    except NodeFailure as error:
        return str(error)
    return ""


def test_one_node_needs_no_door():
    async def run():
        door = Door(ServerArgs(), FACTS)
        assert await door.open(ENDPOINTS) is ENDPOINTS
        door.check()
        door.say_farewell(Farewell(0, "", True))
        await door.close(5.0)
    asyncio.run(run())


def test_joining():
    async def run():
        args = node_args()
        base = args.dist_address()
        door = Door(args, FACTS)
        endpoints = await door.open(ENDPOINTS)
        assert endpoints.rendezvous == f"tcp://{base}" and endpoints.from_other_nodes == f"tcp://{base.at(RESULTS_OFFSET)}"
        assert endpoints.interface == "lo" and endpoints.to_executors == ENDPOINTS.to_executors
        link, welcome = await join(args)
        assert welcome == Welcome(f"tcp://{base.at(RESULTS_OFFSET)}", f"tcp://{base}")
        assert isinstance(await link.receive(), Alive)
        assert failure(door) == ""
        door.say_farewell(Farewell(0, "over", True))
        while isinstance(message := await link.receive(), Alive):
            pass
        assert message == Farewell(0, "over", True)
        _, refusal = await join(args)
        assert refusal == Refusal("the server ends")
        link.close()
        await door.close(5.0)
        assert failure(door) == "", "a node that leaves at the end has not failed"
    asyncio.run(run())


@pytest.mark.parametrize(("node_rank", "facts", "reason"), [
    (1, {**FACTS, "--page-size": "16"}, "--page-size is 64 on node 0 and 16 on node 1"),
    (1, {"the version": "1", "--page-size": "16", "--new": "x"},
     "--page-size is 64 on node 0 and 16 on node 1; --dtype is auto on node 0 and unknown on node 1; --new is unknown on node 0 and x on node 1"),
    (1, {"the version": "2", "--page-size": "16"}, "the version is 1 on node 0 and 2 on node 1"),
    (0, FACTS, "--node-rank 0 is not between 1 and 1"),
    (2, FACTS, "--node-rank 2 is not between 1 and 1"),
])
def test_refusals(node_rank, facts, reason):
    async def run():
        args = node_args(dist_timeout_s=0.2)
        async with opened(args) as door:
            _, answer = await join(args, node_rank, facts)
            assert answer == Refusal(reason)
            await asyncio.sleep(0.3)
            assert failure(door) == f"node rank 1 did not join within 0.2 s (--dist-timeout); node {node_rank} was refused: {reason}"
            await join(args)
            assert failure(door) == "", "a good node may still come"
    asyncio.run(run())


def test_a_rank_is_taken_once():
    async def run():
        args = node_args(nnodes=3, dist_timeout_s=0.2)
        async with opened(args) as door:
            first, _ = await join(args)
            _, answer = await join(args)
            assert answer == Refusal("--node-rank 1 is taken by node 1 (127.0.0.1)")
            await asyncio.sleep(0.3)
            assert failure(door) == "node rank 2 did not join within 0.2 s (--dist-timeout)"
            first.send(Alive())
            await join(args, 2)
            assert failure(door) == ""
    asyncio.run(run())


def test_what_a_node_tells():
    async def run():
        args = node_args()
        async with opened(args) as door:
            link, _ = await join(args)
            link.send(StopWish("SIGTERM"))
            await until(lambda: door.stop_wish)
            assert door.stop_wish == "node 1 (127.0.0.1) received SIGTERM" and failure(door) == ""
            link.send(Trouble("executor rank 1 was killed by SIGKILL"))
            await until(lambda: failure(door))
            link.close()
            await asyncio.sleep(0.1)
            assert failure(door) == "node 1 (127.0.0.1): executor rank 1 was killed by SIGKILL", "the first trouble counts"
    asyncio.run(run())


def test_a_node_that_vanishes():
    async def run():
        args = node_args()
        async with opened(args) as door:
            link, _ = await join(args)
            link.close()
            await until(lambda: "is lost" in failure(door))
    asyncio.run(run())


def test_a_node_that_is_silent():
    async def run():
        args = node_args(watchdog_timeout_s=0.5)
        async with opened(args) as door:
            link, _ = await join(args)
            for _ in range(8):
                link.send(Alive())
                await asyncio.sleep(0.1)
                assert failure(door) == ""
            await until(lambda: "node 1 (127.0.0.1) gave no sign of life" in failure(door))
    asyncio.run(run())


def test_node_0_that_vanishes():
    """Its end of the connection closes without a farewell."""
    async def run():
        async def serve(reader, writer):
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        link = Link(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        with pytest.raises(NodeEnds, match="node 0 is lost") as end:
            await link.receive()
        assert end.value.code == 3
        server.close()
    asyncio.run(run())


def test_the_vocabulary_reaches_every_node(monkeypatch):
    async def run():
        args = node_args(nnodes=3)
        async with opened(args) as door:
            data = bytes(range(256)) * 40_000  # 10 MB: more than a stream's buffer
            links = [(await join(args, rank))[0] for rank in (1, 2)]

            async def take(link):
                while isinstance(message := await link.receive(), Alive):
                    pass
                assert message == Vocabulary(data)
                link.send(VocabularyKept())

            await asyncio.gather(door.share_vocabulary(data), *map(take, links))
            monkeypatch.setattr(door_module, "VOCABULARY_S", 0.1)
            with pytest.raises(NodeFailure, match="node 1 .* did not take the vocabulary"):
                door._members[1].has_vocabulary.clear()
                await door.share_vocabulary(data)
    asyncio.run(run())


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", struct.pack(">I", 3) + b"\xc1\xc1\xc1", struct.pack(">I", 1) + b"\x80", b"\x00", b"",
])
def test_strangers_do_no_harm(data):
    async def run():
        args = node_args()
        async with opened(args) as door:
            address = args.dist_address().at(DOOR_OFFSET)
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(data)
            if writer.can_write_eof():
                writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 5) == b""
            _, answer = await join(args)
            assert isinstance(answer, Welcome) and failure(door) == ""
    asyncio.run(run())


def test_a_lifeline_lasts_as_long_as_the_door():
    async def run():
        args = node_args()
        async with opened(args):
            address = args.dist_address().at(DOOR_OFFSET)
            link = Link(*await asyncio.open_connection(address.host, address.port))
            link.send(Lifeline(1))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(link.receive(), 0.3)
    asyncio.run(run())


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_busy_port_is_named(offset):
    args = node_args()
    with args.dist_address().at(offset).listen():
        with pytest.raises(ConfigError, match=f"--dist-init-addr {args.dist_init_addr}: .*in use"):
            asyncio.run(Door(args, FACTS).open(ENDPOINTS))


def test_an_address_of_another_machine_is_named():
    args = ServerArgs(nnodes=2, cp_size=2, enable_cp_shared_kv=True, dist_init_addr="192.0.2.77:5000").resolve()
    with pytest.raises(ConfigError, match="--dist-init-addr 192.0.2.77:5000: node 0 must be able to listen there"):
        asyncio.run(Door(args, FACTS).open(ENDPOINTS))


# --- facts --------------------------------------------------------------------------------------------------------------


def test_facts(tmp_path):
    """Paths, keys and ports may differ; sizes of the model and of its files may not."""
    config = ('{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, '
              '"num_hidden_layers": %d, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, '
              '"eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "float32"}')
    for name, num_layers, num_bytes in (("a", 2, 10), ("b", 2, 10), ("c", 3, 10), ("d", 2, 11)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config % num_layers)
        (tmp_path / name / "model.safetensors").write_bytes(bytes(num_bytes))

    def facts(name, *words):
        args = parse_args(["--model-path", str(tmp_path / name), *words])
        return facts_of(args, load_model_config(args.model_path, args.context_length))

    ours = facts("a", "--port", "1", "--api-key", "kept-quiet")
    assert differences(ours, facts("b", "--port", "2"), 1) == []
    assert "kept-quiet" not in str(ours)
    assert differences(ours, facts("c"), 1) == ["--model-path, num_layers is 2 on node 0 and 3 on node 1"]
    (found,) = differences(ours, facts("d"), 1)
    assert found.startswith("--model-path, digest of the weight files' names and sizes is ")
    assert differences(ours, facts("b", "--page-size", "16"), 7) == ["--page-size is 64 on node 0 and 16 on node 7"]


def test_node_flags_are_flags():
    assert NODE_FLAGS <= set(ServerArgs.__dataclass_fields__)


def test_addresses_of_a_node():
    assert str(HostPort("::1", 5).at(1)) == "[::1]:6"
