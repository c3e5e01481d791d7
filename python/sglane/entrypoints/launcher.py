"""The life of a server: start, warm-up, service, drain, end. One main task follows it; everything else answers to it."""
import asyncio
import contextlib
import logging
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop
import zmq

from sglane.configs.model_config import ModelConfig, ModelConfigError, load_model_config
from sglane.entrypoints.door import Door, NodeFailure
from sglane.entrypoints.engine_client import EngineClient
from sglane.entrypoints.http_server import make_app
from sglane.entrypoints.middleware import QUIET_PATHS
from sglane.entrypoints.node_facts import facts_of
from sglane.entrypoints.parsers.markers import markers_of
from sglane.entrypoints.processes import Family, WorkFolder, bind_http
from sglane.entrypoints.server_state import HIDDEN, Engine, Phase, ServerState, until_idle
from sglane.entrypoints.signals import Signals, StopRequested
from sglane.entrypoints.tokenizer import TextTokenizer, TokenizerError
from sglane.entrypoints.warmup import WarmupFailed, warm_up
from sglane.entrypoints.worker_node import serve_worker
from sglane.plan.nodes import Farewell
from sglane.server_args import ConfigError, ServerArgs, parse_args, secrets
from sglane.utils import logging as log

logger = logging.getLogger(__name__)

#: How often children and clocks are looked at.
TICK_S = 0.1
#: Seconds that a dying planner gets to say why.
LAST_WORDS_S = 0.5
#: Seconds that children get to end after they were told to.
CHILD_EXIT_S = 15.0
#: Seconds that the planner's process gets before its first sign of life, whatever the watchdog says.
PLANNER_START_S = 60.0
#: Seconds that other nodes get to leave after a failure; one of them may be what failed.
NODE_EXIT_S = 2.0
#: Seconds that answers get to leave before connections are cut.
FAREWELL_S = 5


class EngineDied(RuntimeError):
    """A child ended, hung or gave up; the message says which and how."""


class HttpServer(uvicorn.Server):
    """Signals belong to the launcher."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Stop accepting; answers under way may finish for FAREWELL_S."""
        self.should_exit = True


class Launcher:
    """One server. `run` returns the exit code."""

    def __init__(self, args: ServerArgs, config: ModelConfig, listener: socket.socket, folder: WorkFolder):
        self._args = args
        self._listener = listener
        self._endpoints = folder.endpoints(args.cp_size)
        self._server = ServerState(args, config, launch_command(args, sys.argv[1:]))
        self._signals = Signals()
        self._door = Door(args, facts_of(args, config))
        self._why = "the server was told to stop"
        self._ranks_told = False  # by the planner, to stop
        self._client = EngineClient(zmq.Context.instance(), self._endpoints, self._server.tracker)
        self._family = Family([])
        log_level = "info" if args.log_level == "debug" else args.log_level
        self._http = HttpServer(uvicorn.Config(
            make_app(self._server), log_config=None, log_level=log_level, http="httptools", ws="none", lifespan="off", timeout_keep_alive=60,
            timeout_graceful_shutdown=FAREWELL_S,
        ))

    async def run(self) -> int:
        try:
            self._endpoints = await self._door.open(self._endpoints)
        except ConfigError:
            self._client.close()
            raise
        self._family = Family.start(self._args, self._endpoints)
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        code = 1
        try:
            await self._start()
            await self._watch_until_stop()
            code = await self._drain()
        except StopRequested:
            code = 0 if self._signals.count < 2 else 128 + self._signals.last
            self._end("the server was stopped")
        except (EngineDied, TokenizerError, WarmupFailed) as error:
            logger.error("the server ends: %s", error)
            self._end(f"the engine has failed: {error}")
        finally:
            self._door.say_farewell(Farewell(code, self._why, self._ranks_told))
            self._http.end()
            await serving
            await self._server.end_helpers()
            self._family.kill()
            self._client.close()
            await self._door.close(CHILD_EXIT_S if code == 0 else NODE_EXIT_S)
        return code

    def _end(self, why: str) -> None:
        """Everybody who waits is told; from now on everything is a 503."""
        self._why = why
        self._server.stop(why)
        self._client.fail_all(why)

    # --- start -------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        loading = asyncio.create_task(self._load_tokenizer())
        try:
            await self._watch_until(self._client.ready)
            await self._watch_until(loading)
        finally:
            loading.cancel()
        vocabulary = self._endpoints.vocabulary if self._args.offers_grammars() else ""
        engine = Engine.assemble(self._client, loading.result(), self._server.config, self._client.ready.result(), vocabulary,
                                 self._args.grammar_backend, markers_of(self._args.tool_call_parser, self._args.reasoning_parser))
        if engine.grammars is not None and self._args.nnodes > 1:
            sharing = asyncio.create_task(self._door.share_vocabulary(Path(vocabulary).read_bytes()))
            await self._watch_until(sharing)
        self._server.engine_ready(engine)
        if not self._args.skip_server_warmup:
            key = self._args.admin_api_key or self._args.api_key
            warming = asyncio.create_task(warm_up(self._listener.getsockname(), engine, key))
            try:
                await self._watch_until(warming)
            finally:
                warming.cancel()
        self._server.warmed_up()
        if engine.grammars is not None:
            self._client.warm_grammars()
        logger.info("Uvicorn running on http://%s:%d", self._args.host, self._listener.getsockname()[1])
        logger.info("The server is fired up and ready to roll!")

    async def _load_tokenizer(self) -> TextTokenizer | None:
        if self._args.skip_tokenizer_init:
            return None
        return await asyncio.to_thread(TextTokenizer, self._server.tokenizer_path, self._args.chat_template)

    # --- watching ----------------------------------------------------------------------------------------------------

    async def _watch_until(self, future: "asyncio.Future[object]") -> None:
        """Wait for `future`, but not longer than all children live and nobody asks to stop. Raises what the future raises."""
        while not future.done():
            await self._tick()
            await asyncio.wait([future], timeout=TICK_S)
        future.result()

    async def _watch_until_stop(self) -> None:
        """Returns on the first signal, here or at another node; raises EngineDied when the engine fails."""
        while not self._signals.count and not self._door.stop_wish:
            await self._check_engine()
            await asyncio.sleep(TICK_S)

    async def _tick(self) -> None:
        if self._signals.count or self._door.stop_wish:
            raise StopRequested
        await self._check_engine()

    async def _check_engine(self) -> None:
        """Raises EngineDied for a dead child, the planner's last words, a planner that is silent for too long, or a failure of another node."""
        self._client.receive()
        reasons = self._deaths()
        if reasons or self._client.fatal.done():  # one death brings others: give the cause time to be told
            await asyncio.wait([self._client.fatal], timeout=LAST_WORDS_S)
            if self._args.nnodes > 1:
                await asyncio.sleep(LAST_WORDS_S)
            last_words = [self._client.fatal.result()] if self._client.fatal.done() else []
            raise EngineDied("; ".join([*last_words, *self._deaths(), *self._family.stopped()]))
        silence_s = time.monotonic() - self._client.last_sign_s
        limit_s = self._args.watchdog_timeout_s
        if silence_s > (max(limit_s, PLANNER_START_S) if self._server.phase is Phase.STARTING else limit_s):
            raise EngineDied("; ".join([f"the planner gave no sign of life for {silence_s:.0f} s", *self._family.stopped()]))

    def _deaths(self) -> list[str]:
        """Children that have ended, and what is wrong with other nodes."""
        reasons = self._family.epitaphs()
        try:
            self._door.check()
        except NodeFailure as error:
            reasons.append(str(error))
        return reasons

    # --- end ---------------------------------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """Refuse new requests, let running ones finish, stop the children. Returns the exit code."""
        self._why = self._door.stop_wish or self._why
        self._server.drain()
        self._client.end_pause()
        deadline_s = time.monotonic() + self._args.shutdown_timeout_s
        logger.info("draining: %d requests have up to %g s to finish", self._client.num_jobs, self._args.shutdown_timeout_s)
        idle = asyncio.create_task(until_idle(self._client, deadline_s))
        try:
            while not idle.done():
                if self._signals.count > 1:
                    raise StopRequested
                await self._check_engine()
                await asyncio.wait([idle], timeout=TICK_S)
        finally:
            idle.cancel()
        if not idle.result():
            logger.warning("%d requests did not finish within %g s", self._client.num_jobs, self._args.shutdown_timeout_s)
        self._client.shutdown(0.0)
        self._ranks_told = True
        child_deadline_s = time.monotonic() + CHILD_EXIT_S
        while not self._family.all_ended() and time.monotonic() < child_deadline_s and self._signals.count < 2:
            await asyncio.sleep(TICK_S)
        if not self._family.all_ended():
            logger.warning("not all processes ended when told to; they are killed")
        self._client.receive()
        self._end("the server is shutting down")
        return 0


def launch_command(args: ServerArgs, words: Sequence[str]) -> str:
    """The command line of this process for /server_info, without its secrets."""
    hidden = [getattr(args, name) for name in secrets() if getattr(args, name)]
    shown = []
    for word in words:
        flag, equals, value = word.partition("=")
        shown.append(HIDDEN if word in hidden else f"{flag}={HIDDEN}" if equals and value in hidden else word)
    return shlex.join([sys.executable, "-m", "sglane.launch_server", *shown])


def serve(argv: Sequence[str] | None = None) -> int:
    """Run a server until it ends. Returns the process's exit code."""
    args = parse_args(argv)
    log.setup(args.log_level, layout=args.log_format)
    logging.getLogger("uvicorn.access").addFilter(log.QuietPaths(QUIET_PATHS))
    logger.info("server_args=%s", args)
    try:
        config = load_model_config(args.model_path, args.context_length, args.draft_path())
    except ModelConfigError as error:
        logger.error("%s", error)
        return 1
    if args.node_rank > 0:
        return serve_worker(args, config)
    try:
        listener = bind_http(args.host, args.port)
    except OSError as error:
        logger.error("--host %s --port %d: cannot listen there: %s", args.host, args.port, error)
        return 1
    folder = WorkFolder()

    async def run() -> int:
        return await Launcher(args, config, listener, folder).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    finally:
        folder.remove()
