"""A model loaded here behind the local engine, which answers many questions at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.backends.base import AT_ONCE, Backend, HitCount, TextTokenizer
from kvtuner.exported_configs.profile.evaluation_record import BackendRecord
from kvtuner.runtime_loader.engine.generation import SamplingParameters
from kvtuner.runtime_loader.engine.local_engine import LocalEngine
from kvtuner.runtime_loader.engine.paged_pool import DEFAULT_KV_MEMORY
from kvtuner.runtime_loader.engine.served_model import page_size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import LoadedModel
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.evaluation.tasks.recall_and_needles import Problem
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.runtime_loader.engine.generation import Completion

CHUNK_TOKENS: Final = 2048
_SCORING: Final = SamplingParameters(max_tokens=0, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class _Job:
    """A beginning that is one chunk, and what goes on from it, each another chunk with an answer."""

    beginning: Sequence[int]
    branches: Sequence[Sequence[int]]
    sampling: SamplingParameters
    offset: int = 0

    def num_tokens(self, page_size: int) -> int:
        """The most tokens of pages that all its requests take."""
        answer = self.sampling.max_tokens or 0
        own = sum(len(branch) + answer + 2 * page_size for branch in self.branches)
        return len(self.beginning) + own


class EngineBackend(Backend):
    """A loaded model that answers greedily with a cache in the model's dtype, or of a profile's rows.

    What it is told by `prepare` it answers together; an answer is the same alone, to rounding.
    """

    hits: HitCount | None = None

    def __init__(self, loaded: LoadedModel, scheme: CacheScheme, read_plan: ReadPlanName) -> None:
        self.name, self.dtype = scheme.name, loaded.dtype_name
        self._loaded, self._scheme, self._read_plan = loaded, scheme, read_plan
        self._text = TextTokenizer(loaded.tokenizer)
        self._ready: dict[Any, Any] = {}

    @property
    def key(self) -> str:
        """The scheme's key; answers of the transformers cache are others."""
        return f"engine {self._scheme.key}"

    def record(self) -> BackendRecord:
        """This process, and its read plan."""
        return BackendRecord(kind="engine", read_plan=self._read_plan, reads=None, version=None, hit_share=None)

    def prepare(self, method: str, asked: Sequence[tuple[Any, ...]]) -> None:
        """Answer together what will be asked next of a method, by its arguments."""
        jobs = [getattr(self, f"_job_of_{method}")(*arguments) for arguments in asked]
        for arguments, answers in zip(asked, self._run(jobs), strict=True):
            self._ready[method, _key_of(arguments)] = answers

    def answers(self, problem: Problem, *, offset: int = 0) -> list[str | None]:
        """The text after each question of a problem, long enough to see whether it is right."""
        return [answer.text for answer in self._answers_of("answers", problem, offset)]

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str:
        """The text after a prompt, which is one chunk, up to its end."""
        (answer,) = self._answers_of("continuation", prompt, num_tokens)
        return answer.text

    def generate_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str:
        """The text after a prompt up to the first stop; already its first token reads the prompt as it is stored."""
        (answer,) = self._answers_of("generate_until", prompt, num_tokens, stops)
        return answer.text

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """The log-probability of a continuation; the context's last token and the continuation are one chunk."""
        (answer,) = self._answers_of("log_likelihood", context, continuation)
        scored = answer.prompt_logprobs[-len(continuation) :]
        return sum(entry.logprob for entry in scored), all(entry.top[0][0] == entry.token for entry in scored)

    def whole_log_likelihood(self, ids: Sequence[int]) -> float:
        """The log-probability of a text, of which the first quarter is one chunk, as the tuner measures."""
        (answer,) = self._answers_of("whole_log_likelihood", ids)
        return sum(entry.logprob for entry in answer.prompt_logprobs)

    def _job_of_answers(self, problem: Problem, offset: int) -> _Job:
        branches = [self._text.after(problem.context, question.text) for question in problem.questions]
        most = max(question.max_tokens for question in problem.questions)
        return _Job(self._text.context(problem.context), branches, SamplingParameters(max_tokens=most), offset)

    def _job_of_continuation(self, prompt: Sequence[int], num_tokens: int) -> _Job:
        return _Job([], [prompt], SamplingParameters(max_tokens=num_tokens))

    def _job_of_generate_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> _Job:
        return _Job(prompt[:-1], [prompt[-1:]], SamplingParameters(max_tokens=num_tokens, stop=tuple(stops)))

    def _job_of_log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> _Job:
        return _Job(context[:-1], [[context[-1], *continuation]], _SCORING)

    def _job_of_whole_log_likelihood(self, ids: Sequence[int]) -> _Job:
        split = ReadPlan.of(self._read_plan, len(ids)).split
        return _Job(ids[:split], [ids[split:]], _SCORING)

    def _answers_of(self, method: str, *arguments: Any) -> list[Completion]:
        key = method, _key_of(arguments)
        if key not in self._ready:
            self.prepare(method, [arguments])
        answers: list[Completion] = self._ready.pop(key)
        return answers

    def _run(self, jobs: Sequence[_Job]) -> list[list[Completion]]:
        """The answers of every job, in one engine."""
        if not jobs:
            return []
        loaded = self._loaded
        at_once = max(AT_ONCE, *(len(job.branches) for job in jobs))
        with LocalEngine(
            loaded.model,
            loaded.tokenizer,
            self._scheme.profile,
            attend=self._read_plan,
            kv_memory=self._kv_memory(jobs, at_once),
            max_requests=at_once,
            chunk_tokens=CHUNK_TOKENS,
            context_length=loaded.shape.context_length,
            prefix_cache_tokens=0,
            allow_derived=True,
        ) as engine:
            ids = []
            for job in jobs:
                beginning, branches = (job.beginning, job.branches) if job.beginning else (job.branches[0], [()])
                ids.append(engine.submit_branches(beginning, branches, job.sampling, first_position=job.offset))
            running = {each: engine.generation(each) for submitted in ids for each in submitted}
            while engine.has_requests:
                engine.step()
        answers = [[running[each].completion() for each in submitted] for submitted in ids]
        if any(answer.finish_reason == "error" for group in answers for answer in group):
            raise NonFiniteActivationError(
                f"the model gives NaN or infinity where its cache is stored as {self.name}; run it in a wider dtype"
            )
        return answers

    def _kv_memory(self, jobs: Sequence[_Job], at_once: int) -> int:
        """The bytes of all jobs' pages, as far as the usual size allows, but those of the largest job anyway."""
        profile, shape = self._scheme.profile, self._loaded.shape.geometry
        if profile is None:
            channels = shape.num_layers * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
            per_token, copies = channels * self._loaded.model.dtype.itemsize, 0
        else:
            # Profiles count exact numbers in 16 bits, and copies without their positions.
            wide = max(1, self._loaded.model.dtype.itemsize // 2)
            per_token, copies = wide * profile.bytes_per_token(), 2 * wide * at_once * profile.window_bytes()
        page_size = page_size_of(profile, None)
        sizes = [per_token * (job.num_tokens(page_size) + page_size) for job in jobs]
        room_to_grow = per_token * page_size * at_once
        return copies + room_to_grow + min(sum(sizes), max(DEFAULT_KV_MEMORY, *sizes, 0))


def _key_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list | tuple) else each for each in arguments)
