"""What calls find in the pool by themselves: ordinary graphs without a mark, tenants apart, texts anywhere, pools on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_model, tiny_tokenizer
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph_supervisor import create_supervisor

from polykv import Engine
from polykv.errors import IncompatiblePoolError, InvalidRequestError, PoolFullError, StoreError
from polykv.models.identity import salt_digest
from polykv_agents import ChatPolyKV
from polykv_agents.callers import caller_of
from polykv_agents.portable import portable_ids
from polykv_agents.testing import scripted_chat_model

DOCUMENT = "The carrier bears the risk until the goods are handed over to the buyer at the quay. " * 4
OTHER = "Payment is due within thirty days of the invoice, in the currency of the contract. " * 4


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def cache_read(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


@pytest.fixture
def make(tiny_llama: Any) -> Iterator[Callable[..., ChatPolyKV]]:
    made: list[ChatPolyKV] = []
    tokenizer = tiny_tokenizer()

    def build(script: Any = None, **fields: Any) -> ChatPolyKV:
        fields = {"prefix_cache": True, **fields}
        if script is not None:
            made.append(scripted_chat_model(script, **fields))
        else:
            made.append(ChatPolyKV(model=tiny_llama, tokenizer=tokenizer, **{"max_tokens": 6, **fields}))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


class Recorder:
    """Every request of an engine and its completion, in the order in which they were asked."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: list[Any] = []
        # tokens that a grammar forces at the very end of an answer are not computed, and how many those are cannot be seen here
        monkeypatch.setattr(engine, "_fast_forward", False)
        submit = engine.submit

        def recording(request: Any) -> Any:
            handle = submit(request)
            self.handles.append(handle)
            return handle

        monkeypatch.setattr(engine, "submit", recording)

    def check(self) -> list[int]:
        """Compares what each call read with the longest prefix that any earlier call had computed, token by token."""
        known: list[tuple[int, ...]] = []
        counts = []
        for handle in self.handles:
            prompt, completion = handle.request.token_ids, handle.result(60)
            longest = 0
            for earlier in known:
                same = 0
                while same < min(len(earlier), len(prompt) - 1) and earlier[same] == prompt[same]:
                    same += 1
                longest = max(longest, same)
            assert completion.cached_tokens == longest
            counts.append(longest)
            # the last token of an answer is never computed on
            known.append((*prompt, *completion.token_ids[:-1]))
        return counts


@tool
def search(query: str) -> str:
    """Search the archive."""
    return f"found {query}"


class TestGraphsWithoutAnyMark:
    def test_an_agents_turns_read_all_that_was_computed(
        self, make: Callable[..., ChatPolyKV], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = [call("search", query="risk"), "The carrier.", call("search", query="quay"), "There.", "Bye."]
        llm = make(answers, max_tokens=256)
        recorder = Recorder(llm.engine, monkeypatch)
        agent = create_agent(llm, [search], system_prompt=DOCUMENT, checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        for question in ("Who bears it?", "Where?", "Thanks."):
            state = agent.invoke({"messages": [HumanMessage(question)]}, config)
        counts = recorder.check()
        assert len(counts) == 5 and counts[0] == 0
        # each later call reads its whole past, but for a few tokens where the template renders an answer in another way
        prompts = [len(handle.request.token_ids) for handle in recorder.handles]
        assert all(count >= before - 1 for count, before in zip(counts[1:], prompts, strict=False))
        read = [cache_read(message) for message in state["messages"] if isinstance(message, AIMessage)]
        assert read == counts

    def test_a_supervisor_and_its_agents_hand_the_transcript_on(
        self, make: Callable[..., ChatPolyKV], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = [
            call("transfer_to_lawyer"),
            "The carrier bears it.",
            call("transfer_to_clerk"),
            "Noted.",
            "All is said.",
        ]
        llm = make(said, max_tokens=256)
        recorder = Recorder(llm.engine, monkeypatch)
        agents = [
            create_agent(llm, [search], name=name, system_prompt=f"{DOCUMENT} You are the {name}.")
            for name in ("lawyer", "clerk")
        ]
        team = create_supervisor(agents, model=llm, prompt=f"{DOCUMENT} You lead a team.").compile()
        team.invoke({"messages": [HumanMessage("Who bears the risk?")]})
        counts = recorder.check()
        assert len(counts) == 5
        document = len(llm.engine.tokenizer.encode(DOCUMENT, add_special_tokens=False))
        assert counts[0] == 0 and all(count >= document for count in counts[1:])
        assert [handle.request.agent for handle in recorder.handles] == [
            "supervisor:agent",
            "lawyer:model",
            "supervisor:agent",
            "clerk:model",
            "supervisor:agent",
        ]

    def test_answers_are_those_of_a_model_without_it(self, make: Callable[..., ChatPolyKV]) -> None:
        llm, plain = make(), make(prefix_cache=False)
        for turn in range(3):
            messages = [SystemMessage(DOCUMENT), *[HumanMessage(f"Question {i}?") for i in range(turn + 1)]]
            found, computed = llm.invoke(messages), plain.invoke(messages)
            assert found.content == computed.content
            assert (cache_read(found) > 0) == (turn > 0) and cache_read(computed) == 0

    def test_a_fan_out_over_an_unmarked_text_computes_it_once(self, make: Callable[..., ChatPolyKV]) -> None:
        llm = make()
        llm.batch([[SystemMessage(f"{DOCUMENT} You are agent {i}."), HumanMessage("Who?")] for i in range(8)])
        stats = llm.engine.stats()
        document = len(llm.engine.tokenizer.encode(DOCUMENT, add_special_tokens=False))
        assert stats.prefill_tokens < 2 * document and stats.prefill_saved_tokens >= 7 * document

    def test_the_workflow_hears_of_nodes(self, make: Callable[..., ChatPolyKV]) -> None:
        llm = make()
        graph = StateGraph(MessagesState)
        for name in ("writer", "editor"):

            def node(state: MessagesState, name: str = name) -> Any:
                return {"messages": llm.invoke([SystemMessage(f"You are {name}. {DOCUMENT}"), *state["messages"]])}

            graph.add_node(name, node)
        graph.add_edge(START, "writer")
        graph.add_edge("writer", "editor")
        graph.add_edge("editor", END)
        compiled = graph.compile()
        workflow = llm.pool.attach_graph(compiled)
        assert [workflow.steps_to_execution(name) for name in ("writer", "editor")] == [1, 2]
        compiled.invoke({"messages": [HumanMessage("Go.")]})
        agents = {agent for entry in llm.pool._table for agent in entry.agents}
        assert agents == {"writer", "editor"}
        assert workflow.steps_to_execution("editor") > 1  # it has run, and nothing leads back
        with pytest.raises(InvalidRequestError, match="graph"):
            llm.pool.attach_graph("no graph")

    def test_what_langgraph_tells_about_nodes(self) -> None:
        class Manager:
            metadata: dict[str, Any]

        manager = Manager()
        assert caller_of(None) == caller_of(object()) == {}
        manager.metadata = {
            "langgraph_node": "p",
            "langgraph_step": 3,
            "langgraph_checkpoint_ns": "two:4f|1|p:9a",
            "thread_id": 7,
        }
        assert caller_of(manager) == {"agent": "two:p", "agent_step": None, "agent_run": "7"}
        manager.metadata = {
            "langgraph_node": "p",
            "langgraph_step": 3,
            "langgraph_checkpoint_ns": "p:9a",
            "thread_id": "7",
        }
        assert caller_of(manager) == {"agent": "p", "agent_step": 3, "agent_run": "7"}


class TestTenants:
    def test_the_same_text_of_two_tenants_never_meets(self, make: Callable[..., ChatPolyKV]) -> None:
        one, two = make(cache_salt="one"), make(cache_salt="two")
        assert one.engine is two.engine
        messages = [SystemMessage(DOCUMENT), HumanMessage("Who?")]
        first = one.invoke(messages)
        before = one.engine.stats()
        second = two.invoke(messages)
        after = two.engine.stats()
        assert second.content == first.content and cache_read(second) == 0
        assert after.prefill_tokens - before.prefill_tokens == second.usage_metadata["input_tokens"]
        assert cache_read(one.invoke(messages)) == cache_read(two.invoke(messages)) > 0

    def test_contexts_names_and_ids_are_apart_too(self, make: Callable[..., ChatPolyKV]) -> None:
        one, two, nobody = make(cache_salt="one"), make(cache_salt="two"), make()
        mine = one.share(DOCUMENT, name="law")
        assert nobody.pool.stats().builds == 1
        assert two.find_context("law") is None and nobody.find_context(mine.id) is None
        with pytest.raises(IncompatiblePoolError, match="cache_salt"):
            two.with_context(mine)
        theirs = two.share(DOCUMENT, name="law")
        assert nobody.pool.stats().builds == 2 and theirs.id != mine.id
        assert one.find_context("law") is mine and two.find_context("law") is theirs
        marked = [
            SystemMessage([{"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}]),
            HumanMessage("?"),
        ]
        one.invoke(marked)
        builds = nobody.pool.stats().builds
        message = two.invoke(marked)
        assert cache_read(message) >= 0 and nobody.pool.stats().builds in (builds, builds + 1)
        assert message.response_metadata["shared_context"]["id"] != mine.id

    def test_files_hold_digests_and_no_salts(self, make: Callable[..., ChatPolyKV], tmp_path: Path) -> None:
        llm = make(cache_salt="a secret name")
        llm.invoke([SystemMessage(DOCUMENT), HumanMessage("Who?")])
        llm.pool.save(tmp_path / "pool")
        written = b"".join(path.read_bytes() for path in (tmp_path / "pool").rglob("*") if path.is_file())
        assert b"secret" not in written and salt_digest("a secret name").encode() in written


class TestAnywhere:
    def test_documents_in_any_order_and_subset(self, make: Callable[..., ChatPolyKV]) -> None:
        llm = make(reuse="anywhere", codec="exact", max_tokens=4)
        texts = {"a": DOCUMENT, "b": OTHER}
        contexts = {key: llm.share(text, anywhere=True) for key, text in texts.items()}
        before = llm.engine.stats().build_tokens
        for order in ("ab", "ba", "b", "a"):
            joined = "\n\n".join(texts[key] for key in order)
            message = llm.invoke([SystemMessage(f"You are reader {order}."), HumanMessage(f"{joined}\n\nWho pays?")])
            held = sum(contexts[key].num_tokens - 32 for key in order)
            assert cache_read(message) >= held
        assert llm.engine.stats().build_tokens == before
        assert len(llm.pool.segments) == 2

    def test_prefix_is_the_default_and_reads_none_of_it(self, make: Callable[..., ChatPolyKV]) -> None:
        llm = make()
        llm.share(DOCUMENT, anywhere=True)
        assert cache_read(llm.invoke([SystemMessage("Be brief."), HumanMessage(DOCUMENT)])) == 0

    def test_a_langchain_document_and_bad_input(self, make: Callable[..., ChatPolyKV]) -> None:
        llm = make(reuse="anywhere")
        ctx = llm.share(Document(page_content=DOCUMENT), anywhere=True)
        with pytest.raises(InvalidRequestError, match="wherever its text stands"):
            llm.with_context(ctx)
        with pytest.raises(InvalidRequestError, match="one text"):
            llm.share([DOCUMENT, OTHER], anywhere=True)
        with pytest.raises(InvalidRequestError, match="empty"):
            llm.share("", anywhere=True)
        with pytest.raises(ValueError, match="prefix"):
            ChatPolyKV(reuse="sometimes")
        with pytest.raises(InvalidRequestError, match="recompute"):
            make(reuse="anywhere", recompute=33).invoke("Hello")

    def test_ids_are_those_in_any_surroundings(self) -> None:
        tokenizer = tiny_tokenizer()
        ids = portable_ids(tokenizer, DOCUMENT)
        for around in ("{}", "Read this:\n{}\n\nWho?", "<{}>", "x{}x", " {} "):
            whole = tokenizer.encode(around.format(DOCUMENT), add_special_tokens=False)
            assert any(whole[i : i + len(ids)] == ids for i in range(len(whole)))
        assert len(ids) >= len(tokenizer.encode(DOCUMENT, add_special_tokens=False)) - 8
        assert portable_ids(tokenizer, "") == []


class TestPoolOnDisk:
    def test_a_new_engine_starts_where_the_old_one_ended(self, make: Callable[..., ChatPolyKV], tmp_path: Path) -> None:
        messages = [SystemMessage(DOCUMENT), HumanMessage("Who?")]
        llm = make(pool_dir=str(tmp_path / "pool"))
        first = llm.invoke(messages)
        context = llm.share(OTHER, codec="k8v3")
        llm.pool.save()
        llm.close()
        again = make(pool_dir=str(tmp_path / "pool"))
        assert again.pool.stats().stored_segments == 2
        second = again.invoke(messages)
        assert second.content == first.content
        assert cache_read(second) == second.usage_metadata["input_tokens"] - 1
        assert again.share(OTHER, codec="k8v3").id == context.id
        assert (again.pool.stats().builds, again.pool.stats().restores) == (0, 2)

    def test_a_budget_sends_the_oldest_to_disk_and_brings_it_back(
        self, make: Callable[..., ChatPolyKV], tmp_path: Path
    ) -> None:
        llm = make(pool_dir=str(tmp_path / "pool"), max_pool_bytes=1_500_000)
        prompts = [[SystemMessage(f"{i} {DOCUMENT}"), HumanMessage("Who?")] for i in range(5)]
        answers = [llm.invoke(prompt).content for prompt in prompts]
        stats = llm.pool.stats()
        assert stats.demotions > 0 and stats.num_bytes <= 1_500_000
        for prompt, answer in zip(prompts, answers, strict=True):
            message = llm.invoke(prompt)
            assert message.content == answer
            assert cache_read(message) == message.usage_metadata["input_tokens"] - 1
            assert llm.pool.stats().num_bytes <= 1_500_000
        assert llm.pool.stats().restores > 0

    def test_a_context_beyond_the_budget_is_refused_before_anything_is_lost(
        self, make: Callable[..., ChatPolyKV]
    ) -> None:
        llm = make(max_pool_bytes=1_000_000, codec="exact")
        kept = llm.share(DOCUMENT)
        held = llm.pool.stats()
        with pytest.raises(PoolFullError, match="max_bytes is 1000000"):
            llm.share(OTHER * 5)
        after = llm.pool.stats()
        assert (after.num_bytes, after.builds, after.evictions) == (held.num_bytes, 1, 0)
        assert llm.with_context(kept).invoke("Who?").content
        kept.release()
        assert llm.pool.stats().context_bytes == 0

    def test_bad_folders(self, make: Callable[..., ChatPolyKV], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        llm = make()
        with pytest.raises(StoreError, match="is a file"):
            llm.pool.open_store(tmp_path / "file")
        with pytest.raises(StoreError, match="no store"):
            llm.pool.load(tmp_path / "nothing")
        with pytest.raises(InvalidRequestError, match="say where"):
            llm.pool.save()
        with pytest.raises(InvalidRequestError, match="open_store"):
            llm.pool.refresh_store()
        with pytest.raises(InvalidRequestError, match="max_bytes"):
            make(max_pool_bytes=-1)
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            make(deterministic=True)

    def test_another_model_is_told_why_it_finds_nothing(self, make: Callable[..., ChatPolyKV], tmp_path: Path) -> None:
        llm = make()
        llm.invoke([SystemMessage(DOCUMENT), HumanMessage("Who?")])
        assert llm.pool.save(tmp_path / "pool").segments == 1
        other = ChatPolyKV(model=tiny_model("qwen2"), tokenizer=tiny_tokenizer())
        report = other.pool.load(tmp_path / "pool")
        assert report.segments == 0 and "another model" in next(iter(report.refused.values()))
        other.close()

    @pytest.mark.full
    def test_two_processes_share_a_store(self, tmp_path: Path) -> None:
        """One builds and saves, the other, started later, reads; then both write at once and nothing is lost."""
        script = tmp_path / "child.py"
        script.write_text(
            "import sys, torch\n"
            f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            "from helpers import tiny_model, tiny_tokenizer\n"
            "from polykv_agents import ChatPolyKV\n"
            "torch.manual_seed(0)\n"
            "llm = ChatPolyKV(model=tiny_model('llama'), tokenizer=tiny_tokenizer(), max_tokens=4, pool_dir=sys.argv[1])\n"
            "for text in sys.argv[2:]:\n"
            "    message = llm.invoke([('system', text * 20), ('human', 'Who?')])\n"
            "    print(message.usage_metadata['input_token_details']['cache_read'], message.usage_metadata['input_tokens'])\n"
            "llm.pool.save()\n"
            "llm.close()\n"
        )
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}

        def start(*texts: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(script), str(tmp_path / "pool"), *texts]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        def counts(process: subprocess.Popen[str]) -> list[tuple[int, int]]:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            return [tuple(map(int, line.split())) for line in out.splitlines()]  # type: ignore[misc]

        ((read, _),) = counts(start("alpha beta gamma. "))
        assert read == 0
        both = [start("alpha beta gamma. ", "one two three. "), start("alpha beta gamma. ", "four five six. ")]
        for lines in map(counts, both):
            assert lines[0][0] == lines[0][1] - 1
        everything = counts(start("one two three. ", "four five six. ", "alpha beta gamma. "))
        assert all(read == prompt - 1 for read, prompt in everything)
