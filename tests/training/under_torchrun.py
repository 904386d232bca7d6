"""One process of a tiny run, started by torchrun: OUT [the step at which every process dies]."""

import os
import signal
import sys
from pathlib import Path

import torch
from tiny_training import make_rows, make_target, make_trainer

from dspark.training.parallel import join_ranks

torch.set_num_threads(1)
with join_ranks("cpu") as ranks:
    target = make_target()
    changes: dict[str, object] = {"activation_checkpointing": True}  # which must not change what is learned
    trainer = make_trainer(target, make_rows(target), Path(sys.argv[1]), ranks, {"draft_vocab_size": 30}, changes)
    load_step = trainer.load_step

    def dying(step: int) -> object:
        if step == int(sys.argv[2]):
            trainer.states.finish()
            os.kill(os.getpid(), signal.SIGKILL)
        return load_step(step)

    if len(sys.argv) > 2:
        trainer.load_step = dying
    trainer.run()
