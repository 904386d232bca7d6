"""The built-in tasks: their names, their category, and where the public keeps them. Imports no torch.

Prompts are worded as in the public DSpark evaluation, so that figures can be set beside the paper's (Table 1).
"""

from __future__ import annotations

from typing import NamedTuple

from dspark.data.config import PromptSet

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class BuiltinTask(NamedTuple):
    """A task known by name. `home` says which public rows make its prompts."""

    category: str
    home: PromptSet

    @property
    def name(self) -> str:
        """Name on the command line and in reports."""
        return self.home.name


BUILTIN_TASKS = (
    BuiltinTask(
        "math",
        PromptSet(name="gsm8k", dataset="openai/gsm8k", subset="main", split="test", prompt="{question}" + _BOXED),
    ),
    BuiltinTask(
        "math",
        PromptSet(name="math500", dataset="HuggingFaceH4/MATH-500", split="test", prompt="{problem}" + _BOXED),
    ),
    BuiltinTask("math", PromptSet(name="aime25", dataset="math-ai/aime25", split="test", prompt="{problem}" + _BOXED)),
    BuiltinTask(
        "code",
        PromptSet(
            name="mbpp",
            dataset="google-research-datasets/mbpp",
            subset="sanitized",
            split="test",
            prompt="{prompt}",
        ),
    ),
    BuiltinTask(
        "code",
        PromptSet(
            name="humaneval",
            dataset="openai/openai_humaneval",
            split="test",
            prompt="Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```",
        ),
    ),
    BuiltinTask(
        "code",
        PromptSet(
            name="lbpp",
            dataset="parquet",
            data_files=("hf://datasets/CohereLabs/lbpp/python/test.parquet",),
            prompt="{instruction}",
        ),
    ),
    BuiltinTask(
        "code",
        PromptSet(
            name="livecodebench",
            dataset="json",  # of the hub's set, which is a script, the newest of its files
            data_files=("hf://datasets/livecodebench/code_generation_lite/test6.jsonl",),
            streaming=True,  # its rows carry large hidden tests
            prompt="You are an expert Python programmer. You will be given a question (problem specification) and will "
            "generate a correct Python program that matches the specification and passes all tests. You will NOT "
            "return anything except for the program\n\n### Question:\n{question_content}\n\n"
            "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
            "### Answer: (use the provided format with backticks)",
        ),
    ),
    BuiltinTask(
        "chat",
        PromptSet(name="mt-bench", dataset="HuggingFaceH4/mt_bench_prompts", split="train", rename={"prompt": "turns"}),
    ),
    BuiltinTask(
        "chat",
        PromptSet(
            name="arena-hard-v2",
            dataset="json",
            data_files=("hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",),
            prompt="{prompt}",
        ),
    ),
)
TASK_NAMES = tuple(task.name for task in BUILTIN_TASKS)
