"""`dspark serve`: load, listen, and leave in good order."""

from __future__ import annotations

import socket
import sys
import time
from types import FrameType

import torch
import uvicorn

from dspark.engine.pair import open_engine
from dspark.errors import ConfigError
from dspark.log import get_logger
from dspark.server import logs
from dspark.server.answers import EngineGone
from dspark.server.app import make_app
from dspark.server.config import ServeSettings
from dspark.server.connections import KEEP_ALIVE_SECONDS, WatchedConnection
from dspark.server.service import Service

_log = get_logger(__name__)

_CLOSING_SECONDS = 5  # for connections to end once nothing runs any more


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Leaves the process with code 1 when the engine fails.

    Raises ConfigError where the address is taken, CheckpointError where the models do not load.
    """
    logs.configure(settings.log_format)
    listener = listen(settings.host, settings.port)  # before minutes of loading
    with listener:
        _log.info("loading %s", settings.model.target)
        started = time.perf_counter()
        device = "cuda" if settings.device == "auto" and torch.cuda.is_available() else settings.device
        engine = open_engine(settings.model, settings.engine_settings, "cpu" if device == "auto" else device)
        service = Service(settings, engine)
        _log.info("loaded in %.1f s: %s", time.perf_counter() - started, described(service))
        server = Server(service)
        server.run(sockets=[listener])
    if server.failed:
        sys.exit(1)


class Server(uvicorn.Server):
    """Uvicorn that lets running requests finish before it closes, and leaves when the engine failed.

    The first SIGTERM or SIGINT starts draining: `/ready` fails, new requests are refused, those under way go on for at
    most `drain_seconds`. The second one closes at once.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=WatchedConnection,
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )
        self.service = service
        self._ends_at: float | None = None  # on the clock of time.monotonic

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and tell where."""
        await super().startup(sockets)
        for listener in sockets or ():
            announce(self.service, listener)

    @property
    def failed(self) -> bool:
        """Whether the engine failed."""
        return self.service.engine.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, or close at once when draining already."""
        if self.service.draining:
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Take no new requests, and exit when those under way are done."""
        self.service.draining = True
        limit = self.service.settings.limits.drain_seconds
        self._ends_at = time.monotonic() + limit
        _log.info("draining: %d requests have %g s to finish", self.service.num_requests, limit)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to close now."""
        if self.failed and self._ends_at is None:
            self._ends_at = time.monotonic() + self.service.settings.limits.crash_seconds
        if self._ends_at is not None:
            if time.monotonic() >= self._ends_at:
                self.service.engine.fail_all(EngineGone("the server is shutting down"))
                self.should_exit = True
            elif self.service.draining and not self.service.num_requests:
                self.should_exit = True
        closes = await super().on_tick(counter)
        if closes:
            self.service.rounds.close()  # or those who watch would keep their connections open
        return closes


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ConfigError where that is not possible."""
    listener = None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"host {host!r}, port {port}: cannot listen there ({error.strerror}); choose others"
        ) from None
    return listener


def described(service: Service) -> str:
    """What was loaded, in one line."""
    engine = service.engine.engine
    drafter, weight = engine.drafter, engine.target.decoder.embed_tokens.weight
    pair = (
        "no drafter" if drafter is None else f"drafter {drafter.config.algorithm}, {service.max_draft} drafts a round"
    )
    return (
        f"{engine.target.name} in {str(weight.dtype).removeprefix('torch.')} on {weight.device}; {pair}; "
        f"{engine.settings.max_batch} requests at once, {service.limit} tokens each, {service.engine.load.num_blocks} "
        "cache blocks"
    )


def announce(service: Service, listener: socket.socket) -> None:
    """Tell where the server is and how to ask it."""
    settings, (host, port, *_) = service.settings, listener.getsockname()
    if settings.is_public and settings.api_key is None:
        _log.warning("host %s: other machines can use this server without an API key; set DSPARK_API_KEY", host)
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if settings.log_format == "json":
        _log.info("listening", extra=logs.fields(url=base, model=settings.name))
        return
    key = "none" if settings.api_key is None else "YOUR_KEY"
    logs.say(
        f"""
dspark serves {settings.name} at {base}

    from openai import OpenAI
    client = OpenAI(base_url="{base}/v1", api_key="{key}")
    answer = client.chat.completions.create(
        model="{settings.name}", messages=[{{"role": "user", "content": "Why is the sky blue?"}}], max_tokens=64
    )
    print(answer.choices[0].message.content)

"""
    )
