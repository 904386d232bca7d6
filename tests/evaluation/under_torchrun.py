"""One process of a tiny run: OPTIONS as JSON."""

import json
import sys

from dspark.evaluation.config import EvalOptions
from dspark.evaluation.evaluate import measure
from dspark.training.parallel import join_ranks

with join_ranks("cpu") as ranks:
    measure(EvalOptions.from_dict(json.loads(sys.argv[1]), "test"), ranks)
