"""ChatHuggingFace in the same graph: each node's call prefills the whole prompt again."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer, pipeline
from transformers.generation.streamers import BaseStreamer

from _end_to_end.measuring import Row, Task, TokenTimes, not_run, run_graph, say
from _end_to_end.transformers_peers import Loaded

AGENTS = 2
"""Agents that really run; the work of further ones is the same again."""


class TimedThreads(BaseStreamer):
    """Notes times by the thread that generates: the pipeline has one streamer for all of its calls."""

    def __init__(self) -> None:
        self.times = TokenTimes()
        self._local = threading.local()

    def ask(self, agent: int) -> None:
        self._local.agent, self._local.prompt_seen = agent, False
        self.times.ask(agent)

    def put(self, value: Any) -> None:
        if self._local.prompt_seen:
            self.times.token(self._local.agent)
        self._local.prompt_seen = True

    def end(self) -> None:
        pass


def chat_huggingface(task: Task) -> Iterator[Row]:
    """The usual local chat model of LangChain."""
    try:
        from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    except ImportError:
        yield from not_run(task, "pip install langchain-huggingface")
        return
    loaded = Loaded(task)
    workload = loaded.workload
    timed, alone = TimedThreads(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.config.save_pretrained(folder)  # it looks for a tokenizer where the model's name says
        loaded.tokenizer.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded.model.name_or_path = folder
        made = pipeline(
            "text-generation",
            model=loaded.model,
            tokenizer=tokenizer,
            do_sample=False,
            min_new_tokens=workload.new_tokens,
            max_new_tokens=workload.new_tokens,
            return_full_text=False,
            streamer=timed,
        )
        llm = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made, model_id=folder), tokenizer=tokenizer)
        answers: dict[int, str] = {}

        def ask(index: int) -> None:
            timed.ask(index)
            answers[index] = llm.invoke(workload.messages_with_document(workload.agents[index])).content

        for run in sorted({1, min(AGENTS, max(task.agents))}):
            say(f"{task.system}: {run} agents")
            timed.times = TokenTimes()
            with loaded.memory.watch():
                # LangGraph's default number of threads
                seconds = run_graph(lambda: None, ask, run)
            ttft = [timed.times.ttft(index) for index in range(run)]
            if run == 1:
                alone = ttft[0]
            for agents in task.agents:
                if min(agents, AGENTS) != run:
                    continue
                row = Row(task.system, agents, workload.context_tokens, first_ttft_s=min(ttft), next_ttft_s=alone)
                row.decode_tokens_per_s = timed.times.decode_rate()
                row.peak_extra_bytes = loaded.memory.extra
                row.wall_s = seconds * agents / run
                row.slowest_ttft_s = max(ttft) if agents == run else None
                if agents != run:
                    row.extrapolated, row.note = ["wall_s"], f"{run} agents run at a time"
                row.texts = [answers[index] for index in range(min(agents, run))]
                yield row
