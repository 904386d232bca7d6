"""Tiny random pairs of several kinds, answered by one process or by several that share them: for tests."""

import json
import multiprocessing
import os
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny_target import make_tokenizer

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.engine import calls
from dspark.engine.calls import Line
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.parallel import divide, follow, join
from dspark.engine.request import SamplingParams
from dspark.models.config import DecoderConfig, MoeConfig, RopeConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target

VOCAB = 23  # no number of processes divides it
SETTINGS = EngineSettings(max_batch=3, max_length=96, block_size=4, step_tokens=16)
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=10, ignore_eos=True, temperature=0.9, top_p=0.95, min_p=0.01, repetition_penalty=1.1
)

SIZES: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "layer_types": ("full_attention",) * 3,
    "eos_token_ids": (0,),
}
GEMMA: dict[str, Any] = {
    "norm_style": "rms_plus_one",
    "qk_norm": True,
    "sandwich_norms": True,
    "scale_embeddings": True,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    "sliding_window": 8,
    "local_rope": RopeConfig(rope_theta=100.0),
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 4,
    "attention_k_eq_v": True,
    "v_norm": True,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True}
MOE = {"moe": MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, dense_layers=(0,))}
CHAIN = {"algorithm": "eagle3", "num_hidden_layers": 1, "mask_token_id": None, "ttt_length": 3, "own_lm_head": True}
HEADS = {"markov_rank": 4, "markov_head_type": "rnn", "enable_confidence_head": True, "draft_vocab_size": 11}


class Kind(NamedTuple):
    """Changes to the configs of target and drafter."""

    target: dict[str, Any]
    drafter: dict[str, Any]


KINDS = {
    "biases, DSpark": Kind(BIASES, HEADS),
    "experts, EAGLE-3": Kind(MOE, CHAIN),
    "Gemma, DFlash": Kind(GEMMA, {"algorithm": "dflash", "block_attention": "causal"}),
}


PLANNED = "biases, DSpark"  # has confidences


class Answers(NamedTuple):
    """What a pair wrote, request by request, and how many drafts it accepted."""

    token_ids: list[list[int]]
    accepted: int


def make_pair(kind: Kind) -> tuple[Target, Drafter]:
    """The same weights in every process."""
    torch.manual_seed(5)
    decoder = Decoder(DecoderConfig(**SIZES | kind.target)).requires_grad_(False).eval()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope": RopeConfig(),
        "max_position_embeddings": 128,
        "num_target_layers": 3,
        "target_layer_ids": (-1, 1),
        "block_size": 4,
        "mask_token_id": 1,
    }
    config = DrafterConfig.model_validate(fields | kind.drafter)
    token_ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size) * 2
    return Target("tiny", decoder, make_tokenizer(), "", "", "", ""), make_drafter(config, decoder, token_ids)


def answer(engine: Engine) -> Answers:
    """Greedy and sampled answers to prompts of several lengths, two of which begin alike; one is aborted."""
    prompts = [[5 + (i * k) % 17 for i in range(6 + 3 * k)] for k in range(1, 5)]
    prompts[2] = prompts[3][:9]
    names = [
        engine.submit(prompt, (GREEDY if i % 2 else SAMPLED).replace(seed=i, n=1 + (i == 2)))
        for i, prompt in enumerate(prompts)
    ]
    done, steps = {}, 0
    while engine.has_work():
        for out in engine.step():
            if out.completion is not None:
                done[out.request_id, out.index] = out.completion
        engine.check_integrity()
        steps += 1
        if steps == 5:
            engine.abort(names[1])
    finished = [done[key] for key in sorted(done)]
    return Answers([completion.token_ids for completion in finished], sum(c.figures.accepted for c in finished))


def answer_planned(target: Target, drafter: Drafter, line: Line | None) -> list[int]:
    """One greedy answer whose verify lengths follow from costs, measured by the same processes."""
    settings = SETTINGS.replace(max_batch=1, planner="lagged", costs="measure")
    return Engine(target, drafter, settings, line).generate([[5, 6, 7]], GREEDY)[0].token_ids


def start(world_size: int, out: Path) -> list[BaseProcess]:
    """Start processes that answer with every kind of pair in turn and write what they saw to `out`/RANK.json."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_divided"])  # its imports take seconds: once for all
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(context.Process(target=_run, args=(place, world_size, out), daemon=True))
        processes[-1].start()
    return processes


def _run(place: dict[str, Any], world_size: int, out: Path) -> None:
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.set_num_threads(1)
    calls.LARGE, calls.FIRST_BYTES = 256, 1024  # so that some tensors and messages here are large
    shards = join(world_size, torch.device("cpu"))
    seen = {}
    for name, kind in KINDS.items():
        shards.counts.clear()
        target, drafter = make_pair(kind)
        drafter.prepare(pack=False)
        divide(target.decoder, drafter, shards)
        line, answers = Line(shards), None
        if shards.rank:
            follow(line, target.decoder, drafter)
        else:
            answers = answer(Engine(target, drafter, SETTINGS, line))
            if name == PLANNED:
                (out / "planned.json").write_text(json.dumps(answer_planned(target, drafter, line)))
            line.close()
        sizes = [
            sum(p.numel() for p in layers.parameters()) for layers in (target.decoder.layers, drafter.backbone.layers)
        ]
        seen[name] = {"answers": answers, "sizes": sizes, "counts": dict(shards.counts)}
    (out / f"{shards.rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
