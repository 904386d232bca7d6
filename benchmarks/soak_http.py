"""Mixed load on a real server process, with clients that vanish and requests that are wrong: does it leak or break?

    python benchmarks/soak_http.py --json                                              # 2 minutes, a tiny random pair
    python benchmarks/soak_http.py --minutes 30 --json > soak.json
    python benchmarks/soak_http.py --minutes 30 --target smollm2-135m --json > soak.json
    python benchmarks/soak_http.py --fill soak.json docs/reliability.md                # its table, between the markers

Clients ask for chats and texts, whole and streamed, alone and in bursts that fill the queue; hang up at any moment;
send what must be refused; look at the metrics, the rounds and the page. Ten times they pause until the server is idle;
then its memory, threads and open files are noted, and every cache block must be free. At the end SIGTERM comes while
streams run: none may be cut. Leaves with 1 on a fault. Needs /proc (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
from soak_clients import KEY, Client, Tally, drained_stream
from soak_engine import tiny_pair

from dspark.drafters.layouts.deepspec import write_drafter
from dspark.log import progress
from dspark.models.weights import save_decoder

PAUSES = 10
EARLY, LATE = slice(2, 5), slice(7, 10)  # pauses whose medians are compared: the first two are warm-up
IDLE_SECONDS = 90  # for the server to finish what it has
BUSY = ("num_requests_running", "num_requests_waiting", "num_http_requests")
LIMITS = ("limits.max_waiting=12", "limits.max_body_bytes=16384", "limits.request_seconds=30")
ENGINE = ("engine.max_batch=4", "engine.max_length=400", "model.threads=1", "round_events=64", "served_name=soak")
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
MARKERS = ("<!-- soak_http -->\n", "<!-- end of soak_http -->")


class Snapshot(NamedTuple):
    """An idle server."""

    memory_mib: float  # resident
    threads: int
    files: int  # open file handles, sockets counted
    pages_lost: int  # cache blocks that somebody holds, though nobody runs


@dataclass
class Server:
    """The process under test."""

    process: subprocess.Popen[str]
    base: str
    log: Path
    snapshots: list[Snapshot] = field(default_factory=list)

    async def pause(self, http: httpx.AsyncClient) -> str | None:
        """Wait until nothing runs, and take a snapshot; returns what is wrong, if it never gets so far."""
        end = time.monotonic() + IDLE_SECONDS
        while figures := await self.metrics(http):
            if not any(figures[name] for name in BUSY):
                break
            if time.monotonic() > end:
                return f"not idle after {IDLE_SECONDS} s: { {name: figures[name] for name in BUSY} }"
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # for connections to close
        lost = int(figures["kv_cache_blocks"] - figures["kv_cache_free_blocks"])
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        memory = int(status["VmRSS"].split()[0]) / 1024
        files = sum(1 for _ in (folder / "fd").iterdir())
        self.snapshots.append(Snapshot(round(memory, 1), int(status["Threads"]), files, lost))
        return None

    async def metrics(self, http: httpx.AsyncClient) -> dict[str, float]:
        """The gauges and counters without labels, by name without `dspark_`."""
        text = (await http.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^dspark_(\w+) (\S+)$", text, re.MULTILINE)}


def main() -> int:
    args = arguments()
    if args.fill:
        fill(*args.fill)
        return 0
    if not Path("/proc/self/status").exists():
        sys.exit("soak_http.py reads /proc, which this system does not have: run it on Linux")
    with TemporaryDirectory() as name:
        model = (args.target, f"model.drafter={args.drafter}")
        if args.target == "tiny":
            model = write_pair(Path(name))
        with serving(model, Path(name) / "server.log") as server:
            result = asyncio.run(soak(server, args))
        result["log_errors"] = len(re.findall(r"^(?:ERROR|CRITICAL)\b", server.log.read_text(), re.MULTILINE))
    result["leaks"] = leaks(result)
    wrong = ("leaks", "faults", "log_errors", "unexplained_5xx", "without_finish_reason", "pages_lost", "exit_code")
    print(json.dumps(result) if args.json else "\n".join(f"{key:22} {value}" for key, value in result.items()))
    return int(any(result[name] for name in wrong))


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """The whole run."""
    tally = Tally()
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_keepalive_connections=0)  # or the clients' own connections look like a leak
    async with httpx.AsyncClient(base_url=server.base, headers=headers, timeout=120, limits=limits) as http:
        period = args.minutes * 60 / PAUSES
        with progress(PAUSES, "soak", "period") as bar:
            for i in range(PAUSES):
                until = time.monotonic() + period
                clients = [Client(http, tally, random.Random(f"{args.seed} {i} {j}")) for j in range(args.clients)]
                await asyncio.gather(*(client.run(until) for client in clients))
                fault = await server.pause(http)
                if fault is not None:
                    tally.fault(fault)
                bar.update(1)
        await drain(server, http, tally)
    return {
        "minutes": args.minutes,
        "target": args.target,
        "clients": args.clients,
        **tally.figures(),
        "pages_lost": max((snapshot.pages_lost for snapshot in server.snapshots), default=0),
        **{name: [getattr(s, name) for s in server.snapshots] for name in ("memory_mib", "threads", "files")},
        "exit_code": server.process.returncode,
        "faults": tally.faults[:20],
    }


async def drain(server: Server, http: httpx.AsyncClient, tally: Tally) -> None:
    """SIGTERM while three streams run."""
    begun = [asyncio.Event() for _ in range(3)]
    streams = [asyncio.create_task(drained_stream(http, tally, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    server.process.terminate()
    await asyncio.gather(*streams)
    try:
        await asyncio.to_thread(server.process.wait, 60)
    except subprocess.TimeoutExpired:
        tally.fault("the server was still there a minute after SIGTERM")


@contextmanager
def serving(model: tuple[str, ...], log: Path) -> Iterator[Server]:
    """`dspark serve` on a free port, and what it writes in a file."""
    command = [sys.executable, "-m", "dspark", "serve", *model, *LIMITS, *ENGINE, "--port", "0"]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stderr=out, text=True, env=os.environ | {"DSPARK_API_KEY": KEY})
    try:
        while not (found := re.search(r"serves soak at (\S+)$", log.read_text(encoding="utf-8"), re.MULTILINE)):
            if process.poll() is not None:
                sys.exit(f"the server did not start:\n{log.read_text(encoding='utf-8')}")
            time.sleep(0.2)
        yield Server(process, found[1], log)
    finally:
        process.kill()
        process.wait()


def write_pair(directory: Path) -> tuple[str, ...]:
    """The tiny pair on disk, as `dspark serve` is told of it. Its tokens are bytes, and one that ends answers."""
    target, drafter = tiny_pair(vocab_size=260, num_positions=400)
    target.tokenizer.chat_template = TEMPLATE
    target.tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    save_decoder(target.decoder, target.tokenizer, directory / "target")
    ends = {"eos_token_id": target.tokenizer.eos_token_id}
    (directory / "target" / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    write_drafter(drafter, directory / "drafter")
    return str(directory / "target"), f"model.drafter={directory / 'drafter'}", "model.dtype=float32"


def leaks(result: dict[str, Any]) -> list[str]:
    """What grew from the early pauses to the late ones by more than noise does."""
    allowed = {"memory_mib": max(8.0, 0.02 * result["memory_mib"][-1]), "threads": 2, "files": 2}
    grown = {name: growth(result[name]) for name in allowed}
    return [f"{name} grew by {grown[name]:g}" for name, limit in allowed.items() if grown[name] > limit]


def growth(series: list[float]) -> float:
    """From the median of the early pauses to that of the late ones."""
    return statistics.median(series[LATE]) - statistics.median(series[EARLY]) if len(series) == PAUSES else 0


def fill(source: Path, page: Path) -> None:
    """Put the table of a run between the markers of a page."""
    result, text = json.loads(source.read_text(encoding="utf-8")), page.read_text(encoding="utf-8")
    before, rest = text.split(MARKERS[0])
    page.write_text(before + MARKERS[0] + table(result) + MARKERS[1] + rest.split(MARKERS[1])[1], encoding="utf-8")


def table(result: dict[str, Any]) -> str:
    """The figures of a run as Markdown."""
    listed = {name: ", ".join(f"{n} × {what}" for what, n in result[name].items()) for name in ("finish", "refused")}
    rows = {
        f"load, {result['target']}": f"{result['minutes']:g} minutes, {result['clients']} clients",
        "requests": f"{result['requests']:,}",
        "answers by finish reason": listed["finish"],
        "hung up on by their client": f"{result['disconnects']:,}",
        "refused, as they should be": listed["refused"],
        "stopped by the time limit (504)": f"{result['timeouts']:,}",
        "unexplained 5xx": result["unexplained_5xx"],
        "answers without a finish reason": result["without_finish_reason"],
        "cache blocks lost": result["pages_lost"],
        "streams cut by SIGTERM; exit code": f"{result['cut_by_drain']}; {result['exit_code']}",
        "errors in the server's log": result["log_errors"],
        "other faults": len(result["faults"]),
        "leaks": "; ".join(result["leaks"]) or "none",
    }
    for name, what in (("memory_mib", "memory, MiB"), ("threads", "threads"), ("files", "open files")):
        series = result[name]
        rows[f"{what}: third, sixth, last pause"] = ", ".join(f"{series[i]:g}" for i in (2, 5, -1))
    return (
        "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
        + "\n"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="of load, pauses not counted")
    parser.add_argument("--clients", type=int, default=12, help="that ask at the same time")
    parser.add_argument("--target", default="tiny", help="tiny = made here; else any target, with its drafter")
    parser.add_argument("--drafter", default="auto", help="of a target that is not tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fill", nargs=2, type=Path, metavar=("JSON", "PAGE"), help="write a run's table into a page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
