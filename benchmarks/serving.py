"""What HTTP costs: tokens a second and first-token time through the server, against the same engine alone.

    python benchmarks/serving.py --json

The client is a process of its own and reads streams. Engine and server take turns on the same prompts, greedy, without
a prefix cache; medians of the repeats. `http_over_engine`: tokens a second ÷ tokens a second of the engine alone, with
`--concurrency` requests at a time. `ttft_http_over_engine`: first-token seconds ÷ those of the engine, one at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from common import SETS, models_of, parser_of, read_prompts, tell

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.engine.request import SamplingParams
from dspark.server.config import ServeSettings
from dspark.server.run import Server, listen
from dspark.server.service import Service

CLIENT = Path(__file__).with_name("http_client.py")

Figures = tuple[float, float]  # tokens a second, median first-token seconds


def alone(engine: Engine, prompts: list[list[int]], concurrency: int, max_tokens: int) -> Figures:
    """The engine by itself, its batch kept as full as a client would."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    waiting, live, tokens, first = list(reversed(prompts)), 0, 0, []
    started = time.perf_counter()
    while waiting or live:
        while waiting and live < concurrency:
            engine.submit(waiting.pop(), params)
            live += 1
        for output in engine.step():
            if output.completion is not None:
                live -= 1
                tokens += len(output.completion.token_ids)
                first.append(output.completion.figures.first_token_seconds or 0.0)
    return tokens / (time.perf_counter() - started), median(first)


def over_http(base: str, prompts: list[list[int]], concurrency: int, max_tokens: int) -> Figures:
    """The same through a server, as its client sees it."""
    asked = {"base": base, "model": "served", "prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens}
    command = [sys.executable, str(CLIENT)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    return figures["tokens"] / figures["seconds"], median(figures["first_token_seconds"])


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """A server over an engine on a free port; gives its address."""
    server = Server(Service(ServeSettings(served_name="served", api_key=None), engine))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def measure(
    engine: Engine, prompts: list[list[int]], concurrency: int, max_tokens: int, repeats: int
) -> dict[str, float]:
    """Both figures, and what they are made of."""
    alone(engine, prompts[:1], 1, max_tokens)  # warms the machine up
    many: list[tuple[Figures, Figures]] = []
    one: list[tuple[Figures, Figures]] = []
    for _ in range(repeats):
        for found, at_once in ((many, concurrency), (one, 1)):
            by_itself = alone(engine, prompts, at_once, max_tokens)
            with serving(engine) as base:
                found.append((by_itself, over_http(base, prompts, at_once, max_tokens)))
    return {
        "http_over_engine": median(http[0] / engine[0] for engine, http in many),
        "ttft_http_over_engine": median(http[1] / engine[1] for engine, http in one),
        "engine_tokens_per_second": median(engine[0] for engine, _ in many),
        "http_tokens_per_second": median(http[0] for _, http in many),
        "engine_ttft_seconds": median(engine[1] for engine, _ in one),
        "http_ttft_seconds": median(http[1] for _, http in one),
    }


def main() -> None:
    args = arguments()
    settings = EngineSettings(max_batch=args.concurrency, prefix_cache=False, record_rounds=True)
    engine = open_engine(models_of(args), settings)
    chat = ChatTemplate(engine.target.tokenizer)
    texts = [text for texts in read_prompts(None, SETS, args.prompts).values() for text in texts]
    prompts = [chat.prompt_ids([Message("user", text)]) for text in texts][: args.prompts]
    result = measure(engine, prompts, args.concurrency, args.max_tokens, args.repeats)
    tell(result, args.json)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
