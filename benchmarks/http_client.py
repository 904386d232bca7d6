"""Asks a server for answers, some at a time, and times them. Run by serving.py in a process of its own.

Reads {"base", "model", "prompts", "concurrency", "max_tokens"} from standard input, prints {"tokens", "seconds",
"first_token_seconds": [...]}. Prompts are lists of token ids.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx


async def drive(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt over streams, `concurrency` at a time."""
    first: list[float] = []
    tokens = 0
    prompts = iter(asked["prompts"])

    async def ask_on(prompts: Iterator[list[int]]) -> None:
        nonlocal tokens
        for prompt in prompts:
            body = {
                "model": asked["model"],
                "prompt": prompt,
                "max_tokens": asked["max_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            started, began = time.perf_counter(), False
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        if not began:
                            began = True
                            first.append(time.perf_counter() - started)
                        if '"usage"' in line:
                            tokens += json.loads(line[6:])["usage"]["completion_tokens"]

    async with httpx.AsyncClient(base_url=asked["base"], timeout=600) as http:
        await http.get("/ready")  # connect first
        started = time.perf_counter()
        await asyncio.gather(*(ask_on(prompts) for _ in range(asked["concurrency"])))
        seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": seconds, "first_token_seconds": first}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(json.load(sys.stdin)))))
