"""Answers of the target to prompts from files, through our engine: what a drafter is trained on."""

from dataclasses import dataclass

from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.engine.stream import run_tasks
from dspark.errors import DsparkError
from dspark.generation.answering import Answering, RegenerationReport, open_answers
from dspark.generation.config import RegenerateSettings


def regenerate(engine: Engine, settings: RegenerateSettings) -> RegenerationReport:
    """Append {"id", "source", "messages", "finished", "temperature"} to `settings.out` for each prompt not yet there.

    Rows are written as the engine finishes them, so their order is that of finishing. A prompt's temperature, suffix
    and random numbers depend on the seed and its id alone. Prompts that cannot be served (too long) are left out and
    listed in the `.errors.jsonl` file beside it. Raises `ConfigError` and `DataError`.
    """
    chat = ChatTemplate(engine.target.tokenizer, settings.template_variables)
    with open_answers(settings, engine.target.digest) as answers:
        for task in run_tasks(engine, (_Answering(prompt, settings, chat=chat) for prompt in answers.left)):
            if task.num_answers:
                answers.write(task)
            else:
                assert task.refusal is not None
                answers.give_up(task, task.refusal)
        return answers.report()


@dataclass(kw_only=True)
class _Answering(Answering):
    """A conversation whose turns are requests to the engine."""

    chat: ChatTemplate
    refusal: DsparkError | None = None

    def request(self) -> tuple[list[int], SamplingParams]:
        params = SamplingParams(
            max_tokens=self.settings.max_tokens,
            temperature=self.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            seed=self.seed,
        )
        return self.chat.prompt_ids((*self.messages, self.turn)), params

    def take(self, completion: Completion) -> bool:
        if completion.finish_reason == "error":
            self.refusal = DsparkError("the target's logits are not finite")
            return True
        answer = Message("assistant", completion.text)
        return self.add(answer, len(completion.token_ids), completion.finish_reason == "stop")

    def refuse(self, error: DsparkError) -> None:
        self.refusal = error
