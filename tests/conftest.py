"""Set-up for every test: one thread, so that timings and sums do not depend on the machine's load."""

import torch

torch.set_num_threads(1)
